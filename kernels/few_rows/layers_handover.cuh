// How blocks of the kernel for all layers (cuda_layers.cu) hand data to each other while the grid runs, without
// barriers.
//
// Blocks of different clusters exchange packets of 16 bytes in global memory, of which the last word is a tag that no
// earlier packet at this address had. A packet is written and read as a whole (accesses of 128 bits are atomic), so a
// reader that finds the tag has the data, and neither side needs a fence. Blocks of a cluster store into each other's
// shared memory and count the bytes at an mbarrier.
#pragma once

#include <cstdint>

#include "few_rows/dependent.cuh"

namespace fasttfm {
namespace cuda {
namespace layers {

// How long a block waits for packets of other clusters. All blocks are resident before any of them starts (a
// cooperative launch), so that a kernel of another stream only delays the start, and the limit is for what must not
// happen. A block that reaches it sets `late`, and writes the packets it waits for itself, with NaN. So all blocks end,
// the results that depend on these packets are NaN, and the workspace's owner reads `late`.
struct PollLimit {
  uint32_t* late;  // in the workspace, 0 before; ordered by the stream of the launches that share the workspace
  int polls;       // one takes about 0.3 us
};
constexpr int kPollsBetweenChecks = 1 << 16;   // of the limit, and of `late`, after which no block waits longer
constexpr uint32_t kNotANumber = 0x7fffffffu;  // as one fp32 number, and as two bf16 numbers

__device__ __forceinline__ uint4 packet_of(uint64_t low, uint64_t high) {
  return make_uint4(static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high),
                    static_cast<uint32_t>(high >> 32));
}
__device__ __forceinline__ uint64_t low_half(uint4 v) { return v.x | static_cast<uint64_t>(v.y) << 32; }
__device__ __forceinline__ uint64_t high_half(uint4 v) { return v.z | static_cast<uint64_t>(v.w) << 32; }

__device__ __forceinline__ uint4 load_packet(const uint4* from) {
  uint64_t low, high;
  asm volatile("{ .reg .b128 t; ld.relaxed.gpu.global.b128 t, [%2]; mov.b128 {%0, %1}, t; }"
               : "=l"(low), "=l"(high)
               : "l"(from)
               : "memory");
  return packet_of(low, high);
}

__device__ __forceinline__ void store_packet(uint4* to, uint4 v) {
  asm volatile("{ .reg .b128 t; mov.b128 t, {%0, %1}; st.relaxed.gpu.global.b128 [%2], t; }" ::"l"(low_half(v)),
               "l"(high_half(v)), "l"(to)
               : "memory");
}

// Loads the packet again if it does not have the tag.
__device__ __forceinline__ void reload_packet(uint4& v, const uint4* from, uint32_t tag) {
  uint64_t low = low_half(v), high = high_half(v);
  asm volatile(
      "{ .reg .pred p; .reg .b128 t; setp.ne.b32 p, %3, %4; mov.b128 t, {%0, %1};"
      " @p ld.relaxed.gpu.global.b128 t, [%2]; mov.b128 {%0, %1}, t; }"
      : "+l"(low), "+l"(high)
      : "l"(from), "r"(v.w), "r"(tag)
      : "memory");
  v = packet_of(low, high);
}

// Polls packets until all have the tag; `from(i)`: the address of the i-th. Those that are already loaded with the tag
// are not polled.
template <int COUNT, class From>
__device__ __forceinline__ void wait_for_packets(uint4 (&v)[COUNT], From from, uint32_t tag, const PollLimit& limit) {
  for (int polls = 1;; ++polls) {
    bool waits = false;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) waits |= v[i].w != tag;
    if (!waits) return;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) reload_packet(v[i], from(i), tag);
    if (polls % kPollsBetweenChecks != 0) continue;
    volatile uint32_t* late = limit.late;
    if (polls >= limit.polls) *late = 1;
    if (*late == 0) continue;
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      if (v[i].w != tag) store_packet(from(i), make_uint4(kNotANumber, kNotANumber, kNotANumber, tag));
  }
}

}  // namespace layers
}  // namespace cuda
}  // namespace fasttfm
