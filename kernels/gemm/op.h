// A GEMM of the library that torch has loaded into the process, found at run time: cuBLASLt, or on the CPU a BLAS (MKL,
// OpenBLAS). The core neither links against it nor needs its header.
//
//   d = a b + bias + c        a [M, K], b [K, N], row-major; sums in fp32, rounded once
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/status.h"

namespace fasttfm {

enum class Fp8Format : int32_t { none = 0, e4m3 = 1, e5m2 = 2 };

struct Gemm {
  const void* a;     // [M, K], or [K, M] where transposed_a; dtype, contiguous
  const void* b;     // [K, N], or [N, K] where transposed_b; dtype, contiguous
  const void* bias;  // [N], dtype, or null for 0
  const void* c;     // [M, N], out_dtype, or null for 0; may be d; null where there is a bias
  void* d;           // [M, N], out_dtype
  void* workspace;   // CUDA: kGemmWorkspace bytes, at a multiple of 256
  int64_t rows;      // M
  int64_t columns;   // N
  int64_t inner;     // K
  int transposed_a;
  int transposed_b;
  DType dtype;      // CUDA: bf16 or f16; CPU: f32
  DType out_dtype;  // dtype or f32
  int device;       // CUDA
  void* stream;     // CUDA
  // CUDA: a [M, K] and b [N, K] (transposed_b) in FP8, each to be multiplied by a number; dtype is d's type then.
  Fp8Format a_fp8, b_fp8;  // both or none; one of them e4m3
  const float* a_scale;    // [1], on the device
  const float* b_scale;
  int fast_accumulation;  // whether partial sums may stay in the tensor cores
};

namespace cpu {
Status gemm(const Gemm&);  // with the BLAS of common/cpu/blas.h
}  // namespace cpu

namespace cuda {
constexpr int64_t kGemmWorkspace = int64_t{32} << 20;  // bytes: as much as torch gives cuBLASLt on Hopper

// Tensors start at multiples of 16 bytes, and so do their rows. The algorithm is cuBLASLt's first choice for the sizes,
// kept for the next call with the same sizes; its partial sums are fp32 in the workspace, added in a fixed order.
Status gemm(const Gemm&);

// The version of the cuBLASLt in the process (130100 for 13.1.0); 0 where there is none.
int64_t gemm_library_version();
}  // namespace cuda

}  // namespace fasttfm
