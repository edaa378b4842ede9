// Attention forward on Hopper: out = softmax(scale * q k^T) v, with dropout on the weights.
//
// A block is one producer warp, which copies tiles of q, k and v into shared memory, and warpgroups of 64 queries each,
// which go over the keys from the last to the first: with a running reference r and sum l (online softmax), scores and
// weights in registers. A step's scores are computed before the weights of the step before are multiplied with v, so
// that the matrix units work while the softmax is computed; and the warpgroups take turns at issuing products, so that
// one's softmax runs beside another's products. Blocks stay on the chip and take tile after tile.
//
// Per step of 64 queries and n keys a warpgroup does 2 * 2 * 64 * n * D operations and 64 * n exponentials: with D = 64
// the unit for exponentials (16 per clock) takes as long as the matrix units (4096 operations per clock).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "attention/cuda_tiles.cuh"
#include "common/philox.h"

namespace fasttfm {
namespace cuda {

// ---- producer --------------------------------------------------------------------------------------------------------

template <class S>
__device__ __forceinline__ void load_tile(const CUtensorMap* map, Barrier& full, const char* to, uint32_t bytes,
                                          uint32_t part, int head, int row, int sequence) {
  full.arrive_expect(bytes);
#pragma unroll
  for (int i = 0; i < S::kParts; ++i)
    load_box(map, full, shared_address(to) + i * part, i * kTileColumns, head, row, sequence);
}

// One warp; its first lane issues the copies.
template <class S, bool CAUSAL>
__device__ __forceinline__ void produce(const ForwardParams& p, ForwardMemory<S>& memory, const CUtensorMap* q_map,
                                        const CUtensorMap* k_map, const CUtensorMap* v_map) {
  const bool issues = threadIdx.x % 32 == 0;
  RingPosition<S::kQuerySlots> at;
  RingPosition<S::kStages> k_at, v_at;
  TileWalk<S, CAUSAL> walk(p);
  while (true) {
    const QueryTile tile = walk.take();
    if (issues) {
      memory.q_empty[at.slot].wait(at.parity ^ 1);
      memory.tile[at.slot] = tile;
      if (tile.sequence < 0 || tile.blocks == 0) {
        memory.q_full[at.slot].arrive();
      } else {
        const int sequence = p.packed() ? 0 : tile.sequence;
        const int row = tile.first + (p.packed() ? tile.origin : 0);
        load_tile<S>(q_map, memory.q_full[at.slot], memory.q[at.slot], S::kQueryBytes, S::kQueryPart, tile.head, row,
                     sequence);
        const int k_head = tile.head / p.group, k_first = p.packed() ? walk.k_first : 0;
        for (int block = tile.blocks; block >= 0; --block) {  // k of a step comes before v of the step before
          if (block > 0) {
            memory.k_empty[k_at.slot].wait(k_at.parity ^ 1);
            load_tile<S>(k_map, memory.k_full[k_at.slot], memory.k[k_at.slot], S::kKeyBytes, S::kKeyPart, k_head,
                         k_first + (block - 1) * S::kKeys, sequence);
            k_at.next();
          }
          if (block < tile.blocks) {
            memory.v_empty[v_at.slot].wait(v_at.parity ^ 1);
            load_tile<S>(v_map, memory.v_full[v_at.slot], memory.v[v_at.slot], S::kKeyBytes, S::kKeyPart, k_head,
                         k_first + block * S::kKeys, sequence);
            v_at.next();
          }
        }
      }
    }
    __syncwarp();
    if (tile.sequence < 0) return;
    at.next();
  }
}

// ---- softmax ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

constexpr float kMinusInfinity = -INFINITY;
// r stays until a score is above it by this much, in units of log2: weights are <= 256.
constexpr float kHeadroom = 8.0f;

// Of a thread's two rows; registers of scores are laid out as wgmma leaves them (common/hopper.cuh).
struct RunningSoftmax {
  float reference[2] = {kMinusInfinity, kMinusInfinity};  // r, in units of log2
  float sum[2] = {0.0f, 0.0f};                            // this thread's share
  float correction[2];                                    // of what was summed up before the last step
  bool corrects;                                          // whether that is to be applied in this warp

