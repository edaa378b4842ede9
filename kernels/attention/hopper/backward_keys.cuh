// attention backward for Hopper: the masks, and the code that warpgroups 1 and 2 of the kernels for head dim 64 have in
// common.
#pragma once

#include <type_traits>

#include "attention/hopper/backward_results.cuh"
#include "attention/hopper/backward_tiles.cuh"
#include "attention/hopper/column_sums.cuh"
#include "attention/hopper/fp8_gradients.cuh"
#include "attention/hopper/named_barriers.h"
#include "common/cuda/approximations.cuh"

namespace fasttfm {
namespace cuda {
namespace hopper_backward {

// advance() as a 32-bit addition to the low word, which contains the address and does not overflow.
__device__ __forceinline__ uint64_t advance_lo32(uint64_t descriptor, uint32_t bytes) {
  return (descriptor & 0xffffffff00000000ull) | static_cast<uint32_t>(static_cast<uint32_t>(descriptor) + (bytes >> 4));
}

// ---- masks -----------------------------------------------------------------------------------------------------------

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

// Makes a value opaque to the compiler, so that it recomputes expressions of the value instead of keeping them in
// registers.
__device__ __forceinline__ uint32_t opaque(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Keeps ptxas from sinking the code that computes these words: the branch depends on all of them, and it is taken only
// if all of them are NaN.
template <int COUNT>
__device__ __forceinline__ void prevent_sink(const uint32_t (&word)[COUNT]) {
  uint32_t all = 0xffffffffu;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) all &= word[i];
  if (__any_sync(0xffffffffu, all == 0xffffffffu)) __nanosleep(20);
}

// ---- warpgroups 1 and 2 ----------------------------------------------------------------------------------------------

// The code that the kernels for head dim 64 have in common: iterating over key tiles, storing their gradients, and
// storing dS. A step processes one query tile for one key tile. G: the type of the gradients, T or fp8_t.
template <class T, class G, int HEAD_DIM, Mask MASK, class BlockMemory>
class KeyTiles {
 protected:
  static constexpr bool kGrouped = decltype(BlockMemory::task[0].unit)::kGrouped;
  // `number`: 0 or 1, which half of a tile's keys the warpgroup processes.
  __device__ __forceinline__ KeyTiles(const Parameters& p, BlockMemory& memory, int number)
      : p(p), memory(memory), number(number) {}

  __device__ __forceinline__ const auto& unit() const { return task->unit; }
  // The last key tile of a sequence may have keys only for the first warpgroup.
  __device__ __forceinline__ bool has_keys() const { return first_key() < unit().k.length; }
  __device__ __forceinline__ int first_key() const { return key_tile * kKeys + number * 64; }

  __device__ __forceinline__ void next_key_tile() {
    memory.k_full[k_stage.slot].wait(k_stage.parity);
    task = &memory.task[k_stage.slot];
    key_tile = task->key_tile;
    k = shared_address(memory.k[k_stage.slot]) + number * 64 * kTileRowBytes;
    k_stage.next();
  }

  // The two warpgroups alternate in computing weights, so that the wgmma of one overlap with the other's exponentials.
  __device__ __forceinline__ void wait_for_turn() const { named_barrier_sync(kBackwardTurn + number, 2 * kWarpgroup); }
  __device__ __forceinline__ void pass_turn() const {
    named_barrier_arrive(kBackwardTurn + 1 - number, 2 * kWarpgroup);
  }

