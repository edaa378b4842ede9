// Sums in global memory to which the blocks of a group add in a fixed order. Tiles of fp32 go from a warpgroup's
// registers to shared memory, from where TMA reductions add them in L2.
//
// Blocks iterate over the same sequence of places, a number that increases with unit, round and tile. At a place, the
// block of rank r adds to the place's tile after rank r - 1 has done so, and rank 0 after the last rank has done so at
// the place one round earlier. Each block publishes its progress (all its places below a number are complete) to the
// next block. One thread of a block issues all of its additions and waits for its turns. Before it waits, it completes
// its own additions and publishes them. So the first of all outstanding additions (by unit, round and rank, then tile)
// can always be made, and because the launch is cooperative (all blocks are resident), there is no deadlock. (With one
// thread per quarter of a tile there could be one: a waiting thread holds up the wgmma that it shares with another
// thread, which then does not publish its progress.)
#pragma once

#include <cstdint>

#include "common/cuda/hopper.cuh"

namespace fasttfm {
namespace cuda {
namespace hopper_backward {

// Progress counters between blocks. Relaxed accesses suffice: bulk_wait() returns only when the additions are complete
// in L2, and the counter has nothing else to order.
template <class T>
__device__ __forceinline__ T load_relaxed(const T* from) {
  T value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
template <class T>
__device__ __forceinline__ void store_relaxed(T* to, T value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// Each thread has FLOATS values, a multiple of 4. The tile's layout in memory is private: each thread has its own
// elements.
template <int FLOATS>
class OrderedSums {
 public:
  static constexpr int kTileFloats = FLOATS * kWarpgroup;
  static constexpr int kBuffers = 2;

  struct Memory {
    alignas(128) float4 staging[kBuffers][kTileFloats / 4];
  };

  // `progress` is the block's own counter and `predecessor` that of the previous block, both 0 at the start. They are
  // the same pointer if a block shares with no other. `barrier`: a named barrier for the warpgroup.
  __device__ __forceinline__ OrderedSums(Memory& memory, int barrier, uint32_t* progress, const uint32_t* predecessor)
      : memory_(memory), barrier_(barrier), progress_(progress), predecessor_(predecessor) {}

  // Adds to the tile at `place`, or stores it if it is the `first`. It waits until the previous block has completed the
  // place `place` - `distance`; the distance is 0, or the number of places of a round for rank 0.
  __device__ __forceinline__ void add(const float (&value)[FLOATS], float* tile, uint32_t place, uint32_t distance,
                                      bool first) {
    float4* staging = memory_.staging[buffer_];
    const int thread = reload_tid() % kWarpgroup;
    if (thread == 0 && !first) poll(place + 1 - distance);
#pragma unroll
    for (int i = 0; i < FLOATS / 4; ++i)
      staging[i * kWarpgroup + thread] =
          make_float4(value[4 * i], value[4 * i + 1], value[4 * i + 2], value[4 * i + 3]);
    fence_proxy_async();
    if (thread == 0) bulk_wait_read<0>();  // of the other buffer, which is written next
    named_barrier_sync(barrier_, kWarpgroup);
    if (reload_tid() % kWarpgroup == 0) {
      if (!first) wait_for(place, distance);
      if (first)
        bulk_store(tile, shared_address(staging), kTileFloats * 4);
      else
        bulk_reduce_add(tile, shared_address(staging), kTileFloats * 4);
      bulk_commit();
      if (++unpublished_ == kInterval) {
        bulk_wait<1>();  // all but this one
        publish(place);
      }
    }
    buffer_ ^= 1;
  }

  // Loads the thread's own elements of a tile after the last addition.
  __device__ __forceinline__ void load(float (&value)[FLOATS], const float* tile, uint32_t place, uint32_t distance) {
    if (reload_tid() % kWarpgroup == 0) {
      if (unpublished_ > 0) {
        bulk_wait<0>();
        publish(place);
      }
      wait_for(place, distance);
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

  // Called after the last place, which is below `place`.
  __device__ __forceinline__ void finish(uint32_t place) {
    if (reload_tid() % kWarpgroup == 0) {
      bulk_wait<0>();
      publish(place);
    }
  }

 private:
  static constexpr int kInterval = 4;  // additions between two publications

  __device__ __forceinline__ void wait_for(uint32_t place, uint32_t distance) {
    const uint32_t needed = place + 1 - distance;
    poll(needed);
    if (seen_ < needed) {
      bulk_wait<0>();
      publish(place);
      do poll(needed);
      while (seen_ < needed);
    }
    fence_proxy_async_global();
  }

  // Reads the previous block's progress, unless it is already known to be far enough.
  __device__ __forceinline__ void poll(uint32_t needed) {
    if (seen_ >= needed || predecessor_ == progress_) return;
    seen_ = load_relaxed(predecessor_);
  }

  // Publishes that all places below `place` are complete.
  __device__ __forceinline__ void publish(uint32_t place) {
    store_relaxed(progress_, place);
    if (progress_ == predecessor_) seen_ = place;
    unpublished_ = 0;
  }

  Memory& memory_;
  const int barrier_;
  uint32_t* progress_;
  const uint32_t* predecessor_;
  int buffer_ = 0;
  uint32_t seen_ = 0, unpublished_ = 0;  // in the thread that adds
};

}  // namespace hopper_backward
}  // namespace cuda
}  // namespace fasttfm
