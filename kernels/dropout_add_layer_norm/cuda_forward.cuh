// What the launchers of the forwards of dropout_add_layer_norm share.
#pragma once

#include <cstdint>

#include "common/cuda/launch.cuh"
#include "common/cuda/rows.cuh"
#include "dropout_add_layer_norm/op.h"

namespace fasttfm {
namespace cuda {

constexpr int64_t kMaxRows = int64_t{1} << 30;  // row indices in the backward have 32 bits
inline Status too_many_rows() { return bad_size("dropout_add_layer_norm: the CUDA kernels take at most 2^30 rows"); }

// Checks a forward, and calls body(T{}, R{}, P{}, S{}, blocks), on its device, with the C++ types of x, the residual
// and the parameters, the shape of a row, and the number of blocks for one row per group of threads.
template <class Body>
Status with_forward(const DropoutAddLayerNormForward& p, Body body) {
  if (!rows_aligned(p.x, p.x_stride) || !rows_aligned(p.residual, p.residual_stride) || !rows_aligned(p.weight, 0) ||
      !rows_aligned(p.bias, 0) || !rows_aligned(p.linear_bias, 0))
    return misaligned_rows();
  if (p.rows > kMaxRows) return too_many_rows();
  if (p.rows == 0) return {};
  const DeviceGuard guard(p.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  return with_stream_types(p.dtype, p.residual_dtype, [&](auto element, auto stream) {
    const auto run = [&](auto parameter) {
      return for_row_shape<0>(p.columns, [&](auto shape) {
        constexpr int kGroups = decltype(shape)::kGroups;
        return body(element, stream, parameter, shape, static_cast<unsigned>((p.rows + kGroups - 1) / kGroups));
      });
    };
    if (p.parameter_dtype == DType::f32) return run(float{});
    if constexpr (sizeof(stream) == sizeof(element)) {
      if (p.parameter_dtype == p.dtype) return run(element);
    }
    return bad_size("dropout_add_layer_norm: parameters must be fp32, or of the dtype that x and residual share");
  });
}

}  // namespace cuda
}  // namespace fasttfm
