// The sum that the forwards of dropout_add_layer_norm normalize.
#pragma once

#include <cstdint>

#include "common/cuda/dropout.cuh"
#include "common/cuda/rows.cuh"
#include "dropout_add_layer_norm/op.h"

namespace fasttfm {
namespace cuda {

// z = residual + dropout(x + linear_bias) as it is stored, rounded to the residual's type R.
template <class T, class R, class P, class S>
__device__ __forceinline__ void add_row(const DropoutAddLayerNormForward& p, int64_t row,
                                        float (&z)[S::kVectors][kVector]) {
  const int columns = static_cast<int>(p.columns);
  const T* from = static_cast<const T*>(p.x) + row * p.x_stride;
  const R* residual = static_cast<const R*>(p.residual) + row * p.residual_stride;
  Packed<T> x_packed[S::kVectors];
  Packed<R> residual_packed[S::kVectors];
#pragma unroll
  for (int v = 0; v < S::kVectors; ++v) {
    const bool inside = in_row<S>(v, columns);
    x_packed[v] = load_packed_if(inside, from + column_of<S>(v));
    residual_packed[v] = load_packed_if(inside, residual + column_of<S>(v));
  }
  const Dropout dropout(p);
  RowDraws<S> draws;
  dropout.draw(row, draws);

  const P* linear_bias = static_cast<const P*>(p.linear_bias);
  R* to = static_cast<R*>(p.z) + row * columns;
#pragma unroll
  for (int v = 0; v < S::kVectors; ++v) {
    const bool inside = in_row<S>(v, columns);
    float x[kVector];
    widen(x_packed[v], x);
    widen(residual_packed[v], z[v]);
    if (linear_bias != nullptr && inside) {
      float added[kVector];
      widen(load_packed(linear_bias + column_of<S>(v)), added);
#pragma unroll
      for (int i = 0; i < kVector; ++i) x[i] += added[i];
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      if (draws.kept(v, i, dropout.limit)) z[v][i] = fmaf(x[i], dropout.scale, z[v][i]);
    const Packed<R> rounded = narrow<R>(z[v]);
    widen(rounded, z[v]);
    store_packed_if(p.z != nullptr && inside, to + column_of<S>(v), rounded);
  }
}

}  // namespace cuda
}  // namespace fasttfm
