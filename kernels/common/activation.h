// The activation codes that Python passes. The formulas are in activation.py; values and derivatives are computed in
// cpu/activation.h and cuda/activation.cuh.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/status.h"

namespace fasttfm {

enum class Activation : int32_t { gelu = 0, gelu_tanh = 1, relu = 2, silu = 3 };

inline Status unknown_activation() {
  return {StatusCode::bad_value, "activation code is not 0 (gelu), 1 (gelu_tanh), 2 (relu) or 3 (silu)"};
}

// Calls `body` with the activation as a compile-time constant and returns its result.
template <Activation A>
using ActivationTag = std::integral_constant<Activation, A>;

template <class Body>
inline Status with_activation(Activation activation, Body body) {
  switch (activation) {
    case Activation::gelu: return body(ActivationTag<Activation::gelu>{});
    case Activation::gelu_tanh: return body(ActivationTag<Activation::gelu_tanh>{});
    case Activation::relu: return body(ActivationTag<Activation::relu>{});
    case Activation::silu: return body(ActivationTag<Activation::silu>{});
  }
  return unknown_activation();
}

// The same for the two forms of GELU only.
template <class Body>
inline Status with_gelu(Activation activation, Body body) {
  switch (activation) {
    case Activation::gelu: return body(ActivationTag<Activation::gelu>{});
    case Activation::gelu_tanh: return body(ActivationTag<Activation::gelu_tanh>{});
    default: return {StatusCode::bad_value, "activation code is not 0 (gelu) or 1 (gelu_tanh)"};
  }
}

// Constants of the formulas in activation.py.
constexpr float kHalfRoot = 0.70710678f;    // 1 / sqrt(2)
constexpr float kDensity = 0.39894228f;     // 1 / sqrt(2 pi)
constexpr float kLogDensity = -1.3257481f;  // its logarithm to base 2
constexpr float kLog2E = 1.44269504f;
// Phi, the cumulative normal distribution, for 16-bit types: Phi(u) = 1 / (1 + 2^-z), where z = u * R(u^2) and kLogit0
// ... are the coefficients of R, fitted for the least absolute error. In fp32 arithmetic Phi is within 1.6e-7 and the
// derivative of GELU, Phi(u) + u * Phi'(u), within 2.1e-7. So gradients of fp32 parameters, which are sums over many
// rows of 16-bit elements, keep fp32's precision, at half the cost of an erf that is accurate to the last place. R is
// positive everywhere, so the formula is valid for every u.
constexpr float kLogit0 = 2.30220795f, kLogit1 = 0.104837507f, kLogit2 = -9.50880494e-05f, kLogit3 = -1.59498188e-04f,
                kLogit4 = 1.14639461e-05f, kLogit5 = -3.85620922e-07f, kLogit6 = 5.22065902e-09f;
// Up to these |u|, 2^-z and 2^z, and the density, are in fp32's normal range; beyond them, Phi is 0 or 1 and the
// density 0.
constexpr float kLogitEnd = 7.0f, kDensityEnd = 13.0f;
// For results in bf16: 1 - Phi(a) = 2^T(a) for a >= 0, and kTail0 ... are the coefficients of T, fitted for the least
// relative error up to a = 4. In fp32 arithmetic that error is 1.24e-4, where rounding to bf16 has up to 3.9e-3; from 4
// to 5.5, where GELU(-a) is -1e-4 to -1e-7, it grows to 5.4e-3. T falls up to kTailEnd, where 2^T and the density are 0
// in fp32.
constexpr float kTail0 = -1.0001756f, kTail1 = -1.14844728f, kTail2 = -0.465629876f, kTail3 = -0.0471662953f,
                kTail4 = 0.00552209327f, kTail5 = -0.000290460041f, kTailEnd = 16.0f;
constexpr float kTanhSlope = 1.59576912f;  // 2 sqrt(2 / pi): 2 z = kTanhSlope * u * (1 + kTanhCubic * u^2)
constexpr float kTanhCubic = 0.044715f;
// At and below these u the logistic functions are 0 in fp32, and at them their exponential is still finite.
constexpr float kTanhLowest = -10.0f;
constexpr float kSiluLowest = -85.0f;
// u^2 is clamped to this value. Above it the slope of z does not matter, because it is multiplied by 0.
constexpr float kTanhSquare = 100.0f;

}  // namespace fasttfm
