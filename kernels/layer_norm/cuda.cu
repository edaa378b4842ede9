// LayerNorm on NVIDIA GPUs, in the frame of common/cuda/rows.cuh. The formulas are in reference.py.
//
// Both directions are near the issue limit as well as the memory's: what counts is instructions per element. So the
// forward's parameter type P is known when compiling, and the backward computes xhat as one fused multiply-add, x *
// rstd - mean * rstd, whose rounding is a constant of the row that the correction by mean(xhat) removes.
#include <cstdint>

#include "common/cuda/launch.cuh"
#include "common/cuda/normalize.cuh"
#include "common/cuda/rows.cuh"
#include "layer_norm/op.h"

namespace fasttfm {
namespace cuda {
namespace {

template <class T, class P, class S>
__global__ void __launch_bounds__(S::kBlock) forward_kernel(LayerNormForward p) {
  const int64_t row[1] = {static_cast<int64_t>(blockIdx.x) * S::kGroups + group_of_thread<S>()};
  if (row[0] >= p.rows) return;  // whole groups leave together
  const int columns = static_cast<int>(p.columns);
  const T* from = static_cast<const T*>(p.x) + row[0] * p.x_stride;
  Packed<T> packed[S::kVectors];
#pragma unroll
  for (int v = 0; v < S::kVectors; ++v) packed[v] = load_packed_if(in_row<S>(v, columns), from + column_of<S>(v));
  float x[1][S::kVectors][kVector];
#pragma unroll
  for (int v = 0; v < S::kVectors; ++v) widen(packed[v], x[0][v]);
  normalize_rows<T, P, S, true>(p, row, x);
}

template <class T, class S>
struct BackwardMemory {
  union {
    RowRing<T, S, 2> ring;  // x, dy
    float shares[S::kGroups][S::kColumns];
  };
  float weight[S::kColumns];
};

template <class S>
using BackwardScratch = float[2][3 * S::kBlock / 32];

template <class T, class S>
__global__ void __launch_bounds__(S::kBlock, 1) backward_kernel(LayerNormBackward p) {
  extern __shared__ __align__(16) char dynamic_memory[];
  __shared__ BackwardScratch<S> scratch;
  auto& memory = *reinterpret_cast<BackwardMemory<T, S>*>(dynamic_memory);
  const int columns = static_cast<int>(p.columns);
  const float inverse_c = 1.0f / static_cast<float>(columns);
  float dweight[S::kVectors][kVector] = {}, dbias[S::kVectors][kVector] = {};
  const GroupRows<S> rows(p.rows);
  RowWalk<const T> x_walk(static_cast<const T*>(p.x), rows, p.x_stride);
  RowWalk<const T> dy_walk(static_cast<const T*>(p.dy), rows, columns);
  RowWalk<T> dx_walk(static_cast<T*>(p.dx), rows, columns);
  int64_t row = rows.first;

  memory.ring.clear_past_end(columns);
  memory.ring.start(rows.rounds > 0, columns, 0, x_walk, dy_walk);
  stage_parameter<S>(p.weight, p.weight_dtype, 1.0f, columns, memory.weight);
  __syncthreads();
  for (int round = 0; round < rows.rounds; ++round) {  // a group's threads share the row: they meet at its barriers
    const int slot = round % kRowStages;
    memory.ring.start(round + 1 < rows.rounds, columns, slot ^ 1, x_walk, dy_walk);
    const float rstd = p.rstd[row];
    const float shift = -p.mean[row] * rstd;
    memory.ring.wait();

    float xhat[S::kVectors][kVector];
    float sums[3] = {0.0f, 0.0f, 0.0f};  // of xhat (zero but for rounding), of g and of g * xhat
#pragma unroll
    for (int v = 0; v < S::kVectors; ++v) {
      const bool inside = in_row<S>(v, columns);
      float value[kVector], gradient[kVector], weight[kVector];
      widen(memory.ring.at(slot, 0, v), value);
      widen(memory.ring.at(slot, 1, v), gradient);
      widen(load_packed(memory.weight + column_of<S>(v)), weight);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        xhat[v][i] = fmaf(value[i], rstd, shift);
        const float g = gradient[i] * weight[i];
        if (inside) sums[0] += xhat[v][i];  // the others are sums of products with dy, zero past the end
        sums[1] += g;
        sums[2] = fmaf(g, xhat[v][i], sums[2]);
      }
    }
    group_sum<S::kGroup, S::kBlock>(sums, scratch[slot] + 3 * (threadIdx.x / S::kGroup) * S::kGroup / 32);
    const float correction = sums[0] * inverse_c;
    const float mean_g = sums[1] * inverse_c;
    const float mean_g_xhat = sums[2] * inverse_c - correction * mean_g;
    // dx = rstd * (g - mean_g - (xhat - correction) * mean_g_xhat) = g * rstd + xhat * slope + offset
    const float slope = -rstd * mean_g_xhat;
    const float offset = -rstd * mean_g - correction * slope;

#pragma unroll
    for (int v = 0; v < S::kVectors; ++v) {
      float gradient[kVector], weight[kVector], out[kVector];
      widen(reload_packed(&memory.ring.at(slot, 1, v)), gradient);
      widen(reload_packed(reinterpret_cast<const Packed<float>*>(memory.weight + column_of<S>(v))), weight);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        out[i] = fmaf(gradient[i] * weight[i], rstd, fmaf(xhat[v][i], slope, offset));
        dweight[v][i] = fmaf(gradient[i], xhat[v][i] - correction, dweight[v][i]);
        dbias[v][i] += gradient[i];
      }
      store_packed_if(in_row<S>(v, columns), dx_walk.vector + vector_offset<S>(v), narrow<T>(out));
    }
    dx_walk.next();
    row += rows.stride;
  }
  pass_missed_barriers<1>(p.rows, rows);
  wait_copies<0>();
  float* part = p.workspace + static_cast<int64_t>(blockIdx.x) * columns;
  if (p.dweight != nullptr) store_part<S>(dweight, memory.shares, part, columns);
  if (p.dbias != nullptr)
    store_part<S>(dbias, memory.shares, part + static_cast<int64_t>(gridDim.x) * columns, columns);
}

// Twelve warps leave each thread the 168 registers that four vectors need; the shared memory of fp32 rows allows eight.
template <class T>
struct BackwardPlan {
  static constexpr int kBlock = sizeof(T) == 4 ? 256 : 384;
  static constexpr int kSmallBlock = sizeof(T) == 4 ? 128 : 256;
  template <class S>
  static constexpr int64_t memory(S) {
    return sizeof(BackwardMemory<T, S>) + sizeof(BackwardScratch<S>);
  }
};

template <class T, class P>
Status launch_forward(const LayerNormForward& p) {
  return for_row_shape<0>(p.columns, [&](auto shape) {
    using S = decltype(shape);
    const auto blocks = static_cast<unsigned>((p.rows + S::kGroups - 1) / S::kGroups);
    return launch(forward_kernel<T, P, S>, blocks, S::kBlock, 0, p.stream, p);
  });
}

template <class T>
Status launch_backward(const WithBlockMemory<LayerNormBackward>& p) {
  return for_row_shape_within<BackwardPlan<T>>(p.columns, p.block_memory, [&](auto shape) {
    using S = decltype(shape);
    const int64_t wanted = (p.rows + S::kGroups - 1) / S::kGroups;
    const int blocks = wanted < p.blocks ? static_cast<int>(wanted) : p.blocks;
    const Status status =
        blocks == 0 ? Status{}
                    : launch(backward_kernel<T, S>, blocks, S::kBlock, sizeof(BackwardMemory<T, S>), p.stream, p);
    if (status.code != StatusCode::ok || (p.dweight == nullptr && p.dbias == nullptr)) return status;
    return sum_parts(p.workspace, {p.dweight, p.weight_dtype}, {p.dbias, p.bias_dtype}, blocks, p.columns, p.stream);
  });
}

}  // namespace

