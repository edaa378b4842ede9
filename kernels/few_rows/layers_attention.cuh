// Attention in the kernel for all layers (cuda_layers.cu): every block of a cluster computes the whole head, each of
// its warps 16 queries and a part of the columns. Tokens of all sequences are in one tile of keys.
#pragma once

#include <cstdint>

#include "common/cuda/approximations.cuh"
#include "few_rows/layers_block.cuh"

namespace fasttfm {
namespace cuda {
namespace layers {

template <class S>
__device__ __forceinline__ uint32_t gathered_chunk(const Memory<S>& memory, int part, int row, int chunk) {
  return shared_address(memory.gather) + S::qkv_place(part, row, chunk);
}

// The scores of 16 queries; those of other sequences are -infinity.
template <class S>
__device__ __forceinline__ void score(const Memory<S>& memory, const Place<S>& at, float (&s)[S::kRows / 8][4]) {
  const MatrixRow of = matrix_row_a(at.lane);
#pragma unroll
  for (int pair = 0; pair < S::kHeadDim / 32; ++pair) {
    uint32_t q[2][4], k[S::kRows / 8][4];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      ldmatrix_x4(q[half], gathered_chunk(memory, 0, at.row_tile * 16 + of.row, 4 * pair + 2 * half + of.chunk));
#pragma unroll
    for (int t = 0; t < S::kRows / 8; ++t)
      ldmatrix_x4(k[t], gathered_chunk(memory, 1, 8 * t + (at.lane & 7), 4 * pair + (at.lane >> 3)));
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int t = 0; t < S::kRows / 8; ++t) mma_m16n8k16(s[t], q[half], k[t] + 2 * half, bf16_t{});
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = at.row_tile * 16 + accumulator_row(at.lane) + 8 * half;
    const int begin = memory.begin[row], end = memory.end[row];
#pragma unroll
    for (int t = 0; t < S::kRows / 8; ++t)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int key = 8 * t + accumulator_column(at.lane) + i;
        if (key < begin || key >= end) s[t][2 * half + i] = -INFINITY;
      }
  }
}

// Replaces scores by weights, and computes the inverse of each row's sum. `scale` includes log2(e).
template <int TILES>
__device__ __forceinline__ void weigh(float (&s)[TILES][4], float scale, float (&inverse)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = -INFINITY, total = 0.0f;
#pragma unroll
    for (int t = 0; t < TILES; ++t) top = fmaxf(top, fmaxf(s[t][2 * half], s[t][2 * half + 1]));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
    const float shift = top == -INFINITY ? 0.0f : top * scale;
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        s[t][2 * half + i] = exp2_approx(fmaf(s[t][2 * half + i], scale, -shift));
        total += s[t][2 * half + i];
      }
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    inverse[half] = total == 0.0f ? 0.0f : 1.0f / total;
  }
}

// o += weights v, with the values as operands of mma.m16n8k16.
template <class S, int TILES>
__device__ __forceinline__ void add_values(float (&o)[TILES][4], const uint32_t (&weights)[S::kRows / 16][4],
                                           const uint32_t (&v)[TILES][4]) {
#pragma unroll
  for (int step = 0; step < S::kRows / 16; ++step)
#pragma unroll
    for (int t = 0; t < TILES; ++t) mma_m16n8k16(o[t], weights[step], v[t] + 2 * step, bf16_t{});
}

// Whether a number of the warp is not finite.
template <int TILES>
__device__ __forceinline__ bool any_not_finite(const float (&o)[TILES][4]) {
  float sum = 0.0f;
#pragma unroll
  for (int t = 0; t < TILES; ++t)
#pragma unroll
    for (int i = 0; i < 4; ++i) sum = fmaf(o[t][i], 0.0f, sum);
  return __any_sync(0xffffffffu, sum != 0.0f);
}

// The same as add_values(), sequence by sequence, with zeros as the values of all others.
template <class S, int TILES>
__device__ __forceinline__ void add_values_apart(const Memory<S>& memory, const Place<S>& at, float (&o)[TILES][4],
                                                 const uint32_t (&weights)[S::kRows / 16][4]) {
#pragma unroll 1
  for (int row = 0; row < S::kRows; ++row) {
    const int begin = memory.begin[row], end = memory.end[row];
    if (row != begin || begin == end) continue;
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      float sums[4] = {};
      uint32_t v[4];
      ldmatrix_x4_transposed(v, gathered_chunk(memory, 2, at.lane % S::kRows, at.group * TILES + t));
#pragma unroll
      for (int i = 0; i < S::kRows / 8; ++i) {
        const int key = 8 * i + accumulator_column(at.lane);
        if (key < begin || key >= end) v[i] &= 0xffff0000u;
        if (key + 1 < begin || key + 1 >= end) v[i] &= 0xffffu;
      }
#pragma unroll
      for (int step = 0; step < S::kRows / 16; ++step) mma_m16n8k16(sums, weights[step], v + 2 * step, bf16_t{});
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int query = at.row_tile * 16 + accumulator_row(at.lane) + i / 2 * 8;
        if (query >= begin && query < end) o[t][i] = sums[i];
      }
    }
  }
}

// Attention of 16 queries, and of the warp's part of the head's columns.
template <class S>
__device__ __forceinline__ void attend(const Params& p, Memory<S>& memory, const Place<S>& at) {
  constexpr int kTiles = S::kHeadDim / 8 / S::kInnerGroups;
  static_assert(kTiles >= 1, "a tile for each warp");
  float s[S::kRows / 8][4] = {}, o[kTiles][4] = {}, inverse[2];
  uint32_t v[kTiles][4], weights[S::kRows / 16][4];
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
    ldmatrix_x4_transposed(v[t], gathered_chunk(memory, 2, at.lane % S::kRows, at.group * kTiles + t));
  score<S>(memory, at, s);
  weigh(s, p.scale * kLog2E, inverse);
#pragma unroll
  for (int step = 0; step < S::kRows / 16; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = s[2 * step + i / 2] + i % 2 * 2;
      weights[step][i] = narrow_word(pair[0], pair[1], bf16_t{});
    }
  add_values<S>(o, weights, v);
  if (any_not_finite(o)) add_values_apart<S>(memory, at, o, weights);
  const uint32_t to = shared_address(memory.gather) + S::kAttentionAt +
                      (at.row_tile * 16 + accumulator_row(at.lane)) * S::kHeadPitch +
                      2 * (at.group * kTiles * 8 + accumulator_column(at.lane));
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      store_word(to + half * 8 * S::kHeadPitch + t * 16,
                 narrow_word(o[t][2 * half] * inverse[half], o[t][2 * half + 1] * inverse[half], bf16_t{}));
}

}  // namespace layers
}  // namespace cuda
}  // namespace fasttfm