  // Turns scores into weights, exp(scale * score - r).
  template <int COUNT>
  __device__ __forceinline__ void step(float (&s)[COUNT], float scale) {
    float top[2] = {s[0], s[2]}, base[2];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], s[i]);
    bool rises = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      top[half] = fmaxf(top[half], __shfl_xor_sync(0xffffffffu, top[half], 1));
      top[half] = scale * fmaxf(top[half], __shfl_xor_sync(0xffffffffu, top[half], 2));
      const bool higher = top[half] > reference[half] + kHeadroom;
      correction[half] = higher ? exp2_fast(reference[half] - top[half]) : 1.0f;
      reference[half] = higher ? top[half] : reference[half];
      base[half] = reference[half] == kMinusInfinity ? 0.0f : reference[half];  // nothing attended to so far
      sum[half] *= correction[half];
      rises = rises || higher;
    }
    corrects = __any_sync(0xffffffffu, rises);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      s[i] = exp2_fast(fmaf(s[i], scale, -base[i / 2 % 2]));
      sum[i / 2 % 2] += s[i];
    }
  }

  // The assembler moves waits for products up to where nothing depends on them; it does not move them over a branch,
  // and this one, never taken, needs all weights: the softmax stays beside the product with v instead of coming after
  // it.
  __device__ __forceinline__ void settle() const {
    if (__any_sync(0xffffffffu, sum[0] + sum[1] < 0.0f)) asm volatile("trap;");
  }

  template <int COUNT>
  __device__ __forceinline__ void correct(float (&o)[COUNT]) const {
    if (!corrects) return;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) o[i] *= correction[i / 2 % 2];
  }

  // Sums of whole rows: the four threads of a row add up their shares.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 1);
      sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 2);
    }
  }
};

// Scores of keys from limit[half] on, counted from the thread's first key of the step, become -infinity.
template <int COUNT>
__device__ __forceinline__ void mask_scores(float (&s)[COUNT], const int (&limit)[2]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i)
    if (i / 4 * 8 + i % 2 >= limit[i / 2 % 2]) s[i] = kMinusInfinity;
}

// ---- dropout ---------------------------------------------------------------------------------------------------------

// Which weights stay (common/philox.h). A thread's 16 weights of a row and 64 keys are the bytes of one draw, in order.
struct WeightDropout {
  uint64_t seed;
  uint32_t sequence, head, query[2];
  uint32_t low, all;  // see kept()

  __device__ __forceinline__ void set_threshold(int threshold) {
    low = static_cast<uint32_t>(threshold < 128 ? threshold : threshold - 128) * 0x01010101u;
    all = threshold < 128 ? 0xffffffffu : 0u;
  }

  __device__ __forceinline__ void set_place(const QueryTile& tile, int first_row) {
    sequence = static_cast<uint32_t>(tile.sequence);
    head = static_cast<uint32_t>(tile.head);
    query[0] = static_cast<uint32_t>(first_row);
    query[1] = static_cast<uint32_t>(first_row + 8);
  }

  // The top bit of each byte says whether the byte is at least the threshold: whether its seven low bits reach the
  // threshold's, or its top bit is set; and, not or, if the threshold has a top bit itself.
  __device__ __forceinline__ uint32_t kept(uint32_t bytes) const {
    const uint32_t reaches = (bytes | 0x80808080u) - low;
    return (bytes & reaches) | ((bytes | reaches) & all);
  }

