// Sums in global memory that the blocks of a cluster add to, each element in one fixed order: tiles of fp32 go from a
// warpgroup's registers through shared memory to the copy engine, which adds them in the second level cache.
//
// Blocks walk over the same sequence of places (a number that only rises: unit, round, tile). At a place, the block of
// rank r adds to the place's tile after rank r - 1 has done so, and rank 0 after the last rank has at the place one
// round before. Each block tells the next one how far it has come (all its places below a number are done); nobody else
// has to know. One thread of a block starts all its additions, and takes its turns. If it has to wait, it first lets
// its own additions end and says so; so of all additions that are left the one that comes first (by unit, round and
// rank, then tile) can always be made, and as the blocks of a cluster run at the same time, none waits for ever. (With
// a thread for each quarter of a tile, one of them would wait while another one, which the first holds up by the
// products that they share, has not yet said how far it is.)
#pragma once

#include <cstdint>

#include "common/hopper.cuh"

namespace fasttfm {
namespace cuda {
namespace {

// FLOATS of each thread, a multiple of 4; the tile's layout is private: each thread's numbers in its own places.
template <int FLOATS>
class OrderedSums {
 public:
  static constexpr int kTileFloats = FLOATS * kWarpgroup;
  static constexpr int kBuffers = 2;

  struct Memory {
    alignas(128) float4 staging[kBuffers][kTileFloats / 4];
    uint32_t passed;  // below this number the block before is done with all places. Starts as 0
  };

  // Between this and finish(), memory.passed of all blocks of the cluster has to be there. `barrier`: the number of the
  // hardware's barrier that is the warpgroup's own.
  __device__ __forceinline__ OrderedSums(Memory& memory, int barrier) : memory_(memory), barrier_(barrier) {}

  // Adds to the tile, or is the first to write it, at `place`; all additions before it are those that the block before
  // made up to the place `distance` before: 0, or a round's places for rank 0.
  __device__ __forceinline__ void add(const float (&value)[FLOATS], float* tile, uint32_t place, uint32_t distance,
                                      bool first) {
    float4* staging = memory_.staging[buffer_];
    const int thread = thread_here() % kWarpgroup;
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
      wait_stores<2>();  // this one and the one before it may be under way
      if (previous_ > done_) pass(previous_);
      previous_ = place;
    }
    buffer_ ^= 1;
  }

  // The thread's own part of a tile to which no more is added.
  __device__ __forceinline__ void load(float (&value)[FLOATS], const float* tile, uint32_t place, uint32_t distance) {
    if (thread_here() % kWarpgroup == 0) await(place, distance);
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
      pass(place);
    }
  }

 private:
  __device__ __forceinline__ void await(uint32_t place, uint32_t distance) {
    const uint32_t needed = place + 1 - distance;
    if (reached() < needed) {
      wait_stores<0>();
      pass(place);
      while (reached() < needed) {
      }
    }
    asm volatile("fence.proxy.async.global;" ::: "memory");
  }

  // How far the block before is; that is the block itself where it is alone.
  __device__ __forceinline__ uint32_t reached() const {
    if (cluster_blocks() == 1) return done_;
    uint32_t number;
    asm volatile("ld.relaxed.cluster.shared::cta.u32 %0, [%1];"
                 : "=r"(number)
                 : "r"(shared_address(&memory_.passed))
                 : "memory");
    return number;
  }

  // Tells the next block that all places below `place` are done: the copy engine has said so, its additions are in the
  // second level cache, and there is nothing else that the message would have to stay behind.
  __device__ __forceinline__ void pass(uint32_t place) {
    done_ = place;
    const uint32_t blocks = cluster_blocks(), next = cluster_rank() + 1;
    if (blocks == 1) return;
    asm volatile(
        "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;"
        " st.relaxed.cluster.shared::cluster.u32 [remote], %2; }" ::"r"(shared_address(&memory_.passed)),
        "r"(next == blocks ? 0 : next), "r"(place)
        : "memory");
  }

  Memory& memory_;
  const int barrier_;
  int buffer_ = 0;
  uint32_t previous_ = 0, done_ = 0;  // of the thread that adds
};

}  // namespace
}  // namespace cuda
}  // namespace fasttfm
