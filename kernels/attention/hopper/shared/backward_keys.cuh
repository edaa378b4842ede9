// attention backward for Hopper: the masks, and the code that warpgroups 1 and 2 of the kernels for head dim 64 have in
// common.
#pragma once

#include <type_traits>

#include "attention/hopper/shared/backward_results.cuh"
#include "attention/hopper/shared/backward_tiles.cuh"
#include "attention/hopper/shared/column_sums.cuh"
#include "attention/hopper/shared/fp8_gradients.cuh"
#include "attention/hopper/shared/named_barriers.h"
#include "common/cuda/approximations.cuh"

namespace fasttfm {
namespace cuda {
namespace hopper_backward {

// ---- operands of wgmma ---------------------------------------------------------------------------------------------
//
// Adding to a descriptor takes one instruction (UIADD3.64) if it is computed in the loop over the steps, and four if
// the compiler splits it into words: LLVM does, unless the descriptor is opaque, and ptxas does if it is invariant in
// the loop. So a step computes the low word of each descriptor, an addition to a word that is computed once, and from
// it all descriptors of the operand by advance().

// Makes a value opaque to the compiler, so that it recomputes expressions of the value instead of keeping them in
// registers.
__device__ __forceinline__ uint32_t opaque(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}
__device__ __forceinline__ uint64_t opaque(uint64_t value) {
  asm volatile("" : "+l"(value));
  return value;
}

// The address of a tile as descriptors contain it, in units of 16 bytes.
constexpr uint32_t kAddressUnit = 16;
__device__ __forceinline__ uint32_t tile_address(const void* tile) {
  return (shared_address(tile) & 0x3ffffu) / kAddressUnit;
}
// The same address, which ptxas takes for one that changes from step to step, as `slot` does.
__device__ __forceinline__ uint32_t varying(uint32_t address, uint32_t slot) { return address + (opaque(slot) >> 31); }

// k_major() and mn_major() of a tile_address().
__device__ __forceinline__ uint64_t mn_major_at(uint32_t address, uint32_t leading) {
  const uint64_t rest = mn_major(0, leading);
  const uint64_t descriptor = (rest >> 32 << 32) | (address + static_cast<uint32_t>(rest));
  return opaque(descriptor);
}
__device__ __forceinline__ uint64_t k_major_at(uint32_t address) { return mn_major_at(address, 16); }

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

// The first query that attends to all 64 keys from `key` on, as do those after it; without a mask it is 0, or there is
// none. It is computed once for a key tile, because loading the unit in every step would delay the weights.
template <Mask MASK>
__device__ __forceinline__ int first_whole_query(int key, const Unit<MASK>& unit) {
  if (key + 64 > unit.k.length) return 0x7fffffff;
  return MASK == Mask::causal ? key + 63 - unit.offset() : 0;
}

// Masks the scores of 64 keys from `key` on and 64 queries from `query` on. whole: first_whole_query().
template <Mask MASK>
__device__ __forceinline__ void mask_scores(float (&scores)[32], int key, int query, const Unit<MASK>& unit,
                                            int whole) {
  constexpr bool kCausal = MASK == Mask::causal;
  if constexpr (MASK == Mask::window) {
    mask_window(scores, key, query, unit.k.length, unit.offset(), unit.window);
    return;
  }
  if ((kCausal ? query : 0) >= whole) return;
  const int keys = unit.k.length, offset = unit.offset();
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

// Keeps ptxas from sinking the code that computes these words, by stores that are never made. slot: of any ring buffer;
// the compiler does not know that it is small.
template <int COUNT>
__device__ __forceinline__ void prevent_sink(const uint32_t (&word)[COUNT], uint32_t slot) {
  slot = opaque(slot);
#pragma unroll
  for (int i = 0; i < COUNT; i += 4)
    asm volatile("{ .reg .pred p; setp.gt.u32 p, %0, 15; @p st.shared.v4.b32 [%0], {%1, %2, %3, %4}; }" ::"r"(slot),
                 "r"(word[i]), "r"(word[i + 1]), "r"(word[i + 2]), "r"(word[i + 3])
                 : "memory");
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
    k = tile_address(memory.k) + (k_stage.slot * kKeyTileBytes + number * 64 * kTileRowBytes) / kAddressUnit;
    whole = warp_uniform(first_whole_query<MASK>(first_key(), unit()));
    k_stage.next();
  }

  // The two warpgroups alternate in computing weights, so that the wgmma of one overlap with the other's exponentials.
  __device__ __forceinline__ void scheduler_barrier_sync() const {
    named_barrier_sync(kBackwardWarpScheduler + number, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void scheduler_barrier_arrive() const {
    named_barrier_arrive(kBackwardWarpScheduler + 1 - number, 2 * kWarpgroup);
  }

  // Performs the synchronization of a key tile that has no keys for this warpgroup: arrives at the same mbarriers and
  // stores zeros as dS. Also zeros its rows of dk and dv. Calls begin_step() at the start of each step.
  template <class Step>
  __device__ __forceinline__ void skip_key_tile(Step begin_step) {
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
      begin_step();
      memory.stage_full[stage.slot].wait(stage.parity);
      scheduler_barrier_sync();
      scheduler_barrier_arrive();
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

  // The tile_address() of the queries in a stage, and of their gradients.
  __device__ __forceinline__ uint32_t q_address(uint32_t slot) const {
    return tile_address(memory.stage) + slot * (kStageBytes / kAddressUnit);
  }
  __device__ __forceinline__ uint32_t dout_address(uint32_t slot) const {
    return q_address(slot) + kQueryTileBytes / kAddressUnit;
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
  int whole;  // first_whole_query() of the key tile
  RingPosition<BlockMemory::kStages> stage;
  RingPosition<2> k_stage;
  RingPosition<BlockMemory::kBuffers> step;
  uint32_t v[HEAD_DIM / 4];
  uint32_t k;  // tile_address() of the warpgroup's keys
};

}  // namespace hopper_backward
}  // namespace cuda
}  // namespace fasttfm