  // Two bytes' top bits as masks of 16 bits.
  template <int PAIR>
  static __device__ __forceinline__ uint32_t widen(uint32_t bits) {
    uint32_t mask;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(mask) : "r"(bits), "n"(PAIR == 0 ? 0x9988 : 0xbbaa));
    return mask;
  }

  // Draws for the step from first_key on: a word for four weights of one row, whose top bits say which are kept.
  template <int COUNT>
  __device__ __forceinline__ void draw(uint32_t (&bits)[COUNT], int first_key) const {
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
      const auto block = static_cast<uint32_t>(first_key / 64 + i / 8);
      const Draw drawn = draw_weights(seed, sequence, head, query[i / 4 % 2], block, threadIdx.x % 4);
#pragma unroll
      for (int word = 0; word < 4; ++word) bits[i + word] = kept(drawn.word[word]);
    }
    hold_registers(bits);
  }

  // Of packed weights, the operand a of the product with v: words 4 * i + half and 4 * i + 2 + half are of one draw.
  template <int COUNT>
  static __device__ __forceinline__ void apply(uint32_t (&weights)[2 * COUNT], const uint32_t (&bits)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int first = i / 8 * 16 + i % 4 * 4 + i / 4 % 2;
      weights[first] &= widen<0>(bits[i]);
      weights[first + 2] &= widen<1>(bits[i]);
    }
  }
};

// ---- results ---------------------------------------------------------------------------------------------------------

// Four threads of a row hold four words each, thread t word t of four vectors: afterwards thread t holds vector t.
__device__ __forceinline__ void transpose_words(uint32_t (&word)[4]) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = (threadIdx.x & bit) != 0;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int low = bit == 1 ? 2 * pair : pair, high = low + bit;
      const uint32_t received = __shfl_xor_sync(0xffffffffu, upper ? word[low] : word[high], bit);
      (upper ? word[low] : word[high]) = received;
    }
  }
}

template <class T, class S>
__device__ __forceinline__ void store_results(const ForwardParams& p, const QueryTile& tile, int first_row,
                                              RunningSoftmax& softmax, const float (&o)[S::kHeadDim / 2]) {
  softmax.finish();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t row_elements = static_cast<int64_t>(p.heads) * S::kHeadDim;
  T* out = static_cast<T*>(p.out) + tile.origin * row_elements + tile.head * S::kHeadDim;
  float* lse = p.lse + (p.packed() ? static_cast<int64_t>(tile.head) * p.queries + tile.origin
                                   : (static_cast<int64_t>(tile.sequence) * p.heads + tile.head) * p.queries);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + 8 * half;
    const bool attends = row < tile.q_length && softmax.sum[half] > 0.0f;
    const float factor = attends ? __fdividef(p.dropout_scale, softmax.sum[half]) : 0.0f;
    if (lane % 4 == 0 && row < tile.rows)
      lse[row] = attends ? (softmax.reference[half] + __log2f(softmax.sum[half])) * 0.693147180559945f : kMinusInfinity;
#pragma unroll
    for (int chunk = 0; chunk < S::kHeadDim / 32; ++chunk) {
      uint32_t word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = o + 4 * (4 * chunk + i) + 2 * half;
        word[i] = attends ? narrow_word(pair[0] * factor, pair[1] * factor, T{}) : 0;
      }
      transpose_words(word);
      if (row < tile.rows)
        *reinterpret_cast<uint4*>(out + row * row_elements + 32 * chunk + 8 * (lane % 4)) =
            make_uint4(word[0], word[1], word[2], word[3]);
    }
  }
}

// ---- consumers -------------------------------------------------------------------------------------------------------

