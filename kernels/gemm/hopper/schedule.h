// How the tiles of a Hopper GEMM (gemm.cuh) are assigned to clusters. This also compiles for the host,
// where a test covers it. S is a GemmShape.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace fasttfm {
namespace cuda {

// The sizes of the result, and its cluster tiles. A cluster tile is what a cluster computes at a time: the same columns
// of consecutive rows, kRows for each of its blocks. plan_cluster_tiles() sets all fields after the first three.
//
// Operand b of a gated activation is K-major and has two halves, the gate and up. 32 columns of the gate and the same
// 32 of up alternate in the result, so that each part of 64 columns has both; its columns are 64 for each 32 of the
// gate.
struct GemmSizes {
  int rows, columns;
  int gate;           // columns of the gate, or 0 if b has no halves
  int steps;          // of 64 elements of K
  int column_tiles;   // tiles of kColumns columns
  int cluster_tiles;  // of all rounds; a round has as many as there are clusters
  int whole;          // cluster tiles before the last round
  // The last round. Its cluster tiles are narrower, so that all clusters have about the same work.
  int width;              // of its cluster tiles, in parts of 64 columns
  int head, head_column;  // number of them in the rows that the previous round has begun, and their first column
  int tiles, tiles_row;   // number of them in each of the rows after these, and the first of those rows
};

// Chooses the cluster tiles for `inner` elements of K and `clusters` clusters. Those of the last round are as narrow as
// possible.
template <class S>
void plan_cluster_tiles(GemmSizes* p, int64_t inner, int clusters) {
  constexpr int kPart = S::kColumns / S::kParts;
  const auto ceiling = [](int count, int step) { return (count + step - 1) / step; };
  const int groups = ceiling(p->rows, S::kRows * S::kCluster), parts = ceiling(p->columns, kPart);
  p->steps = static_cast<int>((inner + kPart - 1) / kPart);
  p->column_tiles = ceiling(parts, S::kParts);
  p->whole = groups * p->column_tiles / clusters * clusters;
  const int begun = p->whole % p->column_tiles, after = groups - ceiling(p->whole, p->column_tiles);
  p->head_column = begun * S::kColumns;
  p->tiles_row = (groups - after) * S::kCluster * S::kRows;
  for (p->width = 1;; ++p->width) {
    p->head = begun == 0 ? 0 : ceiling(parts - begun * S::kParts, p->width);
    p->tiles = ceiling(parts, p->width);
    p->cluster_tiles = p->whole + p->head + after * p->tiles;
    if (p->width == S::kParts || p->cluster_tiles - p->whole <= clusters) return;
  }
}

// The first row and column of a cluster tile.
struct ClusterTile {
  int row, column;
};
// This has no branches, which would make the kernels spill registers.
template <class S>
FASTTFM_HOST_DEVICE ClusterTile cluster_tile_at(const GemmSizes& p, int cluster_tile) {
  constexpr int kPart = S::kColumns / S::kParts, kTileRows = S::kCluster * S::kRows;
  const int last = cluster_tile - p.whole;  // index in the last round
  const bool is_last = last >= 0;
  const int width = is_last ? p.width : S::kParts;
  const bool is_head = is_last && last < p.head;
  const auto index = static_cast<unsigned>(is_head ? last : is_last ? last - p.head : cluster_tile);
  const auto tiles = static_cast<unsigned>(is_last ? p.tiles : p.column_tiles);
  const unsigned group = is_head ? 0u : index / tiles;
  const int first_row = is_head ? p.tiles_row - kTileRows : is_last ? p.tiles_row : 0;
  const int first_column = is_head ? p.head_column : 0;
  return {static_cast<int>(group) * kTileRows + first_row,
          static_cast<int>(index - group * tiles) * width * kPart + first_column};
}
// The number of 64-column parts of a cluster tile.
template <class S>
FASTTFM_HOST_DEVICE int cluster_tile_parts(const GemmSizes& p, int cluster_tile, int column) {
  constexpr int kPart = S::kColumns / S::kParts;
  const int width = cluster_tile < p.whole ? S::kParts : p.width, left = (p.columns - column + kPart - 1) / kPart;
  return width < left ? width : left;
}

// The cluster's next tile. In each round neighbouring clusters have neighbouring columns of the same rows. The
// assignment shifts by one cluster from round to round; otherwise one cluster might get all of the narrower tiles at
// the ends of rows.
FASTTFM_HOST_DEVICE int next_cluster_tile(int cluster_tile, int clusters) {
  return cluster_tile +
         (static_cast<unsigned>(cluster_tile + 1) % static_cast<unsigned>(clusters) == 0 ? 1 : clusters + 1);
}

}  // namespace cuda
}  // namespace fasttfm
