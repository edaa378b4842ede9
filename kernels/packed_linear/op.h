// A linear layer whose weight is packed in the order in which the kernel reads it, for inference on a CPU.
//
//   y = activation(x w^T + bias) + residual        x [M, K] fp32; w [N, K] fp32, or bf16, then x is rounded to bf16;
//                                                  sums and y fp32
#pragma once

#include <cstdint>

#include "common/activation.h"
#include "common/dtype.h"
#include "common/status.h"

namespace fasttfm {

// The instructions that multiply. Of a weight in bf16 the slower ones of a CPU are first: sums are in fp32, in
// different orders, and those of AVX512-BF16 and AMX round and flush denormals in their own way. `fp32` is for a weight
// in fp32.
enum class PackedProducts : int32_t { generic = 0, avx512 = 1, amx = 2, arm_matrix = 3, fp32 = 4 };

constexpr int64_t kPackedBlock = 32;  // columns of a tile of y; N is a multiple of it
constexpr int64_t kPackedStep = 32;   // K is a multiple of it

struct PackedLinear {
  const float* x;         // [M, columns of x], contiguous
  const void* w;          // panels of 16 columns: fp32 [N / 16, K, 16], or bf16 [N / 16, K / 2, 16, 2], pairs of K
  const float* bias;      // [N], or null for 0
  const float* residual;  // [M, columns of y], contiguous, or null for 0
  float* y;               // [M, columns of y], contiguous
  void* rounded;          // workspace: [M rounded up to 32, K] in the type of w
  int64_t rows;           // M
  int64_t x_columns;      // at most K; w is 0 from there on
  int64_t y_columns;      // at most N
  int64_t inner;          // K
  int64_t columns;        // N
  int32_t activation;     // a code of common/activation.h, or -1 for none
  PackedProducts products;
  int threads;
};

namespace cpu {
Status packed_linear(const PackedLinear&);
// The set of PackedProducts of weights in bf16 that this CPU supports: bit i is set for the code i.
int64_t packed_products();
}  // namespace cpu

}  // namespace fasttfm
