// A linear layer with an int8 GEMM, for inference on a CPU.
//
//   y = activation(x w^T + bias) + residual        x [M, K] fp32, w [N, K] int8 with a scale for each row
//
// Each row of x is rounded to 256 steps between its smallest and its largest element, or 0 if that is outside, so that
// its result does not depend on other rows. What follows a GELU is hardly ever negative: a range around 0 would leave
// nearly half of the steps unused. Sums are exact, in int32; scales, bias and activation are applied in fp32.
//
// Trained models have columns of x whose elements are many times larger than all others. Two such outlier columns may
// be left out of the rounding: they are outside of the row's range, w is 0 in them, and their products are computed in
// fp32.
#pragma once

#include <cstdint>

#include "common/activation.h"
#include "common/status.h"

namespace fasttfm {

// The instructions that multiply, the slower ones of a CPU first. Their results are bitwise identical. Words are pairs
// of 16-bit integers, which every x86 CPU multiplies; vnni is AVX512-VNNI or, with AVX2's kernels, AVX-VNNI. On Arm
// they are SDOT and SMMLA.
enum class Int8Products : int32_t { generic = 0, words = 1, vnni = 2, amx = 3, arm_dot = 4, arm_matrix = 5 };

constexpr int64_t kInt8Panel = 16;  // columns of a panel of w
constexpr int64_t kInt8Block = 32;  // rows and columns of a tile of y; N is a multiple of it
constexpr int64_t kInt8Step = 64;   // K is a multiple of it
constexpr int kInt8Outliers = 2;    // outlier columns of x
constexpr int64_t kInt8RowFloats = 2 + kInt8Outliers;

struct Int8Linear {
  const float* x;                // [M, columns of x], contiguous
  const int8_t* w;               // [N / 16, K / 4, 16, 4]: panels of 16 columns, groups of four elements of K
  const int32_t* sums;           // [N]: the sum of each column's K elements
  const float* scales;           // [N]
  const float* bias;             // [N], or null for 0
  const int32_t* outliers;       // [2]: outlier columns of x, in ascending order, or null for none
  const float* outlier_weights;  // [2, N]: the columns of the weight at the outliers, or null
  const float* residual;         // [M, columns of y], contiguous, or null for 0
  float* y;                      // [M, columns of y], contiguous
  int8_t* rounded;               // workspace: [M rounded up to 32, K]
  // workspace: [M rounded up to 32, 4]: x is about rounded * the first number + the second one; then x's outliers
  float* row_ranges;
  int64_t rows;        // M
  int64_t x_columns;   // at most K; w is 0 from there on
  int64_t y_columns;   // at most N
  int64_t inner;       // K
  int64_t columns;     // N
  int32_t activation;  // a code of common/activation.h, or -1 for none
  Int8Products products;
  int threads;
};

namespace cpu {
Status int8_linear(const Int8Linear&);
// The set of Int8Products that this CPU supports: bit i is set for the code i.
int64_t int8_products();
}  // namespace cpu

}  // namespace fasttfm
