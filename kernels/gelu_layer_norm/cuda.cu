// LayerNorm of GELU(x + linear_bias) on NVIDIA GPUs, built on rows.cuh. The formulas are in reference.py.
//
// Forward and backward are close to the issue limit as well as the bandwidth limit, so the number of instructions per
// element matters. The backward therefore reads everything once and keeps hhat, gelu' and g of a row, and three sums
// over rows, in registers. It has eight warps with up to 255 registers per thread; the eight independent elements of a
// vector hide latency. hhat is computed with one FMA, h * rstd - mean * rstd. Rounding the constant mean * rstd causes
// an error of 2^-24 * |mean| * rstd, which is visible only if the standard deviation of a row is far below the rounding
// error of 16-bit elements; fp32 rows are therefore centered again.
#include <cstdint>

#include "common/cuda/activation.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/normalize.cuh"
#include "common/cuda/rows.cuh"
#include "gelu_layer_norm/op.h"

namespace fasttfm {
namespace cuda {
namespace {

template <class T>
constexpr bool kExact = sizeof(T) == 4;
// Rows per group: with a 16-bit type two, so that parameters are loaded and converted once for both.
template <class T>
constexpr int kForwardRows = kExact<T> ? 1 : 2;

// P is the parameters' type.
template <class T, class P, Activation A, class S>
__global__ void __launch_bounds__(S::kBlock) forward_kernel(GeluLayerNormForward p) {
  constexpr int kRows = kForwardRows<T>;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * S::kGroups + group_of_thread<S>()) * kRows;
  if (first >= p.rows) return;  // whole groups return together
  const int columns = static_cast<int>(p.columns);
  int64_t row[kRows];
  Packed<T> packed[kRows][S::kVectors];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    row[r] = first + r < p.rows ? first + r
                                : first;  // past the last row, the first row is computed again, with the same result
    const T* from = static_cast<const T*>(p.x) + row[r] * p.x_stride;
#pragma unroll
    for (int v = 0; v < S::kVectors; ++v) packed[r][v] = load_packed_if(in_row<S>(v, columns), from + column_of<S>(v));
  }
  float h[kRows][S::kVectors][kVector];
#pragma unroll
  for (int v = 0; v < S::kVectors; ++v) {
    float linear_bias[kVector];
    load_parameter(in_row<S>(v, columns), static_cast<const P*>(p.linear_bias), column_of<S>(v), 0.0f, linear_bias);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      widen(packed[r][v], h[r][v]);
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        h[r][v][i] = activated<A, kExact<T>>(h[r][v][i] + linear_bias[i]).value;  // zero past the row's end
    }
  }
  normalize_rows<T, P, S, kExact<T>>(p, row, h);
}

template <class T, class S>
struct BackwardMemory {
  union {
    RowRing<T, S, 2> ring;  // x, dy
    float shares[S::kGroups][S::kColumns];
  };
  float linear_bias[S::kColumns];
  float weight[S::kColumns];
};

// A thread's partial sums of the three sums over rows.
template <class S>
struct BackwardShares {
  float dlinear_bias[S::kVectors][kVector] = {}, dweight[S::kVectors][kVector] = {}, dbias[S::kVectors][kVector] = {};

  __device__ __forceinline__ void store(const GeluLayerNormBackward& p, float (&shares)[S::kGroups][S::kColumns],
                                        int columns) const {
    const int64_t step = static_cast<int64_t>(gridDim.x) * columns;
    float* part = p.workspace + static_cast<int64_t>(blockIdx.x) * columns;
    if (p.dlinear_bias != nullptr) store_part<S>(dlinear_bias, shares, part, columns);
    if (p.dweight != nullptr) store_part<S>(dweight, shares, part + step, columns);
    if (p.dbias != nullptr) store_part<S>(dbias, shares, part + 2 * step, columns);
  }
};

