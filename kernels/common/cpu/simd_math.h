// exp, exp2, erf and tanh of sixteen lanes by range reduction and polynomials, without tables or calls into the math
// library.
//
// Largest error over every seventh fp32 number above 2^-40, in units of the last place, with fused multiply-add: exp
// 1.02, erf 1.14, tanh 1.32 (without it, erf 1.44); tests/native/test_math.py measures it. NaN results in NaN,
// infinities in the functions' limits, and subnormal results of exp are rounded once.
//
// Coefficients: minimax fits of the named function, weighted to the relative error of the result, rounded to fp32.
#pragma once

#include "common/cpu/simd.h"

namespace fasttfm {
namespace FASTTFM_ISA {

// All functions operate on whole Lanes, not on single registers: with narrow registers there are then four independent
// chains of multiply-adds, which hides their latency.

inline Lanes absolute(const Lanes& x) {
  return map(x, [](RegF r) { return floats(bits(r) & 0x7fffffffu); });
}
// The magnitude (not negative) with the sign of `sign`.
inline Lanes with_sign(const Lanes& magnitude, const Lanes& sign) {
  return map(magnitude, sign, [](RegF m, RegF s) { return floats(bits(m) | (bits(s) & 0x80000000u)); });
}
// Clamps that keep NaN.
#if defined(__ARM_NEON)
inline Lanes at_most(const Lanes& x, float limit) {
  return map(x, [=](RegF r) { return RegF(vminq_f32(r, limit - RegF{})); });
}
inline Lanes at_least(const Lanes& x, float limit) {
  return map(x, [=](RegF r) { return RegF(vmaxq_f32(r, limit - RegF{})); });
}
#else
inline Lanes at_most(const Lanes& x, float limit) {
  return map(x, [=](RegF r) { return smaller(r, limit - RegF{}); });
}
inline Lanes at_least(const Lanes& x, float limit) {
  return map(x, [=](RegF r) { return larger(r, limit - RegF{}); });
}
#endif

// c[0] + c[1] t + c[2] t^2 + ...
template <int N>
inline Lanes polynomial(const Lanes& t, const float (&c)[N]) {
  Lanes sum = broadcast(c[N - 1]);
  for (int k = N - 2; k >= 0; --k) sum = sum * t + broadcast(c[k]);
  return sum;
}

// exp(x) = mantissa * 2^exponent, with the mantissa in [0.7, 1.42]. `exponent` is the sum of an integer and 1.5 * 2^23,
// which has the integer in its low bits: adding 1.5 * 2^23 to a small number rounds it to the nearest integer.
struct ScaledExp {
  Lanes mantissa, exponent;
};
constexpr float kIntegerShift = 0x1.8p23f;
inline RegF power_of_two(RegI exponent) { return reinterpret_cast<RegF>((exponent + 127) << 23); }
inline RegI shifted_integer(RegF x) { return reinterpret_cast<RegI>(bits(x) - 0x4b400000u); }

inline ScaledExp scaled_exp(const Lanes& x) {
  constexpr float tail[] = {0.4999999403953552f, 0.1666652113199234f, 0.04166838899254799f, 0.008368735201656818f,
                            0.0013814560370519757f};  // (exp(r) - 1 - r) / r^2
  const Lanes exponent = x * broadcast(0x1.715476p0f) + broadcast(kIntegerShift);
  const Lanes n = exponent - broadcast(kIntegerShift);
  // ln 2 is split into two parts; the first has so few bits that its product with n is exact.
  const Lanes r = (x - n * broadcast(0x1.63p-1f)) - n * broadcast(-0x1.bd0106p-13f);
  return {polynomial(r, tail) * (r * r) + r + broadcast(1.0f), exponent};
}

// exp(x) for x in [-87, 88], where both the result and the scale are in fp32's normal range.
inline Lanes exp_in_range(const Lanes& x) {
  const ScaledExp e = scaled_exp(x);
  return map(e.mantissa, e.exponent, [](RegF m, RegF n) { return m * power_of_two(shifted_integer(n)); });
}

// 2^x for x in [-126, 127], with a relative error below 2^-23: x = n + r, and n is added to the exponent of 2^r.
inline Lanes exp2_in_range(const Lanes& x) {
  constexpr float c[] = {0.6931471824645996f,   0.24022647738456726f,   0.05550359934568405f,
                         0.009618505835533142f, 0.0013390807434916496f, 0.00015326471475418657f};  // (2^r - 1) / r
  const Lanes exponent = x + broadcast(kIntegerShift);
  const Lanes r = x - (exponent - broadcast(kIntegerShift)), r2 = r * r;
  const Lanes low = r * broadcast(c[1]) + broadcast(c[0]), middle = r * broadcast(c[3]) + broadcast(c[2]);
  const Lanes quotient = r2 * (r2 * (r * broadcast(c[5]) + broadcast(c[4])) + middle) + low;
  const Lanes mantissa = r * quotient + broadcast(1.0f);
  // The left shift discards all bits of the sum except n.
  return map(mantissa, exponent, [](RegF m, RegF n) { return floats(bits(m) + (bits(n) << 23)); });
}

// Scales in two steps, so that subnormal results and infinity are reached; beyond the limits of the clamp the result is
// 0 or infinity.
inline Lanes exp(const Lanes& x) {
  const ScaledExp e = scaled_exp(at_most(at_least(x, -104.0f), 89.0f));
  return map(e.mantissa, e.exponent, [](RegF m, RegF n) {
    const RegI whole = shifted_integer(n), half = whole >> 1;
    return m * power_of_two(half) * power_of_two(whole - half);
  });
}

// With a = |x|: below 1, a + a * P(a^2); above, 1 - exp(log(erfc(a))). From 4 on, erf is 1 in fp32.
inline Lanes erf(const Lanes& x) {
  constexpr float p[] = {0.12837916612625122f,  -0.3761262595653534f,    0.1128358542919159f,   -0.026853810995817184f,
                         0.005188327748328447f, -0.0008010192541405559f, 7.853857823647559e-05f};
  constexpr float log_erfc[] = {-0.0003415230894461274f, -1.1270891427993774f, -0.638144850730896f,
                                -0.10310675203800201f,   0.02183806337416172f, -0.0029476583003997803f,
                                0.00018637918401509523f};
  const Lanes a = at_most(absolute(x), 4.0f);
  const Lanes small = polynomial(a * a, p) * a + a, large = broadcast(1.0f) - exp_in_range(polynomial(a, log_erfc));
  return with_sign(select(a < 1.0f, small, large), x);
}

// With a = |x|: below 0.625, a + a^3 * P(a^2); above, 1 - 2 / (exp(2a) + 1). From 10 on, tanh is 1 in fp32.
inline Lanes tanh(const Lanes& x) {
  constexpr float p[] = {-0.3333328068256378f, 0.13331441581249237f, -0.05373971536755562f, 0.0206390880048275f,
                         -0.005704986862838268f};
  const Lanes a = at_most(absolute(x), 10.0f), t = a * a;
  const Lanes small = polynomial(t, p) * t * a + a;
  const Lanes large = broadcast(1.0f) - broadcast(2.0f) / (exp_in_range(a + a) + broadcast(1.0f));
  return with_sign(select(a < 0.625f, small, large), x);
}

}  // namespace FASTTFM_ISA
}  // namespace fasttfm
