// attention backward for Hopper, head dim 64: what blocks keep in shared memory to write gradients in FP8.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention/hopper/shared/backward_schedule.cuh"
#include "common/cuda/fp8.cuh"
#include "common/cuda/hopper.cuh"

namespace fasttfm {
namespace cuda {
namespace hopper_backward {

struct fp8_t {
  uint8_t bits;  // e4m3 or e5m2
};

template <class G>
constexpr bool kFp8 = std::is_same_v<G, fp8_t>;

constexpr int kFp8Warps = 3 * kWarpgroup / 32;  // warpgroups 1 to 3 write gradients

// Used by kernels whose gradients have the type G = fp8_t.
struct Fp8Memory {
  float scale;
  float magnitude[kFp8Warps];  // the largest one so far of each warp's gradients

  // Called by one thread, before __syncthreads().
  template <class G>
  __device__ __forceinline__ void init(const Fp8Output& fp8) {
    if constexpr (kFp8<G>) {
      scale = *fp8.scale;
      for (float& warp_magnitude : magnitude) warp_magnitude = 0.0f;
    }
  }
  __device__ __forceinline__ float& own_magnitude() { return magnitude[reload_tid() / 32 - kWarpgroup / 32]; }

  // Called by a whole warp.
  __device__ __forceinline__ void update(float most) {
    const uint32_t bits = __reduce_max_sync(0xffffffffu, __float_as_uint(most));
    if (reload_tid() % 32 == 0) own_magnitude() = fmaxf(own_magnitude(), __uint_as_float(bits));
  }
  // Called by a whole warp, after its last update().
  template <class G>
  __device__ __forceinline__ void finish(const Fp8Output& fp8) {
    if constexpr (kFp8<G>) {
      if (reload_tid() % 32 == 0) record(fp8.amax, __float_as_uint(own_magnitude()));
    }
  }
};

}  // namespace hopper_backward
}  // namespace cuda
}  // namespace fasttfm
