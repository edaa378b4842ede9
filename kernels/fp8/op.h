// Casts to FP8 with one scale per tensor, with and without an activation; the specification is reference.py. Tensors
// have N rows and C columns; P is N rounded up to a multiple of 16.
//
// Bytes per element of 16-bit tensors: cast reads 2 and writes 2; the activation's forward reads 2 and writes 1, its
// backward reads 4 and writes 3.
#pragma once

#include <cstdint>

#include "common/activation.h"
#include "common/dtype.h"
#include "common/status.h"

namespace fasttfm {

struct Fp8Cast {
  const void* x;       // [N, C], dtype; rows x_stride elements apart
  const float* scale;  // [1]
  float* amax;         // [1]: updated to at least the largest magnitude of x
  void* as_rows;       // [N, C], FP8, or null if not needed
  void* as_columns;    // [C, P], FP8, or null if not needed
  int64_t rows;        // N
  int64_t columns;     // C, a multiple of 16
  int64_t padded;      // P
  int64_t x_stride;
  int e5m2;  // not 0 for e5m2, 0 for e4m3
  DType dtype;
  int device;
  void* stream;
  // Dropout of x before the cast, with the masks of packed tokens: see common/philox.h.
  const int64_t* seed;  // [1], or null for none
  const int32_t* cu_seqlens;
  int64_t sequences;
  int threshold;
  float kept_scale;  // multiplies the elements that are kept
};

// Writes the columns of packed sequences from their rows, unless every sequence begins and ends at a multiple of 16 and
// together they have all N rows: then attention's backward has written the columns (attention/op.h).
struct Fp8Transpose {
  const void* as_rows;        // [N, C], FP8, contiguous
  void* as_columns;           // [C, P], FP8
  const int32_t* cu_seqlens;  // [sequences + 1]
  int64_t sequences;
  int64_t rows;     // N
  int64_t columns;  // C, a multiple of 16
  int64_t padded;   // P
  int device;
  void* stream;
};

// Casts several fp32 matrices with one launch.
struct Fp8CastMany {
  const int64_t* table;  // [count, 8] on the device; see Fp8CastRow
  int64_t count;
  int64_t tiles;  // the sum of fp8_cast_tiles(rows, columns) over all matrices
  int e5m2;
  int device;
  void* stream;
};

// A row of the table; fasttfm/ops/fp8/native.py has the same fields in the same order.
struct Fp8CastRow {
  int64_t first_tile;  // the number of tiles of the matrices before it
  const float* x;      // [N, C], contiguous, both multiples of 16
  const float* scale;
  float* amax;
  void* as_rows;
  void* as_columns;
  int64_t rows;
  int64_t columns;
};

struct Fp8GeluForward {
  const void* h;     // [N, C], dtype, contiguous
  const void* bias;  // [C], bias_dtype, or null for 0
  const float* scale;
  float* amax;    // of the activation
  void* as_rows;  // [N, C], FP8
  int64_t rows;
  int64_t columns;
  int e5m2;
  Activation activation;
  DType dtype;
  DType bias_dtype;
  int device;
  void* stream;
};

struct Fp8GeluBackward {
  const void* da;        // [N, C], dtype, contiguous
  const void* h;         // [N, C], dtype, contiguous
  const void* bias;      // [C], bias_dtype, or null for 0
  const float* a_scale;  // [1]
  const float* scale;    // [1], of dh
  float* amax;           // of dh
  void* as_rows;         // [N, C], FP8: dh
  void* as_columns;      // [C, P], FP8: dh
  void* a_columns;       // [C, P], e4m3: the recomputed activation
  void* dbias;           // [C], bias_dtype, or null if not needed
  float* workspace;      // fp8_gelu_workspace(rows, columns) floats; unused without dbias
  int64_t rows;
  int64_t columns;
  int64_t padded;
  int e5m2;  // the format of dh
  Activation activation;
  DType dtype;
  DType bias_dtype;
  int device;
  void* stream;
};

// a = activation(x weight^T / scales + bias) in e4m3, in the epilogue of one GEMM. The sums are rounded to bf16 before
// the bias is added, as h is stored.
struct Fp8GeluGemm {
  const void* x;                // [N, K], e4m3, contiguous
  const void* weight;           // [C, K], e4m3, contiguous
  const float* x_inverse;       // [1]: 1 / scale
  const float* weight_inverse;  // [1]
  const void* bias;             // [C], bias_dtype, or null for 0
  const float* scale;           // [1], of a
  float* amax;                  // of a, or null if not needed
  void* h;                      // [N, C], bf16: x weight^T / scales, or null if not needed
  void* a;                      // [N, C], e4m3
  int64_t rows;                 // N
  int64_t inputs;               // K, a multiple of 16
  int64_t columns;              // C, a multiple of 16
  Activation activation;
  DType bias_dtype;
  int device;
  void* stream;
};

// What Fp8GeluBackward computes from da = dy weight^T / scales, rounded to bf16, in the epilogue of that GEMM.
struct Fp8GeluGemmBackward {
  const void* dy;               // [N, K], e5m2 or e4m3, contiguous
  const void* weight;           // [C, K], e4m3, contiguous
  const float* dy_inverse;      // [1]: 1 / scale
  const float* weight_inverse;  // [1]
  const void* h;                // [N, C], bf16, contiguous
  const void* bias;             // [C], bias_dtype, or null for 0
  const float* a_scale;         // [1]
  const float* scale;           // [1], of dh
  float* amax;                  // of dh
  void* as_rows;                // [N, C], the format of dy: dh
  void* as_columns;             // [C, P], the format of dy: dh
  void* a_columns;              // [C, P], e4m3: the recomputed activation
  void* dbias;                  // [C], bias_dtype, or null if not needed
  float* workspace;             // fp8_gelu_gemm_workspace(rows, columns) floats; unused without dbias
  int64_t rows;                 // N
  int64_t inputs;               // K, a multiple of 16
  int64_t columns;              // C, a multiple of 16
  int64_t padded;               // P
  int e5m2;                     // the format of dy and dh
  Activation activation;
  DType bias_dtype;
  int device;
  void* stream;
};

namespace cuda {
// Tensors and their rows start at multiples of 16 bytes.
Status fp8_cast(const Fp8Cast&);
Status fp8_transpose(const Fp8Transpose&);
Status fp8_cast_many(const Fp8CastMany&);
int64_t fp8_cast_tiles(int64_t rows, int64_t columns);
Status fp8_gelu_forward(const Fp8GeluForward&);
Status fp8_gelu_backward(const Fp8GeluBackward&);
int64_t fp8_gelu_workspace(int64_t rows, int64_t columns);  // in floats
Status fp8_gelu_gemm(const Fp8GeluGemm&);
Status fp8_gelu_gemm_backward(const Fp8GeluGemmBackward&);
int64_t fp8_gelu_gemm_workspace(int64_t rows, int64_t columns);  // in floats
}  // namespace cuda

}  // namespace fasttfm
