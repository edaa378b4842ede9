// LayerNorm on NVIDIA GPUs. N rows of C columns, C a multiple of 8 up to 8192; the formulas are in reference.py.
//
// A row belongs to GROUP threads (a warp up to 1024 columns, else a whole block), each of which holds VECTORS vectors of 8 elements in
// registers: every element is read once, 16 bytes at a time. Forward: one row per group. Backward: groups walk over the rows and keep their
// share of dweight and dbias in registers, with the next row's loads in flight while the current one is computed; a second, small
// kernel adds the blocks' shares in a fixed order.
#include <cstdint>

#include "common/convert.cuh"
#include "common/cuda_launch.h"
#include "common/reduce.cuh"
#include "layer_norm/op.h"

namespace fasttfm {
namespace cuda {
namespace {

constexpr int kWarpRowThreads = 128;  // block size where a warp takes a row

template <int GROUP, int VECTORS>
struct Shape {
  static constexpr int kGroup = GROUP;
  static constexpr int kVectors = VECTORS;
  static constexpr int kBlock = GROUP == 32 ? kWarpRowThreads : GROUP;
  static constexpr int kGroups = kBlock / GROUP;  // rows that a block works on at once
};

// The column of a thread's v-th vector: neighbouring threads read neighbouring vectors.
template <class S>
__device__ __forceinline__ int64_t column_of(int v) {
  return static_cast<int64_t>(v * S::kGroup + threadIdx.x % S::kGroup) * kVector;
}

template <class T, class S>
__device__ __forceinline__ void load_row(const T* row, int64_t columns, Packed<T> (&to)[S::kVectors]) {
#pragma unroll
  for (int v = 0; v < S::kVectors; ++v)
    to[v] = column_of<S>(v) < columns ? load_packed(row + column_of<S>(v)) : Packed<T>{};
}

template <class T, class S>
__global__ void __launch_bounds__(S::kBlock) forward_kernel(LayerNormForward p) {
  __shared__ float scratch[32];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * S::kGroups + threadIdx.x / S::kGroup;
  if (row >= p.rows) return;  // whole groups leave together
  Packed<T> packed[S::kVectors];
  load_row<T, S>(static_cast<const T*>(p.x) + row * p.x_stride, p.columns, packed);

  const float inverse_c = 1.0f / static_cast<float>(p.columns);
  float total[1] = {0.0f};
  float x[S::kVectors][kVector];
#pragma unroll
  for (int v = 0; v < S::kVectors; ++v) {
    widen(packed[v], x[v]);
#pragma unroll
    for (int i = 0; i < kVector; ++i) total[0] += x[v][i];
  }
  group_sum<S::kGroup>(total, scratch);
  const float mean = total[0] * inverse_c;

  float sums[2] = {0.0f, 0.0f};  // of the deviations (zero but for the rounding of the mean) and of their squares
#pragma unroll
  for (int v = 0; v < S::kVectors; ++v) {
    if (column_of<S>(v) >= p.columns) continue;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      x[v][i] -= mean;
      sums[0] += x[v][i];
      sums[1] += x[v][i] * x[v][i];
    }
  }
  group_sum<S::kGroup>(sums, scratch);
  const float correction = sums[0] * inverse_c;
  const float variance = fmaxf(sums[1] * inverse_c - correction * correction, 0.0f);
  const float rstd = 1.0f / sqrtf(variance + p.eps);

