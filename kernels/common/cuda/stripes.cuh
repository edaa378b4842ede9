// Building blocks of elementwise kernels over rows (bias_gelu, gated_activation). N rows of C columns, C a multiple of
// 8.
//
// A warp processes a stripe of 256 columns, 8 per lane, whose parameters it keeps in registers. It loads several rows
// before it computes, so that enough 16-byte loads are in flight to saturate the memory bandwidth. The forward has one
// tile per block and many small blocks. In the backward the blocks iterate over the rows with their partial sums over
// rows in registers; a second, small kernel adds them in a fixed order. Neighbouring blocks process neighbouring
// stripes of the same rows.
#pragma once

#include <cstdint>

#include "common/cuda/convert.cuh"
#include "common/status.h"

namespace fasttfm {
namespace cuda {

constexpr int kStripeWarps = 8;
constexpr int kStripeBlock = 32 * kStripeWarps;
constexpr int kStripe = 32 * kVector;
static_assert(kStripeBlock == kStripe, "each thread adds up one column of the stripe");

inline unsigned stripes_of(int64_t columns) { return static_cast<unsigned>((columns + kStripe - 1) / kStripe); }

inline bool columns_fit_stripes(int64_t columns) {
  return columns >= kVector && columns % kVector == 0 && columns < (1 << 30);
}

// The first column of the block's stripe, which is blockIdx.x, and the lane's first column in it.
__device__ __forceinline__ int stripe_of_block() { return static_cast<int>(blockIdx.x) * kStripe; }
__device__ __forceinline__ int column_of_lane() { return stripe_of_block() + threadIdx.x % 32 * kVector; }

// Adds the partial sums over rows of the block's warps, in warp order, and stores the block's partial sum: row
// blockIdx.y of `parts` ([gridDim.y, C] fp32). There must be a barrier between calls with the same `shares`.
__device__ __forceinline__ void store_stripe_part(const float (&share)[kVector], float (&shares)[kStripeWarps][kStripe],
                                                  float* parts, int64_t columns) {
  store_packed(&shares[threadIdx.x / 32][threadIdx.x % 32 * kVector], narrow<float>(share));
  __syncthreads();
  if (stripe_of_block() + threadIdx.x < columns) {
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kStripeWarps; ++warp) sum += shares[warp][threadIdx.x];
    parts[blockIdx.y * columns + stripe_of_block() + threadIdx.x] = sum;
  }
}

}  // namespace cuda
}  // namespace fasttfm
