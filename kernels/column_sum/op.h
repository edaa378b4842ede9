// The sum over rows, e.g. the gradient of a linear layer's bias. N rows of C columns. Each element is read once: C*e
// bytes per row, where e is the bytes of an element.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/dtype.h"
#include "common/status.h"

namespace fasttfm {

struct ColumnSum {
  const void* x;     // [N, C], dtype; rows x_stride elements apart
  void* sum;         // [C], sum_dtype
  float* workspace;  // CPU: column_sum_workspace(rows, columns) floats; CUDA: parts * columns floats
  int64_t rows;      // N
  int64_t columns;   // C
  int64_t x_stride;
  DType dtype;
  DType sum_dtype;  // f32 on the CPU
  int threads;      // CPU
  int parts;        // CUDA: number of parts into which the rows are split
  int device;       // CUDA
  void* stream;     // CUDA
};

namespace cpu {
Status column_sum(const ColumnSum&);
int64_t column_sum_workspace(int64_t rows, int64_t columns);  // in floats
}  // namespace cpu

namespace cuda {
constexpr int kColumnSumStrip = 256;  // columns per block

// Into how many parts the rows are split on a GPU with `processors` SMs: up to four blocks for each SM, of at least 64
// rows.
inline int64_t column_sum_parts(int64_t rows, int64_t columns, int64_t processors) {
  const int64_t strips = (columns + kColumnSumStrip - 1) / kColumnSumStrip;
  return std::max<int64_t>(1, std::min(4 * processors / strips, rows / 64));
}

// Columns are a multiple of 8; x and each of its rows start at multiples of 16 bytes.
Status column_sum(const ColumnSum&);
}  // namespace cuda

}  // namespace fasttfm
