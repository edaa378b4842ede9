// The tile of a GEMM for few rows, and the number of parts into which K is split. They minimize an estimate of the
// time, which depends only on the sizes and the number of SMs, so results of the same call are always bitwise
// identical.
#pragma once

#include <algorithm>
#include <cstdint>

#include "few_rows/product_tiles.h"
#include "few_rows/tiles.h"

namespace fasttfm {
namespace few_rows {

constexpr int kMaxParts = 4;

// Up to this many rows all GEMMs of a layer have the same tile. Their kernels take a few microseconds, and a further
// kernel adds about 0.6 of them to a layer on an H200, because its instructions are loaded, too.
constexpr int64_t kSameTileRows = 320;

struct Plan {
  int tile;   // an index into kProductTiles
  int parts;  // of K
};

struct ProductSize {
  int64_t columns, inner;
  bool partial;  // whether K may be split; the next kernel adds the parts
};

// How many blocks run at once. Clusters of more than two blocks do not fill all groups of SMs.
inline int64_t resident_blocks(int cluster, int64_t processors) {
  if (cluster <= 2) return processors;
  return std::max<int64_t>(processors * 15 / 16 / cluster, 1) * cluster;
}

// The estimated time in picoseconds, fitted to measurements on an H200 with 16 to 1,152 rows. A block takes kBlock, and
// for each stage kStage and kElement per element of a tile with kColumns more columns. The first stages of each block
// add kFirstStage and 1 per row that they load, because all blocks load them at once. A part takes kPart, and its sums
// kPartElement / 2 per element.
inline int64_t time_of(const ProductTile& tile, int parts, int64_t rows, const ProductSize& size, int64_t processors) {
  constexpr int64_t kBlock = 1'200'000, kStage = 75'000, kElement = 13, kColumns = 2;
  constexpr int64_t kFirstStage = 1300, kFirstStages = 10, kPart = 200'000, kPartElement = 5;
  const int64_t clusters = steps(rows, tile.rows) * steps(size.columns, tile.columns * tile.cluster) * parts;
  const int64_t blocks = clusters * tile.cluster, stages = steps(steps(size.inner, kInner), parts);
  const int64_t block = kBlock + stages * (kStage + tile.rows * (tile.columns + kColumns) * kElement);
  const int64_t first = std::min(stages, kFirstStages) * (kFirstStage + tile.rows / tile.cluster + tile.columns);
  return steps(blocks, resident_blocks(tile.cluster, processors)) * block + blocks * first +
         parts * (kPart + rows * size.columns * kPartElement / 2);
}

struct Estimate {
  int64_t time;
  int parts;
};

// The number of parts with the least time for a tile.
inline Estimate estimate(const ProductTile& tile, int64_t rows, const ProductSize& size, int64_t processors) {
  const int64_t most = size.partial ? std::min<int64_t>(kMaxParts, steps(size.inner, kInner)) : 1;
  Estimate best{INT64_MAX, 1};
  for (int parts = 1; parts <= most; ++parts) {
    const int64_t time = time_of(tile, parts, rows, size, processors);
    if (time < best.time) best = {time, parts};
  }
  return best;
}

// The time of the GEMMs of a layer with a tile. All of them have the layer's width as their smaller size.
inline int64_t layer_time(const ProductTile& tile, int64_t rows, int64_t width, int64_t processors) {
  int64_t time = 0;
  for (const ProductSize& size : {ProductSize{3 * width, width, false}, ProductSize{width, width, true},
                                  ProductSize{4 * width, width, false}, ProductSize{width, 4 * width, true}})
    time += estimate(tile, rows, size, processors).time;
  return time;
}

inline Plan plan_product(int64_t rows, const ProductSize& size, int64_t processors) {
  int best = 0;
  int64_t least = INT64_MAX;
  for (int tile = 0; tile < kProductTileCount; ++tile) {
    // Clusters of four are faster only if all blocks have the same rows.
    if (kProductTiles[tile].cluster > 2 && rows > kProductTiles[tile].rows) continue;
    const int64_t time = rows <= kSameTileRows
                             ? layer_time(kProductTiles[tile], rows, std::min(size.columns, size.inner), processors)
                             : estimate(kProductTiles[tile], rows, size, processors).time;
    if (time >= least) continue;
    least = time;
    best = tile;
  }
  return {best, estimate(kProductTiles[best], rows, size, processors).parts};
}

// Whether attention uses blocks of 16 queries whose keys are divided among the warps: if there are at most two such
// blocks per SM.
inline bool splits_keys(int64_t sequences, int64_t heads, int64_t max_seqlen, int64_t processors) {
  return sequences * heads * ((max_seqlen + 15) / 16) <= 2 * processors;
}

}  // namespace few_rows
}  // namespace fasttfm
