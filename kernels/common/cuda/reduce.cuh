// Reductions in a fixed order.
#pragma once

#include <cstdint>

#include "common/cuda/convert.cuh"
#include "common/cuda/launch.cuh"

namespace fasttfm {
namespace cuda {

// Synchronizes the GROUP consecutive threads of a block of BLOCK threads that process the same row. A group that is the
// whole block uses __syncthreads(). If a block has several groups, each uses a named barrier; such a block allocates
// all 16 named barriers, which limits an SM to four blocks.
template <int GROUP, int BLOCK>
__device__ __forceinline__ void sync_group() {
  if constexpr (GROUP == BLOCK)
    __syncthreads();
  else
    asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.x / GROUP + 1), "n"(GROUP) : "memory");
}

// Computes the sums of COUNT values over the GROUP consecutive threads that process the same row (a power of two, at
// least a warp). Every thread of the group gets the sums. `scratch`: COUNT * GROUP / 32 floats for this group, unused
// if the group is one warp. A call executes only one barrier, so consecutive calls must alternate between two scratch
// buffers.
template <int GROUP, int BLOCK, int COUNT>
__device__ __forceinline__ void group_sum(float (&value)[COUNT], float* scratch) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
#pragma unroll
    for (int i = 0; i < COUNT; ++i) value[i] += __shfl_xor_sync(0xffffffffu, value[i], offset);
  if constexpr (GROUP > 32) {
    constexpr int kWarps = GROUP / 32;
    if (threadIdx.x % 32 == 0)
#pragma unroll
      for (int i = 0; i < COUNT; ++i) scratch[i * kWarps + threadIdx.x % GROUP / 32] = value[i];
    sync_group<GROUP, BLOCK>();
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

// The destination of a sum: [C] of any type, or null if it is not needed.
struct SumOutput {
  void* to;
  DType dtype;
};

// Grid (columns / 32, 2 or 3), block (32, 16).
static __global__ void __launch_bounds__(kSumColumns* kSumRows)
    sum_parts_kernel(const float* parts, SumOutput first, SumOutput second, SumOutput third, int part_count,
                     int64_t columns) {
  __shared__ float partial[kSumRows][kSumColumns + 1];
  const SumOutput out = blockIdx.y == 0 ? first : blockIdx.y == 1 ? second : third;
  if (out.to == nullptr) return;
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
    float sum[kSumRows];  // pairwise summation rounds less than sequential summation
#pragma unroll
    for (int row = 0; row < kSumRows; ++row) sum[row] = partial[row][threadIdx.x];
#pragma unroll
    for (int half = kSumRows / 2; half > 0; half /= 2)
#pragma unroll
      for (int row = 0; row < half; ++row) sum[row] += sum[row + half];
    store_as(out.dtype, out.to, column, sum[0]);
  }
}

// first[c] = sum over p of parts[0][p][c], second[c] = sum over p of parts[1][p][c], and likewise the third, if there
// is one. The sums are computed in fp32, in a fixed order of p, and rounded once.
inline Status sum_parts(const float* parts, SumOutput first, SumOutput second, int part_count, int64_t columns,
                        void* stream, SumOutput third = {}) {
  const dim3 grid(static_cast<unsigned>((columns + kSumColumns - 1) / kSumColumns), third.to == nullptr ? 2 : 3);
  return launch(sum_parts_kernel, grid, dim3(kSumColumns, kSumRows), 0, stream, parts, first, second, third, part_count,
                columns);
}

}  // namespace cuda
}  // namespace fasttfm