// Subtracts from a row's hhat its mean, which is zero except for the rounding of mean and rstd.
template <class S>
__device__ __forceinline__ void center(float (&hhat)[S::kVectors][kVector], int columns, float inverse_c,
                                       float* scratch) {
  float total[1] = {0.0f};
#pragma unroll
  for (int v = 0; v < S::kVectors; ++v) {
    if (!in_row<S>(v, columns)) continue;
#pragma unroll
    for (int i = 0; i < kVector; ++i) total[0] += hhat[v][i];
  }
  group_sum<S::kGroup, S::kBlock>(total, scratch);
#pragma unroll
  for (int v = 0; v < S::kVectors; ++v)
#pragma unroll
    for (int i = 0; i < kVector; ++i) hhat[v][i] -= total[0] * inverse_c;
}

template <class S>
using BackwardScratch = float[3][2 * S::kBlock / 32];

template <class T, Activation A, class S>
__global__ void __launch_bounds__(S::kBlock, 1) backward_kernel(GeluLayerNormBackward p) {
  extern __shared__ __align__(16) char dynamic_memory[];
  __shared__ BackwardScratch<S> scratch;
  const int group = threadIdx.x / S::kGroup * (S::kGroup / 32);  // the group's first warp; offset of its scratch
  auto& memory = *reinterpret_cast<BackwardMemory<T, S>*>(dynamic_memory);
  const int columns = static_cast<int>(p.columns);
  const float inverse_c = 1.0f / static_cast<float>(columns);
  BackwardShares<S> shares;
  const GroupRows<S> rows(p.rows);
  RowWalk<const T> x_walk(static_cast<const T*>(p.x), rows, p.x_stride);
  RowWalk<const T> dy_walk(static_cast<const T*>(p.dy), rows, columns);
  RowWalk<T> dx_walk(static_cast<T*>(p.dx), rows, columns);
  int64_t row = rows.first;

  memory.ring.clear_past_end(columns);
  memory.ring.start(rows.rounds > 0, columns, 0, x_walk, dy_walk);
  stage_parameter<S>(p.linear_bias, p.linear_bias_dtype, 0.0f, columns, memory.linear_bias);
  stage_parameter<S>(p.weight, p.weight_dtype, 1.0f, columns, memory.weight);
  __syncthreads();
  for (int round = 0; round < rows.rounds; ++round) {  // uniform within a group, whose threads meet at barriers
    const int slot = round % kRowStages;
    memory.ring.start(round + 1 < rows.rounds, columns, slot ^ 1, x_walk, dy_walk);
    const float rstd = p.rstd[row];
    const float shift = -p.mean[row] * rstd;
    memory.ring.wait();

    float hhat[S::kVectors][kVector], derivative[S::kVectors][kVector], g[S::kVectors][kVector];
#pragma unroll
    for (int v = 0; v < S::kVectors; ++v) {
      float value[kVector], linear_bias[kVector];
      widen(memory.ring.at(slot, 0, v), value);
      widen(load_packed(memory.linear_bias + column_of<S>(v)), linear_bias);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const Activated h = activated<A, kExact<T>>(value[i] + linear_bias[i]);
        derivative[v][i] = h.derivative;
        hhat[v][i] = fmaf(h.value, rstd, shift);
      }
    }
    if constexpr (kExact<T>) center<S>(hhat, columns, inverse_c, scratch[2] + group);

    float sums[2] = {0.0f, 0.0f};  // of g and of g * hhat; past the row's end g is zero, hhat is not
#pragma unroll
    for (int v = 0; v < S::kVectors; ++v) {
      float gradient[kVector], weight[kVector];
      widen(memory.ring.at(slot, 1, v), gradient);
      widen(load_packed(memory.weight + column_of<S>(v)), weight);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        g[v][i] = gradient[i] * weight[i];
        sums[0] += g[v][i];
        sums[1] = fmaf(g[v][i], hhat[v][i], sums[1]);
        shares.dweight[v][i] = fmaf(gradient[i], hhat[v][i], shares.dweight[v][i]);
        shares.dbias[v][i] += gradient[i];
      }
    }
    group_sum<S::kGroup, S::kBlock>(sums, scratch[slot] + 2 * group);
    const float offset = -rstd * (sums[0] * inverse_c);
    const float slope = -rstd * (sums[1] * inverse_c);

