// The parameters of dropout_add_layer_norm. N rows of C columns, row-major; the formulas are in reference.py.
#pragma once

#include <cstdint>

#include "common/cuda/block_memory.h"
#include "common/dtype.h"
#include "common/status.h"

namespace fasttfm {

struct DropoutAddLayerNormForward {
  const void* x;            // [N, C], dtype; rows x_stride elements apart
  const void* residual;     // [N, C], residual_dtype; rows residual_stride elements apart
  const void* weight;       // [C], parameter_dtype, or null for 1
  const void* bias;         // [C], parameter_dtype, or null for 0
  const void* linear_bias;  // [C], parameter_dtype, or null for 0
  void* y;                  // [N, C], dtype, contiguous
  void* z;          // [N, C], residual_dtype, contiguous. If not needed: null on CUDA; y or scratch memory on the CPU
  float* mean;      // [N], or null if the statistics are not needed
  float* rstd;      // [N], 1 / sqrt(variance + eps)
  int64_t rows;     // N
  int64_t columns;  // C
  int64_t x_stride;
  int64_t residual_stride;
  float eps;
  const int64_t* seed;          // [1], or null for no dropout
  const int32_t* cu_seqlens;    // [sequences + 1], or null for a dense batch
  int64_t sequences;            // when packed
  int64_t tokens_per_sequence;  // when dense
  int threshold;                // out of 256: see common/philox.h
  float scale;                  // multiplies the elements that are kept
  DType dtype;
  DType residual_dtype;   // dtype or f32
  DType parameter_dtype;  // CPU: f32; CUDA: f32, or dtype if the residual has it too
  int threads;            // CPU
  int device;             // CUDA
  void* stream;           // CUDA
  int dependent;          // add_layer_norm_forward: not 0 to start before the previous kernel in the stream ends, in
                          // which case parameters may be read before that
};

// The forward that also writes y in e4m3 (kernels/fp8/reference.py); y of the other forward may be null. P is N rounded
// up to a multiple of 16.
struct DropoutAddLayerNormFp8 : DropoutAddLayerNormForward {
  const float* y_scale;  // [1]
  float* y_amax;         // [1]: updated to at least the largest magnitude of y; null if not needed
  void* as_rows;         // [N, C], e4m3
  void* as_columns;      // [C, P], e4m3, or null if not needed
};

struct DropoutAddLayerNormBackward {
  const void* dy;      // [N, C], dtype, contiguous
  const void* dz;      // [N, C], residual_dtype, contiguous, or null for 0
  const void* z;       // [N, C], residual_dtype, contiguous
  const void* weight;  // [C], weight_dtype, or null for 1
  const float* mean;   // [N]
  const float* rstd;   // [N]
  void* dresidual;     // [N, C], residual_dtype, contiguous
  void* dx;            // [N, C], dtype, contiguous, or null if it equals dresidual
  void* dweight;       // [C], weight_dtype, or null if not needed
  void* dbias;         // [C], bias_dtype, or null if not needed
  void* dlinear_bias;  // [C], linear_bias_dtype, or null if not needed
  float* workspace;    // CPU: dropout_add_layer_norm_workspace(rows, columns) floats; CUDA: 3 * blocks * columns floats
  int64_t rows;
  int64_t columns;
  const int64_t* seed;  // this and the following fields up to scale are as in the forward
  const int32_t* cu_seqlens;
  int64_t sequences;
  int64_t tokens_per_sequence;
  int threshold;
  float scale;
  DType dtype;
  DType residual_dtype;
  DType weight_dtype;  // parameters' types: f32 on the CPU
  DType bias_dtype;
  DType linear_bias_dtype;
  int threads;   // CPU
  int blocks;    // CUDA: maximum number of blocks
  int device;    // CUDA
  void* stream;  // CUDA
};

// The backward that writes dx in FP8, as the cast of dresidual after dropout. dx of the other backward is not used;
// blocks is the number of SMs, and workspace has 6 * blocks * columns floats.
struct DropoutAddLayerNormBackwardFp8 : DropoutAddLayerNormBackward {
  const float* dx_scale;  // [1], a power of two
  float* dx_amax;         // [1]: updated to at least the largest magnitude of dx
  void* as_rows;          // [N, C], FP8
  void* as_columns;       // [C, P], FP8
  int e5m2;               // not 0 for e5m2, 0 for e4m3
};

namespace cpu {
Status dropout_add_layer_norm_forward(const DropoutAddLayerNormForward&);
Status dropout_add_layer_norm_backward(const DropoutAddLayerNormBackward&);
int64_t dropout_add_layer_norm_workspace(int64_t rows, int64_t columns);  // in floats
}  // namespace cpu

namespace cuda {
// Columns are a multiple of 8, up to 8192; x, residual, dy, dz, z and parameters start at multiples of 16 bytes.
Status dropout_add_layer_norm_forward(const DropoutAddLayerNormForward&);
Status dropout_add_layer_norm_backward(const WithBlockMemory<DropoutAddLayerNormBackward>&);
// The forward without dropout (seed is null), with the same bits; requires compute capability 9.0.
Status add_layer_norm_forward(const DropoutAddLayerNormForward&);
// These require compute capability 9.0, bf16 x, and columns that are a multiple of 16, up to 1024.
Status dropout_add_layer_norm_fp8(const DropoutAddLayerNormFp8&);
Status dropout_add_layer_norm_backward_fp8(const DropoutAddLayerNormBackwardFp8&);
// Bytes of shared memory per block of the backward, on a GPU with a limit of `limit` bytes per block; more than `limit`
// if the kernels cannot run there. `linear_bias` is not 0 if its gradient is needed.
int64_t dropout_add_layer_norm_backward_memory(int64_t columns, int64_t dtype, int64_t residual_dtype,
                                               int64_t linear_bias, int64_t limit);
}  // namespace cuda

// Calls body(T{}, R{}) with the C++ types of the branch and of the residual stream.
template <class Body>
inline Status with_stream_types(DType dtype, DType residual_dtype, Body body) {
  return with_dtype(dtype, unknown_dtype(), [&](auto element) {
    if (residual_dtype == dtype) return body(element, element);
    if (residual_dtype == DType::f32) return body(element, float{});
    return bad_size("dropout_add_layer_norm: the residual's dtype must be that of x or fp32");
  });
}

}  // namespace fasttfm
