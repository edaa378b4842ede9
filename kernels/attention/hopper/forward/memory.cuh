// The layout of shared memory of the Hopper attention forward.
#pragma once

#include <cstdint>

#include "attention/hopper/forward/schedule.cuh"
#include "attention/hopper/forward/shape.cuh"
#include "common/cuda/hopper.cuh"

namespace fasttfm {
namespace cuda {

template <class S>
struct ForwardMemory {
  // With kSplitQueries, a warpgroup may still use the tile before the one whose queries another has released.
  static constexpr int kTiles = S::kQuerySlots + 1 + S::kSplitQueries;
  alignas(1024) char q[S::kQuerySlots][S::kQueryBytes];
  alignas(1024) char k[S::kStages][S::kKeyBytes];
  alignas(1024) char v[S::kStages][S::kKeyBytes];
  QueryTile tile[kTiles];  // see tile_of()
  Mbarrier q_full[S::kQuerySlots][S::kQueryBarriers], q_empty[S::kQuerySlots][S::kQueryBarriers];
  Mbarrier k_full[S::kStages], v_empty[S::kStages];  // for both k and v if S::kSharedStages
  Mbarrier v_full[S::kStages], k_empty[S::kStages];

  // The block's tile with index `number`. It remains valid while the next tile's queries are in use.
  __device__ __forceinline__ QueryTile& tile_of(uint32_t number) { return tile[number % kTiles]; }

  static constexpr int kSlack = 1024;  // extra bytes of dynamic memory, to align it to 1024 bytes

  // Called by one thread.
  __device__ __forceinline__ void init() {
    constexpr int warps = 4 * S::kGroups * kWarpArrivals;  // see Consumer::release()
    for (int i = 0; i < S::kQuerySlots; ++i) {
      for (int j = 0; j < S::kQueryBarriers; ++j) {
        q_full[i][j].init(1);
        q_empty[i][j].init(warps / S::kQueryBarriers);
      }
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
