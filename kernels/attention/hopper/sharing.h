// How the backward for head dim 64 shares its work among blocks: host code, known to builds without CUDA too.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/op.h"

namespace fasttfm {
namespace cuda {
namespace hopper_backward {

constexpr int kQueries = 64;  // of a tile
constexpr int kKeys = 128;    // of a tile; 64 for each of the two warpgroups
constexpr int kOnChipQueries = 512;
constexpr int kMaxBlocks = 256;  // of the grid

// The largest number of blocks that may share one of `units` (sequence, head)s; attention_column_parts() has room for
// that many.
inline int64_t max_blocks(int64_t units, int64_t max_seqlen) {
  return max_seqlen > kOnChipQueries ? std::max<int64_t>(kMaxBlocks / std::max<int64_t>(units, 1), 2) : 1;
}

// The number of blocks that share a (sequence, head) of more than kOnChipQueries queries: the number that minimizes the
// steps of the block with the most work. Each additional block of a group costs part of a step per tile of keys,
// because the blocks wait for one another. A block that shares with no other reads the queries, gradients and sums (512
// bytes per token) once per tile of keys: from L2 if they fit for all blocks, otherwise from global memory, which is
// slower.
struct Sharing {
  int blocks;         // per sequence and head
  double efficiency;  // mean number of steps per SM, over the steps of the SM that has the most
};

inline Sharing sharing_of(const AttentionCall& call, bool causal, int processors) {
  if (call.max_seqlen <= kOnChipQueries) return {1, 1.0};
  const int64_t units = call.sequences * call.heads, queries = std::min(call.max_seqlen, call.queries);
  const int64_t key_tiles = (std::min(call.max_seqlen_k, call.keys) + kKeys - 1) / kKeys;
  const double part = causal ? 0.5 : 1.0;  // fraction of all tiles that are computed
  int best = 1;
  double least = 0;
  const int64_t most =
      std::min({std::max<int64_t>(key_tiles, 1), max_blocks(units, call.max_seqlen), static_cast<int64_t>(processors)});
  for (int blocks = 1; blocks <= most; ++blocks) {
    const int64_t groups = processors / blocks;
    const int64_t rounds = (units + groups - 1) / groups * ((key_tiles + blocks - 1) / blocks);
    const bool fits = blocks > 1 || part * std::min(units, groups) * queries <= 90 * 1024;
    const double time = rounds * (part * queries / kQueries + 0.65 * blocks) * (fits ? 1.0 : 1.15);
    if (blocks == 1 || time < least) {
      best = blocks;
      least = time;
    }
  }
  return {best, units * key_tiles * (part * queries / kQueries) / (processors * least)};
}

}  // namespace hopper_backward
}  // namespace cuda
}  // namespace fasttfm
