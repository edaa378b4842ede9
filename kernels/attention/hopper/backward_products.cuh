// attention backward for Hopper, head dims 64 and 32: warpgroups 1 and 2, which compute dK and dV.
#pragma once

#include "attention/hopper/backward_tiles.cuh"
#include "attention/hopper/column_sums.cuh"
#include "attention/hopper/named_barriers.h"
#include "common/cuda/approximations.cuh"

namespace fasttfm {
namespace cuda {
namespace hopper_backward {

// advance() as a 32-bit addition to the low word, which contains the address and does not overflow.
__device__ __forceinline__ uint64_t advance_lo32(uint64_t descriptor, uint32_t bytes) {
  return (descriptor & 0xffffffff00000000ull) | static_cast<uint32_t>(static_cast<uint32_t>(descriptor) + (bytes >> 4));
}

// ---- results ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void exchange(uint32_t& low, uint32_t& high, int bit) {
  const bool upper = (reload_tid() & bit) != 0;
  const uint32_t received = __shfl_xor_sync(0xffffffffu, upper ? low : high, bit);
  if (upper)
    low = received;
  else
    high = received;
}

// Writes the first `rows` rows of a warpgroup's accumulator of 64 rows and 2 * COUNT columns, times `factor`. The four
// threads of a row each hold pairs of columns; they exchange them by shuffles, so that each thread writes 8 consecutive
// columns.
template <class T, int COUNT>
__device__ __forceinline__ void store_product(const float (&value)[COUNT], float factor, T* to, int64_t stride,
                                              int rows) {
  const int lane = reload_tid() % 32, row = reload_tid() % kWarpgroup / 32 * 16 + lane / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int part = 0; part < COUNT / 16; ++part) {
      uint32_t word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 16 * part + 4 * i + 2 * half;
        word[i] = narrow_word(value[at] * factor, value[at + 1] * factor, T{});
      }
      exchange(word[0], word[1], 1);
      exchange(word[2], word[3], 1);
      exchange(word[0], word[2], 2);
      exchange(word[1], word[3], 2);
      if (row + 8 * half < rows)  // in assembly, because the compiler would split the store into four
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to + (row + 8 * half) * stride + 32 * part +
                                                                      8 * (lane % 4)),
                     "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
                     : "memory");
    }
}

// Writes zeros to `rows` rows of COLUMNS columns. Called by THREADS threads, by default a warpgroup.
template <int THREADS = kWarpgroup, int COLUMNS = kTileColumns, class T>
__device__ __forceinline__ void store_zeros(T* to, int64_t stride, int rows) {
  constexpr int kRow = COLUMNS / 8;  // vectors per row
  for (int i = threadIdx.x % THREADS; i < kRow * rows; i += THREADS)
    *reinterpret_cast<uint4*>(to + i / kRow * stride + i % kRow * 8) = make_uint4(0, 0, 0, 0);
}

template <class T>
__device__ __forceinline__ T* row_of(const Output& output, const Parameters& p, int sequence, int head, int row) {
  const int64_t batch = p.cu_seqlens == nullptr ? sequence : 0;
  return static_cast<T*>(output.data) + batch * output.sequence + head * output.head + row * output.token;
}

// ---- warpgroups 1 and 2 ----------------------------------------------------------------------------------------------

// Masks the scores of keys that are more than `right` after the query's position, or more than `left` before it. Most
// tiles need only one of the two comparisons, or none.
__device__ __forceinline__ void mask_window(float (&scores)[32], int key, int query, int keys, int offset,
                                            const Window& window) {
  const int lane = threadIdx.x % 32, row = key + threadIdx.x % kWarpgroup / 32 * 16 + lane / 4;
  const int distance = row - (query + offset + lane % 4 * 2);  // from the thread's first query to its first key
  if (key + 63 > query + offset + window.right) {              // some queries are too far before the keys
    const int limit[2] = {distance - window.right, distance + 8 - window.right};
#pragma unroll
    for (int i = 0; i < 32; ++i)
      if (i / 4 * 8 + i % 2 < limit[i % 4 / 2]) scores[i] = -__int_as_float(0x7f800000);
  }
  if (key < query + offset + 63 - window.left) {  // some queries are too far after the keys
    const int limit[2] = {distance + window.left, distance + 8 + window.left};
#pragma unroll
    for (int i = 0; i < 32; ++i)
      if (i / 4 * 8 + i % 2 > limit[i % 4 / 2]) scores[i] = -__int_as_float(0x7f800000);
  }
  if (key + 64 > keys) {
#pragma unroll
    for (int i = 0; i < 32; ++i)
      if (row + i % 4 / 2 * 8 >= keys) scores[i] = -__int_as_float(0x7f800000);
  }
}

