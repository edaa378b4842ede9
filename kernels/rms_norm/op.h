// RMSNorm over the last dimension. N rows of C columns; see reference.py for the formula.
//
// Bytes per row (e = bytes of an element): forward reads x and writes y, 2*C*e; backward reads dy and x and writes dx,
// 3*C*e.
#pragma once

#include <cstdint>

#include "common/cuda/block_memory.h"
#include "common/dtype.h"
#include "common/status.h"

namespace fasttfm {

struct RmsNormForward {
  const void* x;       // [N, C], dtype; rows x_stride elements apart
  const void* weight;  // [C], weight_dtype, or null for 1
  void* y;             // [N, C], dtype, contiguous
  float* rstd;         // [N], 1 / sqrt(mean(x^2) + eps)
  int64_t rows;        // N
  int64_t columns;     // C
  int64_t x_stride;
  float eps;
  DType dtype;
  DType weight_dtype;  // CPU: f32; CUDA: f32 or dtype
  int threads;         // CPU
  int device;          // CUDA
  void* stream;        // CUDA
};

struct RmsNormBackward {
  const void* dy;      // [N, C], dtype, contiguous
  const void* dz;      // [N, C], dtype, contiguous: added to dx, which it may be; null for 0
  const void* x;       // [N, C], dtype; rows x_stride elements apart
  const void* weight;  // [C], weight_dtype, or null for 1
  const float* rstd;   // [N]
  void* dx;            // [N, C], dtype, contiguous
  void* dweight;       // [C], weight_dtype, or null if not needed
  float* workspace;    // CPU: rms_norm_workspace(rows, columns) floats; CUDA: blocks * columns floats
  int64_t rows;
  int64_t columns;
  int64_t x_stride;
  DType dtype;
  DType weight_dtype;  // f32 on the CPU
  int threads;         // CPU
  int blocks;          // CUDA: maximum number of blocks
  int device;          // CUDA
  void* stream;        // CUDA
};

namespace cpu {
Status rms_norm_forward(const RmsNormForward&);
Status rms_norm_backward(const RmsNormBackward&);
int64_t rms_norm_workspace(int64_t rows, int64_t columns);  // in floats
}  // namespace cpu

namespace cuda {
// Columns are a multiple of 8, up to 8192; x, dy and weight start at multiples of 16 bytes.
Status rms_norm_forward(const RmsNormForward&);
Status rms_norm_backward(const WithBlockMemory<RmsNormBackward>&);
// Bytes of shared memory per block of the backward, on a GPU with a limit of `limit` bytes per block; more than `limit`
// if the kernels cannot run there.
int64_t rms_norm_backward_memory(int64_t columns, int64_t dtype, int64_t limit);
}  // namespace cuda

}  // namespace fasttfm
