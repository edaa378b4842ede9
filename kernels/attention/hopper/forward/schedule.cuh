// Query tiles of the Hopper attention forward, and the tile scheduler that assigns them to blocks.
#pragma once

#include <cstdint>

#include "attention/hopper/forward/shape.cuh"
#include "attention/hopper/shared/seqlen.cuh"
#include "attention/hopper/shared/window.h"
#include "common/packed.h"

namespace fasttfm {
namespace cuda {

// One query tile of one head.
struct alignas(16) QueryTile {
  int sequence;  // -1: there are no more tiles
  int head;
  int first;     // index of its first query in the sequence
  int q_length;  // number of queries and of keys of the sequence
  int k_length;
  int out_row;  // row of the head's first query in [tokens * heads, D]
  int lse_row;  // index of the head's first query in lse
  int blocks;   // number of steps with keys to which some query of the tile attends

  // The number of keys to which a causal query attends: the last query is aligned with the last key.
  __device__ __forceinline__ int causal_keys(int query) const { return query + 1 + k_length - q_length; }

  // The number of warpgroups that have queries in the tile, 64 each.
  template <class S>
  __device__ __forceinline__ int parts() const {
    return max(min((q_length - first + 63) >> 6, S::kQueries / 64), 1);
  }

  // The warpgroup that has the first queries of the next tile; `first_group` has those of this one. Queries are
  // assigned to warpgroups round-robin across tiles: the first queries of a tile go to the warpgroup after the one that
  // had the last queries of the previous tile. After a tile that occupies all warpgroups the assignment also advances
  // by one, because the warpgroups of a causal tile have unequal work.
  template <class S>
  __device__ __forceinline__ uint32_t next_first_group(uint32_t first_group) const {
    const int count = parts<S>();
    return (first_group + static_cast<uint32_t>(count == S::kGroups ? 1 : count)) % S::kGroups;
  }

  // With a window: the steps of keys to which the `count` queries from `query` on attend.
  template <class S>
  __device__ __forceinline__ Tiles window_steps(const Window& window, int query, int count) const {
    return attended_tiles<S::kKeys>(window, query, count, q_length, k_length);
  }
  // Without a window: the number of steps, which start at key 0.
  template <class S, bool CAUSAL>
  __device__ __forceinline__ int steps(int query, int count) const {
    int keys = query < q_length ? k_length : 0;
    if (CAUSAL) keys = min(keys, causal_keys(min(query + count, q_length) - 1));
    return static_cast<int>(static_cast<unsigned>(max(keys, 0) + S::kKeys - 1) / S::kKeys);
  }

  // One past the last result row that is written, which includes padding.
  __device__ __forceinline__ int rows(const ForwardParams& p) const { return p.packed() ? q_length : p.queries; }
};

// Which 64 queries of a tile the warpgroup has if warpgroup `first_group` has the first ones.
template <class S>
__device__ __forceinline__ int part_of(int group, uint32_t first_group) {
  return static_cast<int>((static_cast<uint32_t>(group) + S::kGroups - first_group) % S::kGroups);
}

// Assigns tiles to a block in ascending order of their index. Neighbouring tiles use the same keys, which are then in
// L2. All lanes of a warp call it together.
template <class S, Mask MASK>
class TileScheduler {
 public:
  explicit __device__ __forceinline__ TileScheduler(const ForwardParams& params)
      : p(params), number(static_cast<int>(blockIdx.x - gridDim.x)), fetched(number) {
    if (p.packed()) load_group();
  }

  // Called once between two calls of take(), early enough to hide the latency of the atomic. Calling it much earlier
  // would assign tiles to blocks that are still busy, when other blocks have no more tiles.
  __device__ __forceinline__ void fetch_next() {
    if (p.next != nullptr && lane() == 0) fetched = atomicAdd(p.next, 1);
  }

  // Returns the block's next tile; after the last one its sequence is -1.
  __device__ __forceinline__ QueryTile take() {
    number = static_cast<int>(gridDim.x) + (p.next != nullptr ? __shfl_sync(0xffffffffu, fetched, 0) : number);
    QueryTile tile = p.packed() ? packed_tile(number) : dense_tile(number);
    if (tile.sequence < 0) return tile;
    if constexpr (MASK == Mask::window) {
      const Tiles steps = tile.window_steps<S>(p.window, tile.first, S::kQueries);
      tile.blocks = steps.end - steps.begin;
      k_first = (p.packed() ? k_first : 0) + steps.begin * S::kKeys;
    } else {
      tile.blocks = tile.steps<S, kCausal>(tile.first, S::kQueries);
    }
    return tile;
  }

  int q_first = 0, k_first = 0;  // rows of the tile's first query and first key; relative to the sequence if dense

