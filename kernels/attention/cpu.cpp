// attention on the CPU, in tiles of queries and keys. The matrix products are in common/cpu/simd_gemm.h.
//
// Results are bitwise identical for any number of threads, and for packed and padded tensors: tiles start at multiples
// of their size from a sequence's first token, sums are accumulated over tiles in order, and nothing depends on where
// rows are in memory. All arithmetic is fp32. q is multiplied by the scale when it is read, so scores and dk need no
// further scaling.
#include "attention/op.h"

#include <cmath>

#include "attention/cpu_tiles.h"
#include "common/count.h"
#include "common/cpu/parallel.h"

namespace fasttfm {
namespace FASTTFM_ISA {
namespace {

constexpr int64_t kQueryChunk = 4 * kQueryTile;  // keys and values are converted to fp32 once per chunk

constexpr int64_t chunks(int64_t n, int64_t size) { return (n + size - 1) / size; }

// Calls body(item, workspace) for every item. Each thread has its own workspace of `floats` floats.
template <class Body>
void for_items(const AttentionCall& p, int64_t items, int64_t floats, Body body) {
  const int64_t workers = items < p.threads ? items : p.threads;
  int64_t next = 0;
  parallel_items(workers, p.threads, [&](int64_t worker) {
    for (;;) {
      const int64_t item = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
      if (item >= items) return;
      body(item, p.workspace + worker * floats);
    }
  });
}

// ---- tensors --------------------------------------------------------------------------------------------------------

template <class T, class Pointer>
Rows<T> head_rows(Pointer* data, const AttentionCall& p, int64_t sequence, int64_t first_token, int64_t head,
                  int64_t sequence_stride, int64_t token_stride, int64_t head_stride) {
  const int64_t start = p.cu_seqlens != nullptr ? first_token * token_stride : sequence * sequence_stride;
  return {static_cast<T*>(data) + start + head * head_stride, token_stride};
}
#define FASTTFM_HEAD_ROWS(T, P, TENSOR, SEQUENCE, FIRST, HEAD)                                                \
  head_rows<T>((P).TENSOR, P, SEQUENCE, FIRST, HEAD, (P).TENSOR##_sequence_stride, (P).TENSOR##_token_stride, \
               (P).TENSOR##_head_stride)

// A tensor of q's shape, contiguous.
template <class T, class Pointer>
Rows<T> out_rows(Pointer* data, const AttentionCall& p, const Sequence& s, int64_t head) {
  const int64_t width = p.heads * p.head_dim;
  return head_rows<T>(data, p, s.index, s.first_query, head, p.queries * width, width, p.head_dim);
}

template <class Float>
Float* lse_row(Float* lse, const AttentionCall& p, const Sequence& s, int64_t head) {
  const bool packed = p.cu_seqlens != nullptr;
  return lse + ((packed ? 0 : s.index * p.heads) + head) * p.queries + s.first_query;
}

// Calls body(sequence, tokens) for the tokens that belong to no sequence. In a dense tensor, with `tokens` tokens per
// sequence, those are the tokens past each sequence's length; in a packed tensor, those past the last sequence.
template <class Body>
void for_unused_tokens(const AttentionCall& p, const int32_t* cu_seqlens, const int32_t* lengths, int64_t tokens,
                       Body body) {
  if (cu_seqlens != nullptr) {
    body(0, Range{packed_first(cu_seqlens, p.sequences, packed_size(tokens)), tokens});
  } else if (lengths != nullptr) {
    parallel_items(p.sequences, p.threads, [&](int64_t sequence) { body(sequence, Range{lengths[sequence], tokens}); });
  }
}

template <class T>
void clear_rows(Rows<T> rows, Range range, int64_t columns) {
  for (int64_t row = range.first; row < range.last; ++row)
    std::memset(static_cast<void*>(rows[row]), 0, static_cast<size_t>(columns) * sizeof(T));
}

// ---- forward --------------------------------------------------------------------------------------------------------

// One thread's arrays; D is padded to a multiple of 16.
struct ForwardArrays {
  static Count floats(int64_t d) {
    return Count(2 * (kQueryChunk + kKeyTile)) * d + kQueryTile * kKeyTile + 2 * kQueryChunk;
  }
  ForwardArrays(float* workspace, int64_t d)
      : q(workspace),
        out(q + kQueryChunk * d),
        k_transposed(out + kQueryChunk * d),
        v(k_transposed + kKeyTile * d),
        scores(v + kKeyTile * d),
        rows(reinterpret_cast<SoftmaxRow*>(scores + kQueryTile * kKeyTile)) {}

  float* q;             // [kQueryChunk, D]
  float* out;           // [kQueryChunk, D], before the division by the sums
  float* k_transposed;  // [D, kKeyTile] in panels
  float* v;             // [kKeyTile, D]
  float* scores;        // [kQueryTile, kKeyTile]
  SoftmaxRow* rows;     // [kQueryChunk]
};

// out[queries of the tile] += weights * v; `row` is the index of the tile's first row in the chunk.
FASTTFM_KERNEL void forward_tile(const AttentionCall& p, const Sequence& s, WeightDropout& dropout,
                                 const TilePosition& tile, int64_t row, const ForwardArrays& a) {
  const int64_t d = round_up(p.head_dim, kLanes), first = tile.panels.first * kLanes;
  const int64_t keys = (tile.panels.last * kLanes < tile.keys ? tile.panels.last * kLanes : tile.keys) - first;
  multiply<false>(tile.queries, tile.panels.last - tile.panels.first, p.head_dim, Along{a.q + row * d, d},
                  Panels{a.k_transposed + first * p.head_dim, kLanes, kLanes * p.head_dim}, a.scores + first, kKeyTile);
  for (int64_t i = 0; i < tile.queries; ++i) {
    float* scores = a.scores + i * kKeyTile;
    mask_row(p, s, tile, i, -kInfinity, scores);
    const float factor = softmax_row(tile, scores, a.rows[row + i]);
    mask_row(p, s, tile, i, 0.0f, scores);
    float* out = a.out + (row + i) * d;
    if (factor != 1.0f)
      for (int64_t c = 0; c < d; c += kLanes) store(out + c, load(out + c) * broadcast(factor));
    if (dropout.active()) {
      dropout.draw(tile, i);
      dropout.apply(tile, scores);
    }
  }
  multiply<true>(tile.queries, d / kLanes, keys, Along{a.scores + first, kKeyTile}, Panels{a.v + first * d, d, kLanes},
                 a.out + row * d, d);
}

template <class T>
void forward_chunk(const AttentionForward& p, const Sequence& s, int64_t head, Range queries, float* workspace) {
  const int64_t d = round_up(p.head_dim, kLanes), kv_head = head / (p.heads / p.kv_heads);
  const ForwardArrays a(workspace, d);
  const auto q = FASTTFM_HEAD_ROWS(const T, p, q, s.index, s.first_query, head);
  const auto k = FASTTFM_HEAD_ROWS(const T, p, k, s.index, s.first_key, kv_head);
  const auto v = FASTTFM_HEAD_ROWS(const T, p, v, s.index, s.first_key, kv_head);
  const int64_t count = queries.last - queries.first;
  load_rows(Rows<const T>{q[queries.first], q.stride}, count, p.head_dim, p.scale, a.q);
  std::memset(a.out, 0, static_cast<size_t>(count * d) * sizeof(float));
  for (int64_t row = 0; row < count; ++row) a.rows[row] = {-kInfinity, 0.0f};

  WeightDropout dropout(p, s, head);
  const Range keys = attended_keys(p, s, queries);
  for (int64_t key = keys.first / kKeyTile * kKeyTile; key < keys.last; key += kKeyTile) {
    const Range tile_keys = intersection({key, key + kKeyTile}, {0, s.keys});
    load_transposed(Rows<const T>{k[key], k.stride}, tile_keys.last - key, p.head_dim, a.k_transposed);
    load_rows(Rows<const T>{v[key], v.stride}, tile_keys.last - key, p.head_dim, 1.0f, a.v);
    for (int64_t query = queries.first; query < queries.last; query += kQueryTile) {
      const TilePosition tile = find_tile(p, s, intersection({query, query + kQueryTile}, queries), tile_keys);
      if (tile.panels.first < tile.panels.last) forward_tile(p, s, dropout, tile, query - queries.first, a);
    }
  }

  const auto out = out_rows<T>(p.out, p, s, head);
  float* lse = lse_row(p.lse, p, s, head);
  for (int64_t row = 0; row < count; ++row) {
    const SoftmaxRow& state = a.rows[row];
    const bool empty = state.largest == -kInfinity && state.sum == state.sum;  // NaN propagates
    const int64_t query = queries.first + row;
    if (empty)
      clear_rows(out, {query, query + 1}, p.head_dim);  // the sums may be NaN (0 * NaN)
    else
      store_row(a.out + row * d, p.head_dim, 1.0f / state.sum, out[query]);
    if (p.lse != nullptr) lse[query] = empty ? -kInfinity : state.largest + std::log(state.sum);
  }
}

// ---- backward -------------------------------------------------------------------------------------------------------

// One thread's arrays: those for one tile, then the sums of the gradients of all queries and keys of a sequence.
struct BackwardArrays {
  static Count floats(int64_t queries, int64_t keys, int64_t d) {
    const int64_t rows = 2 * kQueryTile + 3 * kKeyTile + round_up(queries, kQueryTile) + 2 * round_up(keys, kKeyTile);
    return Count(rows) * d + 2 * kQueryTile * kKeyTile + 2 * kQueryTile;
  }
  BackwardArrays(float* workspace, int64_t keys, int64_t d)
      : q(workspace),
        dout(q + kQueryTile * d),
        k_transposed(dout + kQueryTile * d),
        v_transposed(k_transposed + kKeyTile * d),
        k(v_transposed + kKeyTile * d),
        scores(k + kKeyTile * d),
        dscores(scores + kQueryTile * kKeyTile),
        lse(dscores + kQueryTile * kKeyTile),
        delta(lse + kQueryTile),
        dk(delta + kQueryTile),
        dv(dk + round_up(keys, kKeyTile) * d),
        dq(dv + round_up(keys, kKeyTile) * d) {}

  float* q;             // [kQueryTile, D]
  float* dout;          // [kQueryTile, D]
  float* k_transposed;  // [D, kKeyTile] in panels
  float* v_transposed;  // [D, kKeyTile] in panels
  float* k;             // [kKeyTile, D]
  float* scores;        // [kQueryTile, kKeyTile]; then weights
  float* dscores;       // [kQueryTile, kKeyTile]
  float* lse;           // [kQueryTile]
  float* delta;         // [kQueryTile]: sum of dout * out
  float* dk;            // [keys, D]
  float* dv;            // [keys, D]
  float* dq;            // [queries, D], without the scale
};

// Adds a tile's contribution to the gradients. dq points to the row of the tile's first query, dk and dv to that of its
// first key; null if not needed.
FASTTFM_KERNEL void backward_tile(const AttentionCall& p, const Sequence& s, WeightDropout& dropout,
                                  const TilePosition& tile, const BackwardArrays& a, float* dq, float* dk, float* dv) {
  const int64_t d = round_up(p.head_dim, kLanes), panels = d / kLanes;
  const int64_t first = tile.panels.first * kLanes, width = (tile.panels.last - tile.panels.first) * kLanes;
  const int64_t keys = first + width < tile.keys ? width : tile.keys - first;
  const int64_t offset = first * p.head_dim;
  multiply<false>(tile.queries, width / kLanes, p.head_dim, Along{a.q, d},
                  Panels{a.k_transposed + offset, kLanes, kLanes * p.head_dim}, a.scores + first, kKeyTile);
  multiply<false>(tile.queries, width / kLanes, p.head_dim, Along{a.dout, d},
                  Panels{a.v_transposed + offset, kLanes, kLanes * p.head_dim}, a.dscores + first, kKeyTile);
  for (int64_t i = 0; i < tile.queries; ++i) {
    float *scores = a.scores + i * kKeyTile, *dscores = a.dscores + i * kKeyTile;
    if (dropout.active()) {
      dropout.draw(tile, i);
      dropout.apply(tile, dscores);
    }
    softmax_backward_row(tile, a.lse[i], a.delta[i], scores, dscores);
    if (dropout.active()) dropout.apply(tile, scores);
    mask_row(p, s, tile, i, 0.0f, scores);
    mask_row(p, s, tile, i, 0.0f, dscores);
  }
  // The products for dk and dv sum over a multiple of kRowStep rows.
  for (int64_t i = tile.queries; i < round_up(tile.queries, kRowStep); ++i) {
    std::memset(a.scores + i * kKeyTile + first, 0, static_cast<size_t>(width) * sizeof(float));
    std::memset(a.dscores + i * kKeyTile + first, 0, static_cast<size_t>(width) * sizeof(float));
  }
  if (dk != nullptr) {
    multiply<true>(keys, panels, tile.queries, Across{a.scores + first, kKeyTile}, Panels{a.dout, d, kLanes},
                   dv + first * d, d);
    multiply<true>(keys, panels, tile.queries, Across{a.dscores + first, kKeyTile}, Panels{a.q, d, kLanes},
                   dk + first * d, d);
  }
  if (dq != nullptr)
    multiply<true>(tile.queries, panels, keys, Along{a.dscores + first, kKeyTile}, Panels{a.k + first * d, d, kLanes},
                   dq, d);
}

// Loads the rows of a tile of queries and their statistics.
template <class T>
FASTTFM_KERNEL void load_queries(const AttentionBackward& p, const Sequence& s, int64_t head, Range queries,
                                 const BackwardArrays& a) {
  const auto q = FASTTFM_HEAD_ROWS(const T, p, q, s.index, s.first_query, head);
  const auto dout = out_rows<const T>(p.dout, p, s, head), out = out_rows<const T>(p.out, p, s, head);
  const float* lse = lse_row(p.lse, p, s, head);
  const int64_t count = queries.last - queries.first;
  load_rows(Rows<const T>{q[queries.first], q.stride}, count, p.head_dim, p.scale, a.q);
  const Rows<const T> dout_tile = {dout[queries.first], dout.stride}, out_tile = {out[queries.first], out.stride};
  load_rows(dout_tile, count, p.head_dim, 1.0f, a.dout);
  row_products(dout_tile, out_tile, count, p.head_dim, a.scores, a.delta);  // a.scores is scratch memory here
  for (int64_t i = 0; i < count; ++i) {
    const float row_lse = lse[queries.first + i];
    a.lse[i] = row_lse == -kInfinity ? 0.0f : row_lse;  // all keys are masked
  }
}

// Adds the contribution of the given queries and keys of one head to the gradients. dq points to the row of the first
// query, dk and dv to that of the first key; null if not needed. keys.first is a multiple of kKeyTile, queries.first
// one of kQueryTile.
template <class T>
void backward_block(const AttentionBackward& p, const Sequence& s, int64_t head, Range queries, Range keys,
                    const BackwardArrays& a, float* dq, float* dk, float* dv) {
  const int64_t d = round_up(p.head_dim, kLanes), kv_head = head / (p.heads / p.kv_heads);
  const auto k = FASTTFM_HEAD_ROWS(const T, p, k, s.index, s.first_key, kv_head);
  const auto v = FASTTFM_HEAD_ROWS(const T, p, v, s.index, s.first_key, kv_head);
  WeightDropout dropout(p, s, head);
  for (int64_t key = keys.first; key < keys.last; key += kKeyTile) {
    const Range tile_keys = intersection({key, key + kKeyTile}, keys);
    const int64_t count = tile_keys.last - key, done = (key - keys.first) * d;
    load_transposed(Rows<const T>{k[key], k.stride}, count, p.head_dim, a.k_transposed);
    load_transposed(Rows<const T>{v[key], v.stride}, count, p.head_dim, a.v_transposed);
    load_rows(Rows<const T>{k[key], k.stride}, count, p.head_dim, 1.0f, a.k);
    for (int64_t query = queries.first; query < queries.last; query += kQueryTile) {
      const Range tile_queries = intersection({query, query + kQueryTile}, queries);
      const TilePosition tile = find_tile(p, s, tile_queries, tile_keys);
      if (tile.panels.first >= tile.panels.last) continue;
      load_queries<T>(p, s, head, tile_queries, a);
      backward_tile(p, s, dropout, tile, a, dq != nullptr ? dq + (query - queries.first) * d : nullptr,
                    dk != nullptr ? dk + done : nullptr, dv != nullptr ? dv + done : nullptr);
    }
  }
}

inline void clear(float* array, int64_t rows, int64_t d) {
  std::memset(array, 0, static_cast<size_t>(rows * d) * sizeof(float));
}

// Writes the gradients of the queries of one head. A query that attends to nothing has gradients of 0, although its
// sums may be NaN (0 * NaN).
template <class T>
void write_dq(const AttentionBackward& p, const Sequence& s, int64_t head, Range queries, const float* sums) {
  const auto dq = FASTTFM_HEAD_ROWS(T, p, dq, s.index, s.first_query, head);
  const float* lse = lse_row(p.lse, p, s, head);
  const int64_t d = round_up(p.head_dim, kLanes);
  for (int64_t query = queries.first; query < queries.last; ++query)
    if (lse[query] == -kInfinity)
      clear_rows(dq, {query, query + 1}, p.head_dim);
    else
      store_row(sums + (query - queries.first) * d, p.head_dim, p.scale, dq[query]);
}

// Computes the gradients of the keys and values of one kv head, summed over its query heads; with WITH_DQ also dq.
template <class T, bool WITH_DQ>
void backward_keys(const AttentionBackward& p, const Sequence& s, int64_t kv_head, Range keys,
                   const BackwardArrays& a) {
  const int64_t d = round_up(p.head_dim, kLanes), group = p.heads / p.kv_heads;
  const Range queries = {0, s.queries};
  clear(a.dk, round_up(keys.last - keys.first, kRowStep), d);
  clear(a.dv, round_up(keys.last - keys.first, kRowStep), d);
  for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    if (WITH_DQ) clear(a.dq, round_up(s.queries, kRowStep), d);
    backward_block<T>(p, s, head, queries, keys, a, WITH_DQ ? a.dq : nullptr, a.dk, a.dv);
    if (WITH_DQ) write_dq<T>(p, s, head, queries, a.dq);
  }
  const auto dk = FASTTFM_HEAD_ROWS(T, p, dk, s.index, s.first_key, kv_head);
  const auto dv = FASTTFM_HEAD_ROWS(T, p, dv, s.index, s.first_key, kv_head);
  for (int64_t key = keys.first; key < keys.last; ++key) {
    store_row(a.dk + (key - keys.first) * d, p.head_dim, 1.0f, dk[key]);
    store_row(a.dv + (key - keys.first) * d, p.head_dim, 1.0f, dv[key]);
  }
}

template <class T>
void backward_queries(const AttentionBackward& p, const Sequence& s, int64_t head, Range queries,
                      const BackwardArrays& a) {
  clear(a.dq, round_up(queries.last - queries.first, kRowStep), round_up(p.head_dim, kLanes));
  const Range keys = attended_keys(p, s, queries);
  const Range tiles = {keys.first / kKeyTile * kKeyTile, round_up(keys.last, kKeyTile)};
  backward_block<T>(p, s, head, queries, intersection(tiles, {0, s.keys}), a, a.dq, nullptr, nullptr);
  write_dq<T>(p, s, head, queries, a.dq);
}

template <class T>
void clear_unused(const AttentionBackward& p) {
  for_unused_tokens(p, p.cu_seqlens, p.lengths, p.queries, [&](int64_t sequence, Range tokens) {
    for (int64_t head = 0; head < p.heads; ++head)
      clear_rows(FASTTFM_HEAD_ROWS(T, p, dq, sequence, 0, head), tokens, p.head_dim);
  });
  for_unused_tokens(p, p.cu_seqlens_k, p.lengths_k, p.keys, [&](int64_t sequence, Range tokens) {
    for (int64_t head = 0; head < p.kv_heads; ++head) {
      clear_rows(FASTTFM_HEAD_ROWS(T, p, dk, sequence, 0, head), tokens, p.head_dim);
      clear_rows(FASTTFM_HEAD_ROWS(T, p, dv, sequence, 0, head), tokens, p.head_dim);
    }
  });
}

// ---- checks ---------------------------------------------------------------------------------------------------------

Status bad_value(const char* detail) { return {StatusCode::bad_value, detail}; }

Status check(const AttentionCall& p) {
  if (p.head_dim < 16 || p.head_dim > 256 || p.head_dim % 8 != 0)
    return bad_size("attention: head_dim must be 16 to 256 in steps of 8");
  if (p.heads < 1 || p.kv_heads < 1 || p.heads % p.kv_heads != 0)
    return bad_size("attention: the heads of k and v must divide those of q");
  if (p.threads < 1) return bad_value("attention: threads must be at least 1");
  if (p.seed != nullptr && (p.threshold < 1 || p.threshold > 256))
    return bad_value("attention: threshold must be 1 to 256 with a seed");
  if ((p.cu_seqlens != nullptr) != (p.cu_seqlens_k != nullptr))
    return bad_value("attention: cu_seqlens and cu_seqlens_k come together");
  if (p.cu_seqlens != nullptr) {
    if (!packed_valid(p.cu_seqlens, p.sequences, p.queries, p.max_seqlen))
      return bad_value("attention: cu_seqlens must go from 0 to at most the last query, in steps up to max_seqlen");
    if (!packed_valid(p.cu_seqlens_k, p.sequences, p.keys, p.max_seqlen_k))
      return bad_value("attention: cu_seqlens_k must go from 0 to at most the last key, in steps up to max_seqlen_k");
    return {};
  }
  for (int64_t i = 0; i < p.sequences; ++i) {
    const Sequence s = find_sequence(p, i);
    if (s.queries < 0 || s.queries > p.queries) return bad_value("attention: lengths are 0 to the number of queries");
    if (s.keys < 0 || s.keys > p.keys) return bad_value("attention: lengths_k are 0 to the number of keys");
  }
  return {};
}

// The largest numbers of queries and keys of a sequence; max_seqlen is only an upper bound.
struct Longest {
  explicit Longest(const AttentionCall& p) {
    for (int64_t i = 0; i < p.sequences; ++i) {
      const Sequence s = find_sequence(p, i);
      if (s.queries > queries) queries = s.queries;
      if (s.keys > keys) keys = s.keys;
    }
  }
  int64_t queries = 0, keys = 0;
};

}  // namespace

Status attention_forward(const AttentionForward& p) {
  const Status status = check(p);
  if (status.code != StatusCode::ok) return status;
  return with_dtype(p.dtype, unknown_dtype(), [&](auto element) {
    using T = decltype(element);
    for_unused_tokens(p, p.cu_seqlens, p.lengths, p.queries, [&](int64_t sequence, Range tokens) {
      const Sequence s = {sequence, 0, 0, 0, 0};
      for (int64_t head = 0; head < p.heads; ++head) {
        clear_rows(out_rows<T>(p.out, p, s, head), tokens, p.head_dim);
        for (int64_t i = tokens.first; p.lse != nullptr && i < tokens.last; ++i)
          lse_row(p.lse, p, s, head)[i] = -kInfinity;
      }
    });
    const int64_t per_head = chunks(Longest(p).queries, kQueryChunk), per_sequence = p.heads * per_head;
    const int64_t floats = ForwardArrays::floats(round_up(p.head_dim, kLanes)).value;
    for_items(p, p.sequences * per_sequence, floats, [&](int64_t item, float* workspace) {
      const Sequence s = find_sequence(p, item / per_sequence);
      const int64_t first = item % per_head * kQueryChunk;
      const Range queries = intersection({first, first + kQueryChunk}, {0, s.queries});
      if (first < s.queries) forward_chunk<T>(p, s, item % per_sequence / per_head, queries, workspace);
    });
    return Status{};
  });
}

// dq needs all keys of a sequence, dk and dv need all queries. A thread that processes a whole (sequence, kv head) pair
// computes scores once. If there are too few pairs for the threads, dk and dv of key tiles and dq of query chunks are
// separate items of work, each of which computes the scores that it needs. The sums are the same.
Status attention_backward(const AttentionBackward& p) {
  const Status status = check(p);
  if (status.code != StatusCode::ok) return status;
  return with_dtype(p.dtype, unknown_dtype(), [&](auto element) {
    using T = decltype(element);
    clear_unused<T>(p);
    const int64_t d = round_up(p.head_dim, kLanes);
    const Longest longest(p);
    const int64_t floats = BackwardArrays::floats(longest.queries, longest.keys, d).value;
    if (p.threads == 1 || p.sequences * p.kv_heads >= 2 * p.threads) {
      for_items(p, p.sequences * p.kv_heads, floats, [&](int64_t item, float* workspace) {
        const Sequence s = find_sequence(p, item / p.kv_heads);
        backward_keys<T, true>(p, s, item % p.kv_heads, {0, s.keys}, BackwardArrays(workspace, longest.keys, d));
      });
      return Status{};
    }
    const int64_t tiles = chunks(longest.keys, kKeyTile), queries = chunks(longest.queries, kQueryChunk);
    for_items(p, p.sequences * p.kv_heads * tiles, floats, [&](int64_t item, float* workspace) {
      const Sequence s = find_sequence(p, item / tiles / p.kv_heads);
      const int64_t first = item % tiles * kKeyTile;
      const Range keys = intersection({first, first + kKeyTile}, {0, s.keys});
      if (first < s.keys)
        backward_keys<T, false>(p, s, item / tiles % p.kv_heads, keys, BackwardArrays(workspace, longest.keys, d));
    });
    for_items(p, p.sequences * p.heads * queries, floats, [&](int64_t item, float* workspace) {
      const Sequence s = find_sequence(p, item / queries / p.heads);
      const int64_t first = item % queries * kQueryChunk;
      const Range range = intersection({first, first + kQueryChunk}, {0, s.queries});
      if (first < s.queries)
        backward_queries<T>(p, s, item / queries % p.heads, range, BackwardArrays(workspace, longest.keys, d));
    });
    return Status{};
  });
}

}  // namespace FASTTFM_ISA

#ifdef FASTTFM_ISA_BASELINE
int64_t cpu::attention_forward_workspace(int64_t head_dim, int64_t threads) {
  return (baseline::ForwardArrays::floats(baseline::round_up(head_dim, baseline::kLanes)) * threads).value;
}
int64_t cpu::attention_backward_workspace(int64_t max_seqlen, int64_t max_seqlen_k, int64_t head_dim, int64_t threads) {
  const int64_t d = baseline::round_up(head_dim, baseline::kLanes);
  return (baseline::BackwardArrays::floats(max_seqlen, max_seqlen_k, d) * threads).value;
}
#endif

}  // namespace fasttfm

FASTTFM_CPU_LAUNCHER(attention_forward, AttentionForward)
FASTTFM_CPU_LAUNCHER(attention_backward, AttentionBackward)
