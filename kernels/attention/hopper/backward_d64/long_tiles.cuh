// attention backward for Hopper, head dim 64, for long sequences: the layout of shared memory, and warpgroup 0, which
// loads tiles and adds to dQ.
#pragma once

#include "attention/hopper/shared/backward_split_units.cuh"
#include "attention/hopper/shared/backward_tiles.cuh"

namespace fasttfm {
namespace cuda {
namespace hopper_backward {

// A key tile for this block.
template <Mask MASK, bool GROUPED>
struct LongTask {
  SplitUnit<MASK, GROUPED> unit;
  int key_tile;  // -1: there are no more
  int round;     // of the unit
};

template <Mask MASK, bool GROUPED>
struct LongMemory {
  static constexpr int kStages = 5;    // each holds a tile of q and one of dout, or a tile of v
  static constexpr int kBuffers = 2;   // for dS
  static constexpr int kStagings = 3;  // for dQ
  alignas(1024) char stage[kStages][kStageBytes];
  char k[2][kKeyTileBytes];
  char dscores[kBuffers][kKeyTileBytes];     // [keys, queries]
  float4 staging[kStagings][8][kWarpgroup];  // tiles of dQ; each thread of warpgroup 3 has its own elements
  float statistics[kStages][2][kQueries];
  LongTask<MASK, GROUPED> task[2];  // task of the k tile in the same stage, valid when k_full completes
  Mbarrier stage_full[kStages], stage_empty[kStages], k_full[2], k_empty[2], raw[3], dscores_full[kBuffers][2],
      dscores_empty[kBuffers][2], staging_full[kStagings], staging_empty[kStagings], loaded[kStagings];
  Fp8Memory fp8;

  // The tiles of a stage.
  __device__ __forceinline__ char* q(int slot) { return stage[slot]; }
  __device__ __forceinline__ char* dout(int slot) { return stage[slot] + kQueryTileBytes; }
  __device__ __forceinline__ char* v(int slot) { return stage[slot]; }

  // Called by one thread, before __syncthreads().
  __device__ __forceinline__ void init() {
    for (int i = 0; i < kStages; ++i) {
      stage_full[i].init(kWarpArrivals);
      stage_empty[i].init(8 * kWarpArrivals);
    }
    for (int i = 0; i < 2; ++i) {
      k_full[i].init(kWarpArrivals);
      k_empty[i].init(4 * kWarpArrivals);
    }
    for (int i = 0; i < kBuffers; ++i)
      for (int half = 0; half < 2; ++half) {
        dscores_full[i][half].init(4 * kWarpArrivals);
        dscores_empty[i][half].init(4 * kWarpArrivals);
      }
    for (int i = 0; i < kStagings; ++i) {
      staging_full[i].init(4 * kWarpArrivals);
      staging_empty[i].init(1);
      loaded[i].init(1);
    }
    for (Mbarrier& landed : raw) landed.init(kWarpArrivals);
    fence_mbarrier_init();
  }
};
static_assert(sizeof(LongMemory<Mask::full, true>) <= 227 * 1024);

// Warp 0: loads tiles and publishes tasks.
template <Mask MASK, bool GROUPED>
__device__ __forceinline__ void load_tiles_long(const Parameters& p, LongMemory<MASK, GROUPED>& memory) {
  TileLoader<LongMemory<MASK, GROUPED>> loader(p, memory);
  for_each_step<MASK, GROUPED>(
      p,
      [&](const SplitUnit<MASK, GROUPED>& unit, int round) {
        loader.template load_keys<GROUPED>(unit, unit.key_tile(round), [&](int slot) {
          if (threadIdx.x % 32 == 0) memory.task[slot] = {unit, unit.key_tile(round), round};
        });
      },
      [&](const SplitUnit<MASK, GROUPED>& unit, int, int tile) {
        loader.load_queries(unit, tile_of<GROUPED>(p, tile), member_of<GROUPED>(p, tile));
      });
  loader.finish([&](int slot) {
    if (threadIdx.x % 32 == 0) memory.task[slot].key_tile = -1;
  });
}

// Warps 1 to 3, one thread each: moves partial sums of dQ from the staging tile `slot` to the workspace, in order: the
// first one is stored, the others are added. For the last one the sum is loaded into the staging tile, and warpgroup 3
// writes the result. The threads take the block's steps in turn, so while one waits until its addition is complete and
// releases the counter, the others make the next ones. An addition is published as soon as it is complete, so the first
// of all outstanding additions can always be made, and because the launch is cooperative, there is no deadlock.
template <Mask MASK, bool GROUPED>
__device__ __forceinline__ void add_dq_long(const Parameters& p, LongMemory<MASK, GROUPED>& memory, int slot) {
  const uint32_t staging = shared_address(memory.staging[slot]);
  uint32_t parity = 0;
  int skipped = slot;  // steps of the other threads before the next one of this thread
  for_each_step<MASK, GROUPED>(
      p, [](const SplitUnit<MASK, GROUPED>&, int) {},
      [&](const SplitUnit<MASK, GROUPED>& unit, int round, int tile) {
        if (skipped-- > 0) return;
        skipped = LongMemory<MASK, GROUPED>::kStagings - 1;
        const int addition = unit.addition(p, round, tile), stored = stored_tile<GROUPED>(p, tile);
        int* semaphore = p.dq_semaphores + unit.tile + stored;
        float* sums = p.sums + static_cast<int64_t>(unit.tile + stored) * kSumFloats;
        const bool last = addition == unit.last_addition(p, tile);
        if (addition > 0) {
          while (load_acquire(semaphore) < addition) {
          }
          fence_proxy_async_global();
        }
        if (last && addition > 0) {
          bulk_load(memory.loaded[slot], staging, sums, 4 * kSumFloats);
          memory.loaded[slot].arrive_expect_tx(4 * kSumFloats);
        }
        memory.staging_full[slot].wait(parity);
        parity ^= 1;
        if (last) {
          memory.staging_empty[slot].arrive();
          return;
        }
        if (addition == 0)
          bulk_store(sums, staging, 4 * kSumFloats);
        else
          bulk_reduce_add(sums, staging, 4 * kSumFloats);
        bulk_commit();
        bulk_wait_read<0>();
        memory.staging_empty[slot].arrive();
        bulk_wait<0>();
        store_release(semaphore, addition + 1);
      });
}

}  // namespace hopper_backward
}  // namespace cuda
}  // namespace fasttfm
