// A linear layer with 8-bit products, for inference on a CPU.
//
//   y = activation(x w^T + bias)        x [M, K] fp32, w [N, K] int8 with a scale for each row
//
// A row of x is rounded to int8 with a scale of its own, max|x| / 127, so that a row's result does not depend on the
// others. Products are summed in int32, exactly; scales, bias and activation are applied in fp32.
#pragma once

#include <cstdint>

#include "common/activation.h"
#include "common/status.h"

namespace fasttfm {

// How products are computed. All give the same bits.
enum class Int8Products : int32_t { generic = 0, vnni = 1, amx = 2 };

constexpr int64_t kInt8Panel = 16;  // columns of a panel of w
constexpr int64_t kInt8Block = 32;  // rows and columns that are computed at a time: N is a multiple
constexpr int64_t kInt8Step = 64;   // K is a multiple

struct Int8Linear {
  const float* x;       // [M, columns of x], contiguous
  const int8_t* w;      // [N / 16, K / 4, 16, 4]: panels of 16 columns, four numbers of K together
  const int32_t* sums;  // [N]: the sum of each column's K numbers
  const float* scales;  // [N]
  const float* bias;    // [N], or null for 0
  float* y;             // [M, columns of y], contiguous
  int8_t* rounded;      // workspace: [M rounded up to 32, K]
  float* row_scales;    // workspace: [M rounded up to 32]
  int64_t rows;         // M
  int64_t x_columns;    // up to K; the numbers of w that follow are 0
  int64_t y_columns;    // up to N
  int64_t inner;        // K
  int64_t columns;      // N
  int32_t activation;   // a code of common/activation.h, or -1 for none
  Int8Products products;
  int threads;
};

namespace cpu {
Status int8_linear(const Int8Linear&);
// The fastest products of this CPU, as a code.
int64_t int8_products();
}  // namespace cpu

}  // namespace fasttfm
