// A linear layer with a bf16 GEMM, for inference on a CPU.
//
//   y = activation(x w^T + bias) + residual        x [M, K] fp32, rounded to bf16; w [N, K] bf16; sums and y fp32
#pragma once

#include <cstdint>

#include "common/activation.h"
#include "common/dtype.h"
#include "common/status.h"

namespace fasttfm {

// The instructions that multiply, the slower ones of a CPU first. Sums are in fp32, in different orders, and those of
// AVX512-BF16 and AMX round and flush denormals in their own way.
enum class Bf16Products : int32_t { generic = 0, avx512 = 1, amx = 2, arm_matrix = 3 };

constexpr int64_t kBf16Block = 32;  // rows and columns of a tile of y; N is a multiple of it
constexpr int64_t kBf16Step = 32;   // K is a multiple of it

struct Bf16Linear {
  const float* x;         // [M, columns of x], contiguous
  const bf16_t* w;        // [N / 16, K / 2, 16, 2]: panels of 16 columns, pairs of elements of K
  const float* bias;      // [N], or null for 0
  const float* residual;  // [M, columns of y], contiguous, or null for 0
  float* y;               // [M, columns of y], contiguous
  bf16_t* rounded;        // workspace: [M rounded up to 32, K]
  int64_t rows;           // M
  int64_t x_columns;      // at most K; w is 0 from there on
  int64_t y_columns;      // at most N
  int64_t inner;          // K
  int64_t columns;        // N
  int32_t activation;     // a code of common/activation.h, or -1 for none
  Bf16Products products;
  int threads;
};

namespace cpu {
Status bf16_linear(const Bf16Linear&);
// The set of Bf16Products that this CPU supports: bit i is set for the code i.
int64_t bf16_products();
}  // namespace cpu

}  // namespace fasttfm