  T* y = static_cast<T*>(p.y) + row * p.columns;
#pragma unroll
  for (int v = 0; v < S::kVectors; ++v) {
    const int64_t column = column_of<S>(v);
    if (column >= p.columns) continue;
    float weight[kVector], bias[kVector], out[kVector];
    load_parameter(p.weight, p.weight_dtype, column, 1.0f, weight);
    load_parameter(p.bias, p.bias_dtype, column, 0.0f, bias);
#pragma unroll
    for (int i = 0; i < kVector; ++i) out[i] = (x[v][i] - correction) * rstd * weight[i] + bias[i];
    store_packed(y + column, narrow<T>(out));
  }
  if (threadIdx.x % S::kGroup == 0) {
    p.mean[row] = mean;
    p.rstd[row] = rstd;
  }
}

// The block's groups add up their shares: group after group, through shared memory, then one store to the block's part.
template <class S>
__device__ __forceinline__ void store_share(const float (&share)[S::kVectors][kVector], float* part, int64_t columns) {
  if constexpr (S::kGroups == 1) {
#pragma unroll
    for (int v = 0; v < S::kVectors; ++v)
      if (column_of<S>(v) < columns) store_packed(part + column_of<S>(v), narrow<float>(share[v]));
  } else {
    __shared__ float gathered[S::kGroups][S::kVectors * S::kGroup * kVector];
    __syncthreads();
#pragma unroll
    for (int v = 0; v < S::kVectors; ++v)
      store_packed(&gathered[threadIdx.x / S::kGroup][column_of<S>(v)], narrow<float>(share[v]));
    __syncthreads();
    for (int64_t column = threadIdx.x; column < columns; column += S::kBlock) {
      float sum = 0.0f;
#pragma unroll
      for (int group = 0; group < S::kGroups; ++group) sum += gathered[group][column];
      part[column] = sum;
    }
  }
}

template <class T, class S>
__global__ void __launch_bounds__(S::kBlock) backward_kernel(LayerNormBackward p) {
  __shared__ float scratch[3 * 32];
  const int64_t stride = static_cast<int64_t>(gridDim.x) * S::kGroups;
  const float inverse_c = 1.0f / static_cast<float>(p.columns);
  const T* x = static_cast<const T*>(p.x);
  const T* dy = static_cast<const T*>(p.dy);
  T* dx = static_cast<T*>(p.dx);
  float dweight[S::kVectors][kVector] = {}, dbias[S::kVectors][kVector] = {};

  int64_t row = static_cast<int64_t>(blockIdx.x) * S::kGroups + threadIdx.x / S::kGroup;
  Packed<T> next_x[S::kVectors], next_dy[S::kVectors];
  if (row < p.rows) {
    load_row<T, S>(x + row * p.x_stride, p.columns, next_x);
    load_row<T, S>(dy + row * p.columns, p.columns, next_dy);
  }
  // A group that is a warp leaves the loop on its own; a group that is the block has one row counter. Either way no barrier is missed.
  for (; row < p.rows; row += stride) {
    Packed<T> packed_x[S::kVectors], packed_dy[S::kVectors];
#pragma unroll
    for (int v = 0; v < S::kVectors; ++v) {
      packed_x[v] = next_x[v];
      packed_dy[v] = next_dy[v];
    }
    const int64_t next_row = row + stride;
    if (next_row < p.rows) {
      load_row<T, S>(x + next_row * p.x_stride, p.columns, next_x);
      load_row<T, S>(dy + next_row * p.columns, p.columns, next_dy);
    }
    const float mean = p.mean[row];
    const float rstd = p.rstd[row];

    float sums[3] = {0.0f, 0.0f, 0.0f};  // of xhat (zero but for the rounding of the mean), of g and of g * xhat
#pragma unroll
    for (int v = 0; v < S::kVectors; ++v) {
      if (column_of<S>(v) >= p.columns) continue;
      float value[kVector], gradient[kVector], weight[kVector];
      widen(packed_x[v], value);
      widen(packed_dy[v], gradient);
      load_parameter(p.weight, p.weight_dtype, column_of<S>(v), 1.0f, weight);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float xhat = (value[i] - mean) * rstd;
        const float g = gradient[i] * weight[i];
        sums[0] += xhat;
        sums[1] += g;
        sums[2] += g * xhat;
      }
    }
    group_sum<S::kGroup>(sums, scratch);
    const float correction = sums[0] * inverse_c;
    const float mean_g = sums[1] * inverse_c;
    const float mean_g_xhat = sums[2] * inverse_c - correction * mean_g;

#pragma unroll
    for (int v = 0; v < S::kVectors; ++v) {
      const int64_t column = column_of<S>(v);
      if (column >= p.columns) continue;
      float value[kVector], gradient[kVector], weight[kVector], out[kVector];
      widen(packed_x[v], value);
      widen(packed_dy[v], gradient);
      load_parameter(p.weight, p.weight_dtype, column, 1.0f, weight);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float xhat = (value[i] - mean) * rstd - correction;
        out[i] = rstd * (gradient[i] * weight[i] - mean_g - xhat * mean_g_xhat);
        dweight[v][i] += gradient[i] * xhat;
        dbias[v][i] += gradient[i];
      }
      store_packed(dx + row * p.columns + column, narrow<T>(out));
    }
  }
  float* part = p.workspace + static_cast<int64_t>(blockIdx.x) * p.columns;
  if (p.dweight != nullptr) store_share<S>(dweight, part, p.columns);
  if (p.dbias != nullptr) store_share<S>(dbias, part + static_cast<int64_t>(gridDim.x) * p.columns, p.columns);
}

