// Which activation: the codes that Python passes (activation.py), and their formulas' home. Values and derivatives are
// in activation_simd.h (CPU) and activation.cuh (CUDA).
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/status.h"

namespace fasttfm {

enum class Activation : int32_t { gelu = 0, gelu_tanh = 1, relu = 2, silu = 3 };

inline Status unknown_activation() {
  return {StatusCode::bad_value, "activation code is not 0 (gelu), 1 (gelu_tanh), 2 (relu) or 3 (silu)"};
}

// Calls `body` with the activation as a compile-time constant; returns what the body returns.
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

// The two that are forms of GELU.
template <class Body>
inline Status with_gelu(Activation activation, Body body) {
  switch (activation) {
    case Activation::gelu: return body(ActivationTag<Activation::gelu>{});
    case Activation::gelu_tanh: return body(ActivationTag<Activation::gelu_tanh>{});
    default: return {StatusCode::bad_value, "activation code is not 0 (gelu) or 1 (gelu_tanh)"};
  }
}

// Constants of the formulas in activation.py.
constexpr float kHalfRoot = 0.70710678f;   // 1 / sqrt(2)
constexpr float kDensity = 0.39894228f;    // 1 / sqrt(2 pi)
constexpr float kTanhSlope = 1.59576912f;  // 2 sqrt(2 / pi): 2 z = kTanhSlope * u * (1 + kTanhCubic * u^2)
constexpr float kTanhCubic = 0.044715f;
// From here down the logistic functions are 0 in fp32, and their exponential is still finite.
constexpr float kTanhLowest = -10.0f;
constexpr float kSiluLowest = -85.0f;
// From here up (as |u|) the slope of z no longer matters, its factor being 0; u^2 is kept below the square.
constexpr float kTanhSquare = 100.0f;

}  // namespace fasttfm
