// The layout of a padded batch from its mask, by one block: a warp counts the tokens of a row, and the block adds up
// the counts of as many rows as it has threads.
#include <cstdint>

#include "common/cuda/launch.cuh"
#include "pack/op.h"

namespace fasttfm {
namespace cuda {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;

struct RowTokens {
  int count;
  bool first;  // whether they precede the padding
};

// Called by a warp. Loads of several iterations are in flight at the same time.
template <class Element>
__device__ __forceinline__ RowTokens count_tokens(const Element* row, int columns) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int count = 0, end = 0;  // end: the column after the last token
#pragma unroll 8
  for (int column = 0; column < columns; column += 32) {
    const bool token = column + lane < columns && row[column + lane] != 0;
    const unsigned tokens = __ballot_sync(0xffffffffu, token);
    count += __popc(tokens);
    if (tokens != 0) end = column + 32 - __clz(static_cast<int>(tokens));
  }
  return {count, end == count};
}

// Inclusive prefix sums over the block's threads.
__device__ __forceinline__ int prefix_sum(int value, int (&warps)[kWarps]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const auto within_warp = [lane](int sum) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int below = __shfl_up_sync(0xffffffffu, sum, distance);
      if (lane >= distance) sum += below;
    }
    return sum;
  };
  value = within_warp(value);
  if (lane == 31) warps[warp] = value;
  __syncthreads();
  const int before = within_warp(warps[lane]);
  return value + __shfl_sync(0xffffffffu, before, (warp + 31) % 32) * (warp > 0);
}

template <class Element>
__global__ void __launch_bounds__(kThreads) mask_layout_kernel(MaskLayout p) {
  __shared__ int counts[kThreads], warps[kWarps];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  const auto* mask = static_cast<const Element*>(p.mask);
  const int rows = static_cast<int>(p.sequences), columns = static_cast<int>(p.max_seqlen);
  int total = 0;
  bool first = true;
  for (int start = 0; start < rows; start += kThreads) {
    const int chunk_rows = min(kThreads, rows - start);
    for (int row = warp; row < chunk_rows; row += kWarps) {
      const RowTokens tokens = count_tokens(mask + static_cast<int64_t>(start + row) * columns, columns);
      if (thread % 32 == 0) counts[row] = tokens.count;
      first = first && tokens.first;
    }
    __syncthreads();
    const int sum = total + prefix_sum(thread < chunk_rows ? counts[thread] : 0, warps);
    if (thread < chunk_rows) p.cu_seqlens[start + thread + 1] = sum;
    __syncthreads();
    if (thread == kThreads - 1) warps[0] = sum;
    __syncthreads();
    total = warps[0];
    __syncthreads();
  }
  first = __syncthreads_and(first) != 0;
  if (thread == 0) {
    p.cu_seqlens[0] = 0;
    p.summary[0] = total;
    p.summary[1] = first;
  }
}

}  // namespace

Status mask_layout(const MaskLayout& p) {
  if (p.sequences > INT32_MAX || p.max_seqlen > INT32_MAX || p.sequences * p.max_seqlen > INT32_MAX)
    return bad_size("pack: too many tokens for 32-bit indices");
  const DeviceGuard guard(p.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  const auto run = [&](auto kernel) { return launch(kernel, 1, kThreads, 0, p.stream, p); };
  switch (p.element_bytes) {
    case 1: return run(mask_layout_kernel<uint8_t>);
    case 4: return run(mask_layout_kernel<uint32_t>);
    case 8: return run(mask_layout_kernel<uint64_t>);
    default: return bad_size("pack: elements of a mask have 1, 4 or 8 bytes");
  }
}

}  // namespace cuda
}  // namespace fasttfm
