// The tile of a GEMM for few rows, and the number of parts into which K is split. They minimize an estimate of the
// time, which depends only on the sizes and the number of SMs, so results of the same call are always bitwise
// identical.
#pragma once

#include <algorithm>
#include <cstdint>

#include "few_rows/pipelined_tiles.h"
#include "few_rows/tiles.h"

namespace fasttfm {
namespace few_rows {

constexpr int kMaxParts = 8;

struct Plan {
  int tile;   // index into kTiles, or after them into kPipelinedTiles
  int parts;  // of K
};

constexpr int64_t steps(int64_t count, int64_t step) { return (count + step - 1) / step; }

// The estimated time in picoseconds, fitted to measurements on an H200. A block takes kStage for each stage and
// kStageRow for each of the stage's rows, 1.75 times as long with mma.sync, which reads shared memory more often. All
// SMs together need at least kAllStageRow per row. Writing and reading the sums of a part takes 1 per element.
inline int64_t time_of(const Tile& tile, int parts, int64_t rows, int64_t columns, int64_t inner, int64_t processors) {
  constexpr int64_t kStage = 50'000, kStageRow = 1000, kAllStageRow = 12;
  const int64_t blocks = steps(rows, tile.rows) * steps(columns, tile.columns) * parts;
  const int64_t stages = steps(steps(inner, kInner), parts), copied = tile.rows + tile.columns;
  const int64_t block = stages * (kStage + copied * kStageRow) * (tile.wgmma ? 4 : 7) / 4;
  const int64_t product = std::max(steps(blocks, processors) * block, blocks * stages * copied * kAllStageRow);
  return product + parts * rows * columns;
}

// The same for tiles with a producer warp, fitted to 288, 576 and 1,152 rows: a block takes kBlock, and for each stage
// kElement per element of the tile; the sums of a part take kPartElement per element.
inline int64_t pipelined_time_of(const PipelinedTile& tile, int parts, int64_t rows, int64_t columns, int64_t inner,
                                 int64_t processors) {
  constexpr int64_t kBlock = 1'750'000, kElement = 18, kPartElement = 2;
  const int64_t blocks = steps(rows, tile.rows) * steps(columns, tile.columns * tile.cluster) * tile.cluster * parts;
  const int64_t block = kBlock + steps(steps(inner, kInner), parts) * tile.rows * tile.columns * kElement;
  return steps(blocks, processors) * block + parts * rows * columns * kPartElement;
}

constexpr int64_t kLeastPipelinedRows = 257;  // for which they are used

// `partial`: whether K may be split. If it is, the next kernel adds the parts.
inline Plan plan_product(int64_t rows, int64_t columns, int64_t inner, int64_t processors, bool partial) {
  const int most = partial ? static_cast<int>(std::min<int64_t>(kMaxParts, steps(inner, kInner))) : 1;
  Plan best{0, 1};
  int64_t least = INT64_MAX;
  const auto consider = [&](int tile, int parts, int64_t time) {
    if (time >= least) return;
    least = time;
    best = {tile, parts};
  };
  const bool pipelined = rows >= kLeastPipelinedRows;
  for (int tile = 0; tile < (pipelined ? kPipelinedCount : kTileCount); ++tile)
    for (int parts = 1; parts <= most; ++parts)
      if (pipelined)
        consider(kTileCount + tile, parts,
                 pipelined_time_of(kPipelinedTiles[tile], parts, rows, columns, inner, processors));
      else
        consider(tile, parts, time_of(kTiles[tile], parts, rows, columns, inner, processors));
  return best;
}

// Whether attention uses blocks of 16 queries whose keys are divided among the warps: if there are at most two such
// blocks per SM.
inline bool splits_keys(int64_t sequences, int64_t heads, int64_t max_seqlen, int64_t processors) {
  return sequences * heads * ((max_seqlen + 15) / 16) <= 2 * processors;
}

}  // namespace few_rows
}  // namespace fasttfm
