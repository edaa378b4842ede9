// z = residual + sum of a split-K GEMM's parts + bias, y = LayerNorm(z), for few rows: one block per row, 8 columns per
// thread. Parameters are loaded before the GEMM has ended. The residual may have a LayerNorm of its own, whose mean and
// rstd are given.
#include <cstdint>

#include "common/cuda/hopper.cuh"
#include "common/cuda/normalize.cuh"
#include "few_rows/dependent.cuh"
#include "few_rows/op.h"

namespace fasttfm {
namespace cuda {
namespace {

constexpr int kMostThreads = static_cast<int>(kMaxRowColumns) / kVector;
constexpr int kAtOnce = 4;  // parts whose loads are in flight at the same time

// Computes the sum over the block's threads in a fixed order; every thread gets it. `scratch` has room for 32 sums and
// must not be that of the previous call, which other threads may still be reading.
template <int COUNT>
__device__ __forceinline__ void block_sum(float (&value)[COUNT], float (*scratch)[32]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
#pragma unroll
    for (int i = 0; i < COUNT; ++i) value[i] += __shfl_xor_sync(0xffffffffu, value[i], offset);
  if (lane == 0)
#pragma unroll
    for (int i = 0; i < COUNT; ++i) scratch[i][warp] = value[i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    value[i] = 0.0f;
    for (int other = 0; other < warps; ++other) value[i] += scratch[i][other];
  }
}

// Adds the parts of a thread's 8 columns, in order.
__device__ __forceinline__ void add_parts(const float* from, int64_t stride, int count, float (&sum)[kVector]) {
  for (int part = 0; part < count; part += kAtOnce) {
    Packed<float> loaded[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) loaded[i] = load_packed_if(part + i < count, from + (part + i) * stride);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
      for (int j = 0; j < kVector; ++j) sum[j] += loaded[i].element[j];
  }
}

template <class T, class R, bool NORMALIZES_RESIDUAL>
__global__ void __launch_bounds__(kMostThreads) add_norm_kernel(const __grid_constant__ FewRowsAddNorm p) {
  __shared__ float scratch[3][32];
  griddepcontrol_launch_dependents();
  const int columns = static_cast<int>(p.columns), column = static_cast<int>(threadIdx.x) * kVector;
  const bool inside = column < columns;
  float weight[kVector] = {}, bias[kVector] = {}, z[kVector] = {}, residual[kVector] = {};
  if (inside) {
    load_parameter(p.weight, p.parameter_dtype, column, 1.0f, weight);
    load_parameter(p.bias, p.parameter_dtype, column, 0.0f, bias);
    load_parameter(p.linear_bias, p.parameter_dtype, column, 0.0f, z);
  }
  float residual_weight[kVector] = {}, residual_bias[kVector] = {};
  if (NORMALIZES_RESIDUAL && inside) {
    load_parameter(p.residual_weight, p.parameter_dtype, column, 1.0f, residual_weight);
    load_parameter(p.residual_bias, p.parameter_dtype, column, 0.0f, residual_bias);
  }
  const int64_t at = griddepcontrol_wait_for(blockIdx.x * p.columns + column);
  if (inside) {
    float2 norm = {};
    if constexpr (NORMALIZES_RESIDUAL) norm = __ldcg(reinterpret_cast<const float2*>(p.norms) + blockIdx.x);
    const Packed<R> packed = load_packed(static_cast<const R*>(p.residual) + at);
    add_parts(p.parts + at, p.rows * p.columns, p.part_count, z);
    widen(packed, residual);
    if constexpr (NORMALIZES_RESIDUAL)
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        residual[i] = fmaf((residual[i] - norm.x) * norm.y, residual_weight[i], residual_bias[i]);
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) z[i] += residual[i];
  const Packed<R> rounded = narrow<R>(z);
  widen(rounded, z);
  if (inside && p.z != nullptr) store_packed(static_cast<R*>(p.z) + at, rounded);
  const float inverse_c = 1.0f / static_cast<float>(columns);
  float mean[1] = {};
  if (inside)
#pragma unroll
    for (int i = 0; i < kVector; ++i) mean[0] += z[i];
  block_sum(mean, scratch);
  mean[0] *= inverse_c;
  float sums[2] = {};  // of the squared deviations, and of the deviations, which is not 0 because the mean is rounded
  if (inside)
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      z[i] -= mean[0];
      sums[0] = fmaf(z[i], z[i], sums[0]);
      sums[1] += z[i];
    }
  block_sum(sums, scratch + 1);
  const float correction = sums[1] * inverse_c;
  const float rstd = inverse_root<T>(fmaxf(sums[0] * inverse_c - correction * correction, 0.0f) + p.eps);
  const float shift = -correction * rstd;
  if (!inside) return;
  float y[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) y[i] = fmaf(fmaf(z[i], rstd, shift), weight[i], bias[i]);
  store_packed(static_cast<T*>(p.y) + at, narrow<T>(y));
}

Status check(const FewRowsAddNorm& call) {
  if (call.rows < 1 || call.rows > 0x7fffffff || call.part_count < 0)
    return bad_size("few_rows_add_norm: rows are at least 1, and part_count is not negative");
  if (call.columns < kVector || call.columns % kVector != 0 || call.columns > kMaxRowColumns)
    return bad_size("few_rows_add_norm: columns are a multiple of 8, from 8 to 8192");
  for (const void* tensor : {static_cast<const void*>(call.parts), call.residual, call.linear_bias, call.weight,
                             call.bias, static_cast<const void*>(call.norms), call.residual_weight, call.residual_bias,
                             static_cast<const void*>(call.y), static_cast<const void*>(call.z)})
    if (reinterpret_cast<uintptr_t>(tensor) % 16 != 0) return misaligned_rows();
  if (call.norms != nullptr && call.residual_dtype != call.dtype)
    return {StatusCode::bad_value, "few_rows_add_norm: norms: expected a residual of y's dtype"};
  return {};
}

template <class T>
Status launch_add_norm(const FewRowsAddNorm& call) {
  const auto blocks = static_cast<unsigned>(call.rows);
  const auto threads = static_cast<unsigned>((call.columns / kVector + 31) / 32 * 32);
  const auto launch = [&](auto kernel) {
    return launch_after(call.dependent != 0, kernel, blocks, threads, 0, call.stream, call);
  };
  if (call.norms != nullptr) return launch(add_norm_kernel<T, T, true>);
  if (call.residual_dtype == call.dtype) return launch(add_norm_kernel<T, T, false>);
  return call.residual_dtype == DType::f32 ? launch(add_norm_kernel<T, float, false>) : unknown_dtype();
}

}  // namespace

Status few_rows_add_norm(const FewRowsAddNorm& call) {
  const Status status = check(call);
  if (status.code != StatusCode::ok) return status;
  const DeviceGuard guard(call.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  if (call.dtype == DType::bf16) return launch_add_norm<bf16_t>(call);
  return call.dtype == DType::f16 ? launch_add_norm<f16_t>(call) : unknown_dtype();
}

}  // namespace cuda
}  // namespace fasttfm
