// How the Hopper backward divides its work: how many query heads a block processes together if they share k and v, and
// how many blocks process one (sequence, head) pair. Host code, which is also compiled in builds without CUDA.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/hopper/shared/window.h"
#include "attention/op.h"
#include "common/host_device.h"

namespace fasttfm {
namespace cuda {
namespace hopper_backward {

constexpr int kQueries = 64;         // per tile
constexpr int kKeys = 128;           // per tile; 64 for each of the two consumer warpgroups
constexpr int kOnChipQueries = 512;  // up to this many queries, dQ is accumulated in shared memory
constexpr int kMaxBlocks = 256;      // in the grid

// Where heads of q share a head of k and v, a unit of work is a (sequence, head of dk and dv) pair, with kv_heads heads
// or a multiple of that: the unit's query heads are consecutive. Otherwise a unit has one query head.
struct Units {
  int64_t count;
  int64_t heads_per_unit;  // query heads
  int64_t queries, keys;   // of the longest sequence
};

inline Units units_of(const AttentionCall& call, int64_t heads_per_unit) {
  return {call.sequences * call.heads / heads_per_unit, heads_per_unit, std::min(call.max_seqlen, call.queries),
          std::min(call.max_seqlen_k, call.keys)};
}

// The average fraction of the queries that attends to a key tile.
inline double attending_fraction(const AttentionCall& call) {
  if (call.window_left == -1 && call.window_right <= 0) return call.window_right == 0 ? 0.5 : 1.0;
  const Window window = Window::of(call.window_left, call.window_right, call.queries, call.keys);
  const double queries = static_cast<double>(std::min(call.max_seqlen, call.queries));
  return std::min(1.0, (kKeys + window.left + window.right) / (queries + 1.0));
}

inline int64_t tiles_for(int64_t rows, int64_t tile) { return (rows + tile - 1) / tile; }

// The largest number of blocks per unit if there are `units` units. attention_column_parts() allocates for that many.
// `queries`: of a unit; `with_semaphores`: whether the kernel is that of backward_d64/long.cu, in which semaphores
// order the additions to dQ.
inline int64_t max_blocks(int64_t units, int64_t queries, bool with_semaphores) {
  const int64_t blocks = with_semaphores ? 1024 : kMaxBlocks;
  return queries > kOnChipQueries ? std::max<int64_t>(blocks / std::max<int64_t>(units, 1), 2) : 1;
}

// Blocks whose additions to dQ semaphores order (backward_split_units.cuh) start kSpread query tiles apart if there are
// enough query tiles.
constexpr int kSpread = 4;
FASTTFM_HOST_DEVICE bool can_spread(int blocks, int query_tiles, int key_tiles) {
  return blocks * kSpread <= query_tiles && key_tiles % blocks == 0;
}

// A query tile of a unit: its index among the tiles of its head, and which of the unit's query heads it is.
struct HeadTile {
  int tile, member;
};
// The unit's query tiles are ordered by tile, and within a tile by query head: tile * heads_per_unit + member. The
// quotient has the reciprocal of 2 * heads_per_unit as a factor; adding a half makes it exact if can_number().
FASTTFM_HOST_DEVICE uint32_t half_reciprocal(int heads_per_unit) {
  return ((1u << 31) + heads_per_unit - 1) / heads_per_unit;
}
FASTTFM_HOST_DEVICE HeadTile split(int index, int heads_per_unit, uint32_t half_reciprocal) {
  const int tile = static_cast<int>(static_cast<uint64_t>(2u * index + 1u) * half_reciprocal >> 32);
  return {tile, index - tile * heads_per_unit};
}
inline bool can_number(const Units& units) {
  return (tiles_for(units.queries, kQueries) + 1) * units.heads_per_unit * units.heads_per_unit <= 1 << 30;
}

// How a unit is divided among blocks.
struct WorkPartition {
  int blocks;         // per unit
  double efficiency;  // mean number of steps per SM, over the steps of the SM that has the most
};

// The number of blocks per unit of more than kOnChipQueries queries, head dim 64: the one that minimizes the steps of
// the block with the most work. Each additional block of a group costs part of a step per key tile, because the blocks
// wait for one another, unless semaphores order their additions and they start apart. If a group has one block, that
// block reads the queries, gradients and sums (512 bytes per token) once per key tile: from L2 if those of all blocks
// fit, otherwise from global memory, which is slower.
inline WorkPartition partition_of(const Units& units, bool causal, bool with_semaphores, int processors) {
  const int64_t queries = units.heads_per_unit * units.queries, key_tiles = tiles_for(units.keys, kKeys);
  const double part = causal ? 0.5 : 1.0;  // fraction of all tiles that are computed
  const double query_tiles = part * queries / kQueries;
  if (!with_semaphores && units.queries <= kOnChipQueries) return {1, 1.0};
  const int spread_tiles = static_cast<int>(units.heads_per_unit * tiles_for(units.queries, kQueries));
  int best = 1;
  double least = 0;
  const int64_t tokens_in_l2 = (with_semaphores ? 64 : 90) * 1024;
  const int64_t most = std::min({std::max<int64_t>(key_tiles, 1), max_blocks(units.count, queries, with_semaphores),
                                 static_cast<int64_t>(processors)});
  for (int blocks = 1; blocks <= most; ++blocks) {
    const int64_t groups = processors / blocks;
    const int64_t rounds = tiles_for(units.count, groups) * tiles_for(key_tiles, blocks);
    const bool fits = blocks > 1 || part * std::min(units.count, groups) * queries <= tokens_in_l2;
    const bool spread = with_semaphores && !causal && can_spread(blocks, spread_tiles, static_cast<int>(key_tiles));
    const double wait = spread ? 0.0 : 0.65 * blocks;
    const double time = rounds * (query_tiles + wait) * (fits ? 1.0 : 1.15);
    if (blocks == 1 || time < least || (spread && time == least)) {  // more blocks that do not wait find more in L2
      best = blocks;
      least = time;
    }
  }
  return {best, units.count * key_tiles * query_tiles / (processors * least)};
}

// The number of blocks per unit, head dims 80 to 128: the one that minimizes the time of the block with the most work.
// `attending`: attending_fraction(). The blocks of a unit iterate over the same queries, about 2 steps apart. The
// queries, gradients and sums that they access take 1 KB per token. If those of all units in flight do not fit into L2,
// the first block to access them waits longer.
inline WorkPartition partition_of_d128(const Units& units, double attending, int processors) {
  const int64_t key_tiles = std::max<int64_t>(tiles_for(units.keys, kKeys), 1);
  const int64_t query_tiles = units.heads_per_unit * tiles_for(units.queries, kQueries);
  int best = 1;
  double least = 0;
  for (int blocks = 1; blocks <= std::min<int64_t>(key_tiles, processors); ++blocks) {
    const int64_t groups = processors / blocks;
    const int64_t rounds = tiles_for(units.count, groups) * tiles_for(key_tiles, blocks);
    const double tokens =
        std::min(units.count, groups) * units.heads_per_unit * units.queries * (blocks > 1 ? attending : 1.0);
    const double time = (attending * rounds * query_tiles + 2.1 * blocks) *
                        (tokens <= 36 * 1024 ? 1.0 : 1.0 + 0.4 * attending / blocks);
    if (blocks == 1 || time < least) {
      best = blocks;
      least = time;
    }
  }
  return {best, units.count * key_tiles * attending * query_tiles / (processors * least)};
}

// ---- query heads that share k and v ---------------------------------------------------------------------------------

// Whether the kernels can read k and v of shared heads, and whether a block can process several query heads together:
// not where dQ is accumulated in shared memory, because that expects one query head per key tile.
inline bool can_share_keys(const AttentionCall& call) { return call.head_dim >= 64 && call.seed == nullptr; }
inline bool has_plain_mask(const AttentionCall& call) { return call.window_left == -1 && call.window_right <= 0; }
inline bool can_group(const AttentionCall& call) {
  return can_share_keys(call) && (call.head_dim > 64 || has_plain_mask(call));
}

// The steps of the SM with the most work if units have `heads_per_unit` query heads.
inline double most_steps(const AttentionCall& call, int64_t heads_per_unit, int processors) {
  const Units units = units_of(call, heads_per_unit);
  const bool causal = call.window_right == 0, wide = call.head_dim > 128;
  const double attending = attending_fraction(call);
  const int64_t query_tiles = heads_per_unit * tiles_for(units.queries, kQueries),
                key_tiles = tiles_for(units.keys, kKeys);
  if (wide || !has_plain_mask(call))  // key tiles are distributed one by one
    return attending * query_tiles *
           tiles_for(units.count * (wide ? tiles_for(units.keys, 64) : key_tiles), processors);
  const bool with_semaphores = units.queries > kOnChipQueries || heads_per_unit > 1;
  const int blocks = call.head_dim > 64 ? partition_of_d128(units, attending, processors).blocks
                                        : partition_of(units, causal, with_semaphores, processors).blocks;
  const int64_t groups = processors / blocks, rounds = tiles_for(key_tiles, blocks);
  // In two rounds, a causal block has many query tiles and then few, or the other way round.
  const int64_t tiles = query_tiles * (causal ? (rounds + 1) / 2 : rounds);
  // Packed sequences that fill a part of the longest one's length have that part of its query tiles, and of its rounds.
  const double longest = static_cast<double>(std::max<int64_t>(call.sequences * units.queries, 1));
  const double part = call.cu_seqlens == nullptr ? 1.0 : std::min(1.0, call.queries / longest);
  if (part == 1.0) return static_cast<double>(tiles * tiles_for(units.count, groups));
  return tiles * std::max(1.0, part * (part + (1 - part) / rounds) * units.count / groups);
}

// The estimated time in us of a backward whose units have `heads_per_unit` query heads. A step takes about 1.4 us with
// head dim 64 and 2 or 2.7 us with others. If units have several query heads it takes up to 0.08 us more, and 0.25 if
// causal, because blocks of a unit wait for one another more often: in proportion to the unit's queries, up to 16,384.
// If a group's query heads are not all in one unit, another pass reads the partial sums of dk and dv and writes dk and
// dv, at 2 MB per us. The constants are fitted to measurements on an H200: nvidia-h200-kernel_variants.csv.
inline double time_of_units(const AttentionCall& call, int64_t heads_per_unit, int processors) {
  const Units units = units_of(call, heads_per_unit);
  double step = call.head_dim > 128 ? 2.0 : call.head_dim > 64 ? 2.7 : 1.4;
  if (call.head_dim <= 128 && has_plain_mask(call) && heads_per_unit > 1)
    step += (call.window_right == 0 ? 0.25 : 0.08) * std::min(1.0, heads_per_unit * units.queries / 16384.0);
  const double time = step * most_steps(call, heads_per_unit, processors);
  if (heads_per_unit * call.kv_heads == call.heads) return time;
  const int64_t keys = call.cu_seqlens_k == nullptr ? call.sequences * call.keys : call.keys;
  return time + 10.0 + 4.0 * keys * call.head_dim * (call.heads / heads_per_unit + call.kv_heads) / 2e6;
}

// How many query heads that share k and v a block processes together, 1 to all of them: the number with the shortest
// time. The block then accumulates their dk and dv in its registers; but there are fewer units for the SMs.
inline int64_t heads_together(const AttentionCall& call, int processors) {
  const int64_t group = call.heads / std::max<int64_t>(call.kv_heads, 1);
  if (group <= 1 || !can_group(call) || call.sequences == 0 || processors <= 0) return 1;
  int64_t best = 1;
  double least = time_of_units(call, 1, processors);
  for (int64_t heads_per_unit = 2; heads_per_unit <= group; ++heads_per_unit) {
    if (group % heads_per_unit != 0 || !can_number(units_of(call, heads_per_unit))) continue;
    const double time = time_of_units(call, heads_per_unit, processors);
    if (time <= least) {
      best = heads_per_unit;
      least = time;
    }
  }
  return best;
}

}  // namespace hopper_backward
}  // namespace cuda
}  // namespace fasttfm
