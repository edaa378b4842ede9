// The backward of dropout_add_layer_norm that writes dx in FP8, on Hopper.
//
// A block processes adjacent rows in tiles of 32 (cuda_tile_rows.cuh): its eight warps compute a row each, four times
// per tile. Two tiles alternate, so that a tile needs only one barrier. Bytes per element: dy and z are read, 2 + 2 if
// the stream is bf16; dresidual, rows and columns are written, 2 + 1 + 1.
#include <cstdint>

#include "common/cuda/dropout.cuh"
#include "common/cuda/fp8.cuh"
#include "common/cuda/hopper.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/rows.cuh"
#include "dropout_add_layer_norm/cuda_backward_rows.cuh"
#include "dropout_add_layer_norm/cuda_tile_rows.cuh"
#include "dropout_add_layer_norm/op.h"

namespace fasttfm {
namespace cuda {
namespace {

constexpr int kBlock = 256;
constexpr int kWarps = kBlock / 32;
constexpr int kTileRounds = kTileRows / kWarps;

template <class R, class S>
struct CastMemory {
  BackwardMemory<bf16_t, R, S> rows;
  TileRows<S> tiles[2];
};

// Blocks have shares of nearly equal size, multiples of 16 rows.
template <class R, class S, bool E5M2>
__global__ void __launch_bounds__(kBlock, 1) backward_cast_kernel(DropoutAddLayerNormBackwardFp8 p) {
  static_assert(S::kGroup == 32 && S::kBlock == kBlock, "a warp per row");
  extern __shared__ __align__(16) char dynamic_memory[];
  auto& memory = *reinterpret_cast<CastMemory<R, S>*>(dynamic_memory);
  float unused[3 * kWarps];  // warps add without shared memory
  const int columns = static_cast<int>(p.columns), rows = static_cast<int>(p.rows);
  const int64_t padded = padded_rows(p.rows), shares = padded / kColumnRows;
  const int begin = static_cast<int>(shares * blockIdx.x / gridDim.x) * kColumnRows;
  const int end = static_cast<int>(shares * (blockIdx.x + 1) / gridDim.x) * kColumnRows;
  const int rounds = (end - begin) / kWarps, warp = group_of_thread<S>();
  int row = begin + warp;
  float dlinear_bias[S::kVectors][kVector] = {};
  float most = 0.0f;
  const Dropout dropout(p);
  const float scale = *p.dx_scale * dropout.scale;  // dx_scale is a power of two, so rounding commutes with it
  BackwardRows<bf16_t, R, S> gradients(p, memory.rows);

  gradients.start(row, row < rows);
  for (int round = 0; round < rounds; ++round) {  // uniform within the block
    gradients.copy(row + kWarps, round + 1 < rounds && row + kWarps < rows, round % kRowStages ^ 1);
    TileRows<S>& tile = memory.tiles[round / kTileRounds % 2];
    uint32_t* in_tile = tile.row(round % kTileRounds * kWarps + warp);
    if (row < rows) {
      RowDraws<S> draws;
      gradients.finish(
          row, round % kRowStages, unused, [&] { dropout.draw(row, draws); },
          [&](int v, bool inside, int64_t to, float (&)[kVector], const Packed<R>& rounded) {
            float value[kVector];
            widen(rounded, value);
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
              value[i] = draws.kept(v, i, dropout.limit) ? value[i] : 0.0f;
              dlinear_bias[v][i] += value[i];
            }
            const uint2 q = round_vector<E5M2>(value, scale);
            *reinterpret_cast<uint2*>(in_tile + column_of<S>(v) / 4) = q;
            if (inside) {
              most = largest(value, most);
              *reinterpret_cast<uint2*>(static_cast<uint8_t*>(p.as_rows) + to) = q;
            }
          });
    } else {
#pragma unroll
      for (int v = 0; v < S::kVectors; ++v) *reinterpret_cast<uint2*>(in_tile + column_of<S>(v) / 4) = make_uint2(0, 0);
    }
    row += kWarps;
    if (round % kTileRounds == kTileRounds - 1 || round + 1 == rounds) {
      __syncthreads();
      store_columns(tile, p.as_columns, columns, begin + round / kTileRounds * kTileRows, end, padded);
    }
  }
  record_warp(p.dx_amax, most * dropout.scale);
  cp_async_wait<0>();
  const int64_t parts = static_cast<int64_t>(gridDim.x) * columns;
  float* part = p.workspace + static_cast<int64_t>(blockIdx.x) * columns;
  gradients.store(part, parts);
  if (p.dlinear_bias != nullptr) {
#pragma unroll
    for (int v = 0; v < S::kVectors; ++v)
#pragma unroll
      for (int i = 0; i < kVector; ++i) dlinear_bias[v][i] *= dropout.scale;
    store_part<S>(dlinear_bias, memory.rows.shares, part + 2 * parts, columns);
  }
}

template <class R, class S>
Status launch_shape(const DropoutAddLayerNormBackwardFp8& p) {
  const int64_t shares = padded_rows(p.rows) / kColumnRows;
  const int blocks = shares < p.blocks ? static_cast<int>(shares) : p.blocks;
  const auto kernel = p.e5m2 ? backward_cast_kernel<R, S, true> : backward_cast_kernel<R, S, false>;
  const Status status = blocks == 0 ? Status{} : launch(kernel, blocks, kBlock, sizeof(CastMemory<R, S>), p.stream, p);
  if (status.code != StatusCode::ok) return status;
  return sum_parts(p.workspace, {p.dweight, p.weight_dtype}, {p.dbias, p.bias_dtype}, blocks, p.columns, p.stream,
                   {p.dlinear_bias, p.linear_bias_dtype});
}

template <class R>
Status launch_columns(const DropoutAddLayerNormBackwardFp8& p) {
  if (p.columns <= 256) return launch_shape<R, RowShape<32, 1, kBlock>>(p);
  if (p.columns <= 512) return launch_shape<R, RowShape<32, 2, kBlock>>(p);
  if (p.columns <= 768) return launch_shape<R, RowShape<32, 3, kBlock>>(p);
  return launch_shape<R, RowShape<32, 4, kBlock>>(p);
}

}  // namespace

Status dropout_add_layer_norm_backward_fp8(const DropoutAddLayerNormBackwardFp8& p) {
  for (const void* each :
       {p.dy, p.dz, p.z, p.weight, static_cast<const void*>(p.as_rows), static_cast<const void*>(p.as_columns)})
    if (!rows_aligned(each, 0)) return misaligned_rows();
  if (p.columns < 16 || p.columns % 16 != 0 || p.columns > 1024)
    return bad_size("dropout_add_layer_norm: FP8 needs columns that are a multiple of 16, from 16 to 1024");
  if (p.rows > int64_t{1} << 30) return bad_size("dropout_add_layer_norm: the CUDA kernels take at most 2^30 rows");
  if (p.dtype != DType::bf16) return unknown_dtype();
  const DeviceGuard guard(p.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  if (p.residual_dtype == DType::bf16) return launch_columns<bf16_t>(p);
  if (p.residual_dtype == DType::f32) return launch_columns<float>(p);
  return bad_size("dropout_add_layer_norm: the residual's dtype must be that of x or fp32");
}

}  // namespace cuda
}  // namespace fasttfm
