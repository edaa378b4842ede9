// attention backward for Hopper, head dim 64: dq, dk and dv in FP8, rounded from the fp32 accumulators, as rows and as
// columns (fp8/op.h). Packed sequences only.
//
// A warp has 16 tokens and 64 columns of a gradient. It transposes them by shuffles, so that each lane writes 16 bytes
// of a row, and 16 bytes of each of two columns. These are aligned if the sequence's first token is a multiple of 16;
// otherwise, and where fewer than 16 tokens are left, fp8_transpose() writes the columns.
#pragma once

#include <cstdint>

#include "attention/hopper/shared/backward_results.cuh"
#include "attention/hopper/shared/fp8_memory.cuh"
#include "common/cuda/fp8.cuh"
#include "common/cuda/hopper.cuh"

namespace fasttfm {
namespace cuda {
namespace hopper_backward {

// Rounds an accumulator of 64 columns, times `factor`. Word i has columns 8 * i + lane % 4 * 2 + {0, 1} of row lane / 4
// in its low half, and of row lane / 4 + 8 in its high half. Returns the largest magnitude.
template <bool E5M2>
__device__ __forceinline__ float round_product(const float (&value)[32], float factor, float scale,
                                               uint32_t (&word)[8]) {
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float numbers[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float x = value[4 * i + j] * factor;
      most = fmaxf(most, fabsf(x));
      numbers[j] = scaled(x, scale);
    }
    word[i] = round_pair<E5M2>(numbers[0], numbers[1]) | round_pair<E5M2>(numbers[2], numbers[3]) << 16;
  }
  return most;
}

// Writes the first `rows` of a warp's 16 rows of 64 columns.
__device__ __forceinline__ void store_fp8_rows(const uint32_t (&word)[8], fp8_t* to, int64_t stride, int rows) {
  const int lane = reload_tid() % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = __byte_perm(word[2 * i], word[2 * i + 1], half == 0 ? 0x5410 : 0x7632);
    exchange(words[0], words[1], 1);
    exchange(words[2], words[3], 1);
    exchange(words[0], words[2], 2);
    exchange(words[1], words[3], 2);
    const int row = lane / 4 + 8 * half;
    if (row < rows)
      store_words(to + row * stride + lane % 4 * 16,
                  {__byte_perm(words[0], words[1], 0x5410), __byte_perm(words[2], words[3], 0x5410),
                   __byte_perm(words[0], words[1], 0x7632), __byte_perm(words[2], words[3], 0x7632)});
  }
}

// Writes a warp's 64 columns of 16 rows, if it `stores` them; lane l writes columns 2 * (l % 4) + 8 * (l / 4) + {0, 1}.
__device__ __forceinline__ void store_fp8_columns(uint32_t (&word)[8], uint8_t* to, int64_t padded, bool stores) {
#pragma unroll
  for (int distance = 1; distance < 8; distance *= 2)
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if ((i & distance) == 0) exchange(word[i], word[i + distance], 4 * distance);
  // Now word i has the lane's two columns of rows i and i + 8.
  uint32_t upper[4] = {word[0], word[1], word[2], word[3]}, lower[4] = {word[4], word[5], word[6], word[7]};
  transpose_bytes(upper);
  transpose_bytes(lower);
  const int lane = reload_tid() % 32;
  uint8_t* first = to + (lane % 4 * 2 + lane / 4 * 8) * padded;
  if (!stores) return;  // here, because the compiler does not see that it is warp-uniform
  store_words(first, {upper[0], lower[0], upper[2], lower[2]});
  store_words(first + padded, {upper[1], lower[1], upper[3], lower[3]});
}

// Writes the first rows of a warpgroup's accumulator of 64 rows and 64 columns, times `factor`: of dq (which = 0), dk
// (1) or dv (2). This should be the last use of `value`, whose registers it needs.
__device__ __forceinline__ void store_fp8(const float (&value)[32], float factor, const Parameters& p,
                                          Fp8Memory& memory, const Output& to, const GradientRows& at, int which) {
  uint32_t word[8];
  memory.update(p.fp8.e5m2 ? round_product<true>(value, factor, memory.scale, word)
                           : round_product<false>(value, factor, memory.scale, word));
  const int first = reload_tid() % kWarpgroup / 32 * 16, rows = at.rows - first;
  store_fp8_rows(word, row_of<fp8_t>(to, p, at.sequence, at.head, at.row + first), to.token, rows);
  const int64_t column = (static_cast<int64_t>(which) * p.heads + at.head) * kHeadDim;
  store_fp8_columns(word, p.fp8.columns + column * p.fp8.padded + at.row + first, p.fp8.padded,
                    at.row % 16 == 0 && rows >= 16);
}

}  // namespace hopper_backward
}  // namespace cuda
}  // namespace fasttfm
