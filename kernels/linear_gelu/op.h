// A matrix product and the activation beside it in one kernel. N rows; see reference.py for the formulas.
//
//   forward    h = x w^T                a = activation(h + bias)         x [N, C], w [I, C]
//   backward   da = dy w                dh = da * activation'(h + bias)  dy [N, O], w [O, I]
//              a once more              dbias = sum over rows of dh
//
// Bytes beside the operands: forward writes h and a, backward reads h and writes dh and a, I elements a row each.
#pragma once

#include <cstdint>

#include "common/activation.h"
#include "common/dtype.h"
#include "common/status.h"

namespace fasttfm {

struct LinearGeluForward {
  const void* x;       // [N, C], dtype; rows x_stride elements apart
  const void* weight;  // [I, C], dtype, contiguous
  const void* bias;    // [I], bias_dtype, or null for 0
  void* h;             // [N, I], dtype, contiguous, or null when not wanted
  void* a;             // [N, I], dtype, contiguous
  int64_t rows;        // N
  int64_t inputs;      // C
  int64_t columns;     // I
  int64_t x_stride;
  Activation activation;  // of the two forms of GELU
  DType dtype;            // bf16 or f16
  DType bias_dtype;
  int device;
  void* stream;
};

struct LinearGeluBackward {
  const void* dy;      // [N, O], dtype; rows dy_stride elements apart
  const void* weight;  // [O, I], dtype, contiguous
  const void* bias;    // [I], bias_dtype, or null for 0
  const void* h;       // [N, I], dtype, contiguous
  void* dh;            // [N, I], dtype, contiguous
  void* a;             // [N, I], dtype, contiguous, or null when not wanted
  void* dbias;         // [I], bias_dtype, or null when not wanted
  float* workspace;    // linear_gelu_workspace(rows, columns) floats; unused without dbias
  int64_t rows;        // N
  int64_t outputs;     // O
  int64_t columns;     // I
  int64_t dy_stride;
  Activation activation;  // of the two forms of GELU
  DType dtype;            // bf16 or f16
  DType bias_dtype;
  int device;
  void* stream;
};

namespace cuda {
// Compute capability 9.0; sizes and strides are multiples of 8, tensors start at multiples of 16 bytes.
Status linear_gelu_forward(const LinearGeluForward&);
Status linear_gelu_backward(const LinearGeluBackward&);
int64_t linear_gelu_workspace(int64_t rows, int64_t columns);  // in floats
}  // namespace cuda

}  // namespace fasttfm
