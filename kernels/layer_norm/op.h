// LayerNorm over the last dimension. N rows of C columns; see reference.py for the formula.
//
// Bytes per row (e = bytes of an element): forward reads x and writes y, 2*C*e; backward reads dy and x and writes dx,
// 3*C*e.
#pragma once

#include <cstdint>

#include "common/cuda/block_memory.h"
#include "common/dtype.h"
#include "common/status.h"

namespace fasttfm {

struct LayerNormForward {
  const void* x;       // [N, C], dtype; rows x_stride elements apart
  const void* weight;  // [C], parameter_dtype, or null for 1
  const void* bias;    // [C], parameter_dtype, or null for 0
  void* y;             // [N, C], dtype, contiguous
  float* mean;         // [N], or null, like rstd, if there is no backward
  float* rstd;         // [N], 1 / sqrt(variance + eps)
  int64_t rows;        // N
  int64_t columns;     // C
  int64_t x_stride;
  float eps;
  DType dtype;
  DType parameter_dtype;  // CPU: f32; CUDA: f32 or dtype
  int threads;            // CPU
  int device;             // CUDA
  void* stream;           // CUDA
};

struct LayerNormBackward {
  const void* dy;      // [N, C], dtype, contiguous
  const void* x;       // [N, C], dtype; rows x_stride elements apart
  const void* weight;  // [C], weight_dtype, or null for 1
  const float* mean;   // [N]
  const float* rstd;   // [N]
  void* dx;            // [N, C], dtype, contiguous
  void* dweight;       // [C], weight_dtype, or null if not needed
  void* dbias;         // [C], bias_dtype, or null if not needed
  float* workspace;    // CPU: layer_norm_workspace(rows, columns) floats; CUDA: 2 * blocks * columns floats
  int64_t rows;
  int64_t columns;
  int64_t x_stride;
  DType dtype;
  DType weight_dtype;  // f32 on the CPU
  DType bias_dtype;    // f32 on the CPU
  int threads;         // CPU
  int blocks;          // CUDA: maximum number of blocks
  int device;          // CUDA
  void* stream;        // CUDA
};

namespace cpu {
Status layer_norm_forward(const LayerNormForward&);
Status layer_norm_backward(const LayerNormBackward&);
int64_t layer_norm_workspace(int64_t rows, int64_t columns);  // in floats
}  // namespace cpu

namespace cuda {
// Columns are a multiple of 8, up to 8192; x, dy, weight and bias start at multiples of 16 bytes.
Status layer_norm_forward(const LayerNormForward&);
Status layer_norm_backward(const WithBlockMemory<LayerNormBackward>&);
// Bytes of shared memory per block of the backward, on a GPU with a limit of `limit` bytes per block; more than `limit`
// if the kernels cannot run there.
int64_t layer_norm_backward_memory(int64_t columns, int64_t dtype, int64_t limit);
}  // namespace cuda

}  // namespace fasttfm
