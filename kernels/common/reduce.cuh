// Reductions in a fixed order.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace fasttfm {
namespace cuda {

// Sums over the GROUP threads that share a row (a power of two; whole warps when above 32), for COUNT values at once. Every thread
// of the group gets the sums. `scratch`: COUNT * GROUP / 32 floats per group, unused for a single warp; a group above one
// warp must be the whole block.
template <int GROUP, int COUNT>
__device__ __forceinline__ void group_sum(float (&value)[COUNT], float* scratch) {
#pragma unroll
  for (int offset = (GROUP < 32 ? GROUP : 32) / 2; offset > 0; offset /= 2)
#pragma unroll
    for (int i = 0; i < COUNT; ++i) value[i] += __shfl_xor_sync(0xffffffffu, value[i], offset);
  if constexpr (GROUP > 32) {
    constexpr int kWarps = GROUP / 32;
    __syncthreads();  // the previous use of scratch is over
    if (threadIdx.x % 32 == 0)
#pragma unroll
      for (int i = 0; i < COUNT; ++i) scratch[i * kWarps + threadIdx.x / 32] = value[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      value[i] = 0.0f;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) value[i] += scratch[i * kWarps + warp];
    }
  }
}

constexpr int kSumColumns = 32;
constexpr int kSumRows = 16;

// first[c] = sum over p of parts[0][p][c], second[c] = sum over p of parts[1][p][c]; fp32, p in a fixed order; a null output is skipped.
// Grid (columns / 32, 2), block (32, 16).
static __global__ void __launch_bounds__(kSumColumns* kSumRows)
    sum_parts_kernel(const float* parts, float* first, float* second, int part_count, int64_t columns) {
  __shared__ float partial[kSumRows][kSumColumns + 1];
  float* out = blockIdx.y == 0 ? first : second;
  if (out == nullptr) return;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kSumColumns + threadIdx.x;
  const float* from = parts + static_cast<int64_t>(blockIdx.y) * part_count * columns + column;
  float total = 0.0f;
  if (column < columns) {
#pragma unroll 8
    for (int part = threadIdx.y; part < part_count; part += kSumRows) total += from[part * columns];
  }
  partial[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y == 0 && column < columns) {
    float sum = 0.0f;
#pragma unroll
    for (int row = 0; row < kSumRows; ++row) sum += partial[row][threadIdx.x];
    out[column] = sum;
  }
}

}  // namespace cuda
}  // namespace fasttfm
