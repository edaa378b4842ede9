// How a warp of the GEMMs for few rows (cuda_gemm.cu) writes the sums of its 16 rows: rounded, with a bias and an
// activation, or with a bias and a residual of normalized rows, or in fp32 as one part of K.
#pragma once

#include <cstdint>

#include "few_rows/gemm_block.cuh"
#include "few_rows/row_statistics.cuh"

namespace fasttfm {
namespace cuda {
namespace product {

// The address of a warp's rounded rows in shared memory, in place of the stages.
template <class S>
__device__ __forceinline__ uint32_t own_result(Memory<S>& memory, int warp) {
  return shared_address(memory.stage) + warp * 16 * result_pitch(S::kColumns);
}

// Stores a warp's 16 rows from shared memory, in rows of adjacent vectors.
template <class T, class S>
__device__ __forceinline__ void copy_result(const FewRowsGemm& p, Memory<S>& memory, const Place& at, int warp) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t result = own_result<S>(memory, warp);
  __syncwarp();
#pragma unroll 4
  for (int index = lane; index < 16 * S::kColumns / kChunk; index += 32) {
    const ResultVector at_warp = result_vector(index, S::kColumns);
    const int row = at.row + warp * 16 + at_warp.row, column = at.column + at_warp.column;
    const uint4 v = load_vector(result + at_warp.row * result_pitch(S::kColumns) + at_warp.column * 2);
    if (row < p.rows && column < p.columns)
      *reinterpret_cast<uint4*>(static_cast<T*>(p.y) + row * p.columns + column) = v;
  }
}

// Rounds F(rstd * sums + bias).
template <class T, class S, class F>
__device__ __forceinline__ void store_rows(const FewRowsGemm& p, Memory<S>& memory, const Place& at, int warp,
                                           const float (&sums)[S::kSums], F of) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t to = own_result<S>(memory, warp) + result_offset(lane, S::kColumns);
  const float* bias = memory.bias + accumulator_column(lane);
  const float2* norm = memory.norm + warp * 16 + accumulator_row(lane);
  const float rstd[2] = {S::kReadsStatistics ? norm[0].y : 1.0f, S::kReadsStatistics ? norm[8].y : 1.0f};
#pragma unroll
  for (int i = 0; i < S::kColumns / 8; i += 2) {  // columns 8 * i to 8 * i + 15
    uint32_t word[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float2 add = *reinterpret_cast<const float2*>(bias + 8 * (i + k / 2));
      word[k] = narrow_word(of(fmaf(sums[4 * i + 2 * k], rstd[k % 2], add.x)),
                            of(fmaf(sums[4 * i + 2 * k + 1], rstd[k % 2], add.y)), T{});
    }
    stmatrix_x4(to + 16 * i, word);
  }
  copy_result<T, S>(p, memory, at, warp);
}

// The residual of a lane's sums, in words of two columns: [columns / 8][rows 8 apart].
template <class T, class S>
struct AccumulatorResidual {
  uint32_t words[S::kColumns / 8][2];

  // Called after griddepcontrol_wait().
  __device__ __forceinline__ void load(const FewRowsGemm& p, const Place& at, int warp) {
    const int lane = static_cast<int>(threadIdx.x) % 32, column = at.column + accumulator_column(lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = at.row + warp * 16 + accumulator_row(lane) + 8 * half;
      const T* from = static_cast<const T*>(p.residual) + row * p.columns + column;
#pragma unroll
      for (int n = 0; n < S::kColumns / 8; ++n) {
        words[n][half] = 0;
        if (row < p.rows && column + 8 * n < p.columns)
          words[n][half] = __ldcg(reinterpret_cast<const unsigned int*>(from + 8 * n));
      }
    }
  }
};

// Rounds sums + bias + residual, and writes the statistics of the result. Four lanes have the 64 columns of a row.
template <class T, class S>
__device__ __forceinline__ void store_added(const FewRowsGemm& p, Memory<S>& memory, const Place& at, int warp,
                                            const float (&sums)[S::kSums], const AccumulatorResidual<T, S>& residual) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t to = own_result<S>(memory, warp) + result_offset(lane, S::kColumns);
  const float* bias = memory.bias + accumulator_column(lane);
  float z[2][S::kColumns / 4];
#pragma unroll
  for (int i = 0; i < S::kColumns / 8; i += 2) {  // columns 8 * i to 8 * i + 15
    uint32_t word[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float2 add = *reinterpret_cast<const float2*>(bias + 8 * (i + k / 2));
      const float2 residual_pair = widen_word(residual.words[i + k / 2][k % 2], T{});
      word[k] = narrow_word(sums[4 * i + 2 * k] + add.x + residual_pair.x,
                            sums[4 * i + 2 * k + 1] + add.y + residual_pair.y, T{});
      const float2 rounded = widen_word(word[k], T{});
      z[k % 2][2 * (i + k / 2)] = rounded.x;
      z[k % 2][2 * (i + k / 2) + 1] = rounded.y;
    }
    stmatrix_x4(to + 16 * i, word);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float2 statistics = group_statistics<4>(z[half]);
    const int row = at.row + warp * 16 + accumulator_row(lane) + 8 * half;
    if (lane % 4 == 0 && row < p.rows && at.column < p.columns && p.y_statistics != nullptr)
      reinterpret_cast<float2*>(p.y_statistics)[at.column / kStatisticsColumns * p.rows + row] = statistics;
  }
  copy_result<T, S>(p, memory, at, warp);
}

template <class S>
__device__ __forceinline__ void store_part(const FewRowsGemm& p, const Place& at, int warp,
                                           const float (&sums)[S::kSums]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, column = at.column + accumulator_column(lane);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = at.row + warp * 16 + accumulator_row(lane) + 8 * half;
    if (row >= p.rows) continue;
    float* to = p.parts + (blockIdx.z * p.rows + row) * p.columns + column;
#pragma unroll
    for (int n = 0; n < S::kColumns / 8; ++n)
      if (column + 8 * n < p.columns)
        *reinterpret_cast<float2*>(to + 8 * n) = make_float2(sums[4 * n + 2 * half], sums[4 * n + 2 * half + 1]);
  }
}

}  // namespace product
}  // namespace cuda
}  // namespace fasttfm
