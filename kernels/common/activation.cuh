// Values and derivatives of the activations in CUDA; the formulas are in activation.py.
//
// Kernels that use them have few instructions to spare per element, so everything rests on the two approximations that
// the special function unit computes, 2^x and 1/x, both good to about 2^-22. That is fp32's precision for all but erf's
// form of GELU: there, fp32 takes erff (EXACT), and 16-bit types the tail of the normal distribution as a power of two,
//   1 - Phi(a) = 2^P(a), P a polynomial of degree 7 with P(0) = -1, fitted for the least absolute error: 1e-7.
// So gradients of fp32 parameters, sums over many rows of 16-bit elements, keep fp32's precision too.
//
// Every finite u has a finite value and derivative; a NaN stays one.
#pragma once

#include "common/activation.h"

namespace fasttfm {
namespace cuda {

__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
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

// 1 - Phi(a) for a in [0, 10].
__device__ __forceinline__ float normal_tail(float a) {
  float power = fmaf(6.45140426e-06f, a, -3.6043326e-05f);
  power = fmaf(power, a, -4.79933078e-04f);
  power = fmaf(power, a, 7.47827953e-03f);
  power = fmaf(power, a, -5.27534895e-02f);
  power = fmaf(power, a, -0.459136069f);
  power = fmaf(power, a, -1.15111172f);
  return power_of_two(fmaf(power, a, -1.0f));
}

// What a caller does not use of the result, the compiler removes.
template <Activation A, bool EXACT>
__device__ __forceinline__ Activated activated(float u) {
  if constexpr (A == Activation::gelu) {
    const float density = power_of_two(fmaf(u * (-0.5f * kLog2E), u, -1.3257481f));  // -1.33 = log2(1 / sqrt(2 pi))
    if constexpr (EXACT) {
      const float below = fmaf(erff(u * kHalfRoot), 0.5f, 0.5f);  // Phi(u)
      return {u * below, fmaf(u, density, below)};
    } else {
      const float a = at_most(fabsf(u), 10.0f);
      const float tail = normal_tail(a);
      const float rest = fmaf(-a, density, tail);
      return {fmaf(-a, tail, at_least(u, 0.0f)), u < 0.0f ? rest : 1.0f - rest};
    }
  } else if constexpr (A == Activation::gelu_tanh) {
    const float v = at_least(u, kTanhLowest);
    const float square = at_most(v * v, kTanhSquare);
    const float e = power_of_two(v * fmaf(square, -kTanhSlope * kTanhCubic * kLog2E, -kTanhSlope * kLog2E));
    const float s = reciprocal(1.0f + e);
    const float value = v * s;
    return {value, fmaf(value * (e * s), fmaf(square, 3.0f * kTanhSlope * kTanhCubic, kTanhSlope), s)};
  } else if constexpr (A == Activation::relu) {
    return {at_least(u, 0.0f), u > 0.0f ? 1.0f : 0.0f};
  } else {
    const float v = at_least(u, kSiluLowest);
    const float e = power_of_two(v * -kLog2E);
    const float s = reciprocal(1.0f + e);
    const float value = v * s;
    return {value, fmaf(value, e * s, s)};
  }
}

}  // namespace cuda
}  // namespace fasttfm