#pragma unroll
    for (int v = 0; v < S::kVectors; ++v) {
      float out[kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        out[i] = fmaf(g[v][i], rstd, fmaf(hhat[v][i], slope, offset)) * derivative[v][i];
        shares.dlinear_bias[v][i] += out[i];
      }
      store_packed_if(in_row<S>(v, columns), dx_walk.vector + vector_offset<S>(v), narrow<T>(out));
    }
    dx_walk.next();
    row += rows.stride;
  }
  pass_missed_barriers<kExact<T> ? 2 : 1>(p.rows, rows);
  cp_async_wait<0>();
  shares.store(p, memory.shares, columns);
}

template <class T, class P, Activation A>
Status launch_forward(const GeluLayerNormForward& p) {
  return for_row_shape<0>(p.columns, [&](auto shape) {
    using S = decltype(shape);
    constexpr int kRows = S::kGroups * kForwardRows<T>;
    const auto blocks = static_cast<unsigned>((p.rows + kRows - 1) / kRows);
    return launch(forward_kernel<T, P, A, S>, blocks, S::kBlock, 0, p.stream, p);
  });
}

template <class T>
struct BackwardPlan {
  static constexpr int kBlock = 256;
  static constexpr int kSmallBlock = 128;
  template <class S>
  static constexpr int64_t memory(S) {
    return sizeof(BackwardMemory<T, S>) + sizeof(BackwardScratch<S>);
  }
};

template <class T, Activation A>
Status launch_backward(const WithBlockMemory<GeluLayerNormBackward>& p) {
  return for_row_shape_within<BackwardPlan<T>>(p.columns, p.block_memory, [&](auto shape) {
    using S = decltype(shape);
    const int64_t row_blocks = (p.rows + S::kGroups - 1) / S::kGroups;
    const int blocks = row_blocks < p.blocks ? static_cast<int>(row_blocks) : p.blocks;
    const Status status =
        blocks == 0 ? Status{}
                    : launch(backward_kernel<T, A, S>, blocks, S::kBlock, sizeof(BackwardMemory<T, S>), p.stream, p);
    if (status.code != StatusCode::ok) return status;
    if (p.dlinear_bias == nullptr && p.dweight == nullptr && p.dbias == nullptr) return status;
    return sum_parts(p.workspace, {p.dlinear_bias, p.linear_bias_dtype}, {p.dweight, p.weight_dtype}, blocks, p.columns,
                     p.stream, {p.dbias, p.bias_dtype});
  });
}

}  // namespace

int64_t gelu_layer_norm_backward_memory(int64_t columns, int64_t dtype, int64_t limit) {
  int64_t memory = 0;
  with_dtype(static_cast<DType>(dtype), unknown_dtype(), [&](auto element) {
    memory = row_memory<BackwardPlan<decltype(element)>>(columns, limit);
    return Status{};
  });
  return memory;
}

Status gelu_layer_norm_forward(const GeluLayerNormForward& p) {
  for (const void* parameter : {p.linear_bias, p.weight, p.bias})
    if (!rows_aligned(parameter, 0)) return misaligned_rows();
  if (!rows_aligned(p.x, p.x_stride)) return misaligned_rows();
  if (p.rows == 0) return {};
  const DeviceGuard guard(p.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  return with_dtype(p.dtype, unknown_dtype(), [&](auto element) {
    return with_gelu(p.activation, [&](auto gelu) {
      using T = decltype(element);
      constexpr Activation kGelu = decltype(gelu)::value;
      if (p.parameter_dtype == p.dtype) return launch_forward<T, T, kGelu>(p);
      if (p.parameter_dtype == DType::f32) return launch_forward<T, float, kGelu>(p);
      return bad_size("gelu_layer_norm: parameters are of x's type or fp32");
    });
  });
}

Status gelu_layer_norm_backward(const WithBlockMemory<GeluLayerNormBackward>& p) {
  for (const void* tensor : {p.dy, p.linear_bias, p.weight})
    if (!rows_aligned(tensor, 0)) return misaligned_rows();
  if (!rows_aligned(p.x, p.x_stride)) return misaligned_rows();
  const DeviceGuard guard(p.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  return with_dtype(p.dtype, unknown_dtype(), [&](auto element) {
    return with_gelu(p.activation,
                     [&](auto gelu) { return launch_backward<decltype(element), decltype(gelu)::value>(p); });
  });
}

}  // namespace cuda
}  // namespace fasttfm
