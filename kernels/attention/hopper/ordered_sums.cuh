// Sums in global memory that the blocks of a group add to, each element in one fixed order: tiles of fp32 go from a
// warpgroup's registers through shared memory to the copy engine, which adds them in the second level cache.
//
// Blocks walk over the same sequence of places (a number that only rises: unit, round, tile). At a place, the block of
// rank r adds to the place's tile after rank r - 1 has done so, and rank 0 after the last rank has at the place one
// round before. Each block tells the next one how far it has come (all its places below a number are done); nobody else
// has to know. One thread of a block starts all its additions, and takes its turns. If it has to wait, it first lets
// its own additions end and says so; so of all additions that are left the one that comes first (by unit, round and
// rank, then tile) can always be made, and as the blocks run at the same time (a cooperative launch), none waits for
// ever. (With a thread for each quarter of a tile, one of them would wait while another one, which the first holds up
// by the products that they share, has not yet said how far it is.)
#pragma once

#include <cstdint>

#include "common/cuda/hopper.cuh"

namespace fasttfm {
namespace cuda {
namespace {

// Messages between blocks. They order nothing: before one is sent, the copy engine has said that its additions are in
// the second level cache, and there is nothing else that the message would have to stay behind.
template <class T>
__device__ __forceinline__ T receive(const T* from) {
  T value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
template <class T>
__device__ __forceinline__ void send(T* to, T value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// FLOATS of each thread, a multiple of 4; the tile's layout is private: each thread's numbers in its own places.
template <int FLOATS>
class OrderedSums {
 public:
  static constexpr int kTileFloats = FLOATS * kWarpgroup;
  static constexpr int kBuffers = 2;

  struct Memory {
    alignas(128) float4 staging[kBuffers][kTileFloats / 4];
  };

  // How far a block has come stands in `told`, and how far the one before it in `heard`: 0 at the start. Both are the
  // same for a block that is alone. `barrier`: the number of the hardware's barrier that is the warpgroup's own.
  __device__ __forceinline__ OrderedSums(Memory& memory, int barrier, uint32_t* told, const uint32_t* heard)
      : memory_(memory), barrier_(barrier), told_(told), heard_(heard) {}

  // Adds to the tile, or is the first to write it, at `place`; all additions before it are those that the block before
  // made up to the place `distance` before: 0, or a round's places for rank 0.
  __device__ __forceinline__ void add(const float (&value)[FLOATS], float* tile, uint32_t place, uint32_t distance,
                                      bool first) {
    float4* staging = memory_.staging[buffer_];
    const int thread = thread_here() % kWarpgroup;
    if (thread == 0 && !first) listen(place + 1 - distance);
#pragma unroll
    for (int i = 0; i < FLOATS / 4; ++i)
      staging[i * kWarpgroup + thread] =
          make_float4(value[4 * i], value[4 * i + 1], value[4 * i + 2], value[4 * i + 3]);
    fence_async();
    if (thread == 0) wait_stores_read<0>();  // the other buffer's, which is the next to be written
    sync_named(barrier_, kWarpgroup);
    if (thread_here() % kWarpgroup == 0) {
      if (!first) await(place, distance);
      if (first)
        store_bytes(tile, shared_address(staging), kTileFloats * 4);
      else
        add_bytes(tile, shared_address(staging), kTileFloats * 4);
      commit_stores();
      if (++untold_ == kInterval) {
        wait_stores<1>();  // all but this one
        tell(place);
      }
    }
    buffer_ ^= 1;
  }

  // The thread's own part of a tile to which no more is added.
  __device__ __forceinline__ void load(float (&value)[FLOATS], const float* tile, uint32_t place, uint32_t distance) {
    if (thread_here() % kWarpgroup == 0) {
      if (untold_ > 0) {
        wait_stores<0>();
        tell(place);
      }
      await(place, distance);
    }
    sync_named(barrier_, kWarpgroup);
    const float4* from = reinterpret_cast<const float4*>(tile) + thread_here() % kWarpgroup;
#pragma unroll
    for (int i = 0; i < FLOATS / 4; ++i) {
      const float4 part = __ldcg(from + i * kWarpgroup);
      value[4 * i] = part.x;
      value[4 * i + 1] = part.y;
      value[4 * i + 2] = part.z;
      value[4 * i + 3] = part.w;
    }
  }

  // After the last place, which is below `place`.
  __device__ __forceinline__ void finish(uint32_t place) {
    if (thread_here() % kWarpgroup == 0) {
      wait_stores<0>();
      tell(place);
    }
  }

 private:
  static constexpr int kInterval = 4;  // additions from one message to the next

  __device__ __forceinline__ void await(uint32_t place, uint32_t distance) {
    const uint32_t needed = place + 1 - distance;
    listen(needed);
    if (seen_ < needed) {
      wait_stores<0>();
      tell(place);
      do listen(needed);
      while (seen_ < needed);
    }
    fence_async_global();
  }

  // Asks how far the block before is, if it was not known to be far enough.
  __device__ __forceinline__ void listen(uint32_t needed) {
    if (seen_ >= needed || heard_ == told_) return;
    seen_ = receive(heard_);
  }

  // Tells that all places below `place` are done.
  __device__ __forceinline__ void tell(uint32_t place) {
    send(told_, place);
    if (told_ == heard_) seen_ = place;
    untold_ = 0;
  }

  Memory& memory_;
  const int barrier_;
  uint32_t* told_;
  const uint32_t* heard_;
  int buffer_ = 0;
  uint32_t seen_ = 0, untold_ = 0;  // of the thread that adds
};

}  // namespace
}  // namespace cuda
}  // namespace fasttfm
