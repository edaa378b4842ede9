// The forward of dropout_add_layer_norm that also writes y in e4m3, on Hopper.
//
// A warp processes a row. Without columns it takes one row; with columns a block takes a tile of 32 rows, each of its
// eight warps four of them, one after the other. The warp keeps its four rows of FP8 numbers in registers, transposes
// them, and the columns of the tile go through shared memory, so that 32 bytes of each are written together.
#include <cstdint>

#include "common/cuda/fp8.cuh"
#include "common/cuda/hopper.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/normalize.cuh"
#include "common/cuda/rows.cuh"
#include "dropout_add_layer_norm/cuda_add_row.cuh"
#include "dropout_add_layer_norm/op.h"

namespace fasttfm {
namespace cuda {
namespace {

constexpr int kWarpRows = 4;
constexpr int kTileRows = 32;
constexpr int kBlock = 32 * kTileRows / kWarpRows;

// The columns of a tile: 32 bytes for each, in groups of 8 columns that are 272 bytes apart. The 4-byte word of warp w
// is in word (w & 3) ^ (group / 8 & 3) of the 16-byte chunk w / 4, so that the 32 lanes of a warp, whose groups are
// neighbours, write to 32 banks.
template <class S>
struct alignas(16) TileColumns {
  static constexpr int kGroupWords = 8 * kTileRows / 4 + 4;
  uint32_t word[S::kColumns / kVector * kGroupWords];

  static __device__ __forceinline__ int swap(int group) { return group / 8 & 3; }

  // Writes the warp's four rows of the columns of one vector per lane.
  __device__ __forceinline__ void put(int group, int warp, const uint2 (&row)[kWarpRows]) {
    uint32_t half[2][4];
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      half[0][r] = row[r].x;
      half[1][r] = row[r].y;
    }
    uint32_t* to = word + group * kGroupWords + (warp / 4 * 4) + ((warp & 3) ^ swap(group));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      transpose_bytes(half[h]);
#pragma unroll
      for (int i = 0; i < 4; ++i) to[(4 * h + i) * (kTileRows / 4)] = half[h][i];
    }
  }

  // 16 bytes of a column.
  __device__ __forceinline__ uint4 chunk(int column, int part) const {
    const int group = column / kVector, swapped = swap(group);
    uint4 v =
        *reinterpret_cast<const uint4*>(word + group * kGroupWords + column % kVector * (kTileRows / 4) + 4 * part);
    if (swapped & 1) v = make_uint4(v.y, v.x, v.w, v.z);
    if (swapped & 2) v = make_uint4(v.z, v.w, v.x, v.y);
    return v;
  }
};

// ROWS rows of a warp one after the other; with columns ROWS is kWarpRows.
template <class R, class P, class S, int ROWS>
__global__ void __launch_bounds__(S::kBlock, ROWS == 1 ? 0 : 2) fp8_forward_kernel(DropoutAddLayerNormFp8 p) {
  static_assert(S::kGroup == 32, "a warp per row");
  const int columns = static_cast<int>(p.columns), warp = group_of_thread<S>();
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * S::kGroups + warp) * ROWS;
  const float scale = *p.y_scale;
  float most = 0.0f;
  uint2 q[S::kVectors][ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int64_t row[1] = {first + r};
    if (row[0] < p.rows) {
      float z[1][S::kVectors][kVector];
      add_row<bf16_t, R, P, S>(p, row[0], z[0]);
      normalize_rows<bf16_t, P, S, true>(p, row, z, [&](int, int v, const Packed<bf16_t>& y) {
        float value[kVector];
        widen(y, value);
        q[v][r] = round_vector<false>(value, scale);
        if (in_row<S>(v, columns)) {
          most = largest(value, most);
          *reinterpret_cast<uint2*>(static_cast<uint8_t*>(p.as_rows) + row[0] * columns + column_of<S>(v)) = q[v][r];
        }
      });
    } else {
#pragma unroll
      for (int v = 0; v < S::kVectors; ++v) q[v][r] = make_uint2(0, 0);
    }
  }
  record_warp(p.y_amax, most);
  if constexpr (ROWS > 1) {
    __shared__ TileColumns<S> tile;
#pragma unroll
    for (int v = 0; v < S::kVectors; ++v) tile.put(column_of<S>(v) / kVector, warp, q[v]);
    __syncthreads();
    const int64_t padded = (p.rows + 15) / 16 * 16, tile_row = static_cast<int64_t>(blockIdx.x) * kTileRows;
    for (int index = threadIdx.x; index < 2 * columns; index += S::kBlock) {
      const int column = index / 2, part = index % 2;
      if (tile_row + 16 * part < padded)
        *reinterpret_cast<uint4*>(static_cast<uint8_t*>(p.as_columns) + column * padded + tile_row + 16 * part) =
            tile.chunk(column, part);
    }
  }
}

template <class R, class P>
Status launch_shape(const DropoutAddLayerNormFp8& p) {
  const auto run = [&](auto vectors) {
    constexpr int kVectors = decltype(vectors)::value;
    if (p.as_columns != nullptr)
      return launch(fp8_forward_kernel<R, P, RowShape<32, kVectors, kBlock>, kWarpRows>,
                    static_cast<unsigned>((p.rows + kTileRows - 1) / kTileRows), kBlock, 0, p.stream, p);
    using S = RowShape<32, kVectors, 128>;
    return launch(fp8_forward_kernel<R, P, S, 1>, static_cast<unsigned>((p.rows + S::kGroups - 1) / S::kGroups),
                  S::kBlock, 0, p.stream, p);
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
