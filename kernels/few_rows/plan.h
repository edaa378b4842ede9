// The tile of a GEMM for few rows and the number of parts into which K is split, chosen by an estimate of the time from
// the sizes and the number of SMs. It depends on nothing else, so the same call always gives the same bits.
#pragma once

#include <algorithm>
#include <cstdint>

#include "few_rows/tiles.h"

namespace fasttfm {
namespace few_rows {

constexpr int kMaxParts = 8;

struct Plan {
  int tile;   // index into kTiles
  int parts;  // of K
};

// An estimate in picoseconds, fitted to measurements on an H200. A block spends kStage on each stage and kStageRow on
// each of the stage's rows, 1.75 times as much with mma.sync, which reads shared memory more often. All SMs together
// need at least kAllStageRow per row. Writing and reading a part's sums costs 1 per element.
inline int64_t time_of(const Tile& tile, int parts, int64_t rows, int64_t columns, int64_t inner, int64_t processors) {
  constexpr int64_t kStage = 50'000, kStageRow = 1000, kAllStageRow = 12;
  const auto steps = [](int64_t count, int64_t step) { return (count + step - 1) / step; };
  const int64_t blocks = steps(rows, tile.rows) * steps(columns, tile.columns) * parts;
  const int64_t stages = steps(steps(inner, kInner), parts), copied = tile.rows + tile.columns;
  const int64_t block = stages * (kStage + copied * kStageRow) * (tile.wgmma ? 4 : 7) / 4;
  const int64_t product = std::max(steps(blocks, processors) * block, blocks * stages * copied * kAllStageRow);
  return product + parts * rows * columns;
}

// `partial`: whether K may be split; the next kernel then adds up the parts.
inline Plan plan_product(int64_t rows, int64_t columns, int64_t inner, int64_t processors, bool partial) {
  const int64_t stages = (inner + kInner - 1) / kInner;
  const int most = partial ? static_cast<int>(std::min<int64_t>(kMaxParts, stages)) : 1;
  Plan best{0, 1};
  int64_t least = INT64_MAX;
  for (int tile = 0; tile < kTileCount; ++tile)
    for (int parts = 1; parts <= most; ++parts) {
      const int64_t time = time_of(kTiles[tile], parts, rows, columns, inner, processors);
      if (time < least) {
        least = time;
        best = {tile, parts};
      }
    }
  return best;
}

// Whether attention uses blocks of 16 queries whose warps share the keys: if there are at most two such blocks per SM.
inline bool splits_keys(int64_t sequences, int64_t heads, int64_t max_seqlen, int64_t processors) {
  return sequences * heads * ((max_seqlen + 15) / 16) <= 2 * processors;
}

}  // namespace few_rows
}  // namespace fasttfm
