// Gated activations on NVIDIA GPUs, built on common/cuda/stripes.cuh. The formulas are in reference.py.
//
// A lane holds 8 columns of the gate and the same 8 columns of up. Most models have no bias here; kernels without a
// bias have no parameters or sums in registers and therefore a higher occupancy.
#include <algorithm>
#include <cstdint>

#include "common/cuda/activation.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/reduce.cuh"
#include "common/cuda/rows.cuh"
#include "common/cuda/stripes.cuh"
#include "gated_activation/op.h"

namespace fasttfm {
namespace cuda {
namespace {

template <class T>
constexpr bool kExact = sizeof(T) == 4;
// Rows that a lane loads before it computes: the same number of bytes per tensor for all types.
template <class T>
constexpr int kRows = 4 / sizeof(T);
// Blocks of the backward per SM: up to 64 registers per thread, and up to 128 with a bias.
constexpr int backward_blocks(bool biased) { return biased ? 2 : 4; }

constexpr int64_t kMaxParts = 65535;  // the largest gridDim.y

// The offset of the gate in a row of x, and that of up relative to it.
struct Halves {
  int64_t gate, up_from_gate;

  template <class Params>
  __device__ __forceinline__ explicit Halves(const Params& p)
      : gate(p.gate_first ? 0 : p.columns), up_from_gate(p.gate_first ? p.columns : -p.columns) {}
};

// Grid (tiles * stripes). A tile has kStripeWarps * kRows rows, which are interleaved over the warps.
template <class T, Activation A>
__global__ void __launch_bounds__(kStripeBlock) forward_kernel(GatedActivationForward p, unsigned stripes) {
  const int column = static_cast<int>(blockIdx.x % stripes * kStripe + threadIdx.x % 32 * kVector);
  const int64_t first = static_cast<int64_t>(blockIdx.x / stripes) * (kStripeWarps * kRows<T>)+threadIdx.x / 32;
  if (column >= p.columns || first >= p.rows) return;
  const Halves halves(p);
  const T* gate_row = static_cast<const T*>(p.x) + first * p.x_stride + halves.gate + column;
  T* y = static_cast<T*>(p.y) + first * p.columns + column;
  const int64_t x_step = kStripeWarps * p.x_stride, y_step = kStripeWarps * p.columns;

  Packed<T> gate[kRows<T>], up[kRows<T>];
#pragma unroll
  for (int r = 0; r < kRows<T>; ++r)
    if (first + r * kStripeWarps < p.rows) {
      gate[r] = load_packed(gate_row + r * x_step);
      up[r] = load_packed(gate_row + r * x_step + halves.up_from_gate);
    }
  float gate_bias[kVector] = {}, up_bias[kVector] = {};
  if (p.bias != nullptr) {
    const int at = static_cast<int>(halves.gate) + column;
    load_parameter(p.bias, p.bias_dtype, at, 0.0f, gate_bias);
    load_parameter(p.bias, p.bias_dtype, at + static_cast<int>(halves.up_from_gate), 0.0f, up_bias);
  }
#pragma unroll
  for (int r = 0; r < kRows<T>; ++r) {
    if (first + r * kStripeWarps >= p.rows) return;
    float g[kVector], u[kVector];
    widen(gate[r], g);
    widen(up[r], u);
#pragma unroll
    for (int i = 0; i < kVector; ++i) u[i] = activated<A, kExact<T>>(g[i] + gate_bias[i]).value * (u[i] + up_bias[i]);
    store_packed(y + r * y_step, narrow<T>(u));
  }
}

// The state of a lane of the backward: its position in each tensor and, with a bias, bias and dbias of its columns.
template <class T, bool BIASED>
struct BackwardLane {
  const T* x;  // of the gate
  const T* dy;
  T* dx;  // of the gate
  int64_t x_step, dy_step, dx_step, up_from_gate;
  float gate_bias[kVector], up_bias[kVector];
  float gate_sum[kVector], up_sum[kVector];

