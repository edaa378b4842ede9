// The layout of shared memory of the Hopper attention forward.
#pragma once

#include <cstdint>

#include "attention/hopper/forward_schedule.cuh"
#include "attention/hopper/forward_shape.cuh"
#include "common/cuda/hopper.cuh"

namespace fasttfm {
namespace cuda {

template <class S>
struct ForwardMemory {
  alignas(1024) char q[S::kQuerySlots][S::kQueryBytes];
  alignas(1024) char k[S::kStages][S::kKeyBytes];
  alignas(1024) char v[S::kStages][S::kKeyBytes];
  QueryTile tile[S::kQuerySlots + 1];  // see tile_of()
  Mbarrier q_full[S::kQuerySlots], q_empty[S::kQuerySlots];
  Mbarrier k_full[S::kStages], v_empty[S::kStages];  // for both k and v if S::kSharedStages
  Mbarrier v_full[S::kStages], k_empty[S::kStages];

  // The block's tile with index `number`. It remains valid while the next tile's queries are in use.
  __device__ __forceinline__ QueryTile& tile_of(uint32_t number) { return tile[number % (S::kQuerySlots + 1)]; }

  static constexpr int kSlack = 1024;  // extra bytes of dynamic memory, to align it to 1024 bytes

  // Called by one thread.
  __device__ __forceinline__ void init() {
    constexpr int warps = 4 * S::kGroups * kWarpArrivals;  // see Consumer::release()
    for (int i = 0; i < S::kQuerySlots; ++i) {
      q_full[i].init(1);
      q_empty[i].init(warps);
    }
    for (int i = 0; i < S::kStages; ++i) {
      k_full[i].init(1);
      k_empty[i].init(warps);
      v_full[i].init(1);
      v_empty[i].init(warps);
    }
    fence_mbarrier_init();
  }
};

}  // namespace cuda
}  // namespace fasttfm
