// The sum that the forwards of dropout_add_layer_norm normalize.
#pragma once

#include <cstdint>

#include "common/cuda/dropout.cuh"
#include "common/cuda/rows.cuh"
#include "dropout_add_layer_norm/op.h"

namespace fasttfm {
namespace cuda {

// Makes the compiler issue a load before this point; otherwise it may move the load to the first use of its result,
// where nothing hides its latency.
template <class T>
__device__ __forceinline__ void issue_load(Packed<T>& value) {
  auto* word = reinterpret_cast<uint32_t*>(&value);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(value)) / 4; ++i) asm volatile("" : "+r"(word[i]));
}

// Adds the linear bias, if there is one, to the v-th vector of a row.
template <class P, class S>
struct AddLinearBias {
  const P* linear_bias;

  __device__ __forceinline__ void operator()(int v, bool inside, float (&x)[kVector]) const {
    if (linear_bias == nullptr || !inside) return;
    float added[kVector];
    widen(load_packed(linear_bias + column_of<S>(v)), added);
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] += added[i];
  }
};

// z = residual + dropout(x + linear_bias) as it is stored, rounded to the residual's type R. add_bias(v, inside, x)
// adds the linear bias. DROPS: whether there may be dropout, which takes four instructions per element even without a
// seed. Without it, all loads are issued first.
template <class T, class R, class S, bool DROPS, class AddBias>
__device__ __forceinline__ void add_row(const DropoutAddLayerNormForward& p, int64_t row, const AddBias& add_bias,
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
  if constexpr (DROPS) dropout.draw(row, draws);
#pragma unroll
  for (int v = 0; v < S::kVectors && !DROPS; ++v) {
    issue_load(x_packed[v]);
    issue_load(residual_packed[v]);
  }
  R* to = static_cast<R*>(p.z) + row * columns;
#pragma unroll
  for (int v = 0; v < S::kVectors; ++v) {
    const bool inside = in_row<S>(v, columns);
    float x[kVector];
    widen(x_packed[v], x);
    widen(residual_packed[v], z[v]);
    add_bias(v, inside, x);
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      if (!DROPS || draws.kept(v, i, dropout.limit)) z[v][i] = fmaf(x[i], dropout.scale, z[v][i]);
    const Packed<R> rounded = narrow<R>(z[v]);
    widen(rounded, z[v]);
    store_packed_if(p.z != nullptr && inside, to + column_of<S>(v), rounded);
  }
}

template <class T, class R, class P, class S>
__device__ __forceinline__ void add_row(const DropoutAddLayerNormForward& p, int64_t row,
                                        float (&z)[S::kVectors][kVector]) {
  add_row<T, R, S, true>(p, row, AddLinearBias<P, S>{static_cast<const P*>(p.linear_bias)}, z);
}

}  // namespace cuda
}  // namespace fasttfm
