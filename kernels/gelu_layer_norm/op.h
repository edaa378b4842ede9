// LayerNorm of GELU(x + linear_bias). N rows of C columns; see reference.py for the formula.
//
// Bytes per row (e = bytes of an element): forward reads x and writes y, 2*C*e; backward reads dy and x and writes dx,
// 3*C*e.
#pragma once

#include <cstdint>

#include "common/activation.h"
#include "common/cuda/block_memory.h"
#include "common/dtype.h"
#include "common/status.h"

namespace fasttfm {

struct GeluLayerNormForward {
  const void* x;            // [N, C], dtype; rows x_stride elements apart
  const void* linear_bias;  // [C], parameter_dtype, or null for 0
  const void* weight;       // [C], parameter_dtype, or null for 1
  const void* bias;         // [C], parameter_dtype, or null for 0
  void* y;                  // [N, C], dtype, contiguous
  float* mean;              // [N]
  float* rstd;              // [N], 1 / sqrt(variance + eps)
  float* workspace;         // CPU: gelu_layer_norm_forward_workspace(rows, columns) floats
  int64_t rows;             // N
  int64_t columns;          // C
  int64_t x_stride;
  float eps;
  Activation activation;  // gelu or gelu_tanh
  DType dtype;
  DType parameter_dtype;  // CPU: f32; CUDA: f32 or dtype
  int threads;            // CPU
  int device;             // CUDA
  void* stream;           // CUDA
};

struct GeluLayerNormBackward {
  const void* dy;           // [N, C], dtype, contiguous
  const void* x;            // [N, C], dtype; rows x_stride elements apart
  const void* linear_bias;  // [C], linear_bias_dtype, or null for 0
  const void* weight;       // [C], weight_dtype, or null for 1
  const float* mean;        // [N]
  const float* rstd;        // [N]
  void* dx;                 // [N, C], dtype, contiguous
  void* dlinear_bias;       // [C], linear_bias_dtype, or null if not needed
  void* dweight;            // [C], weight_dtype, or null if not needed
  void* dbias;              // [C], bias_dtype, or null if not needed
  float* workspace;  // CPU: gelu_layer_norm_backward_workspace(rows, columns) floats; CUDA: 3 * blocks * columns floats
  int64_t rows;
  int64_t columns;
  int64_t x_stride;
  Activation activation;  // gelu or gelu_tanh
  DType dtype;
  DType linear_bias_dtype;  // these three are f32 on the CPU
  DType weight_dtype;
  DType bias_dtype;
  int threads;   // CPU
  int blocks;    // CUDA: maximum number of blocks
  int device;    // CUDA
  void* stream;  // CUDA
};

namespace cpu {
Status gelu_layer_norm_forward(const GeluLayerNormForward&);
Status gelu_layer_norm_backward(const GeluLayerNormBackward&);
int64_t gelu_layer_norm_forward_workspace(int64_t rows, int64_t columns);   // in floats
int64_t gelu_layer_norm_backward_workspace(int64_t rows, int64_t columns);  // in floats
}  // namespace cpu

namespace cuda {
// Columns are a multiple of 8, up to 8192 (fp32: 4096); x, dy and the parameters start at multiples of 16 bytes.
Status gelu_layer_norm_forward(const GeluLayerNormForward&);
Status gelu_layer_norm_backward(const WithBlockMemory<GeluLayerNormBackward>&);
// Bytes of shared memory per block of the backward, on a GPU with a limit of `limit` bytes per block; more than `limit`
// if the kernels cannot run there.
int64_t gelu_layer_norm_backward_memory(int64_t columns, int64_t dtype, int64_t limit);
}  // namespace cuda

}  // namespace fasttfm
