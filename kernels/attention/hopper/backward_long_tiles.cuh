// attention backward for Hopper, head dim 64, for long sequences: what its warpgroups share, and warpgroup 0, which
// loads tiles and adds to dQ.
#pragma once

#include "attention/hopper/backward_tiles.cuh"
#include "attention/hopper/backward_turns.cuh"

namespace fasttfm {
namespace cuda {
namespace hopper_backward {

// A tile of keys of this block.
template <Mask MASK>
struct LongTask {
  TurnUnit<MASK> unit;
  int key_tile;  // -1: there are no more
  int round;     // of the unit
};

template <Mask MASK>
struct LongMemory {
  static constexpr int kStages = 5;    // each holds a tile of q and of dout, or a tile of v
  static constexpr int kBuffers = 2;   // of dS
  static constexpr int kStagings = 3;  // of dQ
  alignas(1024) char stage[kStages][kStageBytes];
  char k[2][kKeyTileBytes];
  char dscores[kBuffers][kKeyTileBytes];     // [keys, queries]
  float4 staging[kStagings][8][kWarpgroup];  // tiles of dQ, each thread of warpgroup 3 has its own elements
  float statistics[kStages][2][kQueries];
  LongTask<MASK> task[2];  // of the next tile of keys, valid when k_full completes
  Mbarrier stage_full[kStages], stage_empty[kStages], k_full[2], k_empty[2], raw[3], dscores_full[kBuffers][2],
      dscores_empty[kBuffers][2], staging_full[kStagings], staging_empty[kStagings], loaded;

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
    }
    loaded.init(1);
    for (Mbarrier& landed : raw) landed.init(kWarpArrivals);
    fence_mbarrier_init();
  }
};
static_assert(sizeof(LongMemory<Mask::full>) <= 227 * 1024);

// Warp 0: loads tiles and publishes tasks.
template <Mask MASK>
__device__ __forceinline__ void load_tiles_long(const Parameters& p, LongMemory<MASK>& memory) {
  TileLoader<LongMemory<MASK>> loader(p, memory);
  for_each_step<MASK>(
      p,
      [&](const TurnUnit<MASK>& unit, int round) {
        loader.load_keys(unit, unit.key_tile(round), [&](int slot) {
          if (threadIdx.x % 32 == 0) memory.task[slot] = {unit, unit.key_tile(round), round};
        });
      },
      [&](const TurnUnit<MASK>& unit, int, int tile) { loader.load_queries(unit, tile); });
  loader.finish([&](int slot) {
    if (threadIdx.x % 32 == 0) memory.task[slot].key_tile = -1;
  });
}

__device__ __forceinline__ bool is_complete(const Mbarrier& barrier, uint32_t parity) {
  uint32_t done;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done)
               : "r"(barrier.address()), "r"(parity)
               : "memory");
  return done != 0;
}

// A thread's additions to dQ. The latest one may be in flight, and other blocks do not know of it yet.
class Additions {
 public:
  // Completes the latest addition and publishes it.
  __device__ __forceinline__ void finish() { publish<0>(); }

  // Called after an addition was issued; publishes the one before. `done` is the number of additions to the tile with
  // that counter, which is null if no other follows.
  __device__ __forceinline__ void issued(int* counter, int done) {
    bulk_commit();
    publish<1>();
    counter_ = counter;
    done_ = done;
  }

 private:
  // Publishes the latest addition that was recorded, once at most IN_FLIGHT bulk groups are incomplete.
  template <int IN_FLIGHT>
  __device__ __forceinline__ void publish() {
    if (counter_ == nullptr) return;
    bulk_wait<IN_FLIGHT>();
    store_relaxed(counter_, done_);
    counter_ = nullptr;
  }

  int *counter_ = nullptr, done_ = 0;
};

// Warp 1: moves partial sums of dQ from the staging tiles to the workspace, in order: the first one is stored, the
// others are added. For the last one the sum is loaded into the staging tile, and warpgroup 3 writes the result. Runs
// in one thread. Whenever it waits, all of its additions are published, so the first of all outstanding additions can
// always be made, and because the launch is cooperative, there is no deadlock.
template <Mask MASK>
__device__ __forceinline__ void add_dq_long(const Parameters& p, LongMemory<MASK>& memory) {
  RingPosition<LongMemory<MASK>::kStagings> step, previous;
  Additions additions;
  bool follows = false;  // there was a previous step
  for_each_step<MASK>(
      p, [](const TurnUnit<MASK>&, int) {},
      [&](const TurnUnit<MASK>& unit, int round, int tile) {
        const int turn = unit.turn(round, tile);
        int* turns = p.turns + unit.tile + tile;
        float* sums = p.sums + static_cast<int64_t>(unit.tile + tile) * kSumFloats;
        const uint32_t staging = shared_address(memory.staging[step.slot]);
        const bool last = turn == unit.last_turn(tile);
        if (turn > 0) {
          if (load_relaxed(turns) < turn) {
            additions.finish();
            while (load_relaxed(turns) < turn) {
            }
          }
          fence_proxy_async_global();
        }
        if (last && turn > 0) {
          bulk_load(memory.loaded, staging, sums, 4 * kSumFloats);
          memory.loaded.arrive_expect_tx(4 * kSumFloats);
        }
        if (!is_complete(memory.staging_full[step.slot], step.parity)) {
          additions.finish();
          memory.staging_full[step.slot].wait(step.parity);
        }
        if (!last && turn == 0) bulk_store(sums, staging, 4 * kSumFloats);
        if (!last && turn > 0) bulk_reduce_add(sums, staging, 4 * kSumFloats);
        additions.issued(last ? nullptr : turns, turn + 1);
        bulk_wait_read<1>();
        if (follows) memory.staging_empty[previous.slot].arrive();
        follows = true;
        previous = step;
        step.next();
      });
  additions.finish();
}

}  // namespace hopper_backward
}  // namespace cuda
}  // namespace fasttfm
