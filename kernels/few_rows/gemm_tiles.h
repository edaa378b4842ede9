// The tiles of the GEMMs for few rows (cuda_gemm.cu), and how a warp passes its result through shared memory. The
// index arithmetic also compiles for the host, where tests cover it.
#pragma once

#include "few_rows/tiles.h"

namespace fasttfm {
namespace few_rows {

// Each consumer warpgroup computes 64 of the rows. `cluster` blocks have neighbouring columns and share the rows of x.
// Tiles that differ only in `cluster` have the same kernels.
struct GemmTile {
  int rows, columns;
  int stages;
  int cluster;
  bool adds = false;  // whether there are kernels that add a residual
};

// plan.h chooses one of them.
constexpr GemmTile kGemmTiles[] = {
    {64, 32, 12, 4, true}, {64, 64, 12, 2, true}, {64, 64, 12, 4, true}, {64, 96, 10, 2},  {128, 64, 8, 2, true},
    {64, 128, 8, 2},       {128, 96, 7, 1},       {128, 128, 6, 1},      {128, 192, 5, 1}, {128, 256, 4, 2},
};
constexpr int kGemmTileCount = static_cast<int>(sizeof(kGemmTiles) / sizeof(kGemmTiles[0]));

// Bytes between rows of the result in shared memory: with an odd number of chunks of 16 bytes, the same chunk of eight
// consecutive rows is in different banks.
FASTTFM_HOST_DEVICE constexpr int result_pitch(int columns) { return 2 * columns + 16; }

// The byte offset of the row that a lane passes to stmatrix.x4 for the first 16 columns of a warp's 16 rows; those of
// the next 16 columns are 32 bytes further.
FASTTFM_HOST_DEVICE constexpr int result_offset(int lane, int columns) {
  return lane % 16 * result_pitch(columns) + lane / 16 * 16;
}

// A vector of 8 columns of a warp's 16 rows.
struct ResultVector {
  int row, column;
};
FASTTFM_HOST_DEVICE constexpr ResultVector result_vector(int index, int columns) {
  return {index / (columns / kChunk), index % (columns / kChunk) * kChunk};
}

// ---- results with a residual ----------------------------------------------------------------------------------------

constexpr int kGroupColumns = 64;  // whose statistics are written
constexpr int kMostClusterBlocks = 8;

// The number of blocks with neighbouring columns whose columns are whole groups of 64.
FASTTFM_HOST_DEVICE constexpr int joined_blocks(int columns) { return columns % kGroupColumns == 0 ? 1 : 2; }

// Whether a tile has a kernel that adds a residual to one part of K, without an exchange between blocks
// (gemm_result.cuh).
constexpr bool adds_to_one_part(const GemmTile& tile) { return tile.adds && tile.columns == kGroupColumns; }

// Whether a cluster of `multicast_blocks` blocks with neighbouring columns, times `parts` parts of K, can add sums
// (gemm_residual.cuh): the joined blocks of all parts each finish an equal share of the rows, in multiples of 8.
constexpr bool takes_residual(const GemmTile& tile, int multicast_blocks, int parts) {
  const int joined = joined_blocks(tile.columns);
  return tile.adds && multicast_blocks % joined == 0 && multicast_blocks * parts <= kMostClusterBlocks &&
         tile.rows / 8 % (joined * parts) == 0;
}

// The rank in the cluster of the block that finishes a share of the rows: `joined` blocks, the first of which is the
// first-th of the `multicast_blocks` with neighbouring columns, finish one share after the other, part by part.
FASTTFM_HOST_DEVICE constexpr int finishing_rank(int share, int joined, int multicast_blocks, int first) {
  return share / joined * multicast_blocks + first + share % joined;
}

// fp32 sums in shared memory: the byte offset of four columns in a row of a multiple of 32 columns. Neighbouring rows
// have the same columns in different banks.
FASTTFM_HOST_DEVICE constexpr int sums_offset(int row, int chunk) { return (chunk ^ (row % 2 * 4)) * 16; }

// Which four of a row's columns a lane sends, of tiles i and i + 1 of 8 columns; i is even.
FASTTFM_HOST_DEVICE constexpr int sent_chunk(int lane, int i) { return 2 * i + lane % 2 * 2 + lane % 4 / 2; }

}  // namespace few_rows
}  // namespace fasttfm
