// An activation of x + bias. N rows of C columns; see reference.py for the formula.
//
// Bytes per row (e = bytes of an element): forward reads x and writes y, 2*C*e; backward reads dy and x and writes dx,
// 3*C*e, and also writes y if it is needed.
#pragma once

#include <cstdint>

#include "common/activation.h"
#include "common/dtype.h"
#include "common/status.h"

namespace fasttfm {

struct BiasGeluForward {
  const void* x;     // [N, C], dtype; rows x_stride elements apart
  const void* bias;  // [C], bias_dtype, or null for 0
  void* y;           // [N, C], dtype, contiguous
  int64_t rows;      // N
  int64_t columns;   // C
  int64_t x_stride;
  Activation activation;
  DType dtype;
  DType bias_dtype;  // f32 on the CPU
  int threads;       // CPU
  int device;        // CUDA
  void* stream;      // CUDA
};

struct BiasGeluBackward {
  const void* dy;    // [N, C], dtype, contiguous
  const void* x;     // [N, C], dtype; rows x_stride elements apart
  const void* bias;  // [C], bias_dtype, or null for 0
  void* dx;          // [N, C], dtype, contiguous
  void* y;           // [N, C], dtype, contiguous: the recomputed activation, or null if not needed
  void* dbias;       // [C], bias_dtype, or null if not needed
  // CPU: bias_gelu_workspace(rows, columns) floats; CUDA: parts * columns floats; unused without dbias.
  float* workspace;
  int64_t rows;
  int64_t columns;
  int64_t x_stride;
  Activation activation;
  DType dtype;
  DType bias_dtype;  // f32 on the CPU
  int threads;       // CPU
  int parts;         // CUDA: number of parts into which the rows are split, 1 to 65535
  int device;        // CUDA
  void* stream;      // CUDA
};

namespace cpu {
Status bias_gelu_forward(const BiasGeluForward&);
Status bias_gelu_backward(const BiasGeluBackward&);
int64_t bias_gelu_workspace(int64_t rows, int64_t columns);  // in floats
}  // namespace cpu

namespace cuda {
// Columns are a multiple of 8; x, dy and bias start at multiples of 16 bytes.
Status bias_gelu_forward(const BiasGeluForward&);
Status bias_gelu_backward(const BiasGeluBackward&);
}  // namespace cuda

}  // namespace fasttfm
