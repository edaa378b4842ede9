// The forward of dropout_add_layer_norm without dropout on Hopper, for a dependent launch. A group of threads
// processes one row.
#include <cstdint>

#include "common/cuda/dependent.cuh"
#include "common/cuda/hopper.cuh"
#include "common/cuda/normalize.cuh"
#include "common/cuda/rows.cuh"
#include "dropout_add_layer_norm/cuda_add_row.cuh"
#include "dropout_add_layer_norm/cuda_forward.cuh"
#include "dropout_add_layer_norm/op.h"

namespace fasttfm {
namespace cuda {
namespace {

// A row of parameters of type P, or constants if there are none, in a group's registers.
template <class P, class S>
struct ParameterRow {
  Packed<P> vector[S::kVectors];

  __device__ __forceinline__ ParameterRow(const void* from, int columns, float fallback) {
#pragma unroll
    for (int v = 0; v < S::kVectors; ++v) {
      const P* start = static_cast<const P*>(from) + column_of<S>(v);
      vector[v] = load_packed_if(from != nullptr && in_row<S>(v, columns), start, word_of(fallback, P{}));
      issue_load(vector[v]);
    }
  }
};

// Parameters are loaded before the previous kernel has ended, if this is a dependent launch, and stay in registers.
template <class T, class R, class P, class S>
__global__ void __launch_bounds__(S::kBlock) add_forward_kernel(DropoutAddLayerNormForward p) {
  griddepcontrol_launch_dependents();
  const int columns = static_cast<int>(p.columns);
  const ParameterRow<P, S> linear_bias(p.linear_bias, columns, 0.0f), weight(p.weight, columns, 1.0f),
      bias(p.bias, columns, 0.0f);
  const int64_t group_row = static_cast<int64_t>(blockIdx.x) * S::kGroups + group_of_thread<S>();
  const int64_t row[1] = {griddepcontrol_wait_for(group_row)};
  if (row[0] >= p.rows) return;  // whole groups return together
  float z[1][S::kVectors][kVector];
  const auto add_bias = [&](int v, bool, float (&x)[kVector]) {
    float added[kVector];
    widen(linear_bias.vector[v], added);
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] += added[i];
  };
  add_row<T, R, S, false>(p, row[0], add_bias, z[0]);
  const auto load = [&](const auto&, int v, float (&scale)[kVector], float (&shift)[kVector]) {
    widen(weight.vector[v], scale);
    widen(bias.vector[v], shift);
  };
  normalize_rows<T, P, S, true>(p, row, z, NoOutput{}, true, load);
}

}  // namespace

Status add_layer_norm_forward(const DropoutAddLayerNormForward& p) {
  return with_forward(p, [&](auto element, auto stream, auto parameter, auto shape, unsigned blocks) {
    using S = decltype(shape);
    const auto kernel = add_forward_kernel<decltype(element), decltype(stream), decltype(parameter), S>;
    return launch_after(p.dependent != 0, kernel, blocks, S::kBlock, 0, p.stream, p);
  });
}

}  // namespace cuda
}  // namespace fasttfm
