// The projection of N rows to queries, keys and values: qkv = x weight^T + bias, [N, 3C], seen as [N, 3, H, D]; with
// rotary embedding of queries and keys, for heads of 64 columns of which all are rotated.
//
// The sums are rounded to the storage type before the bias is added to them. Memory traffic in addition to the
// operands: 3C elements per row are written.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/status.h"

namespace fasttfm {

struct QkvProjection {
  const void* x;       // [N, C], dtype; rows x_stride elements apart
  const void* weight;  // [3C, C], dtype, contiguous
  const void* bias;    // [3C], bias_dtype, or null for 0
  void* qkv;           // [N, 3C], dtype, contiguous
  int64_t rows;        // N
  int64_t inputs;      // C
  int64_t columns;     // 3C
  int64_t x_stride;
  const float* cos;          // [P, 32], or null without rotary embedding: column i of a head is paired with i + 32
  const float* sin;          // [P, 32]
  const int64_t* positions;  // [N], or null if a row's position is its index modulo `sequence`
  int64_t sequence;
  int64_t table_rows;  // P; other positions result in NaN
  DType dtype;         // bf16 or f16
  DType bias_dtype;
  int device;
  void* stream;
  int dependent;  // not 0 to start before the previous kernel in the stream, which writes x at most, ends
};

namespace cuda {
// Requires compute capability 9.0, sizes and strides that are multiples of 8, and tensors aligned to 16 bytes.
Status qkv_projection(const QkvProjection&);
}  // namespace cuda

}  // namespace fasttfm
