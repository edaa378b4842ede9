// RMSNorm of each head of q and k, as a step of layers (layers/run.h). The formula is rms_norm's; heads of q share one
// weight and heads of k another.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/status.h"

namespace fasttfm {

struct HeadNorm {
  const void* x;         // [T, heads + 2 kv_heads, D], dtype, contiguous
  const void* q_weight;  // [D], weight_dtype, or null for 1
  const void* k_weight;
  void* y;      // as x; v is copied
  float* rstd;  // [T, heads + kv_heads]
  int64_t tokens;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;  // D
  float eps;
  DType dtype;
  DType weight_dtype;  // CPU: f32; CUDA: f32 or dtype
  int threads;         // CPU
  int device;          // CUDA
  void* stream;        // CUDA
};

struct HeadNormBackward {
  void* dy;  // [T, heads + 2 kv_heads, D], dtype, contiguous: replaced by dx, whose v is unchanged
  const void* x;
  const void* q_weight;
  const void* k_weight;
  const float* rstd;
  void* dq_weight;  // [D], weight_dtype, or null if not needed
  void* dk_weight;
  float* workspace;  // head_norm_workspace() floats
  int64_t tokens;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  DType dtype;
  DType weight_dtype;
  int threads;   // CPU
  int blocks;    // CUDA: the number of blocks
  int device;    // CUDA
  void* stream;  // CUDA
};

namespace cpu {
Status head_norm_forward(const HeadNorm&);
Status head_norm_backward(const HeadNormBackward&);
int64_t head_norm_workspace(int64_t tokens, int64_t head_dim);  // in floats
}  // namespace cpu

namespace cuda {
// D is 64, 128 or 256; tensors start at multiples of 16 bytes.
Status head_norm_forward(const HeadNorm&);
Status head_norm_backward(const HeadNormBackward&);
inline int64_t head_norm_workspace(int64_t blocks, int64_t head_dim) { return 2 * blocks * head_dim; }  // in floats
}  // namespace cuda

}  // namespace fasttfm