  // Processes the next COUNT rows.
  template <Activation A, int COUNT>
  __device__ __forceinline__ void take() {
    Packed<T> gate[COUNT], up[COUNT], gradient[COUNT];
#pragma unroll
    for (int r = 0; r < COUNT; ++r) {
      gate[r] = load_packed(x);
      up[r] = load_packed(x + up_from_gate);
      gradient[r] = load_packed(dy);
      x += x_step;
      dy += dy_step;
    }
#pragma unroll
    for (int r = 0; r < COUNT; ++r) {
      float g[kVector], u[kVector], d[kVector];
      widen(gate[r], g);
      widen(up[r], u);
      widen(gradient[r], d);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if constexpr (BIASED) {
          g[i] += gate_bias[i];
          u[i] += up_bias[i];
        }
        const auto at_g = activated<A, kExact<T>>(g[i]);
        g[i] = d[i] * u[i] * at_g.derivative;
        u[i] = d[i] * at_g.value;
        if constexpr (BIASED) {
          gate_sum[i] += g[i];
          up_sum[i] += u[i];
        }
      }
      store_packed(dx, narrow<T>(g));
      store_packed(dx + up_from_gate, narrow<T>(u));
      dx += dx_step;
    }
  }
};

// Grid (stripes, parts).
template <class T, Activation A, bool BIASED>
__global__ void __launch_bounds__(kStripeBlock, backward_blocks(BIASED)) backward_kernel(GatedActivationBackward p) {
  const Halves halves(p);
  const int column = column_of_lane();
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kStripeWarps + threadIdx.x / 32;
  const int64_t stride = static_cast<int64_t>(gridDim.y) * kStripeWarps;  // rows are interleaved over the warps
  BackwardLane<T, BIASED> at{static_cast<const T*>(p.x) + first * p.x_stride + halves.gate + column,
                             static_cast<const T*>(p.dy) + first * p.columns + column,
                             static_cast<T*>(p.dx) + first * 2 * p.columns + halves.gate + column,
                             stride * p.x_stride,
                             stride * p.columns,
                             stride * 2 * p.columns,
                             halves.up_from_gate,
                             {},
                             {},
                             {},
                             {}};
  if (column < p.columns && first < p.rows) {
    if constexpr (BIASED) {
      const int gate = static_cast<int>(halves.gate) + column, up = gate + static_cast<int>(halves.up_from_gate);
      load_parameter(p.bias, p.bias_dtype, gate, 0.0f, at.gate_bias);
      load_parameter(p.bias, p.bias_dtype, up, 0.0f, at.up_bias);
    }
    auto left = static_cast<int>((p.rows - first + stride - 1) / stride);
    for (; left >= kRows<T>; left -= kRows<T>) at.template take<A, kRows<T>>();
    for (; left > 0; --left) at.template take<A, 1>();
  }
  if constexpr (BIASED) {
    __shared__ __align__(16) float shares[2][kStripeWarps][kStripe];
    if (p.dbias == nullptr) return;
    store_stripe_part(at.gate_sum, shares[0], p.workspace, p.columns);
    store_stripe_part(at.up_sum, shares[1], p.workspace + static_cast<int64_t>(gridDim.y) * p.columns, p.columns);
  }
}

Status misfit_columns() { return bad_size("gated_activation: the CUDA kernels take columns that are a multiple of 8"); }

}  // namespace

// One wave of blocks.
int64_t gated_activation_parts(int64_t columns, int64_t multiprocessors) {
  const int64_t blocks = backward_blocks(true) * multiprocessors;
  return std::max<int64_t>(1, std::min<int64_t>(blocks / std::max(1u, stripes_of(columns)), kMaxParts));
}

Status gated_activation_forward(const GatedActivationForward& p) {
  if (!columns_fit_stripes(p.columns)) return misfit_columns();
  if (!rows_aligned(p.x, p.x_stride) || !rows_aligned(p.bias, 0)) return misaligned_rows();
  if (p.rows == 0) return {};
  DeviceGuard guard(p.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  return with_dtype(p.dtype, unknown_dtype(), [&](auto element) {
    return with_activation(p.activation, [&](auto activation) {
      using T = decltype(element);
      constexpr int64_t kTile = kStripeWarps * kRows<T>;
      const unsigned stripes = stripes_of(p.columns);
      const int64_t blocks = (p.rows + kTile - 1) / kTile * stripes;
      if (blocks > INT32_MAX) return bad_size("gated_activation: x is too large for one launch");
      return launch(forward_kernel<T, decltype(activation)::value>, static_cast<unsigned>(blocks), kStripeBlock, 0,
                    p.stream, p, stripes);
    });
  });
}

Status gated_activation_backward(const GatedActivationBackward& p) {
  if (!columns_fit_stripes(p.columns)) return misfit_columns();
  if (!rows_aligned(p.x, p.x_stride) || !rows_aligned(p.dy, 0) || !rows_aligned(p.bias, 0)) return misaligned_rows();
  if (p.parts < 1 || p.parts > kMaxParts) return bad_size("gated_activation: parts must be from 1 to 65535");
  DeviceGuard guard(p.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  return with_dtype(p.dtype, unknown_dtype(), [&](auto element) {
    return with_activation(p.activation, [&](auto activation) {
      // Without sums over rows, each block has one tile, as in the forward.
      constexpr int64_t kTile = kStripeWarps * kRows<decltype(element)>;
      const int64_t tiles = std::clamp<int64_t>((p.rows + kTile - 1) / kTile, 1, kMaxParts);
      const dim3 grid(stripes_of(p.columns), static_cast<unsigned>(p.dbias == nullptr ? tiles : p.parts));
      constexpr Activation kActivation = decltype(activation)::value;
      const auto kernel = p.bias == nullptr ? backward_kernel<decltype(element), kActivation, false>
                                            : backward_kernel<decltype(element), kActivation, true>;
      const Status status = launch(kernel, grid, kStripeBlock, 0, p.stream, p);
      if (status.code != StatusCode::ok || p.dbias == nullptr) return status;
      auto* dbias = static_cast<char*>(p.dbias);
      const int64_t half = p.columns * (p.bias_dtype == DType::f32 ? 4 : 2);
      const SumOutput first{dbias, p.bias_dtype}, second{dbias + half, p.bias_dtype};
      return p.gate_first ? sum_parts(p.workspace, first, second, p.parts, p.columns, p.stream)
                          : sum_parts(p.workspace, second, first, p.parts, p.columns, p.stream);
    });
  });
}

}  // namespace cuda
}  // namespace fasttfm
