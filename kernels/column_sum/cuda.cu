// The sum over rows on NVIDIA GPUs. A block processes a strip of 256 columns and one part of the rows. Rows are
// interleaved over the warps of a block; each lane reads 16 bytes of a row (fp32: 32) and has loads of several rows in
// flight. At the end the warps' sums are combined in shared memory. A second, small kernel adds the parts in a fixed
// order.
#include <cstdint>

#include "column_sum/op.h"
#include "common/cuda/convert.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/reduce.cuh"
#include "common/cuda/rows.cuh"

namespace fasttfm {
namespace cuda {
namespace {

constexpr int kBlock = 256;
constexpr int kWarps = kBlock / 32;
static_assert(kColumnSumStrip == 32 * kVector, "a warp's lanes take one vector each");

template <class T>
constexpr int kRowsInFlight = sizeof(T) == 4 ? 4 : 8;

template <class T>
__device__ __forceinline__ void add(const Packed<T>& packed, float (&sum)[kVector]) {
  float value[kVector];
  widen(packed, value);
#pragma unroll
  for (int i = 0; i < kVector; ++i) sum[i] += value[i];
}

// Grid (strips, parts).
template <class T>
__global__ void __launch_bounds__(kBlock, 4) column_sum_kernel(ColumnSum p) {
  __shared__ float shares[kWarps][kColumnSumStrip];
  constexpr int kRows = kRowsInFlight<T>;
  const int columns = static_cast<int>(p.columns);
  const int warp = threadIdx.x / 32;
  const int in_strip = threadIdx.x % 32 * kVector;
  const int column = blockIdx.x * kColumnSumStrip + in_strip;
  const int64_t begin = p.rows * blockIdx.y / gridDim.y;
  const int64_t end = p.rows * (blockIdx.y + 1) / gridDim.y;

  float sum[kVector] = {};
  if (column < columns) {
    const T* from = static_cast<const T*>(p.x) + (begin + warp) * p.x_stride + column;
    const int64_t step = kWarps * p.x_stride;
    int left = static_cast<int>((end - begin - warp + kWarps - 1) / kWarps);  // rows of this warp; none if negative
    for (; left >= kRows; left -= kRows) {
      Packed<T> row[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) row[r] = load_packed(from + r * step);
#pragma unroll
      for (int r = 0; r < kRows; ++r) add(row[r], sum);
      from += kRows * step;
    }
    for (; left > 0; --left, from += step) add(load_packed(from), sum);
  }
  store_packed(&shares[warp][in_strip], narrow<float>(sum));
  __syncthreads();
  const int sum_column = blockIdx.x * kColumnSumStrip + threadIdx.x;
  if (sum_column >= columns) return;
  float total[kWarps];
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total[w] = shares[w][threadIdx.x];
#pragma unroll
  for (int half = kWarps / 2; half > 0; half /= 2)
#pragma unroll
    for (int w = 0; w < half; ++w) total[w] += total[w + half];
  p.workspace[static_cast<int64_t>(blockIdx.y) * columns + sum_column] = total[0];
}
static_assert(kBlock == kColumnSumStrip, "each thread adds up one column of the strip");

}  // namespace

Status column_sum(const ColumnSum& p) {
  if (!rows_aligned(p.x, p.x_stride)) return misaligned_rows();
  if (p.columns < kVector || p.columns % kVector != 0)
    return bad_size("column_sum: columns must be a multiple of 8, at least 8");
  if (p.parts < 1 || p.parts > 65535) return bad_size("column_sum: parts must be from 1 to 65535");
  const DeviceGuard guard(p.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  return with_dtype(p.dtype, unknown_dtype(), [&](auto element) {
    const auto strips = static_cast<unsigned>((p.columns + kColumnSumStrip - 1) / kColumnSumStrip);
    const dim3 grid(strips, static_cast<unsigned>(p.parts));
    const Status status = launch(column_sum_kernel<decltype(element)>, grid, kBlock, 0, p.stream, p);
    if (status.code != StatusCode::ok) return status;
    return sum_parts(p.workspace, {p.sum, p.sum_dtype}, {nullptr, DType::f32}, p.parts, p.columns, p.stream);
  });
}

}  // namespace cuda
}  // namespace fasttfm
