// A GEMM fused with an activation: the GEMMs before the activation of a feed-forward block, in the forward and in the
// backward. N rows.
//
//   forward    h = x weight^T     a = activation(h + bias)            x [N, C], weight [I, C]
//   gated      h = x weight^T     a = activation(g) * u, [g, u] = h + bias       weight [2 I, C]
//   backward   da = dy weight     dh = da * activation'(h + bias)     dy [N, O], weight [O, I]
//              a recomputed       dbias = sum over rows of dh
//
// For the backward, the forward stores h or, if a is kept too, activation'(h + bias). In the latter case the backward's
// epilogue is one multiplication and does not need the bias.
//
// h and da are rounded to the storage type before the activation, and so is a derivative that is kept. dbias is the sum
// of dh before rounding, or after rounding if the derivative was kept. Memory traffic in addition to the operands, I
// elements per row each: the forward writes the kept tensor and a; the backward reads the kept tensor and writes dh
// and, if h was kept, a.
#pragma once

#include <cstdint>

#include "common/activation.h"
#include "common/dtype.h"
#include "common/status.h"

namespace fasttfm {

struct ActivatedGemm {
  const void* x;       // [N, C], dtype; rows x_stride elements apart
  const void* weight;  // [I, C], or with a gate [2 I, C]: the gate's rows, then up's; dtype, contiguous
  const void* bias;    // [I] or [2 I], bias_dtype, or null for 0
  void* a;             // [N, I], dtype, contiguous
  int64_t rows;        // N
  int64_t inputs;      // C
  int64_t columns;     // I
  int64_t x_stride;
  Activation activation;
  DType dtype;  // bf16 or f16
  DType bias_dtype;
  int device;
  void* stream;
  int dependent;  // not 0 to start before the previous kernel in the stream, which writes neither weight nor bias, ends
};

struct GeluGemmForward : ActivatedGemm {
  void* h;           // [N, I], dtype, contiguous, or null if not needed
  void* derivative;  // [N, I], dtype, contiguous, or null if not needed; at most one of the two
};

struct GeluGemmBackward {
  const void* dy;          // [N, O], dtype; rows dy_stride elements apart
  const void* weight;      // [O, I], dtype, contiguous
  const void* bias;        // [I], bias_dtype, or null for 0
  const void* h;           // [N, I], dtype, contiguous
  const void* derivative;  // [N, I], dtype, contiguous, or null; replaces bias, h and a, which are null then
  void* dh;                // [N, I], dtype, contiguous
  void* a;                 // [N, I], dtype, contiguous, or null if not needed
  void* dbias;             // [I], bias_dtype, or null if not needed
  float* workspace;        // gelu_gemm_workspace_cuda(rows, columns) floats; unused without dbias
  int64_t rows;            // N
  int64_t outputs;         // O
  int64_t columns;         // I
  int64_t dy_stride;
  Activation activation;
  DType dtype;  // bf16 or f16
  DType bias_dtype;
  int device;
  void* stream;
};

namespace cuda {
// Requires compute capability 9.0, sizes and strides that are multiples of 8, and tensors aligned to 16 bytes.
Status gelu_gemm_forward(const GeluGemmForward&);
Status gelu_gemm_backward(const GeluGemmBackward&);
Status gated_gemm(const ActivatedGemm&);
int64_t gelu_gemm_workspace(int64_t rows, int64_t columns);  // in floats
}  // namespace cuda

}  // namespace fasttfm
