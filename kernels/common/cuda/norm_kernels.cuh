// LayerNorm and RMSNorm of rows on NVIDIA GPUs, built on rows.cuh. The formulas are in layer_norm/reference.py and
// rms_norm/reference.py: RMSNorm is LayerNorm without the mean and the bias.
//
// Forward and backward are close to the issue limit as well as the bandwidth limit, so the number of instructions per
// element matters. The forward's parameter type P is a template parameter. The backward computes xhat with one FMA, x *
// rstd - mean * rstd; its rounding error is constant over a row, and subtracting mean(xhat) removes it.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/cuda/block_memory.h"
#include "common/cuda/launch.cuh"
#include "common/cuda/normalize.cuh"
#include "common/cuda/rows.cuh"

namespace fasttfm {
namespace cuda {

// Whether rows are centered: LayerNorm's params struct has a mean and a bias, RMSNorm's has neither.
template <class Params, class = void>
constexpr bool kCentered = false;
template <class Params>
constexpr bool kCentered<Params, std::void_t<decltype(Params::mean)>> = true;

template <class T, class P, class S, class Params>
__global__ void __launch_bounds__(S::kBlock) norm_forward_kernel(Params p) {
  const int64_t row[1] = {static_cast<int64_t>(blockIdx.x) * S::kGroups + group_of_thread<S>()};
  if (row[0] >= p.rows) return;  // whole groups return together
  const int columns = static_cast<int>(p.columns);
  const T* from = static_cast<const T*>(p.x) + row[0] * p.x_stride;
  Packed<T> packed[S::kVectors];
#pragma unroll
  for (int v = 0; v < S::kVectors; ++v) packed[v] = load_packed_if(in_row<S>(v, columns), from + column_of<S>(v));
  float x[1][S::kVectors][kVector];
#pragma unroll
  for (int v = 0; v < S::kVectors; ++v) widen(packed[v], x[0][v]);
  if constexpr (kCentered<Params>)
    normalize_rows<T, P, S, true>(p, row, x);
  else
    rms_normalize_row<T, P, S>(p, row[0], x[0]);
}

// What the backward adds to dx: RMSNorm's params struct has such a gradient.
template <class T, class Params>
__device__ __forceinline__ const T* added_gradient(const Params& p) {
  if constexpr (kCentered<Params>)
    return nullptr;
  else
    return static_cast<const T*>(p.dz);
}

template <class T, class S>
struct NormBackwardMemory {
  union {
    RowRing<T, S, 2> ring;  // x, dy
    float shares[S::kGroups][S::kColumns];
  };
  float weight[S::kColumns];
};

template <class S>
using NormBackwardScratch = float[2][3 * S::kBlock / 32];

template <class T, class S, class Params>
__global__ void __launch_bounds__(S::kBlock, 1) norm_backward_kernel(Params p) {
  constexpr bool kCenter = kCentered<Params>;
  extern __shared__ __align__(16) char dynamic_memory[];
  __shared__ NormBackwardScratch<S> scratch;
  auto& memory = *reinterpret_cast<NormBackwardMemory<T, S>*>(dynamic_memory);
  const int columns = static_cast<int>(p.columns);
  const float inverse_c = 1.0f / static_cast<float>(columns);
  float dweight[S::kVectors][kVector] = {}, dbias[S::kVectors][kVector] = {};
  const GroupRows<S> rows(p.rows);
  RowWalk<const T> x_walk(static_cast<const T*>(p.x), rows, p.x_stride);
  RowWalk<const T> dy_walk(static_cast<const T*>(p.dy), rows, columns);
  RowWalk<T> dx_walk(static_cast<T*>(p.dx), rows, columns);
  RowWalk<const T> dz_walk(added_gradient<T>(p), rows, columns);
  int64_t row = rows.first;

  memory.ring.clear_past_end(columns);
  memory.ring.start(rows.rounds > 0, columns, 0, x_walk, dy_walk);
  stage_parameter<S>(p.weight, p.weight_dtype, 1.0f, columns, memory.weight);
  __syncthreads();
  for (int round = 0; round < rows.rounds; ++round) {  // uniform within a group, whose threads meet at barriers
    const int slot = round % kRowStages;
    memory.ring.start(round + 1 < rows.rounds, columns, slot ^ 1, x_walk, dy_walk);
    const float rstd = p.rstd[row];
    float shift = 0.0f;
    if constexpr (kCenter) shift = -p.mean[row] * rstd;
    memory.ring.wait();

    float xhat[S::kVectors][kVector];
    float sums[kCenter ? 3 : 1] = {};  // if centered, of xhat (zero except for rounding) and of g; of g * xhat
    float& sum_g_xhat = sums[kCenter ? 2 : 0];
#pragma unroll
    for (int v = 0; v < S::kVectors; ++v) {
      const bool inside = in_row<S>(v, columns);
      float value[kVector], gradient[kVector], weight[kVector];
      widen(memory.ring.at(slot, 0, v), value);
      widen(memory.ring.at(slot, 1, v), gradient);
      widen(load_packed(memory.weight + column_of<S>(v)), weight);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        xhat[v][i] = kCenter ? fmaf(value[i], rstd, shift) : value[i] * rstd;
        const float g = gradient[i] * weight[i];
        if constexpr (kCenter) {
          if (inside) sums[0] += xhat[v][i];  // the other sums have dy as a factor, which is zero past the end
          sums[1] += g;
        }
        sum_g_xhat = fmaf(g, xhat[v][i], sum_g_xhat);
      }
    }
    constexpr int kSums = sizeof(sums) / sizeof(float);
    group_sum<S::kGroup, S::kBlock>(sums, scratch[slot] + kSums * (threadIdx.x / S::kGroup) * S::kGroup / 32);
    // dx = rstd * (g - mean_g - (xhat - correction) * mean_g_xhat) = g * rstd + xhat * slope + offset. Without
    // centering, mean_g and correction are zero.
    const float correction = kCenter ? sums[0] * inverse_c : 0.0f;
    const float mean_g = kCenter ? sums[kCenter] * inverse_c : 0.0f;
    const float mean_g_xhat = sum_g_xhat * inverse_c - correction * mean_g;
    const float slope = -rstd * mean_g_xhat;
    const float offset = -rstd * mean_g - correction * slope;

#pragma unroll
    for (int v = 0; v < S::kVectors; ++v) {
      float gradient[kVector], weight[kVector], out[kVector];
      widen(reload_packed(&memory.ring.at(slot, 1, v)), gradient);
      widen(reload_packed(reinterpret_cast<const Packed<float>*>(memory.weight + column_of<S>(v))), weight);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        out[i] = fmaf(gradient[i] * weight[i], rstd, kCenter ? fmaf(xhat[v][i], slope, offset) : xhat[v][i] * slope);
        dweight[v][i] = fmaf(gradient[i], xhat[v][i] - correction, dweight[v][i]);
        dbias[v][i] += gradient[i];
      }
      if constexpr (!kCenter)
        if (p.dz != nullptr) {
          float added[kVector];
          widen(load_packed_if(in_row<S>(v, columns), dz_walk.vector + vector_offset<S>(v)), added);
#pragma unroll
          for (int i = 0; i < kVector; ++i) out[i] += added[i];
        }
      store_packed_if(in_row<S>(v, columns), dx_walk.vector + vector_offset<S>(v), narrow<T>(out));
    }
    dx_walk.next();
    dz_walk.next();
    row += rows.stride;
  }
  pass_missed_barriers<1>(p.rows, rows);
  cp_async_wait<0>();
  float* part = p.workspace + static_cast<int64_t>(blockIdx.x) * columns;
  if (p.dweight != nullptr) store_part<S>(dweight, memory.shares, part, columns);
  if constexpr (kCenter)
    if (p.dbias != nullptr)
      store_part<S>(dbias, memory.shares, part + static_cast<int64_t>(gridDim.x) * columns, columns);
}

