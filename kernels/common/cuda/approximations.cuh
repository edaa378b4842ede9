// Approximations that the special function unit computes in one instruction, with a relative error of about 2^-22.
// Subnormal inputs and results are flushed to zero.
#pragma once

namespace fasttfm {
namespace cuda {

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace cuda
}  // namespace fasttfm
