// A GEMM whose second matrix is that of each row's adapter (LoRA of several adapters in one batch). Consecutive rows of
// the same adapter are computed together.
//
//   y (+)= x b[adapter]^T        of a range of y's columns and a range of x's; sums in fp32, rounded once
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/status.h"

namespace fasttfm {

struct SelectedGemm {
  const void* x;            // [rows, x_stride], dtype; the columns from x_first are read
  const void* b;            // [adapters, b_rows, inner], dtype; of each adapter the rows from b_first are read
  void* y;                  // [rows, y_stride], dtype; the columns from y_first are written
  const int32_t* adapters;  // [rows]: the adapter of each row; -1 for none, whose product is 0
  int64_t rows;
  int64_t x_stride;
  int64_t x_first;
  int64_t b_rows;
  int64_t b_first;
  int64_t y_stride;
  int64_t y_first;
  int64_t columns;
  int64_t inner;
  int adds;      // whether the product is added to y
  DType dtype;   // CUDA: bf16 or f16; CPU: f32
  int device;    // CUDA
  void* stream;  // CUDA
};

namespace cpu {
Status selected_gemm(const SelectedGemm&);  // with the BLAS of common/cpu/blas.h
}  // namespace cpu

namespace cuda {
// Tensors and ranges of columns start at multiples of 16 bytes; columns and inner are multiples of 8.
Status selected_gemm(const SelectedGemm&);
}  // namespace cuda

}  // namespace fasttfm