// Threads per block. With twelve warps each thread has the 168 registers that four vectors need. For fp32 rows, shared
// memory limits the block to eight warps.
template <class T>
struct NormBackwardPlan {
  static constexpr int kBlock = sizeof(T) == 4 ? 256 : 384;
  static constexpr int kSmallBlock = sizeof(T) == 4 ? 128 : 256;
  template <class S>
  static constexpr int64_t memory(S) {
    return sizeof(NormBackwardMemory<T, S>) + sizeof(NormBackwardScratch<S>);
  }
};

// Launches the forward of either op. Its pointers have been checked. P is the parameters' type.
template <class T, class P, class Params>
Status launch_norm_forward(const Params& p) {
  const auto launch_shape = [&](auto shape) {
    using S = decltype(shape);
    const auto blocks = static_cast<unsigned>((p.rows + S::kGroups - 1) / S::kGroups);
    return launch(norm_forward_kernel<T, P, S, Params>, blocks, S::kBlock, 0, p.stream, p);
  };
  // RMSNorm has only one reduction, so two warps per row need only one barrier and are faster: 34.5 us instead of 35.1
  // for 32768 x 1024 in bf16 on an H200.
  if constexpr (!kCentered<Params>)
    if (p.columns > 768 && p.columns <= 1024 && p.columns % kVector == 0) return launch_shape(RowShape<64, 2, 64>{});
  return for_row_shape<0>(p.columns, launch_shape);
}

