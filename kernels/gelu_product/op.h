// A matrix product and the activation of its result's neighbourhood in one kernel: the two products of a feed-forward
// block that meet its activation. N rows.
//
//   forward    h = x weight^T     a = activation(h + bias)            x [N, C], weight [I, C]
//   backward   da = dy weight     dh = da * activation'(h + bias)     dy [N, O], weight [O, I]
//              a once more        dbias = sum over rows of dh
//
// The forward leaves h for the backward, or, where a is kept too, activation'(h + bias) itself: the backward is then
// one multiplication, and has no need of the bias.
//
// h and da are rounded to the storage type before the activation, and so is a derivative that is kept; dbias sums up dh
// before it is rounded, but after that where the derivative was kept. Bytes beside the operands, I elements a row each:
// forward writes what is kept and a, backward reads what was kept and writes dh and, of h, a.
#pragma once

#include <cstdint>

#include "common/activation.h"
#include "common/dtype.h"
#include "common/status.h"

namespace fasttfm {

struct GeluProductForward {
  const void* x;       // [N, C], dtype; rows x_stride elements apart
  const void* weight;  // [I, C], dtype, contiguous
  const void* bias;    // [I], bias_dtype, or null for 0
  void* h;             // [N, I], dtype, contiguous, or null when not wanted
  void* derivative;    // [N, I], dtype, contiguous, or null when not wanted; at most one of the two
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
};

struct GeluProductBackward {
  const void* dy;          // [N, O], dtype; rows dy_stride elements apart
  const void* weight;      // [O, I], dtype, contiguous
  const void* bias;        // [I], bias_dtype, or null for 0
  const void* h;           // [N, I], dtype, contiguous
  const void* derivative;  // [N, I], dtype, contiguous, or null; in the place of bias, h and a, which are null then
  void* dh;                // [N, I], dtype, contiguous
  void* a;                 // [N, I], dtype, contiguous, or null when not wanted
  void* dbias;             // [I], bias_dtype, or null when not wanted
  float* workspace;        // gelu_product_workspace_cuda(rows, columns) floats; unused without dbias
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
// Compute capability 9.0; sizes and strides are multiples of 8, tensors start at multiples of 16 bytes.
Status gelu_product_forward(const GeluProductForward&);
Status gelu_product_backward(const GeluProductBackward&);
int64_t gelu_product_workspace(int64_t rows, int64_t columns);  // in floats
}  // namespace cuda

}  // namespace fasttfm
