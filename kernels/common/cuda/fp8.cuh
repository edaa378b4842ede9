// Rounding to FP8 with one scale per tensor, as fp8/reference.py defines it, and the transposition of FP8 tiles.
// Requires compute capability 8.9.
#pragma once

#include <cstdint>

#include "common/cuda/convert.cuh"

namespace fasttfm {
namespace cuda {

// The conversion saturates finite values (satfinite); x - x makes infinite values NaN.
__device__ __forceinline__ float scaled(float x, float scale) { return fmaf(x, scale, x - x); }

template <bool E5M2>
__device__ __forceinline__ uint32_t round_pair(float low, float high) {
  uint16_t pair;
  if constexpr (E5M2)
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  else
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

// Rounds eight values; the first one is in the lowest byte.
template <bool E5M2>
__device__ __forceinline__ uint2 round_vector(const float (&x)[kVector], float scale) {
  uint32_t pair[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) pair[i] = round_pair<E5M2>(scaled(x[2 * i], scale), scaled(x[2 * i + 1], scale));
  return make_uint2(pair[0] | pair[1] << 16, pair[2] | pair[3] << 16);
}

// The largest magnitude; fmaxf ignores NaN.
__device__ __forceinline__ float largest(const float (&x)[kVector], float so_far) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) so_far = fmaxf(so_far, fabsf(x[i]));
  return so_far;
}

// Sets *amax to the maximum of itself and `value`, both as the bits of nonnegative fp32 numbers, which compare like the
// numbers. The load avoids most atomics, because usually *amax is already large enough.
__device__ __forceinline__ void record(float* amax, uint32_t value) {
  auto* bits = reinterpret_cast<unsigned*>(amax);
  if (value > *static_cast<volatile unsigned*>(bits)) atomicMax(bits, value);
}

// Records the largest `most` of a warp in *amax; null if it is not needed.
__device__ __forceinline__ void record_warp(float* amax, float most) {
  if (amax == nullptr) return;
  const uint32_t bits = __reduce_max_sync(0xffffffffu, __float_as_uint(most));
  if (threadIdx.x % 32 == 0) record(amax, bits);
}

// Transposes 4 x 4 bytes: the i-th byte of the j-th word becomes the j-th byte of the i-th word.
__device__ __forceinline__ void transpose_bytes(uint32_t (&word)[4]) {
  const uint32_t low01 = __byte_perm(word[0], word[1], 0x5140), high01 = __byte_perm(word[0], word[1], 0x7362);
  const uint32_t low23 = __byte_perm(word[2], word[3], 0x5140), high23 = __byte_perm(word[2], word[3], 0x7362);
  word[0] = __byte_perm(low01, low23, 0x5410);
  word[1] = __byte_perm(low01, low23, 0x7632);
  word[2] = __byte_perm(high01, high23, 0x5410);
  word[3] = __byte_perm(high01, high23, 0x7632);
}

// Transposes 4 rows of 8 bytes: the bytes of column i are in column[i / 4][i % 4].
__device__ __forceinline__ void transpose_rows(const uint2 (&row)[4], uint32_t (&column)[2][4]) {
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    column[0][r] = row[r].x;
    column[1][r] = row[r].y;
  }
  transpose_bytes(column[0]);
  transpose_bytes(column[1]);
}

}  // namespace cuda
}  // namespace fasttfm
