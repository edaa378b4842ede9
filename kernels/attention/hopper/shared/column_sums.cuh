// attention backward for Hopper: column sums of dq, dk and dv over all tokens, which are the bias gradient of the qkv
// projection. They are computed from the fp32 accumulators, before the gradients are rounded.
//
// Every warp adds to its own partial sums in the workspace, which are zeroed first. Only one thread adds to each
// element, so the order of additions is fixed. A final kernel adds the partial sums in a fixed order.
#pragma once

#include "attention/hopper/shared/backward_tiles.cuh"

namespace fasttfm {
namespace cuda {
namespace hopper_backward {

// One step of a transposing warp reduction: two lanes whose indices differ in `bit` each have 2 * COUNT sums; each lane
// keeps one half of them and adds the other lane's values to it.
template <int COUNT>
__device__ __forceinline__ void halve(float (&sum)[16], int bit) {
  const bool upper = (threadIdx.x & bit) != 0;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const float low = sum[i], high = sum[COUNT + i];
    // The unary plus makes the operands values. If they were variables, the compiler could select between their
    // addresses, which would put sum into local memory.
    const float kept = upper ? +high : +low, sent = upper ? +low : +high;
    sum[i] = kept + __shfl_xor_sync(0xffffffffu, sent, bit);
  }
}

// Adds the column sums over a warp's 16 rows of a 64-column accumulator, times `factor`, to the 64 floats at `to`. Lane
// l adds columns 2 * l and 2 * l + 1.
__device__ __forceinline__ void add_columns(const float (&value)[32], float factor, float* to) {
  float sum[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) sum[i] = value[i / 2 * 4 + i % 2] + value[i / 2 * 4 + 2 + i % 2];
  halve<8>(sum, 16);
  halve<4>(sum, 8);
  halve<2>(sum, 4);
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to + reload_tid() % 32 * 2),
               "f"(sum[0] * factor), "f"(sum[1] * factor)
               : "memory");
}

// Column sums are only supported for head dim 64.
__device__ __forceinline__ void add_columns(const float (&)[16], float, float*) {}

// The partial sums of a warp for dq (which = 0), dk (1) or dv (2). `warp`: the warp's index below kColumnParts;
// `rank`: the block's index in its group.
__device__ __forceinline__ float* column_part(const Parameters& p, int sequence, int rank, int warp, int which,
                                              int head) {
  const int64_t part = (static_cast<int64_t>(sequence) * p.blocks + rank) * kColumnParts + warp;
  return p.column_parts + ((part * 3 + which) * p.heads + head) * kHeadDim;
}

// Zeros all partial sums of a (sequence, head) pair. Called by a whole block.
__device__ __forceinline__ void clear_column_parts(const Parameters& p, int sequence, int head) {
  constexpr int kRow = kHeadDim / 4;
  for (int i = threadIdx.x; i < p.blocks * kColumnParts * 3 * kRow; i += blockDim.x)
    reinterpret_cast<float4*>(column_part(p, sequence, 0, 0, i / kRow, head))[i % kRow] = make_float4(0, 0, 0, 0);
}

}  // namespace hopper_backward
}  // namespace cuda
}  // namespace fasttfm
