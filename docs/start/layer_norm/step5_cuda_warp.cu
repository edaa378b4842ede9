// Step 5: one warp per row. Lanes read neighbouring 16-byte vectors, keep the row in registers, so that x is read once,
// and add up their sums by shuffles. C is a multiple of 4, up to 128 * VECTORS.
#include <cuda_runtime.h>

constexpr int VECTORS = 16;  // of four floats per lane: rows of up to 2,048 columns
constexpr int WARPS = 4;     // rows per block

__device__ float warp_sum(float value) {
  for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(0xffffffffu, value, lanes);
  return value;  // the same in all lanes
}

__global__ void fwd_kernel(const float4* x, const float4* weight, const float4* bias, float4* y, int N, int C,
                           float eps) {
  const int lane = threadIdx.x % 32, vectors = C / 4;
  const long long row = blockIdx.x * static_cast<long long>(WARPS) + threadIdx.x / 32;
  if (row >= N) return;  // the whole warp returns
  float4 values[VECTORS];
  float sum = 0.0f, squares = 0.0f;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int v = lane + 32 * i;
    values[i] = v < vectors ? x[row * vectors + v] : float4{};
    sum += values[i].x + values[i].y + values[i].z + values[i].w;
  }
  const float mean = warp_sum(sum) / C;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    if (lane + 32 * i >= vectors) continue;  // vectors past the end must not count
    values[i] = {values[i].x - mean, values[i].y - mean, values[i].z - mean, values[i].w - mean};
    squares +=
        values[i].x * values[i].x + values[i].y * values[i].y + values[i].z * values[i].z + values[i].w * values[i].w;
  }
  const float rstd = rsqrtf(warp_sum(squares) / C + eps);
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int v = lane + 32 * i;
    if (v >= vectors) continue;
    const float4 w = weight[v], b = bias[v];
    y[row * vectors + v] = {values[i].x * rstd * w.x + b.x, values[i].y * rstd * w.y + b.y,
                            values[i].z * rstd * w.z + b.z, values[i].w * rstd * w.w + b.w};
  }
}

extern "C" int layer_norm_fwd(const float4* x, const float4* weight, const float4* bias, float4* y, int N, int C,
                              float eps, cudaStream_t stream) {
  if (C % 4 != 0 || C > 128 * VECTORS) return cudaErrorInvalidValue;
  fwd_kernel<<<(N + WARPS - 1) / WARPS, 32 * WARPS, 0, stream>>>(x, weight, bias, y, N, C, eps);
  return cudaGetLastError();
}
