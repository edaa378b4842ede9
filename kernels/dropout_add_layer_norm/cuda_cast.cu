// The forward of dropout_add_layer_norm that also writes y in e4m3, on Hopper.
//
// A warp processes a row at a time. If as_columns is not needed, it processes only one. Otherwise a block processes a
// tile of 32 rows, four rows per warp (cuda_tile_rows.cuh).
#include <cstdint>

#include "common/cuda/fp8.cuh"
#include "common/cuda/hopper.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/normalize.cuh"
#include "common/cuda/rows.cuh"
#include "dropout_add_layer_norm/cuda_add_row.cuh"
#include "dropout_add_layer_norm/cuda_tile_rows.cuh"
#include "dropout_add_layer_norm/op.h"

namespace fasttfm {
namespace cuda {
namespace {

constexpr int kBlock = 256;

// Writes y of a row in FP8 to `to`, and to the tile's row unless that is null.
template <class R, class P, class S>
__device__ __forceinline__ void normalize_row(const DropoutAddLayerNormFp8& p, int64_t row, float scale, uint32_t* tile,
                                              float& most) {
  const int columns = static_cast<int>(p.columns);
  const int64_t rows[1] = {row};
  float z[1][S::kVectors][kVector];
  add_row<bf16_t, R, P, S>(p, row, z[0]);
  const auto cast = [&](int, int v, const Packed<bf16_t>& y) {
    float value[kVector];
    widen(y, value);
    const uint2 q = round_vector<false>(value, scale);
    if (tile != nullptr) *reinterpret_cast<uint2*>(tile + column_of<S>(v) / 4) = q;
    if (in_row<S>(v, columns)) {
      most = largest(value, most);
      *reinterpret_cast<uint2*>(static_cast<uint8_t*>(p.as_rows) + row * columns + column_of<S>(v)) = q;
    }
  };
  normalize_rows<bf16_t, P, S, true>(p, rows, z, cast, p.y != nullptr);
}

template <class R, class P, class S>
__global__ void __launch_bounds__(S::kBlock, sizeof(P) == 2 ? 0 : 6) rows_kernel(DropoutAddLayerNormFp8 p) {
  static_assert(S::kGroup == 32, "a warp per row");
  const int64_t row = static_cast<int64_t>(blockIdx.x) * S::kGroups + group_of_thread<S>();
  if (row >= p.rows) return;
  float most = 0.0f;
  normalize_row<R, P, S>(p, row, *p.y_scale, nullptr, most);
  record_warp(p.y_amax, most);
}

template <class R, class P, class S>
__global__ void __launch_bounds__(S::kBlock, sizeof(R) == 2 ? 4 : 3) tiles_kernel(DropoutAddLayerNormFp8 p) {
  static_assert(S::kGroup == 32, "a warp per row");
  __shared__ TileRows<S> tile;
  const int64_t tile_row = static_cast<int64_t>(blockIdx.x) * kTileRows;
  const float scale = *p.y_scale;
  float most = 0.0f;
#pragma unroll 1
  for (int number = group_of_thread<S>(); number < kTileRows; number += S::kGroups) {
    uint32_t* to = tile.row(number);
    if (tile_row + number < p.rows) {
      normalize_row<R, P, S>(p, tile_row + number, scale, to, most);
    } else {
#pragma unroll
      for (int v = 0; v < S::kVectors; ++v) *reinterpret_cast<uint2*>(to + column_of<S>(v) / 4) = make_uint2(0, 0);
    }
  }
  record_warp(p.y_amax, most);
  __syncthreads();
  const int64_t padded = padded_rows(p.rows);
  store_columns(tile, p.as_columns, static_cast<int>(p.columns), tile_row, padded);
}

template <class R, class P>
Status launch_shape(const DropoutAddLayerNormFp8& p) {
  const auto run = [&](auto vectors) {
    constexpr int kVectors = decltype(vectors)::value;
    if (p.as_columns != nullptr)
      return launch(tiles_kernel<R, P, RowShape<32, kVectors, kBlock>>,
                    static_cast<unsigned>((p.rows + kTileRows - 1) / kTileRows), kBlock, 0, p.stream, p);
    using S = RowShape<32, kVectors, 128>;
    return launch(rows_kernel<R, P, S>, static_cast<unsigned>((p.rows + S::kGroups - 1) / S::kGroups), S::kBlock, 0,
                  p.stream, p);
  };
  if (p.columns <= 256) return run(std::integral_constant<int, 1>{});
  if (p.columns <= 512) return run(std::integral_constant<int, 2>{});
  if (p.columns <= 768) return run(std::integral_constant<int, 3>{});
  return run(std::integral_constant<int, 4>{});
}

}  // namespace

Status dropout_add_layer_norm_fp8(const DropoutAddLayerNormFp8& p) {
  if (!rows_aligned(p.x, p.x_stride) || !rows_aligned(p.residual, p.residual_stride) || !rows_aligned(p.weight, 0) ||
      !rows_aligned(p.bias, 0) || !rows_aligned(p.linear_bias, 0) || !rows_aligned(p.as_rows, 0) ||
      !rows_aligned(p.as_columns, 0))
    return misaligned_rows();
  if (p.columns < 16 || p.columns % 16 != 0 || p.columns > 1024)
    return bad_size("dropout_add_layer_norm: FP8 needs columns that are a multiple of 16, from 16 to 1024");
  if (p.rows > int64_t{1} << 30) return bad_size("dropout_add_layer_norm: the CUDA kernels take at most 2^30 rows");
  if (p.dtype != DType::bf16) return unknown_dtype();
  if (p.rows == 0) return {};
  const DeviceGuard guard(p.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  if (p.residual_dtype == DType::f32 && p.parameter_dtype == DType::f32) return launch_shape<float, float>(p);
  if (p.residual_dtype == DType::bf16 && p.parameter_dtype == DType::f32) return launch_shape<bf16_t, float>(p);
  if (p.residual_dtype == DType::bf16 && p.parameter_dtype == DType::bf16) return launch_shape<bf16_t, bf16_t>(p);
  return bad_size("dropout_add_layer_norm: parameters must be fp32, or of the dtype that x and residual share");
}

}  // namespace cuda
}  // namespace fasttfm