int64_t layer_norm_backward_memory(int64_t columns, int64_t dtype, int64_t limit) {
  int64_t memory = 0;
  with_dtype(static_cast<DType>(dtype), unknown_dtype(), [&](auto element) {
    memory = row_memory<BackwardPlan<decltype(element)>>(columns, limit);
    return Status{};
  });
  return memory;
}

Status layer_norm_forward(const LayerNormForward& p) {
  if (!rows_aligned(p.x, p.x_stride) || !rows_aligned(p.weight, 0) || !rows_aligned(p.bias, 0))
    return misaligned_rows();
  if (p.rows == 0) return {};
  DeviceGuard guard(p.device);
  return with_dtype(p.dtype, unknown_dtype(), [&](auto element) {
    using T = decltype(element);
    if (p.parameter_dtype == p.dtype) return launch_forward<T, T>(p);
    if (p.parameter_dtype == DType::f32) return launch_forward<T, float>(p);
    return bad_size("layer_norm: parameters are of x's type or fp32");
  });
}

Status layer_norm_backward(const WithBlockMemory<LayerNormBackward>& p) {
  if (!rows_aligned(p.x, p.x_stride) || !rows_aligned(p.dy, 0) || !rows_aligned(p.weight, 0)) return misaligned_rows();
  DeviceGuard guard(p.device);
  return with_dtype(p.dtype, unknown_dtype(), [&](auto element) { return launch_backward<decltype(element)>(p); });
}

}  // namespace cuda
}  // namespace fasttfm
