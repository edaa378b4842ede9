// The tile of a GEMM for few rows, and the number of parts into which K is split. They minimize an estimate of the
// time, which depends only on the sizes and the number of SMs, so results of the same call are always bitwise
// identical.
#pragma once

#include <algorithm>
#include <cstdint>

#include "few_rows/gemm_tiles.h"
#include "few_rows/tiles.h"

namespace fasttfm {
namespace few_rows {

constexpr int kMaxParts = 4;

// Up to this many rows all GEMMs of a layer have the same tile. Their kernels take a few microseconds, and a further
// kernel adds about 0.6 of them to a layer on an H200, because its instructions are loaded, too.
constexpr int64_t kSameTileRows = 320;

struct Plan {
  int tile;         // an index into kGemmTiles
  int parts;        // of K
  int cluster = 0;  // blocks that share the rows of x; 0: the tile's own number
};

struct GemmSize {
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
inline int64_t time_of(const GemmTile& tile, int parts, int64_t rows, const GemmSize& size, int64_t processors) {
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
inline Estimate estimate(const GemmTile& tile, int64_t rows, const GemmSize& size, int64_t processors) {
  const int64_t most = size.partial ? std::min<int64_t>(kMaxParts, steps(size.inner, kInner)) : 1;
  Estimate best{INT64_MAX, 1};
  for (int parts = 1; parts <= most; ++parts) {
    const int64_t time = time_of(tile, parts, rows, size, processors);
    if (time < best.time) best = {time, parts};
  }
  return best;
}

// The time of the GEMMs of a layer with a tile. All of them have the layer's width as their smaller size.
inline int64_t layer_time(const GemmTile& tile, int64_t rows, int64_t width, int64_t processors) {
  int64_t time = 0;
  for (const GemmSize& size : {GemmSize{3 * width, width, false}, GemmSize{width, width, true},
                               GemmSize{4 * width, width, false}, GemmSize{width, 4 * width, true}})
    time += estimate(tile, rows, size, processors).time;
  return time;
}

inline Plan plan_gemm(int64_t rows, const GemmSize& size, int64_t processors) {
  int best = 0;
  int64_t least = INT64_MAX;
  for (int tile = 0; tile < kGemmTileCount; ++tile) {
    // Clusters of four are faster only if all blocks have the same rows.
    if (kGemmTiles[tile].cluster > 2 && rows > kGemmTiles[tile].rows) continue;
    const int64_t time = rows <= kSameTileRows
                             ? layer_time(kGemmTiles[tile], rows, std::min(size.columns, size.inner), processors)
                             : estimate(kGemmTiles[tile], rows, size, processors).time;
    if (time >= least) continue;
    least = time;
    best = tile;
  }
  return {best, estimate(kGemmTiles[best], rows, size, processors).parts};
}

// ---- layers ----------------------------------------------------------------------------------------------------------

// Which LayerNorms of a post-LN layer are parts of its GEMMs: none; the first, after attention; or both.
enum class FoldedNorms : int32_t { none = 0, first = 1, both = 2 };

struct LayerPlan {
  Plan qkv, out, up, down;
};

// Indices into kGemmTiles:
constexpr int k64x32 = 0, k64x64 = 2, k128x64 = 4;
constexpr int64_t kNarrow = 512;  // with both LayerNorms folded, layers up to this width have tiles of half the size
constexpr int64_t kWide = 1024;   // from this width on, fewer blocks share the rows of x

inline int64_t tiles_in(int tile, int64_t rows, int64_t columns) {
  return steps(rows, kGemmTiles[tile].rows) * steps(columns, kGemmTiles[tile].columns);
}

inline LayerPlan plan_separate_norms(int64_t rows, int64_t width, int64_t intermediate, int64_t processors) {
  return {plan_gemm(rows, {3 * width, width, false}, processors), plan_gemm(rows, {width, width, true}, processors),
          plan_gemm(rows, {intermediate, width, false}, processors),
          plan_gemm(rows, {width, intermediate, true}, processors)};
}

// With the first LayerNorm in the GEMMs, the out projection has K in one part, to which its epilogue adds the residual
// (gemm_result.cuh). Of the tiles of 64 columns it has the smaller one, while that has no more blocks than SMs. The
// others have the tiles that they have without: every tile has a kernel that reads statistics.
static_assert(adds_to_one_part(kGemmTiles[k64x64]) && adds_to_one_part(kGemmTiles[k128x64]), "tiles of out");
inline LayerPlan plan_first_norm(int64_t rows, int64_t width, int64_t intermediate, int64_t processors) {
  LayerPlan plan = plan_separate_norms(rows, width, intermediate, processors);
  plan.out = {tiles_in(k64x64, rows, width) <= processors ? k64x64 : k128x64, 1, 1};
  return plan;
}

// With both LayerNorms in them, all GEMMs of a layer have the same kernel, so few sizes of tiles come into question;
// the thresholds are those of measurements on an H200 (docs/notes/few_tokens.md).
inline int layer_tile(int64_t rows, int64_t width) {
  const bool narrow = width <= kNarrow;
  if (rows <= 64) return narrow ? k64x32 : k64x64;
  return narrow ? k64x64 : k128x64;
}

// The most parts of K, up to four, with at most `blocks` blocks. More parts take longer to add than they save.
inline int parts_within(int64_t blocks, int64_t tiles, int64_t inner) {
  int parts = kMaxParts;
  while (parts > 1 && (parts * tiles > blocks || parts > steps(inner, kInner))) parts /= 2;
  return parts;
}

// Blocks share the rows of x only where each has few of them to multiply: loading x takes most of the time then.
// Otherwise a cluster has only the parts of K, since its blocks begin together. The out projection, whose sums over K
// are short, leaves some SMs free, because fewer parts are faster than blocks on all of them.
inline LayerPlan plan_both_norms(int64_t rows, int64_t width, int64_t intermediate, int64_t processors) {
  const int tile = layer_tile(rows, width);
  const int added = rows <= 64 ? 2 : 1, rounded = rows <= 64 && width < kWide ? 4 : added;
  const int64_t tiles = tiles_in(tile, rows, width);
  const int64_t filled = resident_blocks(kMaxParts, processors);
  const int out = parts_within(processors * 3 / 4, tiles, width), down = parts_within(filled, tiles, intermediate);
  return {{tile, 1, rounded}, {tile, out, added}, {tile, 1, rounded}, {tile, down, added}};
}

inline LayerPlan plan_layer(FoldedNorms norms, int64_t rows, int64_t width, int64_t intermediate, int64_t processors) {
  const auto plan = norms == FoldedNorms::both    ? plan_both_norms
                    : norms == FoldedNorms::first ? plan_first_norm
                                                  : plan_separate_norms;
  return plan(rows, width, intermediate, processors);
}

// Layers with folded LayerNorms have up to this many elements in a row times rows, so that parts of K and statistics
// fit into the workspace.
constexpr int64_t kMostFoldedElements = 1 << 22;

// The rows for which layers are faster with both LayerNorms in their GEMMs than with a kernel for each. Up to 32 rows,
// one kernel runs all layers of common sizes. Where tiles have 128 rows, a quarter or more of those of two tiles are
// empty from 129 to 192 rows; from 257 on, adding the parts of K of the down projection in clusters takes as long as a
// LayerNorm.
constexpr bool folds_both(int64_t rows, int64_t width) {
  if (width <= kNarrow) return rows > 32 && rows <= kSameTileRows;
  return (rows > 32 && rows <= 128) || (rows > 192 && rows <= 256);
}

// The same with the first LayerNorm. Up to kSameTileRows rows all GEMMs would otherwise share one kernel, and those of
// out and up take as long to load as a LayerNorm takes, except in wide layers. Where out has more blocks than SMs, K in
// one part takes longer than parts and a LayerNorm.
inline bool folds_first(int64_t rows, int64_t width, int64_t processors) {
  return rows > (width < kWide ? kSameTileRows : 256) && tiles_in(k128x64, rows, width) <= processors;
}

// The LayerNorms that are parts of the GEMMs of a layer. With both, the widest GEMM has a block for each of its tiles
// at once.
inline FoldedNorms folded_norms(int64_t rows, int64_t width, int64_t intermediate, int64_t processors) {
  if (width % kGroupColumns != 0 || rows * width > kMostFoldedElements) return FoldedNorms::none;
  const int64_t widest = tiles_in(layer_tile(rows, width), rows, std::max(3 * width, intermediate));
  if (folds_both(rows, width) && widest <= processors) return FoldedNorms::both;
  return folds_first(rows, width, processors) ? FoldedNorms::first : FoldedNorms::none;
}

// Whether attention uses blocks of 16 queries whose keys are divided among the warps: if there are at most two such
// blocks per SM.
inline bool splits_keys(int64_t sequences, int64_t heads, int64_t max_seqlen, int64_t processors) {
  return sequences * heads * ((max_seqlen + 15) / 16) <= 2 * processors;
}

}  // namespace few_rows
}  // namespace fasttfm
