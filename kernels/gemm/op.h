// GEMMs of the library that torch has loaded into the process: cuBLASLt, or on the CPU a BLAS (MKL, OpenBLAS). It is
// looked up at run time; the core neither links against it nor needs its header.
//
//   d = a b + bias + c        a [M, K], b [K, N], row-major; sums in fp32, rounded once
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/status.h"

namespace fasttfm {

enum class Fp8Format : int32_t { none = 0, e4m3 = 1, e5m2 = 2 };

struct Gemm {
  const void* a;     // [M, K], or [K, M] if transposed_a; dtype, contiguous
  const void* b;     // [K, N], or [N, K] if transposed_b; dtype, contiguous
  const void* bias;  // [N], dtype, or null for 0
  const void* c;     // [M, N], out_dtype, or null for 0; may be d; null if there is a bias
  void* d;           // [M, N], out_dtype
  void* workspace;   // CUDA: kGemmWorkspace bytes, aligned to 256
  int64_t rows;      // M
  int64_t columns;   // N
  int64_t inner;     // K
  int transposed_a;
  int transposed_b;
  DType dtype;      // CUDA: bf16 or f16; CPU: f32
  DType out_dtype;  // dtype or f32
  int device;       // CUDA
  void* stream;     // CUDA
  // CUDA: a [M, K] and b [N, K] (transposed_b) in FP8, each with a scale by which it is multiplied; dtype is then d's
  // type.
  Fp8Format a_fp8, b_fp8;  // both or none; one of them e4m3
  const float* a_scale;    // [1], on the device
  const float* b_scale;
  int fast_accumulation;  // whether partial sums may stay in the tensor cores
  int threads;            // CPU: of GEMMs with few rows; 0: the BLAS computes those, too
};

namespace cpu {
// With the BLAS of common/cpu/blas.h; with threads, products of a few rows and a transposed b with an own kernel, which
// reads b once. Its sums do not depend on the number of rows or threads.
Status gemm(const Gemm&);
}  // namespace cpu

namespace cuda {
constexpr int64_t kGemmWorkspace = int64_t{32} << 20;  // bytes: as much as torch passes to cuBLASLt on Hopper

// Tensors and their rows start at multiples of 16 bytes. The algorithm is the first result of cuBLASLt's heuristic for
// the problem with M and K rounded up, so that it depends only on the sizes; its partial sums are fp32 in the
// workspace and are added in a fixed order.
Status gemm(const Gemm&);

// The version of the cuBLASLt in the process (130100 for 13.1.0); 0 if there is none.
int64_t gemm_library_version();
}  // namespace cuda

}  // namespace fasttfm
