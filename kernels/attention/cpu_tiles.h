// CPU attention for one tile of queries and keys: loading and storing rows, masks, dropout, softmax.
//
// Scores are [queries, keys] matrices of fp32 with a row stride of kKeyTile. q is multiplied by the scale when it is
// read, so the scores need no further scaling.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "attention/op.h"
#include "common/cpu/dropout.h"
#include "common/cpu/simd.h"
#include "common/cpu/simd_gemm.h"
#include "common/cpu/simd_math.h"
#include "common/packed.h"
#include "common/philox.h"

namespace fasttfm {
namespace FASTTFM_ISA {

constexpr int64_t kQueryTile = 64;
constexpr int64_t kKeyTile = 128;  // a multiple of the 64 keys of a dropout draw
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// ---- rows and sequences ---------------------------------------------------------------------------------------------

// Rows (tokens of one head) of a tensor.
template <class T>
struct Rows {
  T* data;
  int64_t stride;
  T* operator[](int64_t row) const { return data + row * stride; }
};

struct Range {
  int64_t first, last;  // last is exclusive
};

struct Sequence {
  int64_t index;
  int64_t first_query, first_key;  // packed: its first tokens; dense: 0
  int64_t queries, keys;           // Lq and Lk
};

inline Sequence find_sequence(const AttentionCall& p, int64_t index) {
  if (p.cu_seqlens != nullptr) {
    const Span q = packed_span(p.cu_seqlens, index, packed_size(p.queries), packed_size(p.max_seqlen));
    const Span k = packed_span(p.cu_seqlens_k, index, packed_size(p.keys), packed_size(p.max_seqlen_k));
    return {index, q.first, k.first, q.length, k.length};
  }
  return {index, 0, 0, p.lengths != nullptr ? p.lengths[index] : p.queries,
          p.lengths_k != nullptr ? p.lengths_k[index] : p.keys};
}

// The keys that at least one of the queries [first, last) attends to.
inline Range attended_keys(const AttentionCall& p, const Sequence& s, Range queries) {
  const int64_t offset = s.keys - s.queries;  // the last query is aligned with the last key
  Range keys = {0, s.keys};
  if (p.window_left >= 0 && p.window_left < queries.first + offset) keys.first = queries.first + offset - p.window_left;
  if (p.window_right >= 0 && p.window_right < s.keys - (queries.last + offset))
    keys.last = queries.last + offset + p.window_right;
  return keys;
}

inline Range intersection(Range a, Range b) {
  return {a.first > b.first ? a.first : b.first, a.last < b.last ? a.last : b.last};
}

// ---- rows in and out ------------------------------------------------------------------------------------------------

// Rows of one head are far apart in memory, so they are prefetched. The distance is this many rows.
constexpr int64_t kRowsAhead = 8;

// to[row] = from[row] * scale in fp32. Columns are padded with zeros to a multiple of 16, rows to a multiple of
// kRowStep.
template <class T>
FASTTFM_KERNEL void load_rows(Rows<const T> from, int64_t rows, int64_t columns, float scale, float* to) {
  const int64_t stride = round_up(columns, kLanes);
  for (int64_t row = 0; row < rows; ++row) {
    const T* ahead = from[row + kRowsAhead < rows ? row + kRowsAhead : row];
    for_columns(columns, [&](int64_t c, auto n) {
      prefetch(ahead + c);
      store(to + row * stride + c, load(from[row] + c, n) * broadcast(scale));
    });
  }
  std::memset(to + rows * stride, 0, static_cast<size_t>((round_up(rows, kRowStep) - rows) * stride) * sizeof(float));
}

template <class T>
FASTTFM_KERNEL void store_row(const float* from, int64_t columns, float scale, T* to) {
  for_columns(columns, [&](int64_t c, auto n) { store(to + c, load(from + c) * broadcast(scale), n); });
}

typedef float Quad __attribute__((vector_size(16)));
inline Quad load_quad(const float* from) {
  Quad quad;
  std::memcpy(&quad, from, sizeof(quad));
  return quad;
}

// to[c][r] = from[r][c] for contiguous blocks of 16 x 16 floats.
inline void transpose_block(const float* from, float* to) {
  for (int r = 0; r < kLanes; r += 4) {
    for (int c = 0; c < kLanes; c += 4) {
      const Quad a = load_quad(from + r * kLanes + c), b = load_quad(from + (r + 1) * kLanes + c);
      const Quad d = load_quad(from + (r + 2) * kLanes + c), e = load_quad(from + (r + 3) * kLanes + c);
      const Quad ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5),
                 ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
      const Quad de_low = __builtin_shufflevector(d, e, 0, 4, 1, 5),
                 de_high = __builtin_shufflevector(d, e, 2, 6, 3, 7);
      const Quad out[4] = {
          __builtin_shufflevector(ab_low, de_low, 0, 1, 4, 5), __builtin_shufflevector(ab_low, de_low, 2, 3, 6, 7),
          __builtin_shufflevector(ab_high, de_high, 0, 1, 4, 5), __builtin_shufflevector(ab_high, de_high, 2, 3, 6, 7)};
      for (int i = 0; i < 4; ++i) std::memcpy(to + (c + i) * kLanes + r, &out[i], sizeof(Quad));
    }
  }
}

// Transposes rows into panels [rows / 16][columns][16], padded with rows of zeros. Columns are processed in blocks of
// 16. The last block of a panel may write past its end; the next panel overwrites that, and `to` has room for it after
// the last panel.
template <class T>
FASTTFM_KERNEL void load_transposed(Rows<const T> from, int64_t rows, int64_t columns, float* to) {
  float block[kLanes * kLanes];
  for (int64_t first = 0; first < rows; first += kLanes) {
    const int64_t count = rows - first < kLanes ? rows - first : kLanes;
    if (count < kLanes) std::memset(block, 0, sizeof(block));
    for_columns(columns, [&](int64_t c, auto n) {
      for (int64_t row = 0; row < count; ++row) store(block + row * kLanes, load(from[first + row] + c, n));
      transpose_block(block, to + first * columns + c * kLanes);
    });
  }
}

// to[row] = sum of a[row] * b[row], accumulated in the same order as in multiply(). Sums that are equal in exact
// arithmetic (dout * out = dout * v for a query that attends to a single key) are therefore equal here, too. `scratch`
// holds 32 rows; `to` is written 16 elements at a time.
template <class T>
FASTTFM_KERNEL void row_products(Rows<const T> a, Rows<const T> b, int64_t rows, int64_t columns, float* scratch,
                                 float* to) {
  float *a_transposed = scratch, *b_transposed = scratch + kLanes * round_up(columns, kLanes);
  for (int64_t row = 0; row < rows; row += kLanes) {
    const int64_t count = rows - row < kLanes ? rows - row : kLanes;
    load_transposed(Rows<const T>{a[row], a.stride}, count, columns, a_transposed);
    load_transposed(Rows<const T>{b[row], b.stride}, count, columns, b_transposed);
    Lanes total = broadcast(0.0f);
    for (int64_t c = 0; c < columns * kLanes; c += kLanes)
      total = total + load(a_transposed + c) * load(b_transposed + c);
    store(to + row, total);
  }
}

// ---- scores ---------------------------------------------------------------------------------------------------------

// A tile of scores: queries from `query` on, keys from `key` on (a multiple of kKeyTile). The columns to which any of
// its queries attends are in the 16-key panels [panels.first, panels.last).
struct TilePosition {
  int64_t query, queries;
  int64_t key, keys;
  Range panels;
};

// If no query of the tile attends to any of its keys, the result has panels.last <= panels.first.
inline TilePosition find_tile(const AttentionCall& p, const Sequence& s, Range queries, Range keys) {
  const Range columns = intersection(attended_keys(p, s, queries), keys);
  TilePosition tile = {queries.first, queries.last - queries.first, keys.first, keys.last - keys.first, {0, 0}};
  if (columns.first < columns.last)
    tile.panels = {(columns.first - keys.first) / kLanes, round_up(columns.last - keys.first, kLanes) / kLanes};
  return tile;
}

// Writes `value` to the columns of a row to whose keys its query does not attend.
inline void mask_row(const AttentionCall& p, const Sequence& s, const TilePosition& tile, int64_t row, float value,
                     float* columns) {
  const int64_t query = tile.query + row;
  const Range keys = intersection(attended_keys(p, s, {query, query + 1}), {tile.key, tile.key + tile.keys});
  const int64_t begin = tile.panels.first * kLanes, end = tile.panels.last * kLanes;
  int64_t first = keys.first - tile.key, last = keys.last - tile.key;
  if (first >= last) first = last = end;
  for (int64_t c = begin; c < first; ++c) columns[c] = value;
  for (int64_t c = last; c < end; ++c) columns[c] = value;
}

// Dropout of the weights of a row.
class WeightDropout {
 public:
  WeightDropout(const AttentionCall& p, const Sequence& s, int64_t head)
      : seed_(p.seed != nullptr ? static_cast<uint64_t>(*p.seed) : 0),
        active_(p.seed != nullptr),
        limit_(static_cast<uint8_t>(p.threshold - 1)),
        scale_(p.dropout_scale),
        sequence_(static_cast<uint32_t>(s.index)),
        head_(static_cast<uint32_t>(head)) {}

