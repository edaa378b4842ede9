// Tiles of 32 FP8 rows in shared memory, from which a block writes the columns. A thread transposes 16 rows of 4
// columns, so that 32 bytes of a column are written together.
#pragma once

#include <cstdint>

#include "common/cuda/fp8.cuh"

namespace fasttfm {
namespace cuda {

constexpr int kTileRows = 32;
constexpr int kColumnRows = 16;  // rows that a thread writes of a column

// The FP8 rows of a tile. The second half is padded by 16 words, so that the 32 lanes of a warp, which read 16
// neighbouring words in each half, read from 32 different banks.
template <class S>
struct alignas(16) TileRows {
  static constexpr int kRowWords = S::kColumns / 4;
  uint32_t word[kTileRows * kRowWords + 16];

  __device__ __forceinline__ uint32_t* row(int number) { return word + number * kRowWords + number / 16 * 16; }

  // The transpose of 16 rows, from row 16 * half on, by 4 columns.
  __device__ __forceinline__ void columns(int group, int half, uint4 (&transposed)[4]) {
    const uint32_t* from = row(16 * half) + group;
    uint32_t part[4][4];
#pragma unroll
    for (int i = 0; i < 16; ++i) part[i / 4][i % 4] = from[i * kRowWords];
#pragma unroll
    for (int i = 0; i < 4; ++i) transpose_bytes(part[i]);
#pragma unroll
    for (int i = 0; i < 4; ++i) transposed[i] = make_uint4(part[0][i], part[1][i], part[2][i], part[3][i]);
  }
};

// The columns of FP8 tensors have room for a multiple of 16 rows.
__host__ __device__ __forceinline__ int64_t padded_rows(int64_t rows) {
  return (rows + kColumnRows - 1) / kColumnRows * kColumnRows;
}

// Writes the columns of a tile to [C, P], after a barrier.
template <class S>
__device__ __forceinline__ void store_columns(TileRows<S>& tile, void* as_columns, int columns, int64_t tile_row,
                                              int64_t padded) {
  for (int index = threadIdx.x; index < columns / 2; index += S::kBlock) {
    const int group = index / 2, half = index % 2;
    if (tile_row + kColumnRows * half >= padded) continue;
    uint4 column[4];
    tile.columns(group, half, column);
    uint8_t* to = static_cast<uint8_t*>(as_columns) + 4 * group * padded + tile_row + kColumnRows * half;
#pragma unroll
    for (int i = 0; i < 4; ++i) *reinterpret_cast<uint4*>(to + i * padded) = column[i];
  }
}

}  // namespace cuda
}  // namespace fasttfm