// Turns at issuing products go round the warpgroups.
template <class S, bool TURNS>
struct Turns {
  static constexpr int kFirst = 1;  // named barriers
  int group;
  __device__ __forceinline__ void start() const {
    if (TURNS && group == S::kGroups - 1) arrive_named(kFirst, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void take() const {
    if (TURNS) sync_named(kFirst + group, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void pass() const {
    if (TURNS) arrive_named(kFirst + (group + 1) % S::kGroups, 2 * kWarpgroup);
  }
};

// s = q k^T for this warpgroup's 64 queries.
template <class T, class S>
__device__ __forceinline__ void issue_scores(float (&s)[S::kKeys / 2], uint32_t q, uint32_t k) {
#pragma unroll
  for (int step = 0; step < S::kHeadDim / 16; ++step) {
    const uint32_t offset = step % 4 * kKMajorStep;
    multiply<T>(s, advance(k_major(q + step / 4 * S::kQueryPart), offset),
                advance(k_major(k + step / 4 * S::kKeyPart), offset), step > 0);
  }
  commit_products();
}

// o += weights v
template <class T, class S>
__device__ __forceinline__ void issue_values(float (&o)[S::kHeadDim / 2], uint32_t (&weights)[S::kKeys / 4],
                                             uint32_t v) {
#pragma unroll
  for (int step = 0; step < S::kKeys / 16; ++step)
    multiply<T, Major::mn>(o, weights + 4 * step, advance(mn_major(v, S::kKeyPart), step * kMnMajorStep));
  commit_products();
}

// Rows from `first` on of a tile of v become 0: a weight of 0 does not silence a NaN. All threads of a warpgroup.
template <class S>
__device__ __forceinline__ void clear_rows(char* v, int first, int group) {
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
#pragma unroll
  for (int part = 0; part < S::kParts; ++part)
    for (int i = 8 * first + thread; i < 8 * S::kKeys; i += kWarpgroup)
      reinterpret_cast<uint4*>(v + part * S::kKeyPart)[i] = make_uint4(0, 0, 0, 0);
  fence_async();
  sync_named(4 + group, kWarpgroup);
}

template <class T, int COUNT>
__device__ __forceinline__ void pack_weights(const float (&s)[2 * COUNT], uint32_t (&weights)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) weights[i] = narrow_word(s[2 * i], s[2 * i + 1], T{});
}

// A warpgroup of the block: 64 queries of each tile.
template <class T, class S, bool CAUSAL, bool DROPOUT, bool TURNS>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const ForwardParams& params, ForwardMemory<S>& shared, int number)
      : p(params), memory(shared), group(number), turns{number} {
    if (!DROPOUT) return;
    dropout.seed = static_cast<uint64_t>(*p.seed);
    dropout.set_threshold(p.threshold);
  }

  __device__ __forceinline__ void run() {
    RingPosition<S::kQuerySlots> at;
    turns.start();
    while (true) {
      memory.q_full[at.slot].wait(at.parity);
      const QueryTile tile = memory.tile[at.slot];
      if (tile.sequence < 0) return;
      RunningSoftmax softmax;
      float o[S::kHeadDim / 2];
#pragma unroll
      for (int i = 0; i < S::kHeadDim / 2; ++i) o[i] = 0.0f;
      if (tile.blocks > 0)
        attend(tile, shared_address(memory.q[at.slot]) + group * 64 * kTileRowBytes, memory.q_empty[at.slot], softmax,
               o);
      else
        release(memory.q_empty[at.slot]);
      store_results<T, S>(p, tile, first_row(tile), softmax, o);
      at.next();
    }
  }

 private:
  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }

  // The thread's first query of a tile; the other is 8 further.
  __device__ __forceinline__ int first_row(const QueryTile& tile) const {
    return tile.first + 64 * group + 16 * (static_cast<int>(threadIdx.x) / 32 % 4) + lane() / 4;
  }

  static __device__ __forceinline__ void release(Barrier& empty) {
    __syncwarp();
    if (lane() == 0) empty.arrive();
  }

