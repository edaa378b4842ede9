// The rows of dropout_add_layer_norm's backward, which its kernel processes one after another; the formulas are in
// reference.py.
//
// dy and z are copied to ring buffers in shared memory, from which both passes over a row read them, so that registers
// hold little except the sums over rows. dz, which only the second pass needs, is loaded at the start of the first.
#pragma once

#include <cstdint>

#include "common/cuda/rows.cuh"
#include "dropout_add_layer_norm/op.h"

namespace fasttfm {
namespace cuda {

// dresidual is rstd * (g - mean(g) - (xhat - correction) * mean(g * xhat)) = g * rstd + xhat * slope + offset, where
// `correction` is the mean of xhat, zero except for rounding.
struct RowTerms {
  float slope, offset, correction;

  // `sums`: of xhat, of g and of g * xhat.
  __device__ __forceinline__ RowTerms(const float (&sums)[3], float rstd, float inverse_c) {
    correction = sums[0] * inverse_c;
    const float mean_g = sums[1] * inverse_c;
    const float mean_g_xhat = sums[2] * inverse_c - correction * mean_g;
    slope = -rstd * mean_g_xhat;
    offset = -rstd * mean_g - correction * slope;
  }
};

template <class T, class R, class S>
struct BackwardMemory {
  struct Rings {
    RowRing<T, S, 1> dy;
    RowRing<R, S, 1> z;
  };
  union {
    Rings rings;
    float shares[S::kGroups][S::kColumns];
  };
  float weight[S::kColumns];
};

// A thread's first vector of a row that RowRing copies, for callers that iterate over the rows themselves.
template <class T>
struct RowStart {
  T* vector;
  __device__ __forceinline__ void next() {}
};

// A thread's part of the rows of its group.
template <class T, class R, class S>
struct BackwardRows {
  const DropoutAddLayerNormBackward& p;
  BackwardMemory<T, R, S>& memory;
  const int columns;
  const float inverse_c;
  float dweight[S::kVectors][kVector], dbias[S::kVectors][kVector];

  __device__ __forceinline__ BackwardRows(const DropoutAddLayerNormBackward& params, BackwardMemory<T, R, S>& shared)
      : p(params),
        memory(shared),
        columns(static_cast<int>(params.columns)),
        inverse_c(1.0f / static_cast<float>(columns)),
        dweight{},
        dbias{} {}

  // Starts copying the first row, and loads the weight. Called by all threads of a block together.
  __device__ __forceinline__ void start(int row, bool copies) {
    memory.rings.dy.clear_past_end(columns);
    memory.rings.z.clear_past_end(columns);
    copy(row, copies, 0);
    stage_parameter<S>(p.weight, p.weight_dtype, 1.0f, columns, memory.weight);
    __syncthreads();
  }

  // Starts copying a row into a slot of the ring buffers.
  __device__ __forceinline__ void copy(int row, bool copies, int slot) {
    RowStart<const T> dy{static_cast<const T*>(p.dy) + static_cast<int64_t>(row) * columns + column_of<S>(0)};
    RowStart<const R> z{static_cast<const R*>(p.z) + static_cast<int64_t>(row) * columns + column_of<S>(0)};
    memory.rings.dy.start(copies, columns, slot, dy);
    memory.rings.z.start(copies, columns, slot, z);
  }

  // Computes the gradients of a row, whose copies were started before those of one other row. Calls meanwhile() while
  // they are in flight, and use(v, inside, to, out) for each vector: whether it is inside of the row, its offset in
  // tensors, and dresidual before rounding.
  template <class Meanwhile, class Use>
  __device__ __forceinline__ void finish(int row, int slot, float (&scratch)[3 * S::kBlock / 32], Meanwhile meanwhile,
                                         Use use) {
    auto& rings = memory.rings;
    const int64_t row_start = static_cast<int64_t>(row) * columns;
    const float rstd = p.rstd[row];
    const float shift = -p.mean[row] * rstd;
    Packed<R> dz[S::kVectors];
#pragma unroll
    for (int v = 0; v < S::kVectors; ++v) {
      const bool loads = p.dz != nullptr && in_row<S>(v, columns);
      dz[v] = load_packed_if(loads, static_cast<const R*>(p.dz) + row_start + column_of<S>(v));
    }
    meanwhile();
    cp_async_wait<2 * (kRowStages - 1)>();  // two ring buffers, so two cp.async groups per row

    float sums[3] = {0.0f, 0.0f, 0.0f};  // of xhat (zero except for rounding), of g and of g * xhat
#pragma unroll
    for (int v = 0; v < S::kVectors; ++v) {
      const bool inside = in_row<S>(v, columns);
      float gradient[kVector], value[kVector], weight[kVector];
      widen(rings.dy.at(slot, 0, v), gradient);
      widen(rings.z.at(slot, 0, v), value);
      widen(load_packed(memory.weight + column_of<S>(v)), weight);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float xhat = fmaf(value[i], rstd, shift);
        const float g = gradient[i] * weight[i];
        if (inside) sums[0] += xhat;  // the other sums have dy as a factor, which is zero past the end
        sums[1] += g;
        sums[2] = fmaf(g, xhat, sums[2]);
      }
    }
    group_sum<S::kGroup, S::kBlock>(sums, scratch + 3 * (threadIdx.x / S::kGroup) * S::kGroup / 32);
    const RowTerms terms(sums, rstd, inverse_c);

#pragma unroll
    for (int v = 0; v < S::kVectors; ++v) {
      float gradient[kVector], value[kVector], weight[kVector], out[kVector];
      widen(reload_packed(&rings.dy.at(slot, 0, v)), gradient);
      widen(reload_packed(&rings.z.at(slot, 0, v)), value);
      widen(reload_packed(reinterpret_cast<const Packed<float>*>(memory.weight + column_of<S>(v))), weight);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float xhat = fmaf(value[i], rstd, shift);
        out[i] = fmaf(gradient[i] * weight[i], rstd, fmaf(xhat, terms.slope, terms.offset));
        dweight[v][i] = fmaf(gradient[i], xhat - terms.correction, dweight[v][i]);
        dbias[v][i] += gradient[i];
      }
      if (p.dz != nullptr) {
        float stream[kVector];
        widen(dz[v], stream);
#pragma unroll
        for (int i = 0; i < kVector; ++i) out[i] += stream[i];
      }
      const bool inside = in_row<S>(v, columns);
      const int64_t to = row_start + column_of<S>(v);
      store_packed_if(inside, static_cast<R*>(p.dresidual) + to, narrow<R>(out));
      use(v, inside, to, out);
    }
  }

  // Stores those of the block's sums over rows that are needed, `parts` floats apart, from `part` on.
  __device__ __forceinline__ void store(float* part, int64_t parts) {
    if (p.dweight != nullptr) store_part<S>(dweight, memory.shares, part, columns);
    if (p.dbias != nullptr) store_part<S>(dbias, memory.shares, part + parts, columns);
  }
};

}  // namespace cuda
}  // namespace fasttfm
