// The polynomial with which the CUDA kernels compute GELU for bf16 (common/activation.h), in fp32 on the host, against
// erfc in fp64: its relative error, that it falls, and that nothing is left of it where |u| is limited.
#include <cmath>
#include <cstdio>
#include <initializer_list>
#include <limits>

#include "common/activation.h"

using namespace fasttfm;

namespace {

float tail_exponent(float a) {
  float r = std::fma(kTail5, a, kTail4);
  for (const float coefficient : {kTail3, kTail2, kTail1, kTail0}) r = std::fma(r, a, coefficient);
  return r;
}

double largest_error(float from, float to) {
  double largest = 0;
  constexpr int kSteps = 1 << 16;
  for (int i = 0; i <= kSteps; ++i) {
    const float a = from + (to - from) * (static_cast<float>(i) / kSteps);
    const double exact = std::erfc(double{a} / std::sqrt(2.0)) / 2;
    largest = std::fmax(largest, std::fabs(std::exp2(double{tail_exponent(a)}) / exact - 1));
  }
  return largest;
}

}  // namespace

int main() {
  if (const double error = largest_error(0, 4); error > 1.24e-4) return std::printf("up to 4: %g\n", error), 1;
  if (const double error = largest_error(4, 5.5f); error > 5.5e-3) return std::printf("up to 5.5: %g\n", error), 1;
  for (float a = 0, last = 0; a <= kTailEnd; a += 0x1p-10f) {
    const float exponent = tail_exponent(a);
    if (!(exponent < last)) return std::printf("rises at %g\n", double{a}), 1;
    last = exponent;
  }
  constexpr float kZero = -150;  // 2 to a lower power is 0 in fp32
  if (const float end = tail_exponent(kTailEnd); !(end < kZero)) return std::printf("2^%g is left\n", double{end}), 1;
  if (!(kTailEnd * kTailEnd * -0.5f * kLog2E + kLogDensity < kZero)) return std::printf("a density is left\n"), 1;
  const float infinite = std::numeric_limits<float>::infinity(), end = std::fmin(infinite, kTailEnd);
  if (std::fma(-end, std::exp2(tail_exponent(end)), infinite) != infinite) return std::printf("not infinite\n"), 1;
  std::printf("ok\n");
}