template <class Params>
Status norm_forward(const Params& p, DType parameter_dtype) {
  if (p.rows == 0) return {};
  const DeviceGuard guard(p.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  return with_dtype(p.dtype, unknown_dtype(), [&](auto element) {
    using T = decltype(element);
    if (parameter_dtype == p.dtype) return launch_norm_forward<T, T>(p);
    if (parameter_dtype == DType::f32) return launch_norm_forward<T, float>(p);
    return bad_size("parameters are of x's type or fp32");
  });
}

// `dbias`: the destination of LayerNorm's second sum.
template <class Params>
Status norm_backward(const WithBlockMemory<Params>& p, SumOutput dbias) {
  const DeviceGuard guard(p.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  return with_dtype(p.dtype, unknown_dtype(), [&](auto element) {
    using T = decltype(element);
    return for_row_shape_within<NormBackwardPlan<T>>(p.columns, p.block_memory, [&](auto shape) {
      using S = decltype(shape);
      const int64_t row_blocks = (p.rows + S::kGroups - 1) / S::kGroups;
      const int blocks = row_blocks < p.blocks ? static_cast<int>(row_blocks) : p.blocks;
      const Params& params = p;
      const Status status = blocks == 0 ? Status{}
                                        : launch(norm_backward_kernel<T, S, Params>, blocks, S::kBlock,
                                                 sizeof(NormBackwardMemory<T, S>), p.stream, params);
      if (status.code != StatusCode::ok || (p.dweight == nullptr && dbias.to == nullptr)) return status;
      return sum_parts(p.workspace, {p.dweight, p.weight_dtype}, dbias, blocks, p.columns, p.stream);
    });
  });
}

// Bytes of shared memory per block of the backward, on a GPU whose blocks may use `limit` bytes.
inline int64_t norm_backward_memory(int64_t columns, int64_t dtype, int64_t limit) {
  int64_t memory = 0;
  with_dtype(static_cast<DType>(dtype), unknown_dtype(), [&](auto element) {
    memory = row_memory<NormBackwardPlan<decltype(element)>>(columns, limit);
    return Status{};
  });
  return memory;
}

}  // namespace cuda
}  // namespace fasttfm
