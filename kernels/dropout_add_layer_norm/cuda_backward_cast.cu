// The backward of dropout_add_layer_norm that writes dx in FP8, on Hopper.
//
// TMA copies the rows of a tile to shared memory, where two passes read them. In the first, a warp computes the sums
// over a row. In the second, a thread has 8 columns of 4 rows: it keeps the sums of its columns in 24 registers instead
// of the 96 of a thread that has a part of whole rows, and transposes its FP8 numbers in registers. Columns are staged
// in shared memory until there are 32 rows of them. Bytes per element: dy and z are read, 2 + 2 if the stream is bf16;
// dresidual, rows and columns are written, 2 + 1 + 1.
#include <cstdint>

#include "common/cuda/dropout.cuh"
#include "common/cuda/fp8.cuh"
#include "common/cuda/hopper.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/rows.cuh"
#include "common/packed.h"
#include "dropout_add_layer_norm/cuda_backward_tiles.cuh"
#include "dropout_add_layer_norm/cuda_tile_rows.cuh"
#include "dropout_add_layer_norm/op.h"

namespace fasttfm {
namespace cuda {
namespace {

template <class S, bool E5M2, bool DZ>
__global__ void __launch_bounds__(S::kBlock, S::kBlocks) backward_kernel(DropoutAddLayerNormBackwardFp8 p) {
  using R = typename S::Stream;
  using Row = typename S::Row;
  using Stripe = typename S::Stripe;
  constexpr int kWarps = S::kBlock / 32, kWarpRows = (S::kTile + kWarps - 1) / kWarps;
  extern __shared__ __align__(128) char dynamic_memory[];
  auto& memory = *reinterpret_cast<TileMemory<S>*>(dynamic_memory);
  const int columns = static_cast<int>(p.columns);
  const int64_t padded = padded_rows(p.rows);
  const BlockTiles<S> tiles(p.rows);
  TileBackward<S, E5M2, DZ> block(p, memory);
  const int warp = group_of_thread<Row>(), part = group_of_thread<Stripe>(), column = column_of<Stripe>(0);
  const int number = kThreadRows * part;  // of this thread's first row in a tile
  const bool inside = column < columns;

  if (threadIdx.x == 0) {
    memory.full[0].init(1);
    memory.full[1].init(1);
    fence_mbarrier_init();
  }
  stage_parameter<Row>(p.weight, p.weight_dtype, 1.0f, columns, memory.weight);
  block.clear(0, -1);
  block.clear(1, -1);
  __syncthreads();
  if (threadIdx.x == 0)
    for (int tile = 0; tile < 2 && tile < tiles.count; ++tile) block.load(tiles.first_row(tile), tiles.rows, tile);
  float weight[kVector];
  widen(load_packed(memory.weight + column), weight);
  const RowPositions positions{p.cu_seqlens, p.sequences, p.tokens_per_sequence};
  const KeptBytes kept(p.seed == nullptr ? 0 : p.threshold);
  const PhiloxKeys keys(p.seed == nullptr ? 0 : static_cast<uint64_t>(*p.seed));
  const float scale = *p.dx_scale * p.scale;  // dx_scale is a power of two, so rounding commutes with it

  // The means and rstds of the next tile's rows that this warp sums.
  float mean[kWarpRows], rstd[kWarpRows];
  const auto load_statistics = [&](int tile) {
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
      const int number = warp + i * kWarps, row = tiles.first_row(tile) + number;
      const bool loads = tile < tiles.count && number < S::kTile && row < tiles.rows;
      mean[i] = loads ? p.mean[row] : 0.0f;
      rstd[i] = loads ? p.rstd[row] : 0.0f;
    }
  };
  load_statistics(0);

  for (int tile = 0; tile < tiles.count; ++tile) {
    const int slot = tile % 2, first = tiles.first_row(tile);
    const int64_t to = static_cast<int64_t>(first + number) * columns + column;
    Packed<R> dz[DZ ? kThreadRows : 1];
    if constexpr (DZ) {
#pragma unroll
      for (int r = 0; r < kThreadRows; ++r)
        dz[r] = load_packed_if(inside && first + number + r < tiles.rows,
                               static_cast<const R*>(p.dz) + to + static_cast<int64_t>(r) * columns);
    }
    RowPosition position[kWarpRows] = {};
    float now_mean[kWarpRows], now_rstd[kWarpRows];
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
      now_mean[i] = mean[i];
      now_rstd[i] = rstd[i];
      const int row = first + warp + i * kWarps;
      if (p.seed != nullptr && warp + i * kWarps < S::kTile && row < tiles.rows)
        position[i] = positions.found_by_warp(row);
    }
    load_statistics(tile + 1);
    memory.full[slot].wait(tile / 2 % 2);
    if (first + S::kTile > tiles.rows) block.clear(slot, max(tiles.rows - first, 0));
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
      if (warp + i * kWarps >= S::kTile) continue;
      if (first + warp + i * kWarps < tiles.rows)
        block.sum_row(warp + i * kWarps, slot, now_mean[i], now_rstd[i], position[i]);
      else if (threadIdx.x % 32 == 0)
        memory.terms[warp + i * kWarps] = {};
    }
    __syncthreads();

