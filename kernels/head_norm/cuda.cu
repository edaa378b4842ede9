// RMSNorm of heads on NVIDIA GPUs. A lane holds 8 columns of a head, and D / 8 neighbouring lanes hold the head.
#include <algorithm>
#include <cstdint>

#include "common/cuda/convert.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/reduce.cuh"
#include "common/cuda/rows.cuh"
#include "head_norm/op.h"

namespace fasttfm {
namespace cuda {
namespace {

constexpr int kBlock = 256;

// The sum over the lanes of a head, in all of them.
template <int LANES>
__device__ __forceinline__ float head_sum(float value) {
#pragma unroll
  for (int distance = LANES / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
  return value;
}

template <class T, int LANES>
__global__ void __launch_bounds__(kBlock) forward_kernel(HeadNorm p) {
  constexpr int kHeads = kBlock / LANES;
  const int lane = threadIdx.x % LANES, column = lane * kVector;
  const auto all = static_cast<int>(p.heads + 2 * p.kv_heads), normed = static_cast<int>(p.heads + p.kv_heads);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kHeads + threadIdx.x / LANES;
  const bool inside = row < p.tokens * all;
  const int64_t token = row / all;
  const int head = static_cast<int>(row % all);
  const int64_t at = row * (LANES * kVector) + column;
  const Packed<T> packed = load_packed_if(inside, static_cast<const T*>(p.x) + at);
  float x[kVector], weight[kVector];
  widen(packed, x);
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kVector; ++i) squares = fmaf(x[i], x[i], squares);
  const float rstd = rsqrtf(head_sum<LANES>(squares) * (1.0f / (LANES * kVector)) + p.eps);
  if (!inside) return;
  if (head >= normed) {
    store_packed(static_cast<T*>(p.y) + at, packed);
    return;
  }
  load_parameter(head < p.heads ? p.q_weight : p.k_weight, p.weight_dtype, column, 1.0f, weight);
#pragma unroll
  for (int i = 0; i < kVector; ++i) x[i] *= rstd * weight[i];
  store_packed(static_cast<T*>(p.y) + at, narrow<T>(x));
  if (lane == 0) p.rstd[token * normed + head] = rstd;
}

// Blocks iterate over heads; a lane's columns stay the same, so that its sums stay in registers.
template <class T, int LANES>
__global__ void __launch_bounds__(kBlock) backward_kernel(HeadNormBackward p) {
  constexpr int kHeads = kBlock / LANES, kColumns = LANES * kVector;
  __shared__ __align__(16) float shares[kHeads][kColumns];
  const int lane = threadIdx.x % LANES, column = lane * kVector, group = threadIdx.x / LANES;
  const auto all = static_cast<int>(p.heads + 2 * p.kv_heads), normed = static_cast<int>(p.heads + p.kv_heads);
  const int64_t rows = p.tokens * normed, stride = static_cast<int64_t>(gridDim.x) * kHeads;
  float q_weight[kVector], k_weight[kVector], q_sums[kVector] = {}, k_sums[kVector] = {};
  load_parameter(p.q_weight, p.weight_dtype, column, 1.0f, q_weight);
  load_parameter(p.k_weight, p.weight_dtype, column, 1.0f, k_weight);
  // All lanes of a warp take part in the sums over a head.
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kHeads; first < rows; first += stride) {
    const int64_t row = first + group;
    const bool inside = row < rows;
    const int64_t token = row / normed;
    const int head = static_cast<int>(row % normed);
    const bool is_q = head < p.heads;
    const int64_t at = (token * all + head) * kColumns + column;
    T* dy = static_cast<T*>(p.dy) + at;
    float x[kVector], gradient[kVector], out[kVector];
    widen(load_packed_if(inside, static_cast<const T*>(p.x) + at), x);
    widen(load_packed_if(inside, static_cast<const T*>(dy)), gradient);
    const float rstd = inside ? p.rstd[row] : 0.0f;
    float products = 0.0f;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      x[i] *= rstd;  // normalized
      out[i] = gradient[i] * (is_q ? q_weight[i] : k_weight[i]);
      products = fmaf(out[i], x[i], products);
      const float term = gradient[i] * x[i];
      q_sums[i] += is_q ? term : 0.0f;
      k_sums[i] += is_q ? 0.0f : term;
    }
    const float mean = head_sum<LANES>(products) * (1.0f / kColumns);
#pragma unroll
    for (int i = 0; i < kVector; ++i) out[i] = rstd * (out[i] - x[i] * mean);
    store_packed_if(inside, dy, narrow<T>(out));
  }
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    __syncthreads();
    store_packed(&shares[group][column], narrow<float>(part == 0 ? q_sums : k_sums));
    __syncthreads();
    for (int c = threadIdx.x; c < kColumns; c += kBlock) {
      float total = 0.0f;
#pragma unroll
      for (int other = 0; other < kHeads; ++other) total += shares[other][c];
      p.workspace[(static_cast<int64_t>(part) * gridDim.x + blockIdx.x) * kColumns + c] = total;
    }
  }
}

template <class Launch>
Status for_head_dim(int64_t head_dim, Launch launch) {
  if (head_dim == 64) return launch(std::integral_constant<int, 8>{});
  if (head_dim == 128) return launch(std::integral_constant<int, 16>{});
  if (head_dim == 256) return launch(std::integral_constant<int, 32>{});
  return bad_size("head_norm: the CUDA kernels take heads of 64, 128 and 256 columns");
}

}  // namespace

Status head_norm_forward(const HeadNorm& p) {
  if (!rows_aligned(p.x, 0) || !rows_aligned(p.y, 0) || !rows_aligned(p.q_weight, 0) || !rows_aligned(p.k_weight, 0))
    return misaligned_rows();
  const DeviceGuard guard(p.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  return with_dtype(p.dtype, unknown_dtype(), [&](auto element) {
    return for_head_dim(p.head_dim, [&](auto lanes) {
      constexpr int kHeads = kBlock / decltype(lanes)::value;
      const int64_t rows = p.tokens * (p.heads + 2 * p.kv_heads), blocks = (rows + kHeads - 1) / kHeads;
      if (rows == 0) return Status{};
      if (blocks > INT32_MAX) return bad_size("head_norm: x is too large for one launch");
      return launch(forward_kernel<decltype(element), decltype(lanes)::value>, static_cast<unsigned>(blocks), kBlock, 0,
                    p.stream, p);
    });
  });
}

Status head_norm_backward(const HeadNormBackward& p) {
  if (!rows_aligned(p.x, 0) || !rows_aligned(p.dy, 0) || !rows_aligned(p.q_weight, 0) || !rows_aligned(p.k_weight, 0))
    return misaligned_rows();
  const DeviceGuard guard(p.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  return with_dtype(p.dtype, unknown_dtype(), [&](auto element) {
    return for_head_dim(p.head_dim, [&](auto lanes) {
      const Status status = launch(backward_kernel<decltype(element), decltype(lanes)::value>,
                                   static_cast<unsigned>(p.blocks), kBlock, 0, p.stream, p);
      if (status.code != StatusCode::ok || (p.dq_weight == nullptr && p.dk_weight == nullptr)) return status;
      return sum_parts(p.workspace, {p.dq_weight, p.weight_dtype}, {p.dk_weight, p.weight_dtype}, p.blocks, p.head_dim,
                       p.stream);
    });
  });
}

}  // namespace cuda
}  // namespace fasttfm
