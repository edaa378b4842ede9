// attention backward for Hopper: sums of the gradients' columns over all tokens, which are the bias gradient of the
// product that made q, k and v. They are taken from fp32 registers, where a tile's gradients stand before they are
// rounded.
//
// Every warp adds to places of its own in the workspace, which are zeros at first: only one thread ever adds to a
// number, in its own order. A last, small kernel adds the places up in a fixed order.
#pragma once

#include "attention/hopper/backward_tiles.cuh"

namespace fasttfm {
namespace cuda {
namespace {

// The lanes `bit` apart each keep one half of 2 * COUNT sums, and get the other's numbers of it.
template <int COUNT>
__device__ __forceinline__ void halve(float (&sum)[16], int bit) {
  const bool upper = (threadIdx.x & bit) != 0;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const float low = sum[i], high = sum[COUNT + i];
    // Of values, by the signs: of variables, the compiler may choose an address, and then sum is in local memory.
    const float kept = upper ? +high : +low, given = upper ? +low : +high;
    sum[i] = kept + __shfl_xor_sync(0xffffffffu, given, bit);
  }
}

// Adds the sums over a warp's 16 rows of a product of 64 columns, times `factor`, to the 64 numbers at `to`. Lane l
// comes out with columns 2 * l and 2 * l + 1.
__device__ __forceinline__ void add_columns(const float (&value)[32], float factor, float* to) {
  float sum[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) sum[i] = value[i / 2 * 4 + i % 2] + value[i / 2 * 4 + 2 + i % 2];
  halve<8>(sum, 16);
  halve<4>(sum, 8);
  halve<2>(sum, 4);
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to + thread_here() % 32 * 2),
               "f"(sum[0] * factor), "f"(sum[1] * factor)
               : "memory");
}

// Where a warp adds columns of dq (0), dk (1) or dv (2). `place`: which of kColumnPlaces warps, by the rows of a tile;
// `rank`: of the block among those that share the head.
__device__ __forceinline__ float* column_place(const Parameters& p, int sequence, int rank, int place, int which,
                                               int head) {
  const int64_t part = (static_cast<int64_t>(sequence) * p.blocks + rank) * kColumnPlaces + place;
  return p.column_parts + ((part * 3 + which) * p.heads + head) * kHeadDim;
}

// Zeros in all places of a (sequence, head). A whole block.
__device__ __forceinline__ void clear_column_places(const Parameters& p, int sequence, int head) {
  constexpr int kRow = kHeadDim / 4;
  for (int i = threadIdx.x; i < p.blocks * kColumnPlaces * 3 * kRow; i += blockDim.x)
    reinterpret_cast<float4*>(column_place(p, sequence, 0, 0, i / kRow, head))[i % kRow] = make_float4(0, 0, 0, 0);
}

}  // namespace
}  // namespace cuda
}  // namespace fasttfm