 private:
  static constexpr bool kCausal = MASK == Mask::causal;
  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }

  __device__ __forceinline__ QueryTile dense_tile(int index) {
    QueryTile tile;
    // Order: batches of heads; within a batch, the first tile of all heads, then the second, and so on. Causal tiles
    // with the most keys come first.
    const int pairs = p.sequences * p.heads;
    const int batch = index / (p.batched * p.tiles), rest = index - batch * p.batched * p.tiles;
    const int size = max(min(p.batched, pairs - batch * p.batched), 1);
    const int step = kCausal ? p.tiles - 1 - rest / size : rest / size;
    const int pair = batch * p.batched + rest % size;
    if (index >= pairs * p.tiles) {
      tile.sequence = -1;
      return tile;
    }
    tile.sequence = pair / p.heads;
    tile.head = pair - tile.sequence * p.heads;
    tile.first = step * S::kQueries;
    tile.q_length = dense_length(p.lengths, tile.sequence, p.queries);
    tile.k_length = dense_length(p.lengths_k, tile.sequence, p.keys);
    tile.out_row = tile.sequence * p.queries * p.heads + tile.head;
    tile.lse_row = pair * p.queries;
    q_first = tile.first;
    return tile;
  }

  // Longer sequences come first, which reduces the tail effect: round 0 has the sequences longer than half of the
  // longest, round 1 those longer than a quarter, round 2 all others.
  static constexpr int kRounds = 3;
  __device__ __forceinline__ int round_of(int length) const {
    return length > p.max_seqlen / 2 ? 0 : length > p.max_seqlen / 4 ? 1 : 2;
  }

  // Lane i loads the span of sequence 32 * group + i and computes the number of tiles up to its end. Rows after the
  // last sequence are treated as one more sequence, without keys.
  __device__ __forceinline__ void load_group() {
    const int sequence = 32 * group + lane();
    span = {0, 0};
    if (sequence < p.sequences) span = packed_span(p.cu_seqlens, sequence, p.queries, p.max_seqlen);
    if (sequence == p.sequences) {
      const int first = packed_first(p.cu_seqlens, sequence, p.queries);
      span = {first, p.queries - first};
    }
    end = start + (round_of(span.length) == round ? (span.length + S::kQueries - 1) / S::kQueries * p.heads : 0);
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int before = __shfl_up_sync(0xffffffffu, end - start, distance);
      if (lane() >= distance) end += before;
    }
  }

  __device__ __forceinline__ QueryTile packed_tile(int index) {
    QueryTile tile;
    unsigned after = __ballot_sync(0xffffffffu, end > index);
    while (after == 0) {
      start = __shfl_sync(0xffffffffu, end, 31);
      ++group;
      if (32 * group > p.sequences) {
        group = 0;
        ++round;
      }
      if (round == kRounds) {
        tile.sequence = -1;
        return tile;
      }
      load_group();
      after = __ballot_sync(0xffffffffu, end > index);
    }
    const int owner = __ffs(static_cast<int>(after)) - 1;
    tile.sequence = 32 * group + owner;
    const int origin = __shfl_sync(0xffffffffu, span.first, owner);
    tile.q_length = __shfl_sync(0xffffffffu, span.length, owner);
    const int tiles = (tile.q_length + S::kQueries - 1) / S::kQueries;
    const int index_in_sequence = index - (__shfl_sync(0xffffffffu, end, owner) - tiles * p.heads);
    // With a window, the tiles of neighbouring heads follow one another: their rows are adjacent in memory, and each is
    // read about once. Without a window, the tiles of one head follow one another, because they use the same keys.
    tile.head = MASK == Mask::window ? index_in_sequence % p.heads : index_in_sequence / tiles;
    const int step = MASK == Mask::window ? index_in_sequence / p.heads : index_in_sequence - tile.head * tiles;
    tile.first = (kCausal ? tiles - 1 - step : step) * S::kQueries;
    tile.out_row = origin * p.heads + tile.head;
    tile.lse_row = tile.head * p.queries + origin;
    q_first = origin + tile.first;
    Span keys = {0, 0};
    if (tile.sequence < p.sequences) keys = packed_span(p.cu_seqlens_k, tile.sequence, p.keys, p.max_seqlen_k);
    k_first = keys.first;
    tile.k_length = keys.length;
    return tile;
  }

  const ForwardParams& p;
  int number;                                    // index of the tile
  int fetched;                                   // in lane 0: index of the next tile, minus the grid size
  int round = 0, group = 0, start = 0, end = 0;  // packed: see load_group()
  Span span = {0, 0};
};

}  // namespace cuda
}  // namespace fasttfm
