// How many blocks of the backward for head dim 64 process one (sequence, head) pair. Host code, which is also compiled
// in builds without CUDA.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/op.h"
#include "common/philox.h"  // FASTTFM_HOST_DEVICE

namespace fasttfm {
namespace cuda {
namespace hopper_backward {

constexpr int kQueries = 64;         // per tile
constexpr int kKeys = 128;           // per tile; 64 for each of the two consumer warpgroups
constexpr int kOnChipQueries = 512;  // up to this many queries, dQ is accumulated in shared memory
constexpr int kMaxBlocks = 256;      // in the grid

// The largest number of blocks per (sequence, head) pair if there are `units` pairs. attention_column_parts() allocates
// for that many. `in_turns`: whether the kernel is that of backward_long.cu, whose blocks add to dQ in turns.
inline int64_t max_blocks(int64_t units, int64_t max_seqlen, bool in_turns) {
  const int64_t blocks = in_turns ? 1024 : kMaxBlocks;
  return max_seqlen > kOnChipQueries ? std::max<int64_t>(blocks / std::max<int64_t>(units, 1), 2) : 1;
}

// Blocks that add to dQ in turns (backward_turns.cuh) start kSpread query tiles apart if there are enough query tiles.
constexpr int kSpread = 4;
FASTTFM_HOST_DEVICE bool can_spread(int blocks, int query_tiles, int key_tiles) {
  return blocks * kSpread <= query_tiles && key_tiles % blocks == 0;
}

// The number of blocks per (sequence, head) pair of more than kOnChipQueries queries: the one that minimizes the steps
// of the block with the most work. Each additional block of a group costs part of a step per key tile, because the
// blocks wait for one another, unless they add in turns and start apart. If a group has one block, that block reads the
// queries, gradients and sums (512 bytes per token) once per key tile: from L2 if those of all blocks fit, otherwise
// from global memory, which is slower.
struct Sharing {
  int blocks;         // per (sequence, head) pair
  double efficiency;  // mean number of steps per SM, over the steps of the SM that has the most
};

inline Sharing sharing_of(const AttentionCall& call, bool causal, bool in_turns, int processors) {
  if (call.max_seqlen <= kOnChipQueries) return {1, 1.0};
  const int64_t units = call.sequences * call.heads, queries = std::min(call.max_seqlen, call.queries);
  const int64_t key_tiles = (std::min(call.max_seqlen_k, call.keys) + kKeys - 1) / kKeys;
  const double part = causal ? 0.5 : 1.0;  // fraction of all tiles that are computed
  const int query_tiles = static_cast<int>((queries + kQueries - 1) / kQueries);
  int best = 1;
  double least = 0;
  const int64_t tokens_in_l2 = (in_turns ? 64 : 90) * 1024;
  const int64_t most = std::min({std::max<int64_t>(key_tiles, 1), max_blocks(units, call.max_seqlen, in_turns),
                                 static_cast<int64_t>(processors)});
  for (int blocks = 1; blocks <= most; ++blocks) {
    const int64_t groups = processors / blocks;
    const int64_t rounds = (units + groups - 1) / groups * ((key_tiles + blocks - 1) / blocks);
    const bool fits = blocks > 1 || part * std::min(units, groups) * queries <= tokens_in_l2;
    const bool spread = in_turns && !causal && can_spread(blocks, query_tiles, static_cast<int>(key_tiles));
    const double wait = spread ? 0.0 : 0.65 * blocks;
    const double time = rounds * (part * queries / kQueries + wait) * (fits ? 1.0 : 1.15);
    if (blocks == 1 || time < least || (spread && time == least)) {  // more blocks that do not wait find more in L2
      best = blocks;
      least = time;
    }
  }
  return {best, units * key_tiles * (part * queries / kQueries) / (processors * least)};
}

}  // namespace hopper_backward
}  // namespace cuda
}  // namespace fasttfm