// Masks the scores of 64 keys from `key` on and 64 queries from `query` on.
template <Mask MASK>
__device__ __forceinline__ void mask_scores(float (&scores)[32], int key, int query, const Unit<MASK>& unit) {
  constexpr bool kCausal = MASK == Mask::causal;
  const int keys = unit.k.length, offset = unit.offset();
  if constexpr (MASK == Mask::window) {
    mask_window(scores, key, query, keys, offset, unit.window);
    return;
  }
  const bool whole = key + 64 <= keys && (!kCausal || key + 63 <= query + offset);
  if (whole) return;
  const int lane = threadIdx.x % 32, row = key + threadIdx.x % kWarpgroup / 32 * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int own_key = row + i % 4 / 2 * 8, own_query = query + i / 4 * 8 + lane % 4 * 2 + i % 2;
    if (own_key >= keys || (kCausal && own_key > own_query + offset)) scores[i] = -__int_as_float(0x7f800000);
  }
}

// Rounds two floats to 16 bits and replaces negative ones by 0.
__device__ __forceinline__ uint32_t narrow_relu(float low, float high, bf16_t) {
  uint32_t word;
  asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
__device__ __forceinline__ uint32_t narrow_relu(float low, float high, f16_t) {
  uint32_t word;
  asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

// ptxas hoists a wgmma wait above computations that should overlap with the wgmma, but not across a branch. This branch
// depends on `value` and is never taken, because no computation produces this NaN.
__device__ __forceinline__ void prevent_hoist(float value) {
  if (__any_sync(0xffffffffu, __float_as_uint(value) == 0x7fc0dead)) asm volatile("nanosleep.u32 0;");
}

// A step processes one query tile for one key tile; the pipeline continues across key tiles and units. While P and dS
// of a step are computed, wgmma of the previous and the next step are in flight: S of the next step is issued before dS
// is stored, and dP after it, together with dK. The sign bit of a weight is set if dropout drops it.
template <class T, int HEAD_DIM, bool DROPOUT, Mask MASK, bool ON_CHIP>
class KeyWarpgroup {
  static constexpr int kStages = Memory<ON_CHIP, MASK>::kStages;

 public:
  // `number`: 0 or 1, the warpgroup's half of the 128 keys of a tile.
  __device__ __forceinline__ KeyWarpgroup(const Parameters& p, Memory<ON_CHIP, MASK>& memory, int number)
      : p(p), memory(memory), number(number) {}

  __device__ __forceinline__ void run() {
    if (number == 1) give_turn();
    next_key_tile();
    while (key_tile >= 0) {
      if (has_keys()) {
        process_key_tiles();
      } else {
        skip_key_tile();
        next_key_tile();
      }
    }
  }

 private:
  // The last key tile of a sequence may have keys only for the first warpgroup.
  __device__ __forceinline__ bool has_keys() const { return first_key() < unit().k.length; }
  __device__ __forceinline__ int first_key() const { return key_tile * kKeys + number * 64; }

  // Performs the synchronization of a key tile that has no keys for this warpgroup: arrives at the same mbarriers and
  // stores zeros as dS. Also zeros its rows of dk and dv.
  __device__ __forceinline__ void skip_key_tile() {
    memory.stage_full[stage.slot].wait(stage.parity);
    arrive_warp(memory.stage_empty[stage.slot]);
    stage.next();
    const int row = unit().k.first + first_key(), rows = min(unit().k.stored - first_key(), 64);
    constexpr auto zeros = store_zeros<kWarpgroup, HEAD_DIM, T>;
    zeros(row_of<T>(p.dk, p, unit().sequence, unit().head, row), p.dk.token, rows);
    zeros(row_of<T>(p.dv, p, unit().sequence, unit().head, row), p.dv.token, rows);
#pragma unroll
    for (int i = 0; i < 16; ++i) operand[i] = 0;
    const int end = task_end(unit(), key_tile);  // read here, because the task may be overwritten after the last step
    for (int tile = task_begin(unit(), key_tile); tile < end; ++tile) {
      if constexpr (DROPOUT) {
        memory.kept_full[step.slot][number].wait(step.parity);
        arrive_warp(memory.kept_empty[step.slot][number]);
      }
      memory.stage_full[stage.slot].wait(stage.parity);
      take_turn();
      give_turn();
      store_dscores();
      arrive_warp(memory.stage_empty[stage.slot]);
      stage.next();
      step.next();
    }
  }

  // Processes key tiles until one has no keys for this warpgroup, or until there are no more.
  __device__ __forceinline__ void process_key_tiles() {
    int tile = task_begin(unit(), key_tile);
    load_values(stage);
    stage.next();
    memory.stage_full[stage.slot].wait(stage.parity);
    const int start = warp_uniform(stage.slot);
    wgmma_fence();
    start_scores(start, warp_uniform(k));
    wgmma_commit();  // an empty wgmma group in place of dK's, for the waits that count groups
    start_dweights(start);
    for (;;) {
      __syncwarp();  // otherwise the compiler assumes that warps diverge here
      // The addresses of wgmma operands are warp-uniform, but the compiler does not see that in this loop.
      const int slot = warp_uniform(stage.slot);
      const int key = first_key();
      const bool first = tile == task_begin(unit(), key_tile);
      compute(slot, key, tile * kQueries, first);
      const bool last = tile + 1 == task_end(unit(), key_tile);
      Place own;
      stage.next();
      const RingPosition<kStages> values = stage;  // stage of v, if there is a next key tile
      if (last) {
        stage.next();
        own = {unit().sequence, unit().head, unit().k.first + key, unit().k.stored - key};
        next_key_tile();
        if (key_tile < 0 || !has_keys()) {
          stage = values;
          store_dscores();
          wgmma_fence();
          start_dk(slot, first);
          store_dv(own);
          wgmma_wait<0>();
          store_dk(own, slot);
          step.next();
          return;
        }
      }
      const uint32_t keys = warp_uniform(k);
      const int next = warp_uniform(stage.slot);
      if (!ON_CHIP) {
        memory.stage_full[next].wait(stage.parity);
        wgmma_fence();
        start_scores(next, keys);
      }
      store_dscores();
      if (last) load_values(values);
      wgmma_fence();
      start_dk(slot, first);
      if (ON_CHIP) {
        memory.stage_full[next].wait(stage.parity);
        wgmma_fence();
        start_scores(next, keys);
      }
      start_dweights(next);
      if (last) {
        wgmma_wait<0>();  // also for dP of the next step; otherwise ptxas assumes that its accumulators are read here
        fence_operand(scores);
        fence_operand(dweights);
        store_dk(own, slot);
        store_dv(own);
      }
      tile = last ? task_begin(unit(), key_tile) : tile + 1;
      step.next();
    }
  }

  // The address of a lane's row for ldmatrix and stmatrix of 16 rows and columns 0 to 15. Columns from 16 * c on are at
  // the address ^ 32 * c.
  __device__ __forceinline__ uint32_t matrix_address(const char* tile) const {
    const int lane = threadIdx.x % 32, row = number * 64 + threadIdx.x % kWarpgroup / 32 * 16 + lane % 16;
    return shared_address(tile) + row * kTileRowBytes + (lane / 16 ^ lane % 8) * 16;
  }

  // The two warpgroups alternate in computing weights, so that the wgmma of one overlap with the other's exponentials.
  __device__ __forceinline__ void take_turn() const { named_barrier_sync(kBackwardTurn + number, 2 * kWarpgroup); }
  __device__ __forceinline__ void give_turn() const {
    named_barrier_arrive(kBackwardTurn + 1 - number, 2 * kWarpgroup);
  }

  __device__ __forceinline__ void next_key_tile() {
    memory.k_full[k_stage.slot].wait(k_stage.parity);
    task = &memory.task[k_stage.slot];
    key_tile = task->key_tile;
    k = shared_address(memory.k[k_stage.slot]) + number * 64 * kTileRowBytes;
    k_stage.next();
  }
  __device__ __forceinline__ void load_values(const RingPosition<kStages>& at) {
    memory.stage_full[at.slot].wait(at.parity);
#pragma unroll
    for (int c = 0; c < HEAD_DIM / 16; ++c) ldmatrix_x4(v + 4 * c, matrix_address(memory.v(at.slot)) ^ 32 * c);
  }
  __device__ __forceinline__ const Unit<MASK>& unit() const { return task->unit; }

  __device__ __forceinline__ void start_scores(int slot, uint32_t keys) {
    const uint32_t q = shared_address(memory.q(slot));
#pragma unroll
    for (int c = 0; c < HEAD_DIM / 16; ++c)
      wgmma<T>(scores, advance_lo32(k_major(keys), c * kKMajorStep), advance_lo32(k_major(q), c * kKMajorStep), c > 0);
    wgmma_commit();
  }
  __device__ __forceinline__ void start_dweights(int slot) {
    const uint32_t dout = shared_address(memory.dout(slot));
#pragma unroll
    for (int c = 0; c < HEAD_DIM / 16; ++c)
      wgmma<T>(dweights, v + 4 * c, advance_lo32(k_major(dout), c * kKMajorStep), c > 0);
    wgmma_commit();
  }

  // Overwrites S with P.
  __device__ __forceinline__ void compute_weights(const float2* lse, uint32_t dropped) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 own = lse[4 * i];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* pair = scores + 4 * i + 2 * half;
        pair[0] = exp2_approx(pair[0] * p.score_scale - own.x);
        pair[1] = exp2_approx(pair[1] * p.score_scale - own.y);
        if constexpr (DROPOUT) {
          const int bit = i / 2 * 8 + (1 - half) * 4 + i % 2 * 2;
          pair[0] = __uint_as_float(__float_as_uint(pair[0]) | (dropped << (31 - bit) & 0x80000000u));
          pair[1] = __uint_as_float(__float_as_uint(pair[1]) | (dropped << (30 - bit) & 0x80000000u));
        }
      }
    }
  }

  // Overwrites dP with dS.
  __device__ __forceinline__ void compute_dscores(const float2 (&delta)[8]) {
#pragma unroll
    for (int at = 0; at < 32; ++at) {
      const float mean = at % 2 == 0 ? delta[at / 4].x : delta[at / 4].y;
      dweights[at] = DROPOUT ? fmaxf(scores[at], 0.0f) * dweights[at] - fabsf(scores[at]) * mean
                             : scores[at] * (dweights[at] - mean);
    }
  }

  // Computes dS of a step as a 16-bit wgmma operand from S and dP, whose wgmma are in flight, and issues dV. `first`:
  // the step is the first one of a key tile.
  __device__ __forceinline__ void compute(int slot, int key, int query, bool first) {
    const float2* statistics = reinterpret_cast<const float2*>(memory.statistics[slot]) + threadIdx.x % 4;
    uint32_t dropped = 0;
    if constexpr (DROPOUT) {
      memory.kept_full[step.slot][number].wait(step.parity);
      dropped = ~memory.kept[step.slot][number][threadIdx.x % kWarpgroup];
    }
    wgmma_wait<ON_CHIP ? 1 : 2>();
    fence_operand(scores);
    const auto give_free = [&] { arrive_warp(memory.stage_empty[slot == 0 ? kStages - 1 : slot - 1]); };
    if (ON_CHIP && !first) give_free();  // dK of the previous step has read the stage
    take_turn();
    mask_scores(scores, key, query, unit());
    compute_weights(statistics, dropped);
    if constexpr (!ON_CHIP) {
      prevent_hoist(scores[31]);
      wgmma_wait<1>();  // dV's operand reuses the registers of dK's
    }
    fence_operand(operand);
#pragma unroll
    for (int i = 0; i < 16; ++i)
      operand[i] = DROPOUT ? narrow_relu(scores[2 * i], scores[2 * i + 1], T{})
                           : narrow_word(scores[2 * i], scores[2 * i + 1], T{});
    give_turn();
    float2 delta[8];  // loaded before the wgmma, which would delay the loads
#pragma unroll
    for (int i = 0; i < 8; ++i) delta[i] = statistics[kQueries / 2 + 4 * i];
    if constexpr (DROPOUT)
      arrive_warp(memory.kept_empty[step.slot][number]);  // the word was used, so its load is complete
    wgmma_fence();
    const uint32_t dout = shared_address(memory.dout(slot));
#pragma unroll
    for (int c = 0; c < 4; ++c)
      wgmma<T, Major::mn>(dv, operand + 4 * c, advance_lo32(mn_major(dout, 0), c * kMnMajorStep), c > 0 || !first);
    wgmma_commit();
    wgmma_wait<1>();
    fence_operand(dweights);
    // A load from shared memory is complete only when its value is used; arriving at an mbarrier does not wait for it.
    // So v's stage is released here, where wgmma have used the loaded registers.
    if (!ON_CHIP || first) give_free();
    compute_dscores(delta);
    prevent_hoist(dweights[31]);
    wgmma_wait<0>();  // dK's operand reuses the registers of dV's
    fence_operand(operand);
#pragma unroll
    for (int i = 0; i < 16; ++i) operand[i] = narrow_word(dweights[2 * i], dweights[2 * i + 1], T{});
  }

  // Stores dS in shared memory, from where warpgroup 3 reads it.
  __device__ __forceinline__ void store_dscores() {
    memory.dscores_empty[step.slot][number].wait(step.parity ^ 1);
    const uint32_t to = matrix_address(memory.dscores[step.slot]);
#pragma unroll
    for (int c = 0; c < 4; ++c) stmatrix_x4(to ^ 32 * c, operand + 4 * c);
    fence_proxy_async();
    arrive_warp(memory.dscores_full[step.slot][number]);
  }

  __device__ __forceinline__ void start_dk(int slot, bool first) {
    const uint32_t q = shared_address(memory.q(slot));
#pragma unroll
    for (int c = 0; c < 4; ++c)
      wgmma<T, Major::mn>(dk, operand + 4 * c, advance_lo32(mn_major(q, 0), c * kMnMajorStep), c > 0 || !first);
    wgmma_commit();
  }

  // The rows of dk and dv of a key tile.
  struct Place {
    int sequence, head, row, rows;
  };
  // Called after the last step of a key tile; the queries of that step are in stage `slot`.
  __device__ __forceinline__ void store_dk(const Place& at, int slot) {
    fence_operand(dk);
    arrive_warp(memory.stage_empty[slot]);
    store_product(dk, p.dq_scale, row_of<T>(p.dk, p, at.sequence, at.head, at.row), p.dk.token, at.rows);
    store_columns(dk, p.dq_scale, at, 1);
  }
  // dV is complete before dK, so this may be called while wgmma of dK are in flight.
  __device__ __forceinline__ void store_dv(const Place& at) {
    fence_operand(dv);
    store_product(dv, p.dv_scale, row_of<T>(p.dv, p, at.sequence, at.head, at.row), p.dv.token, at.rows);
    store_columns(dv, p.dv_scale, at, 2);
  }
  __device__ __forceinline__ void store_columns(const float (&value)[HEAD_DIM / 2], float factor, const Place& at,
                                                int which) {
    if (HEAD_DIM != kHeadDim || p.column_parts == nullptr) return;
    add_columns(value, factor, column_place(p, at.sequence, Share(p).rank, reload_tid() / 32 - 4, which, at.head));
  }

  const Parameters& p;
  Memory<ON_CHIP, MASK>& memory;
  const int number;
  const Task<MASK>* task;
  int key_tile;
  RingPosition<kStages> stage;
  RingPosition<2> k_stage;
  RingPosition<Memory<ON_CHIP, MASK>::kBuffers> step;
  float dk[HEAD_DIM / 2], dv[HEAD_DIM / 2], scores[32], dweights[32];
  uint32_t v[HEAD_DIM / 4], operand[16];
  uint32_t k;  // shared address of the warpgroup's keys
};

}  // namespace hopper_backward
}  // namespace cuda
}  // namespace fasttfm
