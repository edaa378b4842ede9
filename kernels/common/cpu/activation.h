// Values and derivatives of the activations on sixteen lanes; the formulas are in activation.py.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/activation.h"
#include "common/cpu/simd_math.h"

namespace fasttfm {
namespace FASTTFM_ISA {

struct Activated {
  Lanes value, derivative;
};

// The logistic function at w: s = sigmoid(w), and rest = 1 - s without cancellation. w must be above -88.
struct Logistic {
  Lanes s, rest;
};
inline Logistic logistic(const Lanes& w) {
  const Lanes e = exp(broadcast(0.0f) - w);
  const Lanes s = broadcast(1.0f) / (e + broadcast(1.0f));
  return {s, e * s};
}

// With EXACT the error is bounded relative to the result, at fp32's precision; without it, for 16-bit types, the
// absolute error is bounded.
template <Activation A, bool EXACT>
inline Activated activated(const Lanes& u) {
  if constexpr (A == Activation::gelu && EXACT) {
    const Lanes below = erf(u * broadcast(kHalfRoot)) * broadcast(0.5f) + broadcast(0.5f);  // Phi(u)
    const Lanes density = exp(u * u * broadcast(-0.5f)) * broadcast(kDensity);
    return {u * below, u * density + below};
  } else if constexpr (A == Activation::gelu) {
    constexpr float logit[] = {-kLogit0, -kLogit1, -kLogit2, -kLogit3, -kLogit4, -kLogit5, -kLogit6};
    const Lanes v = at_least(u, -kLogitEnd), w = at_most(v, kLogitEnd);
    const Lanes below = broadcast(1.0f) / (exp2_in_range(w * polynomial(w * w, logit)) + broadcast(1.0f));  // Phi(u)
    const Lanes d = at_most(at_least(u, -kDensityEnd), kDensityEnd);
    const Lanes density = exp2_in_range(d * d * broadcast(-0.5f * kLog2E) + broadcast(kLogDensity));
    return {v * below, d * density + below};
  } else if constexpr (A == Activation::gelu_tanh) {
    const Lanes v = at_least(u, kTanhLowest), square = at_most(v * v, kTanhSquare);
    const Logistic l = logistic(v * (square * broadcast(kTanhSlope * kTanhCubic) + broadcast(kTanhSlope)));
    const Lanes value = v * l.s;
    const Lanes slope = square * broadcast(3.0f * kTanhSlope * kTanhCubic) + broadcast(kTanhSlope);
    return {value, value * l.rest * slope + l.s};
  } else if constexpr (A == Activation::relu) {
    return {at_least(u, 0.0f), select(broadcast(0.0f) - u < 0.0f, broadcast(1.0f), broadcast(0.0f))};
  } else {
    const Lanes v = at_least(u, kSiluLowest);
    const Logistic l = logistic(v);
    const Lanes value = v * l.s;
    return {value, value * l.rest + l.s};
  }
}

// The same for a block of columns. Tails may share one copy of each activation (FASTTFM_TAIL).
template <Activation A, bool EXACT>
inline Activated activated(const Lanes& u, Full) {
  return activated<A, EXACT>(u);
}
template <Activation A, bool EXACT>
FASTTFM_TAIL Activated activated(const Lanes& u, Tail) {
  return activated<A, EXACT>(u);
}

// Calls body(column, lanes, count) for groups of N blocks of 16 columns with count = std::integral_constant<int, N>,
// and for the remaining blocks one by one. An activation is a long chain of dependent operations. Where sixteen lanes
// are one register, the chains of several blocks hide each other's latency.
template <int N, class Body>
inline void for_column_groups(int64_t columns, Body body) {
  int64_t column = 0;
  if constexpr (kRegisters == 1) {
    for (; column + N * kLanes <= columns; column += N * kLanes) body(column, Full{}, std::integral_constant<int, N>{});
  }
  for_columns(columns - column, [&](int64_t c, auto n) { body(column + c, n, std::integral_constant<int, 1>{}); });
}

}  // namespace FASTTFM_ISA
}  // namespace fasttfm
