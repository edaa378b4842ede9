// The tiles of the GEMMs for few rows (cuda_product.cu), and how a warp passes its result through shared memory. The
// index arithmetic also compiles for the host, where tests cover it.
#pragma once

#include "few_rows/tiles.h"

namespace fasttfm {
namespace few_rows {

// Each consumer warpgroup computes 64 of the rows. `cluster` blocks have neighbouring columns and share the rows of x.
struct ProductTile {
  int rows, columns;
  int stages;
  int cluster;
};

// plan.h chooses one of them.
constexpr ProductTile kProductTiles[] = {
    {64, 32, 12, 4}, {64, 64, 12, 2}, {64, 64, 12, 4},  {64, 96, 10, 2},  {128, 64, 8, 2},
    {64, 128, 8, 2}, {128, 96, 7, 1}, {128, 128, 6, 1}, {128, 192, 5, 1}, {128, 256, 4, 2},
};
constexpr int kProductTileCount = static_cast<int>(sizeof(kProductTiles) / sizeof(kProductTiles[0]));

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

}  // namespace few_rows
}  // namespace fasttfm
