// attention backward for Hopper, head dims 64 and 32: warpgroup 3, which computes and accumulates dQ.
#pragma once

#include "attention/hopper/shared/backward_products.cuh"

namespace fasttfm {
namespace cuda {
namespace hopper_backward {

// Writes zeros to the gradients of queries that attend to no keys, of keys to which no query attends, and of rows past
// the sequence's end. This is for units that have queries and keys; statistics_kernel() writes the
// zeros of the others.
template <class G, int HEAD_DIM, bool GROUPED, Mask MASK>
__device__ __forceinline__ void store_zero_rows(const Parameters& p, const Unit<MASK>& unit) {
  if constexpr (kFp8<G>) return;  // packed self-attention has no such rows
  const auto zero_queries = [&](int begin, int end) {
    for_each_head<GROUPED>(p, [&](int member) {
      if (begin < end)
        store_zeros<kWarpgroup, HEAD_DIM>(row_of<G>(p.dq, p, unit.sequence, unit.head + member, unit.q.first + begin),
                                          p.dq.token, end - begin);
    });
  };
  const auto zero_keys = [&](const Output& output, int begin, int end) {
    if (begin < end)
      store_zeros<kWarpgroup, HEAD_DIM>(
          row_of<G>(output, p, unit.sequence, gradient_head<GROUPED>(p, unit.head), unit.k.first + begin), output.token,
          end - begin);
  };
  if (MASK != Mask::full) zero_queries(0, min(unit.begin(unit.first_key_tile()) * kQueries, unit.q.stored));
  if (MASK == Mask::window) {
    zero_keys(p.dk, 0, unit.first_key_tile() * kKeys);
    zero_keys(p.dv, 0, unit.first_key_tile() * kKeys);
  }
  zero_queries(unit.query_tiles * kQueries, unit.q.stored);
  zero_keys(p.dk, unit.key_tiles * kKeys, unit.k.stored);
  zero_keys(p.dv, unit.key_tiles * kKeys, unit.k.stored);
}

// dQ in shared memory. Each thread has its own FLOATS elements of a tile.
template <int FLOATS>
class SharedSums {
 public:
  explicit __device__ __forceinline__ SharedSums(float4* sums) : sums_(sums) {}

  __device__ __forceinline__ void load(float (&value)[FLOATS], int tile) const {
    const float4* from = sums_ + tile * (kSumFloats / 4) + reload_tid() % kWarpgroup;
#pragma unroll
    for (int i = 0; i < FLOATS / 4; ++i) {
      const float4 part = from[i * kWarpgroup];
      value[4 * i] = part.x;
      value[4 * i + 1] = part.y;
      value[4 * i + 2] = part.z;
      value[4 * i + 3] = part.w;
    }
  }
  __device__ __forceinline__ void store(const float (&value)[FLOATS], int tile) {
    float4* to = sums_ + tile * (kSumFloats / 4) + reload_tid() % kWarpgroup;
#pragma unroll
    for (int i = 0; i < FLOATS / 4; ++i)
      to[i * kWarpgroup] = make_float4(value[4 * i], value[4 * i + 1], value[4 * i + 2], value[4 * i + 3]);
  }

