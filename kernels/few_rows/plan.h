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
  int tile;   // 0 for kSmallTile, or one more than an index into kPipelinedTiles
  int parts;  // of K
};

// The estimated time in picoseconds, fitted to measurements on an H200 with 32 to 1,152 rows. A block takes kBlock, and
// for each stage kStage and kElement per element of a tile with kColumns more columns. The first stages of each block
// add kFirstStage and 1 per row that they load, because all blocks load them at once. The sums of a part take
// kPartElement / 2 per element.
inline int64_t time_of(const PipelinedTile& tile, int parts, int64_t rows, int64_t columns, int64_t inner,
                       int64_t processors) {
  constexpr int64_t kBlock = 1'200'000, kStage = 75'000, kElement = 13, kColumns = 2, kPartElement = 5;
  constexpr int64_t kFirstStage = 1300, kFirstStages = 10;
  const int64_t blocks = steps(rows, tile.rows) * steps(columns, tile.columns * tile.cluster) * tile.cluster * parts;
  const int64_t stages = steps(steps(inner, kInner), parts);
  const int64_t block = kBlock + stages * (kStage + tile.rows * (tile.columns + kColumns) * kElement);
  const int64_t first = std::min(stages, kFirstStages) * (kFirstStage + tile.rows / tile.cluster + tile.columns);
  return steps(blocks, processors) * block + blocks * first + parts * rows * columns * kPartElement / 2;
}

// `partial`: whether K may be split. If it is, the next kernel adds the parts.
inline Plan plan_product(int64_t rows, int64_t columns, int64_t inner, int64_t processors, bool partial) {
  const int64_t stages = steps(inner, kInner), most = partial ? std::min<int64_t>(kMaxParts, stages) : 1;
  // Blocks of kSmallTile take the least time, if one per SM is enough for K in as many parts as possible.
  if (rows <= kSmallTile.rows && steps(columns, kSmallTile.columns) * most <= processors)
    return {0, static_cast<int>(steps(stages, steps(stages, most)))};
  Plan best{1, 1};
  int64_t least = INT64_MAX;
  for (int tile = 0; tile < kPipelinedCount; ++tile)
    for (int parts = 1; parts <= most; ++parts) {
      const int64_t time = time_of(kPipelinedTiles[tile], parts, rows, columns, inner, processors);
      if (time >= least) continue;
      least = time;
      best = {1 + tile, parts};
    }
  return best;
}

// Whether attention uses blocks of 16 queries whose keys are divided among the warps: if there are at most two such
// blocks per SM.
inline bool splits_keys(int64_t sequences, int64_t heads, int64_t max_seqlen, int64_t processors) {
  return sequences * heads * ((max_seqlen + 15) / 16) <= 2 * processors;
}

}  // namespace few_rows
}  // namespace fasttfm
