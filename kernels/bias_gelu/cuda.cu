// Activation of x + bias on NVIDIA GPUs, built on stripes.cuh. The formulas are in reference.py.
#include <cstdint>

#include "bias_gelu/op.h"
#include "common/cuda/activation.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/reduce.cuh"
#include "common/cuda/rows.cuh"
#include "common/cuda/stripes.cuh"

namespace fasttfm {
namespace cuda {
namespace {

constexpr int kBackwardBlocks = 4;  // per SM: 32 warps with up to 64 registers per thread

template <class T>
constexpr bool kExact = sizeof(T) == 4;
// Rows that a lane loads before it computes: the same number of bytes per tensor for all types.
template <class T>
constexpr int kForwardRows = 16 / sizeof(T) / 2;
template <class T>
constexpr int kBackwardRows = 4 / sizeof(T);

// Grid (tiles * stripes). A tile has kStripeWarps * kForwardRows rows, which are interleaved over the warps.
template <class T, Activation A>
__global__ void __launch_bounds__(kStripeBlock) forward_kernel(BiasGeluForward p, unsigned stripes) {
  constexpr int kRows = kForwardRows<T>;
  const int column = static_cast<int>(blockIdx.x % stripes * kStripe + threadIdx.x % 32 * kVector);
  const int64_t first = static_cast<int64_t>(blockIdx.x / stripes) * (kStripeWarps * kRows) + threadIdx.x / 32;
  if (column >= p.columns || first >= p.rows) return;
  const T* x = static_cast<const T*>(p.x) + first * p.x_stride + column;
  T* y = static_cast<T*>(p.y) + first * p.columns + column;
  const int64_t x_step = kStripeWarps * p.x_stride, y_step = kStripeWarps * p.columns;

  Packed<T> packed[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r)
    if (first + r * kStripeWarps < p.rows) packed[r] = load_packed(x + r * x_step);
  float bias[kVector];
  load_parameter(p.bias, p.bias_dtype, column, 0.0f, bias);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (first + r * kStripeWarps >= p.rows) return;
    float value[kVector];
    widen(packed[r], value);
#pragma unroll
    for (int i = 0; i < kVector; ++i) value[i] = activated<A, kExact<T>>(value[i] + bias[i]).value;
    store_packed(y + r * y_step, narrow<T>(value));
  }
}

// The state of a lane of the backward: its position in each tensor, and bias and dbias of its columns.
template <class T>
struct BackwardLane {
  const T* x;
  const T* dy;
  T* dx;
  T* y;  // or null
  int64_t x_step, step;
  float bias[kVector];
  float dbias[kVector];

  // Processes the next COUNT rows.
  template <Activation A, bool WITH_Y, int COUNT>
  __device__ __forceinline__ void take() {
    Packed<T> value[COUNT], gradient[COUNT];
#pragma unroll
    for (int r = 0; r < COUNT; ++r) {
      value[r] = load_packed(x);
      gradient[r] = load_packed(dy);
      x += x_step;
      dy += step;
    }
#pragma unroll
    for (int r = 0; r < COUNT; ++r) {
      float u[kVector], out[kVector];
      widen(value[r], u);
      widen(gradient[r], out);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const auto at_u = activated<A, kExact<T>>(u[i] + bias[i]);
        u[i] = at_u.value;
        out[i] *= at_u.derivative;
        dbias[i] += out[i];
      }
      store_packed(dx, narrow<T>(out));
      dx += step;
      if (WITH_Y) {
        store_packed(y, narrow<T>(u));
        y += step;
      }
    }
  }
};

// Grid (stripes, parts).
template <class T, Activation A, bool WITH_Y>
__global__ void __launch_bounds__(kStripeBlock, kBackwardBlocks) backward_kernel(BiasGeluBackward p) {
  __shared__ __align__(16) float shares[kStripeWarps][kStripe];
  constexpr int kRows = kBackwardRows<T>;
  const int column = column_of_lane();
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kStripeWarps + threadIdx.x / 32;
  const int64_t stride = static_cast<int64_t>(gridDim.y) * kStripeWarps;  // rows are interleaved over the warps
  BackwardLane<T> at{static_cast<const T*>(p.x) + first * p.x_stride + column,
                     static_cast<const T*>(p.dy) + first * p.columns + column,
                     static_cast<T*>(p.dx) + first * p.columns + column,
                     static_cast<T*>(p.y) + (WITH_Y ? first * p.columns + column : 0),
                     stride * p.x_stride,
                     stride * p.columns,
                     {},
                     {}};
  if (column < p.columns && first < p.rows) {
    load_parameter(p.bias, p.bias_dtype, column, 0.0f, at.bias);
    auto left = static_cast<int>((p.rows - first + stride - 1) / stride);
    for (; left >= kRows; left -= kRows) at.template take<A, WITH_Y, kRows>();
    for (; left > 0; --left) at.template take<A, WITH_Y, 1>();
  }
  if (p.dbias == nullptr) return;
  store_stripe_part(at.dbias, shares, p.workspace, p.columns);
}

Status misfit_columns() { return bad_size("bias_gelu: the CUDA kernels take columns that are a multiple of 8"); }

}  // namespace

Status bias_gelu_forward(const BiasGeluForward& p) {
  if (!columns_fit_stripes(p.columns)) return misfit_columns();
  if (!rows_aligned(p.x, p.x_stride) || !rows_aligned(p.bias, 0)) return misaligned_rows();
  if (p.rows == 0) return {};
  const DeviceGuard guard(p.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  return with_dtype(p.dtype, unknown_dtype(), [&](auto element) {
    return with_activation(p.activation, [&](auto activation) {
      using T = decltype(element);
      constexpr int64_t kTile = kStripeWarps * kForwardRows<T>;
      const unsigned stripes = stripes_of(p.columns);
      const int64_t blocks = (p.rows + kTile - 1) / kTile * stripes;
      if (blocks > INT32_MAX) return bad_size("bias_gelu: x is too large for one launch");
      return launch(forward_kernel<T, decltype(activation)::value>, static_cast<unsigned>(blocks), kStripeBlock, 0,
                    p.stream, p, stripes);
    });
  });
}

Status bias_gelu_backward(const BiasGeluBackward& p) {
  if (!columns_fit_stripes(p.columns)) return misfit_columns();
  if (!rows_aligned(p.x, p.x_stride) || !rows_aligned(p.dy, 0) || !rows_aligned(p.bias, 0)) return misaligned_rows();
  if (p.parts < 1 || p.parts > 65535) return bad_size("bias_gelu: parts must be from 1 to 65535");
  const DeviceGuard guard(p.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  return with_dtype(p.dtype, unknown_dtype(), [&](auto element) {
    return with_activation(p.activation, [&](auto activation) {
      const dim3 grid(stripes_of(p.columns), static_cast<unsigned>(p.parts));
      constexpr Activation kActivation = decltype(activation)::value;
      const auto kernel = p.y == nullptr ? backward_kernel<decltype(element), kActivation, false>
                                         : backward_kernel<decltype(element), kActivation, true>;
      const Status status = launch(kernel, grid, kStripeBlock, 0, p.stream, p);
      if (status.code != StatusCode::ok || p.dbias == nullptr) return status;
      return sum_parts(p.workspace, {p.dbias, p.bias_dtype}, {}, p.parts, p.columns, p.stream);
    });
  });
}

}  // namespace cuda
}  // namespace fasttfm
