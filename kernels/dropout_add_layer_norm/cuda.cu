// dropout_add_layer_norm on NVIDIA GPUs, built on rows.cuh. The formulas are in reference.py.
//
// The forward processes one row per group of threads. The backward is persistent: see cuda_backward_rows.cuh.
//
// Whether there is dropout is decided at run time, because it only adds one Philox draw per 16 elements.
#include <cstdint>

#include "common/cuda/dropout.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/normalize.cuh"
#include "common/cuda/rows.cuh"
#include "dropout_add_layer_norm/cuda_add_row.cuh"
#include "dropout_add_layer_norm/cuda_backward_rows.cuh"
#include "dropout_add_layer_norm/cuda_forward.cuh"
#include "dropout_add_layer_norm/op.h"

namespace fasttfm {
namespace cuda {
namespace {

template <class T, class R, class P, class S>
__global__ void __launch_bounds__(S::kBlock) forward_kernel(DropoutAddLayerNormForward p) {
  const int64_t row[1] = {static_cast<int64_t>(blockIdx.x) * S::kGroups + group_of_thread<S>()};
  if (row[0] >= p.rows) return;  // whole groups return together
  float z[1][S::kVectors][kVector];
  add_row<T, R, P, S>(p, row[0], z[0]);
  normalize_rows<T, P, S, true>(p, row, z);
}

template <class S>
using BackwardScratch = float[2][3 * S::kBlock / 32];

template <class T, class R, class S, bool LINEAR_BIAS>
__global__ void __launch_bounds__(S::kBlock, 1) backward_kernel(DropoutAddLayerNormBackward p) {
  extern __shared__ __align__(16) char dynamic_memory[];
  __shared__ BackwardScratch<S> scratch;
  auto& memory = *reinterpret_cast<BackwardMemory<T, R, S>*>(dynamic_memory);
  const int columns = static_cast<int>(p.columns);
  float dlinear_bias[LINEAR_BIAS ? S::kVectors : 1][kVector] = {};
  const GroupRows<S> rows(p.rows);
  const Dropout dropout(p);
  int row = static_cast<int>(rows.first);  // 32 bits, because the sums over rows need the registers
  const int stride = static_cast<int>(rows.stride);
  BackwardRows<T, R, S> gradients(p, memory);

  gradients.start(row, rows.rounds > 0);
  for (int round = 0; round < rows.rounds; ++round) {  // uniform within a group, whose threads meet at barriers
    gradients.copy(row + stride, round + 1 < rows.rounds, round % kRowStages ^ 1);
    RowDraws<S> draws;
    gradients.finish(
        row, round % kRowStages, scratch[round % kRowStages], [&] { dropout.draw(row, draws); },
        [&](int v, bool inside, int64_t to, float (&out)[kVector]) {
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
            out[i] = draws.kept(v, i, dropout.limit) ? out[i] * dropout.scale : 0.0f;
            if constexpr (LINEAR_BIAS) dlinear_bias[v][i] += out[i];
          }
          store_packed_if(p.dx != nullptr && inside, static_cast<T*>(p.dx) + to, narrow<T>(out));
        });
    row += stride;
  }
  pass_missed_barriers<1>(p.rows, rows);
  cp_async_wait<0>();
  const int64_t parts = static_cast<int64_t>(gridDim.x) * columns;
  float* part = p.workspace + static_cast<int64_t>(blockIdx.x) * columns;
  gradients.store(part, parts);
  if constexpr (LINEAR_BIAS) store_part<S>(dlinear_bias, memory.shares, part + 2 * parts, columns);
}

// Threads per block: twelve warps, so that each thread has 168 registers. A third sum over rows needs more registers,
// and fp32 rows need more shared memory; in these cases there are eight warps.
template <class T, class R, bool LINEAR_BIAS>
struct BackwardPlan {
  static constexpr int kBlock = sizeof(R) == 4 || LINEAR_BIAS ? 256 : 384;
  static constexpr int kSmallBlock = sizeof(R) == 4 ? 128 : 256;
  template <class S>
  static constexpr int64_t memory(S) {
    return sizeof(BackwardMemory<T, R, S>) + sizeof(BackwardScratch<S>);
  }
};

template <class T, class R, bool LINEAR_BIAS>
Status launch_backward(const WithBlockMemory<DropoutAddLayerNormBackward>& p) {
  return for_row_shape_within<BackwardPlan<T, R, LINEAR_BIAS>>(p.columns, p.block_memory, [&](auto shape) {
    using S = decltype(shape);
    const int64_t row_blocks = (p.rows + S::kGroups - 1) / S::kGroups;
    const int blocks = row_blocks < p.blocks ? static_cast<int>(row_blocks) : p.blocks;
    const Status status = blocks == 0 ? Status{}
                                      : launch(backward_kernel<T, R, S, LINEAR_BIAS>, blocks, S::kBlock,
                                               sizeof(BackwardMemory<T, R, S>), p.stream, p);
    if (status.code != StatusCode::ok || (p.dweight == nullptr && p.dbias == nullptr && !LINEAR_BIAS)) return status;
    return sum_parts(p.workspace, {p.dweight, p.weight_dtype}, {p.dbias, p.bias_dtype}, blocks, p.columns, p.stream,
                     {p.dlinear_bias, p.linear_bias_dtype});
  });
}

}  // namespace

int64_t dropout_add_layer_norm_backward_memory(int64_t columns, int64_t dtype, int64_t residual_dtype,
                                               int64_t linear_bias, int64_t limit) {
  int64_t memory = 0;
  with_stream_types(static_cast<DType>(dtype), static_cast<DType>(residual_dtype), [&](auto element, auto stream) {
    using T = decltype(element);
    using R = decltype(stream);
    memory = linear_bias == 0 ? row_memory<BackwardPlan<T, R, false>>(columns, limit)
                              : row_memory<BackwardPlan<T, R, true>>(columns, limit);
    return Status{};
  });
  return memory;
}

Status dropout_add_layer_norm_forward(const DropoutAddLayerNormForward& p) {
  return with_forward(p, [&](auto element, auto stream, auto parameter, auto shape, unsigned blocks) {
    using S = decltype(shape);
    return launch(forward_kernel<decltype(element), decltype(stream), decltype(parameter), S>, blocks, S::kBlock, 0,
                  p.stream, p);
  });
}

Status dropout_add_layer_norm_backward(const WithBlockMemory<DropoutAddLayerNormBackward>& p) {
  if (!rows_aligned(p.dy, 0) || !rows_aligned(p.dz, 0) || !rows_aligned(p.z, 0) || !rows_aligned(p.weight, 0))
    return misaligned_rows();
  if (p.rows > kMaxRows) return too_many_rows();
  const DeviceGuard guard(p.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  return with_stream_types(p.dtype, p.residual_dtype, [&](auto element, auto stream) {
    using T = decltype(element);
    using R = decltype(stream);
    return p.dlinear_bias == nullptr ? launch_backward<T, R, false>(p) : launch_backward<T, R, true>(p);
  });
}

}  // namespace cuda
}  // namespace fasttfm