  bool active() const { return active_; }

  // Draws for the tile's keys. It is not inlined, so that forward and backward share one copy.
  __attribute__((noinline)) void draw(const TilePosition& tile, int64_t row) {
    const auto query = static_cast<uint32_t>(tile.query + row), first = static_cast<uint32_t>(tile.key / kBlock);
    auto* out = reinterpret_cast<uint16_t*>(bytes_);
    for (int64_t block = 0; block * kBlock < tile.panels.last * kLanes; ++block) {
      uint16_t pairs[4][8];
      for (uint32_t d = 0; d < 4; ++d) {  // the draws are independent, so the compiler vectorizes them
        const Draw drawn = draw_weights(seed_, sequence_, head_, query, first + static_cast<uint32_t>(block), d);
        std::memcpy(pairs[d], drawn.word, sizeof(drawn.word));
      }
      for (int pair = 0; pair < 8; ++pair)
        for (int d = 0; d < 4; ++d) *out++ = pairs[d][pair];
    }
  }

  // Scales the kept weights of the drawn row and zeros the others.
  void apply(const TilePosition& tile, float* row) const {
    for (int64_t c = tile.panels.first * kLanes; c < tile.panels.last * kLanes; c += kLanes)
      store(row + c, select(above(bytes_ + c, limit_), load(row + c) * broadcast(scale_), broadcast(0.0f)));
  }

