// A gated activation: act(gate) * up, where gate and up are the two halves of x. N rows of C columns, and 2 C columns
// of x; see reference.py for the formula.
//
// Bytes per row (e = bytes of an element): forward reads x and writes y, 3*C*e; backward reads dy and x and writes dx,
// 5*C*e.
#pragma once

#include <cstdint>

#include "common/activation.h"
#include "common/dtype.h"
#include "common/status.h"

namespace fasttfm {

struct GatedActivationForward {
  const void* x;     // [N, 2 C], dtype; rows x_stride elements apart
  const void* bias;  // [2 C], bias_dtype, or null for 0
  void* y;           // [N, C], dtype, contiguous
  int64_t rows;      // N
  int64_t columns;   // C
  int64_t x_stride;
  Activation activation;
  int gate_first;  // 1: the gate is the first half of x and of the bias; 0: the second
  DType dtype;
  DType bias_dtype;  // f32 on the CPU
  int threads;       // CPU
  int device;        // CUDA
  void* stream;      // CUDA
};

struct GatedActivationBackward {
  const void* dy;    // [N, C], dtype, contiguous
  const void* x;     // [N, 2 C], dtype; rows x_stride elements apart
  const void* bias;  // [2 C], bias_dtype, or null for 0
  void* dx;          // [N, 2 C], dtype, contiguous
  void* dbias;       // [2 C], bias_dtype, or null if not needed
  float* workspace;  // CPU: gated_activation_workspace(rows, columns) floats; CUDA: 2 * parts * columns floats; unused
                     // without dbias
  int64_t rows;
  int64_t columns;
  int64_t x_stride;
  Activation activation;
  int gate_first;
  DType dtype;
  DType bias_dtype;  // f32 on the CPU
  int threads;       // CPU
  int parts;         // CUDA, with dbias: number of parts into which the rows are split, 1 to 65535
  int device;        // CUDA
  void* stream;      // CUDA
};

namespace cpu {
Status gated_activation_forward(const GatedActivationForward&);
Status gated_activation_backward(const GatedActivationBackward&);
int64_t gated_activation_workspace(int64_t rows, int64_t columns);  // in floats
}  // namespace cpu

namespace cuda {
// Columns are a multiple of 8; x, dy and bias start at multiples of 16 bytes.
Status gated_activation_forward(const GatedActivationForward&);
Status gated_activation_backward(const GatedActivationBackward&);
// The value of `parts` in the backward for a GPU with this many SMs.
int64_t gated_activation_parts(int64_t columns, int64_t multiprocessors);
}  // namespace cuda

}  // namespace fasttfm
