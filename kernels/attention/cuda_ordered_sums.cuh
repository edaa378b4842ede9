// Sums in global memory that the blocks of a group add to, each element in one fixed order: tiles of fp32 go from a
// warpgroup's registers through shared memory to the copy engine, which adds them in the second level cache.
//
// Blocks walk over the same sequence of places (a number that only rises: unit, round, tile). At a place, the block of
// rank r adds to the place's tile after rank r - 1 has done so, and rank 0 after the last rank has at the place one
// round before. Each block tells the next one, by a number in global memory, how far it has come (all its places below
// it are done); nobody else has to know. One thread of a warp that does nothing else starts a block's additions and
// takes its turns: the warpgroup that brings tiles does not wait for them. Before the thread waits for anything, it
// lets its additions end and says so; so of all additions that are left the one that comes first (by unit, round and
// rank, then tile) can always be made, and as the blocks run at the same time (a cooperative launch), none waits for
// ever.
#pragma once

#include <cstdint>

#include "common/hopper.cuh"

namespace fasttfm {
namespace cuda {
namespace {

// What a block hears of the one before it: all places below a number are done. 0 at the start.
class Turn {
 public:
  explicit __device__ __forceinline__ Turn(const uint32_t* heard) : heard_(heard) {}

  __device__ __forceinline__ bool reached(uint32_t needed) {
    if (seen_ < needed) asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen_) : "l"(heard_) : "memory");
    return seen_ >= needed;
  }

 private:
  const uint32_t* heard_;
  uint32_t seen_ = 0;
};

// FLOATS of each thread, a multiple of 4; the tile's layout is private: each thread's numbers in its own places.
template <int FLOATS>
struct OrderedSums {
  static constexpr int kTileFloats = FLOATS * kWarpgroup;
  static constexpr int kBuffers = 4;

  struct Memory {
    alignas(128) float4 staging[kBuffers][kTileFloats / 4];
    Barrier full[kBuffers], empty[kBuffers];

    // One thread; then fence_barriers() and a barrier of the block.
    __device__ __forceinline__ void initialize() {
      for (int i = 0; i < kBuffers; ++i) {
        full[i].initialize(4 * kWarpArrivals);
        empty[i].initialize(1);
      }
    }
  };

  // The warpgroup's side. `barrier`: the number of the hardware's barrier that is its own.
  class Source {
   public:
    __device__ __forceinline__ Source(Memory& memory, int barrier, const uint32_t* heard)
        : memory_(memory), barrier_(barrier), turn_(heard) {}

    // A tile for the block's next addition.
    __device__ __forceinline__ void put(const float (&value)[FLOATS]) {
      memory_.empty[buffer_.slot].wait(buffer_.parity ^ 1);
      float4* staging = memory_.staging[buffer_.slot] + thread_here() % kWarpgroup;
#pragma unroll
      for (int i = 0; i < FLOATS / 4; ++i)
        staging[i * kWarpgroup] = make_float4(value[4 * i], value[4 * i + 1], value[4 * i + 2], value[4 * i + 3]);
      fence_async();
      arrive_warp(memory_.full[buffer_.slot]);
      buffer_.next();
    }

    // The thread's own part of a tile to which no more is added, when the block before has passed `needed`.
    __device__ __forceinline__ void load(float (&value)[FLOATS], const float* tile, uint32_t needed) {
      if (thread_here() % kWarpgroup == 0)
        while (!turn_.reached(needed)) {
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

   private:
    Memory& memory_;
    const int barrier_;
    RingPosition<kBuffers> buffer_;
    Turn turn_;  // of the first thread
  };

  // The side of the thread that adds. How far the block has come stands in `told`, which is `heard` where it is alone.
  class Adder {
   public:
    __device__ __forceinline__ Adder(Memory& memory, uint32_t* told, const uint32_t* heard)
        : memory_(memory), turn_(heard), told_(told) {}

    // Adds the warpgroup's next tile, or is the first to write it, at `place`, when the block before has passed
    // `needed`.
    __device__ __forceinline__ void add(float* tile, uint32_t place, uint32_t needed, bool first) {
      const Barrier& full = memory_.full[buffer_.slot];
      if (!full.test(buffer_.parity)) {
        end(place);
        full.wait(buffer_.parity);
      }
      if (!first) {
        if (!turn_.reached(needed)) {
          end(place);
          while (!turn_.reached(needed)) {
          }
        }
        asm volatile("fence.proxy.async.global;" ::: "memory");
      }
      const uint32_t staging = shared_address(memory_.staging[buffer_.slot]);
      if (first)
        store_bytes(tile, staging, kTileFloats * 4);
      else
        add_bytes(tile, staging, kTileFloats * 4);
      commit_stores();
      if (untold_) {
        wait_stores<1>();  // all but this one
        tell(place);
      }
      untold_ = true;
      wait_stores_read<0>();
      memory_.empty[buffer_.slot].arrive();
      buffer_.next();
    }

    // Lets all additions end, which are at places below `place`.
    __device__ __forceinline__ void end(uint32_t place) {
      if (!untold_) return;
      wait_stores<0>();
      tell(place);
      untold_ = false;
    }

   private:
    // The copy engine has said that additions below `place` are in the second level cache, and there is nothing else
    // that the message would have to stay behind.
    __device__ __forceinline__ void tell(uint32_t place) {
      asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(told_), "r"(place) : "memory");
    }

    Memory& memory_;
    Turn turn_;
    uint32_t* told_;
    RingPosition<kBuffers> buffer_;
    bool untold_ = false;  // an addition may be under way
  };
};

}  // namespace
}  // namespace cuda
}  // namespace fasttfm