 private:
  float4* sums_;
};

// How a block accumulates dQ of a query tile for a key tile: see ChunkStep.
template <Mask MASK>
struct DqStep {
  bool follows, last;
  static constexpr bool sends_partial_sum = false, adds_partial_sum = false;
  __device__ __forceinline__ DqStep(const Unit<MASK>& unit, int key_tile, int tile)
      : follows(key_tile > 0), last(key_tile == unit.last_key_tile(tile)) {}
};
template <>
struct DqStep<Mask::window> : ChunkStep {
  __device__ __forceinline__ DqStep(const Unit<Mask::window>& unit, int key_tile, int tile)
      : ChunkStep(chunk_step(unit.keys_of(tile), unit.chunk, unit.has_next, key_tile)) {}
};

// Stores the partial sum of a tile in the workspace for the block that completes it, and increments a counter once per
// warp. Each thread has its own elements.
__device__ __forceinline__ void store_partial_sum(const float (&value)[32], float* sum, int* arrivals) {
  float4* to = reinterpret_cast<float4*>(sum) + reload_tid() % kWarpgroup;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    __stcg(to + i * kWarpgroup, make_float4(value[4 * i], value[4 * i + 1], value[4 * i + 2], value[4 * i + 3]));
  __syncwarp();
  if (reload_tid() % 32 == 0)
    asm volatile("fence.acq_rel.gpu; red.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(arrivals) : "memory");
  __syncwarp();
}

// Waits for the partial sum of the other block, and adds it.
__device__ __forceinline__ void add_partial_sum(float (&value)[32], const float* sum, const int* arrivals) {
  if (reload_tid() % 32 == 0) {
    while (load_acquire(arrivals) < kWarpgroup / 32) {
    }
  }
  __syncwarp();
  const float4* from = reinterpret_cast<const float4*>(sum) + reload_tid() % kWarpgroup;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float4 part = __ldcg(from + i * kWarpgroup);
    value[4 * i] += part.x;
    value[4 * i + 1] += part.y;
    value[4 * i + 2] += part.z;
    value[4 * i + 3] += part.w;
  }
}

// The index of a query tile in SharedSums, which is a ring buffer for windows.
template <Mask MASK>
__device__ __forceinline__ int ring_tile(int tile) {
  return MASK == Mask::window ? tile % (kRingQueries / kQueries) : tile;
}
static_assert(kRingQueries == kOnChipQueries);

// dq = dS K of a step, or dq += dS K. k_slot: the stage of the key tile. Each half waits for dS of one warpgroup, and
// computes its descriptors again, because keeping them across the wait would take registers.
template <class T, class BlockMemory, int COUNT>
__device__ __forceinline__ void multiply_dscores(float (&dq)[COUNT], BlockMemory& memory, uint32_t k_slot,
                                                 const RingPosition<BlockMemory::kBuffers>& step, bool add) {
  constexpr uint32_t kTile = kKeyTileBytes / kAddressUnit;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    memory.dscores_full[step.slot][half].wait(step.parity);
    const uint64_t dscores = mn_major_at(tile_address(memory.dscores) + warp_uniform(step.slot) * kTile, 0);
    const uint64_t k = mn_major_at(varying(tile_address(memory.k) + warp_uniform(k_slot) * kTile, step.slot), 0);
    wgmma_fence();
#pragma unroll
    for (int c = 4 * half; c < 4 * half + 4; ++c)
      wgmma<T, Major::mn, Major::mn>(dq, advance(dscores, c * kMnMajorStep), advance(k, c * kMnMajorStep),
                                     c > 0 || add);
    wgmma_commit();
  }
  wgmma_wait<1>();
  arrive_warp(memory.dscores_empty[step.slot][0]);
  wgmma_wait<0>();
  fence_operand(dq);
  arrive_warp(memory.dscores_empty[step.slot][1]);
}

template <class T, class G, int HEAD_DIM, Mask MASK, bool ON_CHIP>
__device__ __forceinline__ void sum_dq(const Parameters& p, Memory<ON_CHIP, MASK>& memory) {
  const int rank = ON_CHIP ? 0 : blockIdx.x % p.blocks;
  uint32_t* own_progress = p.progress + blockIdx.x;
  auto sums = [&] {
    if constexpr (ON_CHIP)
      return SharedSums<HEAD_DIM / 2>(memory.sums);
    else
      return OrderedSums<kSumFloats / kWarpgroup>(memory.sums, kBackwardSums, own_progress,
                                                  rank == 0 ? own_progress + p.blocks - 1 : own_progress - 1);
  }();
  RingPosition<2> k_stage;
  RingPosition<Memory<ON_CHIP, MASK>::kBuffers> step;
  for (;;) {
    memory.k_full[k_stage.slot].wait(k_stage.parity);
    const Task<MASK>& task = memory.task[k_stage.slot];
    const Unit<MASK>& unit = task.unit;
    const int key_tile = task.key_tile;
    const uint32_t addition = task.addition;
    if (key_tile < 0) {
      if constexpr (!ON_CHIP) sums.finish(addition);
      return;
    }
    for (int tile = task_begin(unit, key_tile); tile < task_end(unit, key_tile); ++tile, step.next()) {
      float* sum = p.sums + static_cast<int64_t>(unit.tile + tile) * kSumFloats;
      const DqStep<MASK> dq_step(unit, key_tile, tile);
      const bool last = dq_step.last, load = (last || ON_CHIP) && dq_step.follows;
      float dq[HEAD_DIM / 2];
      if (load) {
        if constexpr (ON_CHIP)
          sums.load(dq, ring_tile<MASK>(tile));
        else
          sums.load(dq, sum, addition + tile, rank == 0 ? unit.query_tiles : 0);
      }
      multiply_dscores<T>(dq, memory, k_stage.slot, step, load);
      if constexpr (MASK == Mask::window) {
        if (last && dq_step.adds_partial_sum) add_partial_sum(dq, sum, p.arrivals + unit.tile + tile);
      }
      if (last && dq_step.sends_partial_sum) {
        if constexpr (MASK == Mask::window) store_partial_sum(dq, sum, p.arrivals + unit.tile + tile);
      } else if (last) {
        const int query = tile * kQueries;
        if constexpr (!kFp8<G>) {
          store_product(dq, p.dq_scale, row_of<G>(p.dq, p, unit.sequence, unit.head, unit.q.first + query), p.dq.token,
                        unit.q.stored - query);
          __syncwarp();  // otherwise the compiler assumes that warps diverge here and uses no uniform registers
        }
        if (p.column_parts != nullptr)
          add_columns(dq, p.dq_scale,
                      column_part(p, unit.sequence, rank, reload_tid() % kWarpgroup / 32, 0, unit.head));
        if constexpr (kFp8<G>)
          store_fp8(dq, p.dq_scale, p, memory.fp8, p.dq,
                    {unit.sequence, unit.head, unit.q.first + query, unit.q.stored - query}, 0);
      } else if constexpr (ON_CHIP) {
        sums.store(dq, ring_tile<MASK>(tile));
      } else {
        sums.add(dq, sum, addition + tile, rank == 0 ? unit.query_tiles : 0, key_tile == 0);
      }
    }
    if (key_tile == unit.first_key_tile()) store_zero_rows<G, HEAD_DIM, false>(p, unit);
    arrive_warp(memory.k_empty[k_stage.slot]);
    k_stage.next();
  }
}

}  // namespace hopper_backward
}  // namespace cuda
}  // namespace fasttfm