 private:
  static constexpr int64_t kBlock = 64;  // keys
  alignas(16) uint8_t bytes_[kKeyTile];
  uint64_t seed_;
  bool active_;
  uint8_t limit_;
  float scale_;
  uint32_t sequence_, head_;
};

// The online softmax state of a row: the largest score so far, and the sum of exp(score - largest).
struct SoftmaxRow {
  float largest, sum;
};

// exp(score - shift), but at least 2^-126, also for -infinity; mask_row() writes zeros afterwards.
inline Lanes weights(const Lanes& scores, float shift) {
  constexpr float log2_e = 0x1.715476p0f;
  return exp2_in_range(at_least((scores - broadcast(shift)) * broadcast(log2_e), -126.0f));
}

// Replaces scores by weights relative to the row's largest score so far, which it updates. Returns the factor by which
// earlier weights of the row must be multiplied. Masked scores are -infinity.
inline float softmax_row(const TilePosition& tile, float* scores, SoftmaxRow& state) {
  const int64_t begin = tile.panels.first * kLanes, end = tile.panels.last * kLanes;
  Lanes most = load(scores + begin);
  for (int64_t c = begin + kLanes; c < end; c += kLanes) most = larger(load(scores + c), most);
  const float here = largest(most), before = state.largest;
  if (here > before) state.largest = here;
  const float shift = state.largest == -kInfinity ? 0.0f : state.largest;  // all keys are masked
  Lanes total = broadcast(0.0f);
  for (int64_t c = begin; c < end; c += kLanes) {
    const Lanes weight = weights(load(scores + c), shift);
    store(scores + c, weight);
    total = total + weight;
  }
  const bool unchanged = before == state.largest || before == -kInfinity;  // or there are no earlier weights
  const float factor = unchanged ? 1.0f : weights(broadcast(before), shift).r[0][0];
  state.sum = state.sum * factor + sum(total);
  return factor;
}

// Given dweights = dout * V^T, replaces scores by weights P, and dweights by dscores = P * (dweights - delta). The
// caller masks the results.
inline void softmax_backward_row(const TilePosition& tile, float lse, float delta, float* scores, float* dweights) {
  for (int64_t c = tile.panels.first * kLanes; c < tile.panels.last * kLanes; c += kLanes) {
    const Lanes weight = weights(load(scores + c), lse);
    store(scores + c, weight);
    store(dweights + c, weight * (load(dweights + c) - broadcast(delta)));
  }
}

}  // namespace FASTTFM_ISA
}  // namespace fasttfm