// Calls launch(T{}, Shape{}) for the element type and the smallest shape that holds a row.
template <class Launch>
Status for_shape(DType dtype, int64_t columns, Launch launch) {
  if (columns < 1 || columns % kVector != 0 || columns > 8192)
    return bad_size("layer_norm: the CUDA kernels take columns that are a multiple of 8, from 8 to 8192");
  return with_dtype(dtype, unknown_dtype(), [&](auto element) {
    using T = decltype(element);
    if (columns <= 256) return launch(T{}, Shape<32, 1>{});
    if (columns <= 512) return launch(T{}, Shape<32, 2>{});
    if (columns <= 768) return launch(T{}, Shape<32, 3>{});
    if (columns <= 1024) return launch(T{}, Shape<32, 4>{});
    if (columns <= 2048) return launch(T{}, Shape<128, 2>{});
    if (columns <= 4096) return launch(T{}, Shape<256, 2>{});
    return launch(T{}, Shape<512, 2>{});
  });
}

bool aligned(const void* pointer, int64_t stride) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && stride % kVector == 0;
}

Status misaligned() { return {StatusCode::bad_alignment, "layer_norm: rows must start at multiples of 16 bytes"}; }

}  // namespace

Status layer_norm_forward(const LayerNormForward& p) {
  if (!aligned(p.x, p.x_stride) || !aligned(p.weight, 0) || !aligned(p.bias, 0)) return misaligned();
  if (p.rows == 0) return {};
  DeviceGuard guard(p.device);
  return for_shape(p.dtype, p.columns, [&](auto element, auto shape) {
    using S = decltype(shape);
    const auto blocks = static_cast<unsigned>((p.rows + S::kGroups - 1) / S::kGroups);
    forward_kernel<decltype(element), S><<<blocks, S::kBlock, 0, static_cast<cudaStream_t>(p.stream)>>>(p);
    return status_of(cudaGetLastError());
  });
}

Status layer_norm_backward(const LayerNormBackward& p) {
  if (!aligned(p.x, p.x_stride) || !aligned(p.dy, 0) || !aligned(p.weight, 0)) return misaligned();
  DeviceGuard guard(p.device);
  const auto stream = static_cast<cudaStream_t>(p.stream);
  return for_shape(p.dtype, p.columns, [&](auto element, auto shape) {
    using S = decltype(shape);
    const int64_t wanted = (p.rows + S::kGroups - 1) / S::kGroups;
    const int blocks = wanted < p.blocks ? static_cast<int>(wanted) : p.blocks;
    if (blocks > 0) backward_kernel<decltype(element), S><<<blocks, S::kBlock, 0, stream>>>(p);
    if (p.dweight != nullptr || p.dbias != nullptr) {
      const dim3 grid(static_cast<unsigned>((p.columns + kSumColumns - 1) / kSumColumns), 2);
      sum_parts_kernel<<<grid, dim3(kSumColumns, kSumRows), 0, stream>>>(p.workspace, p.dweight, p.dbias, blocks, p.columns);
    }
    return status_of(cudaGetLastError());
  });
}

}  // namespace cuda
}  // namespace fasttfm