  // Scores of keys that are not there, or that a query does not attend to, become -infinity.
  __device__ __forceinline__ void mask(float (&s)[S::kKeys / 2], const QueryTile& tile, int block) const {
    const int all = CAUSAL ? min(tile.k_length, tile.causal_keys(tile.first + 64 * group)) : tile.k_length;
    if ((block + 1) * S::kKeys <= all) return;  // every query of the warpgroup attends to them
    int limit[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      limit[half] = (CAUSAL ? min(tile.k_length, tile.causal_keys(first_row(tile) + 8 * half)) : tile.k_length) -
                    block * S::kKeys - 2 * (lane() % 4);
    mask_scores(s, limit);
  }

  // Scores s of a step, which are there now, become weights; o is not touched.
  __device__ __forceinline__ void weigh(float (&s)[S::kKeys / 2], const QueryTile& tile, int block,
                                        RunningSoftmax& softmax) {
    hold_registers(s);
    release(memory.k_empty[k_at.slot]);
    k_at.next();
    mask(s, tile, block);
    softmax.step(s, p.scale);
  }

  // Before the first product with v: rows of other sequences, or of none, are no values.
  __device__ __forceinline__ void clear_absent(const QueryTile& tile, int block) {
    const int present = tile.k_length - block * S::kKeys;
    if (present >= S::kKeys || (!p.packed() && p.lengths_k == nullptr)) return;
    memory.v_full[v_at.slot].wait(v_at.parity);
    clear_rows<S>(memory.v[v_at.slot], present, group);
  }

  // Goes over the keys of a tile whose queries are at q in shared memory.
  __device__ __forceinline__ void attend(const QueryTile& tile, uint32_t q, Barrier& q_empty, RunningSoftmax& softmax,
                                         float (&o)[S::kHeadDim / 2]) {
    if (DROPOUT) dropout.set_place(tile, first_row(tile));
    float s[S::kKeys / 2];
    uint32_t weights[S::kKeys / 4], kept[S::kKeys / 8];
    int block = tile.blocks - 1;
    memory.k_full[k_at.slot].wait(k_at.parity);
    turns.take();
    begin_products();
    issue_scores<T, S>(s, q, shared_address(memory.k[k_at.slot]));
    turns.pass();
    if (DROPOUT) dropout.draw(kept, block * S::kKeys);
    wait_products<0>();
    weigh(s, tile, block, softmax);
    pack_weights<T>(s, weights);
    if (DROPOUT) WeightDropout::apply(weights, kept);
    clear_absent(tile, block);
    while (--block >= 0) {
      memory.k_full[k_at.slot].wait(k_at.parity);
      turns.take();
      hold_registers(o);
      hold_registers(weights);
      begin_products();
      issue_scores<T, S>(s, q, shared_address(memory.k[k_at.slot]));
      memory.v_full[v_at.slot].wait(v_at.parity);
      begin_products();
      issue_values<T, S>(o, weights, shared_address(memory.v[v_at.slot]));
      turns.pass();
      if (DROPOUT) dropout.draw(kept, block * S::kKeys);
      wait_products<1>();
      weigh(s, tile, block, softmax);
      softmax.settle();
      wait_products<0>();
      hold_registers(o);
      hold_registers(weights);
      release(memory.v_empty[v_at.slot]);
      v_at.next();
      softmax.correct(o);
      pack_weights<T>(s, weights);
      if (DROPOUT) WeightDropout::apply(weights, kept);
    }
    release(q_empty);
    memory.v_full[v_at.slot].wait(v_at.parity);
    hold_registers(o);
    hold_registers(weights);
    begin_products();
    issue_values<T, S>(o, weights, shared_address(memory.v[v_at.slot]));
    wait_products<0>();
    hold_registers(o);
    release(memory.v_empty[v_at.slot]);
    v_at.next();
  }

  const ForwardParams& p;
  ForwardMemory<S>& memory;
  const int group;
  const Turns<S, TURNS> turns;
  WeightDropout dropout;
  RingPosition<S::kStages> k_at, v_at;
};

template <class T, class S, bool CAUSAL, bool DROPOUT, bool TURNS>
__global__ void __launch_bounds__(S::kThreads, 1)
    forward_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                   const __grid_constant__ CUtensorMap v_map, const __grid_constant__ ForwardParams p) {
  extern __shared__ char dynamic_memory[];
  auto& memory =
      *reinterpret_cast<ForwardMemory<S>*>(dynamic_memory + (1024 - shared_address(dynamic_memory) % 1024) % 1024);
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
  if (threadIdx.x == 0) memory.initialize();
  __syncthreads();
  if (warp < 4) {
    lower_registers<S::kProducerRegisters>();
    if (warp == 0) {
      if (elected()) {
        prefetch_map(&q_map);
        prefetch_map(&k_map);
        prefetch_map(&v_map);
      }
      produce<S, CAUSAL>(p, memory, &q_map, &k_map, &v_map);
    }
  } else {
    raise_registers<S::kConsumerRegisters>();
    Consumer<T, S, CAUSAL, DROPOUT, TURNS>(p, memory, warp / 4 - 1).run();
  }
}

