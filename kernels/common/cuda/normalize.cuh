// The last part of the LayerNorm and RMSNorm forwards that are built on rows.cuh: computes the statistics of rows in
// registers and writes the normalized rows.
#pragma once

#include <cstdint>

#include "common/cuda/rows.cuh"

namespace fasttfm {
namespace cuda {

// 1 / sqrt(x) for rows of type T: correctly rounded operations for fp32, where the error would be visible in the
// result; otherwise rsqrtf and one Newton step.
template <class T>
__device__ __forceinline__ float inverse_root(float x) {
  if constexpr (sizeof(T) == 4) return 1.0f / sqrtf(x);
  const float y = rsqrtf(x);
  return fmaf(fmaf(-x * y, y, 1.0f), 0.5f * y, y);
}

struct NoOutput {
  template <class... Arguments>
  __device__ __forceinline__ void operator()(const Arguments&...) const {}
};

template <class P, class S>
struct LoadParameters {
  template <class Params>
  __device__ __forceinline__ void operator()(const Params& p, int v, float (&weight)[kVector],
                                             float (&bias)[kVector]) const {
    const bool inside = in_row<S>(v, static_cast<int>(p.columns));
    load_parameter(inside, static_cast<const P*>(p.weight), column_of<S>(v), 1.0f, weight);
    load_parameter(inside, static_cast<const P*>(p.bias), column_of<S>(v), 0.0f, bias);
  }
};

// Computes y = (x - mean) * rstd * weight + bias for a group's ROWS rows `x`, which are zero past their end. `p` has
// the fields of a forward: weight, bias (of type P, or null), y (of type T), mean, rstd, columns, eps. `row`: the
// indices of the rows.
//
// The variance is the mean square of the deviations from the mean. With CORRECTED, the mean of the deviations, which is
// zero except for the rounding of the mean, is also computed and subtracted; this is needed for rows whose mean is far
// larger than their standard deviation.
//
// Calls also(r, v, y) with the v-th vector of the r-th row, as it is stored, or would be without `want_y`, and
// load(p, v, weight, bias) for the parameters of the v-th vectors.
template <class T, class P, class S, bool CORRECTED, int ROWS, class Params, class Also = NoOutput,
          class Load = LoadParameters<P, S>>
__device__ __forceinline__ void normalize_rows(const Params& p, const int64_t (&row)[ROWS],
                                               float (&x)[ROWS][S::kVectors][kVector], Also also = {},
                                               bool want_y = true, Load load = {}) {
  __shared__ float scratch[2][2 * ROWS * S::kBlock / 32];
  const int columns = static_cast<int>(p.columns);
  const float inverse_c = 1.0f / static_cast<float>(columns);
  float mean[ROWS] = {};
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int v = 0; v < S::kVectors; ++v)
#pragma unroll
      for (int i = 0; i < kVector; ++i) mean[r] += x[r][v][i];
  group_sum<S::kGroup, S::kBlock>(mean, scratch[0]);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) mean[r] *= inverse_c;

  float sums[CORRECTED ? 2 * ROWS : ROWS] = {};  // of the squared deviations, and of the deviations
#pragma unroll
  for (int v = 0; v < S::kVectors; ++v)
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const float center = in_row<S>(v, columns) ? mean[r] : 0.0f;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        x[r][v][i] -= center;
        sums[r] = fmaf(x[r][v][i], x[r][v][i], sums[r]);
        if constexpr (CORRECTED) sums[ROWS + r] += x[r][v][i];
      }
    }
  group_sum<S::kGroup, S::kBlock>(sums, scratch[1]);
  float rstd[ROWS], shift[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    float correction = 0.0f;
    if constexpr (CORRECTED) correction = sums[ROWS + r] * inverse_c;
    rstd[r] = inverse_root<T>(fmaxf(sums[r] * inverse_c - correction * correction, 0.0f) + p.eps);
    shift[r] = -correction * rstd[r];
    if (threadIdx.x % S::kGroup == 0 && p.mean != nullptr) {
      p.mean[row[r]] = mean[r] + correction;
      p.rstd[row[r]] = rstd[r];
    }
  }

#pragma unroll
  for (int v = 0; v < S::kVectors; ++v) {
    const bool inside = in_row<S>(v, columns);
    float weight[kVector], bias[kVector];
    load(p, v, weight, bias);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float out[kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) out[i] = fmaf(fmaf(x[r][v][i], rstd[r], shift[r]), weight[i], bias[i]);
      const Packed<T> rounded = narrow<T>(out);
      store_packed_if(want_y && inside, static_cast<T*>(p.y) + row[r] * columns + column_of<S>(v), rounded);
      also(r, v, rounded);
    }
  }
}

// Computes y = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) + eps) for a group's row `x`, which is zero past its
// end. `p` has the fields of a forward: weight (of type P, or null), y (of type T), rstd, columns, eps.
template <class T, class P, class S, class Params>
__device__ __forceinline__ void rms_normalize_row(const Params& p, int64_t row,
                                                  const float (&x)[S::kVectors][kVector]) {
  __shared__ float scratch[S::kBlock / 32];
  const int columns = static_cast<int>(p.columns);
  const float inverse_c = 1.0f / static_cast<float>(columns);
  float squares[1] = {};
#pragma unroll
  for (int v = 0; v < S::kVectors; ++v)
#pragma unroll
    for (int i = 0; i < kVector; ++i) squares[0] = fmaf(x[v][i], x[v][i], squares[0]);
  group_sum<S::kGroup, S::kBlock>(squares, scratch);
  const float rstd = inverse_root<T>(squares[0] * inverse_c + p.eps);
  if (threadIdx.x % S::kGroup == 0) p.rstd[row] = rstd;

#pragma unroll
  for (int v = 0; v < S::kVectors; ++v) {
    const bool inside = in_row<S>(v, columns);
    float weight[kVector], out[kVector];
    load_parameter(inside, static_cast<const P*>(p.weight), column_of<S>(v), 1.0f, weight);
#pragma unroll
    for (int i = 0; i < kVector; ++i) out[i] = x[v][i] * rstd * weight[i];
    store_packed_if(inside, static_cast<T*>(p.y) + row * columns + column_of<S>(v), narrow<T>(out));
  }
}

}  // namespace cuda
}  // namespace fasttfm