    uint2 q[kThreadRows];
#pragma unroll
    for (int r = 0; r < kThreadRows; r += 2) {
      uint32_t bytes[2][2] = {};
      if (p.seed != nullptr) block.draw(keys, number + r, column, bytes);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const bool stores = inside && first + number + r + k < tiles.rows;
        const uint32_t reached[2] = {kept(bytes[k][0]), kept(bytes[k][1])};
        const int64_t offset = to + static_cast<int64_t>(r + k) * columns;
        q[r + k] =
            block.vector(number + r + k, slot, column, stores, offset, weight, dz[DZ ? r + k : 0], reached, scale);
        if (stores) *reinterpret_cast<uint2*>(static_cast<uint8_t*>(p.as_rows) + offset) = q[r + k];
      }
    }
    memory.staged.put(tile % S::kUnitTiles * S::kParts + part, column, q);
    __syncthreads();
    if (threadIdx.x == 0 && tile + 2 < tiles.count) block.load(tiles.first_row(tile + 2), tiles.rows, slot);
    if (tile % S::kUnitTiles == S::kUnitTiles - 1)
      memory.staged.store(p.as_columns, columns, first + S::kTile - kUnitRows, padded);
  }

  record_warp(p.dx_amax, block.magnitude.value() * p.scale);
  const int64_t parts = static_cast<int64_t>(gridDim.x) * columns;
  float* sums = p.workspace + static_cast<int64_t>(blockIdx.x) * columns;
  if (p.dweight != nullptr) store_part<Stripe>(block.dweight, memory.shares, sums, columns);
  if (p.dbias != nullptr) store_part<Stripe>(block.dbias, memory.shares, sums + parts, columns);
  if (p.dlinear_bias != nullptr) {
#pragma unroll
    for (float& sum : block.dlinear_bias[0]) sum *= p.scale;
    store_part<Stripe>(block.dlinear_bias, memory.shares, sums + 2 * parts, columns);
  }
}

template <class S>
Status launch_shape(const DropoutAddLayerNormBackwardFp8& p) {
  const int64_t units = (p.rows + kUnitRows - 1) / kUnitRows, most = S::kBlocks * p.blocks;
  const int blocks = static_cast<int>(units < most ? units : most);
  if (blocks > 0) {
    const auto with_dz = p.e5m2 ? backward_kernel<S, true, true> : backward_kernel<S, false, true>;
    const auto without = p.e5m2 ? backward_kernel<S, true, false> : backward_kernel<S, false, false>;
    const Status status =
        launch(p.dz != nullptr ? with_dz : without, blocks, S::kBlock, sizeof(TileMemory<S>), p.stream, p);
    if (status.code != StatusCode::ok) return status;
  }
  return sum_parts(p.workspace, {p.dweight, p.weight_dtype}, {p.dbias, p.bias_dtype}, blocks, p.columns, p.stream,
                   {p.dlinear_bias, p.linear_bias_dtype});
}

template <class R>
Status launch_columns(const DropoutAddLayerNormBackwardFp8& p) {
  if (p.columns <= 256) return launch_shape<TileShape<R, 1>>(p);
  if (p.columns <= 512) return launch_shape<TileShape<R, 2>>(p);
  if (p.columns <= 768) return launch_shape<TileShape<R, 3>>(p);
  return launch_shape<TileShape<R, 4>>(p);
}

}  // namespace

Status dropout_add_layer_norm_backward_fp8(const DropoutAddLayerNormBackwardFp8& p) {
  for (const void* tensor :
       {p.dy, p.dz, p.z, p.weight, static_cast<const void*>(p.as_rows), static_cast<const void*>(p.as_columns)})
    if (!rows_aligned(tensor, 0)) return misaligned_rows();
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