// ---- launch ----------------------------------------------------------------------------------------------------------

// A tensor of no rows is never read, but a map needs some.
inline TensorView head_view(const void* data, const AttentionCall& call, int64_t heads, int64_t rows,
                            const int64_t (&stride)[3], int box_rows) {
  const int64_t sequences = call.cu_seqlens == nullptr ? call.sequences : 1;
  return {rows > 0 ? data : call.q,
          call.dtype,
          {call.head_dim, heads, std::max<int64_t>(rows, 1), sequences},
          {stride[0], stride[1], stride[2]},
          {kTileColumns, 1, box_rows, 1}};
}

template <class T, class S, bool CAUSAL, bool DROPOUT, bool TURNS>
Status launch_forward(const AttentionForward& call, int multiprocessors, int* next) {
  CUtensorMap maps[3];
  const TensorView views[3] = {
      head_view(call.q, call, call.heads, call.queries,
                {call.q_head_stride, call.q_token_stride, call.q_sequence_stride}, S::kQueries),
      head_view(call.k, call, call.kv_heads, call.keys,
                {call.k_head_stride, call.k_token_stride, call.k_sequence_stride}, S::kKeys),
      head_view(call.v, call, call.kv_heads, call.keys,
                {call.v_head_stride, call.v_token_stride, call.v_sequence_stride}, S::kKeys)};
  for (int i = 0; i < 3; ++i) {
    const Status status = make_tensor_map(&maps[i], views[i]);
    if (status.code != StatusCode::ok) return status;
  }
  ForwardParams p;
  p.out = call.out;
  p.lse = call.lse;
  p.cu_seqlens = call.cu_seqlens;
  p.cu_seqlens_k = call.cu_seqlens_k;
  p.lengths = call.lengths;
  p.lengths_k = call.lengths_k;
  p.seed = call.seed;
  p.next = next;
  p.sequences = static_cast<int>(call.sequences);
  p.heads = static_cast<int>(call.heads);
  p.group = static_cast<int>(call.heads / call.kv_heads);
  p.queries = static_cast<int>(call.queries);
  p.keys = static_cast<int>(call.keys);
  p.max_seqlen = static_cast<int>(call.max_seqlen);
  p.max_seqlen_k = static_cast<int>(call.max_seqlen_k);
  p.tiles = (p.queries + S::kQueries - 1) / S::kQueries;
  constexpr int64_t kCached = 16 << 20;  // bytes of k and v whose heads go together
  p.batched = static_cast<int>(std::max<int64_t>(kCached / std::max<int64_t>(4 * call.head_dim * call.keys, 1), 1));
  p.scale = call.scale * 1.44269504088896f;
  p.dropout_scale = DROPOUT ? call.dropout_scale : 1.0f;
  p.threshold = call.threshold;
  constexpr size_t memory = sizeof(ForwardMemory<S>) + ForwardMemory<S>::kSlack;
  static_assert(memory <= 227 * 1024, "more shared memory than a multiprocessor has");
  return launch(forward_kernel<T, S, CAUSAL, DROPOUT, TURNS>, dim3(multiprocessors), dim3(S::kThreads), memory,
                call.stream, maps[0], maps[1], maps[2], p);
}

}  // namespace cuda
}  // namespace fasttfm
