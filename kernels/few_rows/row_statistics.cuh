// Statistics of rows that a GEMM writes, for a LayerNorm that the next kernels apply without a kernel of its own: the
// epilogue writes the mean and the sum of squared deviations of every 64 columns of a row, and readers merge them.
// Deviations from the mean of their own columns lose no digits if the mean is large.
#pragma once

#include <cstdint>

#include "common/cuda/normalize.cuh"

namespace fasttfm {
namespace cuda {

constexpr int kStatisticsColumns = 64;

// `groups`: [columns / 64, rows] of (mean, sum of squared deviations from it); null for rows with mean 0 and
// deviation 1.
struct RowStatistics {
  const float2* groups;
  int rows;
  int count;  // of groups of columns
  float eps;
};

// What LayerNorm needs of a row.
struct RowNorm {
  float mean, rstd;
};

// The mean of a group's 64 values, of which each of LANES neighbouring lanes has as many, and the sum of their squared
// deviations from it.
template <int LANES>
__device__ __forceinline__ float2 group_statistics(const float (&z)[kStatisticsColumns / LANES]) {
  constexpr int kOwn = kStatisticsColumns / LANES;
  float mean = 0.0f, squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) mean += z[i];
  mean *= 1.0f / kOwn;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) squares = fmaf(z[i] - mean, z[i] - mean, squares);
#pragma unroll
  for (int lanes = 1; lanes < LANES; lanes *= 2) {
    const float other_mean = __shfl_xor_sync(0xffffffffu, mean, lanes);
    const float other_squares = __shfl_xor_sync(0xffffffffu, squares, lanes);
    const float away = other_mean - mean;
    squares = fmaf(0.5f * static_cast<float>(kOwn * lanes) * away, away, squares + other_squares);
    mean = 0.5f * (mean + other_mean);
  }
  return make_float2(mean, squares);
}

}  // namespace cuda
}  // namespace fasttfm
