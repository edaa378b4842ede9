// Sums in global memory to which the blocks of a group add in a fixed order. A warpgroup stores an fp32 tile from
// registers to shared memory, and a TMA reduction adds it in L2.
//
// All blocks of a group number their additions in the same way: the index of an addition increases with unit, round and
// tile. For each index, the block of rank r adds to the tile after the block of rank r - 1, and rank 0 adds after the
// last rank has made its addition to the same tile in the previous round. Each block publishes its progress to the next
// block: its additions with indices below that number are complete.
//
// One thread of a block issues all additions of the block and waits for the previous block. Before it waits, it
// completes its own additions and publishes them. So the first of all outstanding additions (ordered by unit, round,
// rank and tile) can always proceed, and because the launch is cooperative (all blocks are resident), there is no
// deadlock. With one thread per quarter of a tile there could be one: a waiting thread would stall the warpgroup's
// wgmma, on which another thread depends before it can publish its progress.
#pragma once

#include <cstdint>

#include "common/cuda/hopper.cuh"

namespace fasttfm {
namespace cuda {
namespace hopper_backward {

// Counters that order additions of different blocks. A bulk group that is complete is visible to the thread that waited
// for it, and the release makes it visible to the block that acquires the counter. On sm_90, waits for completion and
// for reads are the same instruction (DEPBAR on one scoreboard), so without the release (MEMBAR) the counter may reach
// L2 before the additions: benchmarks/lab/backward_long.py shows it.
template <class T>
__device__ __forceinline__ T load_acquire(const T* from) {
  T value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
template <class T>
__device__ __forceinline__ void store_release(T* to, T value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// Each thread has FLOATS values, a multiple of 4. In memory the values of a thread are at positions that only this
// class knows; each thread accesses its own elements only.
template <int FLOATS>
class OrderedSums {
 public:
  static constexpr int kTileFloats = FLOATS * kWarpgroup;
  static constexpr int kBuffers = 2;

  struct Memory {
    alignas(128) float4 staging[kBuffers][kTileFloats / 4];
  };

  // `progress` is the block's own counter and `predecessor` that of the previous block, both initially 0. They are the
  // same pointer if a group has one block. `barrier`: a named barrier for the warpgroup.
  __device__ __forceinline__ OrderedSums(Memory& memory, int barrier, uint32_t* progress, const uint32_t* predecessor)
      : memory_(memory), barrier_(barrier), progress_(progress), predecessor_(predecessor) {}

  // Adds `value` to a tile, or stores it if it is the `first`; `index` is the index of the addition. Waits until the
  // previous block has completed the addition `index` - `distance`; the distance is the number of additions of a round
  // for rank 0, and otherwise 0.
  __device__ __forceinline__ void add(const float (&value)[FLOATS], float* tile, uint32_t index, uint32_t distance,
                                      bool first) {
    float4* staging = memory_.staging[buffer_];
    const int thread = reload_tid() % kWarpgroup;
    if (thread == 0 && !first) poll(index + 1 - distance);
#pragma unroll
    for (int i = 0; i < FLOATS / 4; ++i)
      staging[i * kWarpgroup + thread] =
          make_float4(value[4 * i], value[4 * i + 1], value[4 * i + 2], value[4 * i + 3]);
    fence_proxy_async();
    if (thread == 0) bulk_wait_read<0>();  // the other buffer is written next, so its reduction must have read it
    named_barrier_sync(barrier_, kWarpgroup);
    if (reload_tid() % kWarpgroup == 0) {
      if (!first) wait_for(index, distance);
      if (first)
        bulk_store(tile, shared_address(staging), kTileFloats * 4);
      else
        bulk_reduce_add(tile, shared_address(staging), kTileFloats * 4);
      bulk_commit();
      if (++unpublished_ == kInterval) {
        bulk_wait<1>();  // for all but the last one
        publish(index);
      }
    }
    buffer_ ^= 1;
  }

  // Loads the thread's own elements of a tile after the last addition to it.
  __device__ __forceinline__ void load(float (&value)[FLOATS], const float* tile, uint32_t index, uint32_t distance) {
    if (reload_tid() % kWarpgroup == 0) {
      if (unpublished_ > 0) {
        bulk_wait<0>();
        publish(index);
      }
      wait_for(index, distance);
    }
    named_barrier_sync(barrier_, kWarpgroup);
    const float4* from = reinterpret_cast<const float4*>(tile) + reload_tid() % kWarpgroup;
#pragma unroll
    for (int i = 0; i < FLOATS / 4; ++i) {
      const float4 part = __ldcg(from + i * kWarpgroup);
      value[4 * i] = part.x;
      value[4 * i + 1] = part.y;
      value[4 * i + 2] = part.z;
      value[4 * i + 3] = part.w;
    }
  }

  // Called after the last addition; all additions have indices below `index`.
  __device__ __forceinline__ void finish(uint32_t index) {
    if (reload_tid() % kWarpgroup == 0) {
      bulk_wait<0>();
      publish(index);
    }
  }

 private:
  static constexpr int kInterval = 4;  // additions between two publications

  __device__ __forceinline__ void wait_for(uint32_t index, uint32_t distance) {
    const uint32_t needed = index + 1 - distance;
    poll(needed);
    if (seen_ < needed) {
      bulk_wait<0>();
      publish(index);
      do poll(needed);
      while (seen_ < needed);
    }
    fence_proxy_async_global();
  }

  // Reads the previous block's progress, unless it is already known to be far enough.
  __device__ __forceinline__ void poll(uint32_t needed) {
    if (seen_ >= needed || predecessor_ == progress_) return;
    seen_ = load_acquire(predecessor_);
  }

  // Publishes that all additions with indices below `index` are complete.
  __device__ __forceinline__ void publish(uint32_t index) {
    store_release(progress_, index);
    if (progress_ == predecessor_) seen_ = index;
    unpublished_ = 0;
  }

  Memory& memory_;
  const int barrier_;
  uint32_t* progress_;
  const uint32_t* predecessor_;
  int buffer_ = 0;
  uint32_t seen_ = 0, unpublished_ = 0;  // used by the thread that issues the additions
};

}  // namespace hopper_backward
}  // namespace cuda
}  // namespace fasttfm
