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

}  // namespace cuda
}  // namespace fasttfm
