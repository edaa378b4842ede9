// A GEMM and an adapter's: y = x b + t c + add + bias. Both products are summed in fp32 and rounded once, then rounded
// again with `add` and the bias. Memory traffic is that of the first product, and t.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/status.h"

namespace fasttfm {

struct AdaptedGemm {
  const void* x;     // [N, inner], dtype, contiguous, as all matrices
  const void* b;     // [inner, columns], or [columns, inner] if transposed
  const void* t;     // [N, rank], dtype
  const void* c;     // [rank, columns], or [columns, rank] if transposed
  const void* bias;  // [columns], bias_dtype, or null for 0
  const void* add;   // [N, columns], dtype, or null for 0; may be y
  void* y;           // [N, columns], dtype
  int64_t rows;      // N
  int64_t columns;
  int64_t inner;
  int64_t rank;
  int transposed;
  DType dtype;  // bf16 or f16
  DType bias_dtype;
  int device;
  void* stream;
  int dependent;  // not 0 to start before the previous kernel in the stream, which does not write b or c, ends
};

namespace cuda {
// Requires compute capability 9.0, sizes that are multiples of 8, and tensors aligned to 16 bytes.
Status adapted_gemm(const AdaptedGemm&);
}  // namespace cuda

}  // namespace fasttfm