  // Performs the synchronization of a key tile that has no keys for this warpgroup: arrives at the same mbarriers and
  // stores zeros as dS. Also zeros its rows of dk and dv. each_step() is called at the start of each step.
  template <class Step>
  __device__ __forceinline__ void skip_key_tile(Step each_step) {
    memory.stage_full[stage.slot].wait(stage.parity);
    arrive_warp(memory.stage_empty[stage.slot]);
    stage.next();
    if constexpr (!kFp8<G>) {  // which has no rows without keys
      const int row = unit().k.first + first_key(), rows = min(unit().k.stored - first_key(), 64);
      constexpr auto zeros = store_zeros<kWarpgroup, HEAD_DIM, G>;
      zeros(row_of<G>(p.dk, p, unit().sequence, gradient_head<kGrouped>(p, unit().head), row), p.dk.token, rows,
            HEAD_DIM);
      zeros(row_of<G>(p.dv, p, unit().sequence, gradient_head<kGrouped>(p, unit().head), row), p.dv.token, rows,
            HEAD_DIM);
    }
    const uint32_t nothing[16] = {};
    int left = unit().count_steps(p, key_tile);
    for (; left > 0; --left) {  // the task may be overwritten after the last step
      each_step();
      memory.stage_full[stage.slot].wait(stage.parity);
      wait_for_turn();
      pass_turn();
      store_dscores(nothing);
      arrive_warp(memory.stage_empty[stage.slot]);
      stage.next();
      step.next();
    }
  }

  // The address of a lane's row for ldmatrix and stmatrix of 16 rows and columns 0 to 15. Columns from 16 * c on are at
  // the address ^ 32 * c.
  __device__ __forceinline__ uint32_t matrix_address(const char* tile) const {
    const int lane = threadIdx.x % 32, row = number * 64 + threadIdx.x % kWarpgroup / 32 * 16 + lane % 16;
    return shared_address(tile) + row * kTileRowBytes + (lane / 16 ^ lane % 8) * 16;
  }

  // Loads the warpgroup's values from a stage into registers.
  __device__ __forceinline__ void load_values(const RingPosition<BlockMemory::kStages>& at) {
    memory.stage_full[at.slot].wait(at.parity);
#pragma unroll
    for (int c = 0; c < HEAD_DIM / 16; ++c) ldmatrix_x4(v + 4 * c, matrix_address(memory.v(at.slot)) ^ 32 * c);
  }

  // Stores dS in shared memory, from where warpgroup 3 reads it.
  __device__ __forceinline__ void store_dscores(const uint32_t (&dscores)[16]) {
    memory.dscores_empty[step.slot][number].wait(step.parity ^ 1);
    const uint32_t to = matrix_address(memory.dscores[step.slot]);
#pragma unroll
    for (int c = 0; c < 4; ++c) stmatrix_x4(to ^ 32 * c, dscores + 4 * c);
    fence_proxy_async();
    arrive_warp(memory.dscores_full[step.slot][number]);
  }

  // The rows of dk and dv of a key tile.
  __device__ __forceinline__ GradientRows key_rows() const {
    return {unit().sequence, gradient_head<kGrouped>(p, unit().head), unit().k.first + first_key(),
            unit().k.stored - first_key()};
  }
  // Writes a gradient of a key tile, dk (1) or dv (2), and adds to its column sums.
  __device__ __forceinline__ void store_gradient(const float (&value)[HEAD_DIM / 2], float factor, const Output& to,
                                                 const GradientRows& at, int which) {
    if constexpr (!kFp8<G>)
      store_product(value, factor, row_of<G>(to, p, at.sequence, at.head, at.row), to.token, at.rows);
    if (HEAD_DIM == kHeadDim && p.column_parts != nullptr)
      add_columns(value, factor, column_part(p, at.sequence, Share(p).rank, reload_tid() / 32 - 4, which, at.head));
    if constexpr (kFp8<G>) store_fp8(value, factor, p, memory.fp8, to, at, which);
  }

  const Parameters& p;
  BlockMemory& memory;
  const int number;
  const std::remove_reference_t<decltype(BlockMemory::task[0])>* task;
  int key_tile;
  RingPosition<BlockMemory::kStages> stage;
  RingPosition<2> k_stage;
  RingPosition<BlockMemory::kBuffers> step;
  uint32_t v[HEAD_DIM / 4];
  uint32_t k;  // shared address of the warpgroup's keys
};

}  // namespace hopper_backward
}  // namespace cuda
}  // namespace fasttfm
