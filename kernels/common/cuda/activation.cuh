// Values and derivatives of the activations in CUDA; the formulas are in activation.py.
//
// The kernels that use them are close to the issue limit, so everything is built on exp2_approx() and rcp_approx(),
// whose relative errors are about 2^-22. That is fp32's precision for everything except the erf form of GELU. There,
// fp32 uses erff (EXACT), and 16-bit types use the logistic form of Phi (activation.h), which needs no clamp,
// comparison or sign handling: 2^x may overflow to infinity, whose reciprocal is zero.
//
// Every finite u has a finite value and derivative. NaN propagates.
#pragma once

#include <type_traits>

#include "common/activation.h"
#include "common/cuda/approximations.cuh"
#include "common/dtype.h"

namespace fasttfm {
namespace cuda {

// fminf and fmaxf drop NaN; these keep it.
__device__ __forceinline__ float at_most(float x, float limit) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(limit));
  return y;
}
__device__ __forceinline__ float at_least(float x, float limit) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(limit));
  return y;
}

struct Activated {
  float value, derivative;
};

// log2(Phi(u) / (1 - Phi(u))) / u as a function of u^2.
__device__ __forceinline__ float normal_logit(float square) {
  float r = fmaf(kLogit6, square, kLogit5);
  r = fmaf(r, square, kLogit4);
  r = fmaf(r, square, kLogit3);
  r = fmaf(r, square, kLogit2);
  r = fmaf(r, square, kLogit1);
  return fmaf(r, square, kLogit0);
}

// If a caller uses only one of the results, the compiler removes the computation of the other.
template <Activation A, bool EXACT>
__device__ __forceinline__ Activated activated(float u) {
  if constexpr (A == Activation::gelu) {
    const float square = u * u;
    const float density = exp2_approx(fmaf(square, -0.5f * kLog2E, kLogDensity));
    float below;  // Phi(u)
    if constexpr (EXACT)
      below = fmaf(erff(u * kHalfRoot), 0.5f, 0.5f);
    else
      below = rcp_approx(1.0f + exp2_approx(-u * normal_logit(square)));
    return {u * below, fmaf(u, density, below)};
  } else if constexpr (A == Activation::gelu_tanh) {
    const float v = at_least(u, kTanhLowest);
    const float square = at_most(v * v, kTanhSquare);
    const float e = exp2_approx(v * fmaf(square, -kTanhSlope * kTanhCubic * kLog2E, -kTanhSlope * kLog2E));
    const float s = rcp_approx(1.0f + e);
    const float value = v * s;
    return {value, fmaf(value * (e * s), fmaf(square, 3.0f * kTanhSlope * kTanhCubic, kTanhSlope), s)};
  } else if constexpr (A == Activation::relu) {
    return {at_least(u, 0.0f), u > 0.0f ? 1.0f : 0.0f};
  } else {
    const float v = at_least(u, kSiluLowest);
    const float e = exp2_approx(v * -kLog2E);
    const float s = rcp_approx(1.0f + e);
    const float value = v * s;
    return {value, fmaf(value, e * s, s)};
  }
}

// The same with fewer instructions, for results that are rounded to T, a 16-bit type. For bf16 the erf form of GELU is
// max(u, 0) - |u| q, where q = 1 - Phi(|u|) is 2 to the power of a polynomial (activation.h). |u| is limited, because
// infinity times 0 is NaN: the value is infinity at infinity and 0 at -infinity, the derivative 1 and 0, and both are
// NaN at NaN. (torch has NaN for the value at -infinity and for both derivatives.) The tanh form needs no clamp for the
// value, because 2^x may overflow.
template <Activation A, class T>
__device__ __forceinline__ Activated activated_as(float u) {
  if constexpr (A == Activation::gelu && std::is_same_v<T, bf16_t>) {
    const float a = at_most(fabsf(u), kTailEnd);
    float r = fmaf(kTail5, a, kTail4);
    r = fmaf(r, a, kTail3);
    r = fmaf(r, a, kTail2);
    r = fmaf(r, a, kTail1);
    const float q = exp2_approx(fmaf(r, a, kTail0));
    const float density = exp2_approx(fmaf(a * a, -0.5f * kLog2E, kLogDensity));
    const float below = fmaf(-a, density, q);  // the derivative at -|u|
    return {fmaf(-a, q, fmaxf(u, 0.0f)), u > 0.0f ? 1.0f - below : below};
  } else if constexpr (A == Activation::gelu_tanh) {
    const float square = u * u;
    const float s =
        rcp_approx(1.0f + exp2_approx(u * fmaf(square, -kTanhSlope * kTanhCubic * kLog2E, -kTanhSlope * kLog2E)));
    const float value = u * s, slope = fmaf(at_most(square, kTanhSquare), 3.0f * kTanhSlope * kTanhCubic, kTanhSlope);
    return {value, fmaf(value * (1.0f - s), slope, s)};
  } else {
    return activated<A, false>(u);
  }
}

}  // namespace cuda
}  // namespace fasttfm
