// attention backward for Hopper: its parameters, and which tiles of which (sequence, head) a block processes.
#pragma once

#include <cstdint>

#include "attention/hopper/seqlen.cuh"
#include "attention/hopper/sharing.h"
#include "common/cuda/hopper.cuh"

namespace fasttfm {
namespace cuda {
namespace hopper_backward {

constexpr int kHeadDim = 64;
constexpr int kThreads = 4 * kWarpgroup;
constexpr int kQueryTileBytes = kQueries * kTileRowBytes;
constexpr int kKeyTileBytes = kKeys * kTileRowBytes;
constexpr int kStageBytes = 2 * kQueryTileBytes;
static_assert(kStageBytes == kKeyTileBytes);
constexpr int kStatisticsBytes = 2 * kQueries * 4;
constexpr int kSumFloats = kQueries * kHeadDim;  // of dQ, per tile
constexpr int kColumnPlaces = 8;                 // warps that process the rows of a tile of keys

struct Output {
  void* data;
  int64_t sequence, token, head;  // strides in elements
};

struct Parameters {
  CUtensorMap q, k, v, dout;
  Output dq, dk, dv;
  const int32_t *cu_seqlens, *cu_seqlens_k, *lengths, *lengths_k;
  const int64_t* seed;
  const float* statistics;  // [heads, tiles, 2, kQueries]: lse in units of log2, and delta
  float* sums;              // [heads, tiles, kSumFloats]: partial sums of dQ, unless they are in shared memory
  uint32_t* progress;       // [kMaxBlocks]: how many additions to them each block has completed
  int* order;  // [sequences]: the sequences in the order of their work, most first; null: in their own order
  int* taken;  // counter from which blocks fetch (sequence, head)s; null: the assignment is static
  int sequences, heads, queries, keys, max_seqlen, max_seqlen_k, tiles;
  int threshold;
  float score_scale;  // in units of log2
  float dq_scale;     // of dq and dk
  float dv_scale;
  int blocks;           // of a group, which shares a (sequence, head)
  float* column_parts;  // [sequences, blocks, kColumnPlaces, 3, heads, kHeadDim], or null: see column_sums.cuh
};

// The tokens of one sequence, and the number of rows of results to write for it.
struct StoredSpan {
  int first, length, stored;
};

__device__ __forceinline__ StoredSpan span_of(const int32_t* cu_seqlens, const int32_t* lengths, int sequence, int size,
                                              int longest) {
  if (cu_seqlens != nullptr) {
    const Span span = packed_span(cu_seqlens, sequence, size, longest);
    return {span.first, span.length, span.length};
  }
  return {0, dense_length(lengths, sequence, size), size};
}

__device__ __forceinline__ int divide_up(int a, int b) { return (a + b - 1) / b; }

// The index of a sequence's first tile in statistics and sums. The last tile of a sequence may extend past its end.
__device__ __forceinline__ int first_tile(const int32_t* cu_seqlens, int sequence, int first, int queries) {
  return cu_seqlens == nullptr ? sequence * divide_up(queries, kQueries) : first / kQueries + sequence;
}

// One (sequence, head), and which tiles of queries attend to which tiles of keys.
template <bool CAUSAL>
struct Unit {
  int sequence, head;
  StoredSpan q, k;
  int query_tiles, key_tiles, tile;  // tile: index of the first one in statistics and sums

  Unit() = default;
  __device__ __forceinline__ Unit(const Parameters& p, int unit)
      : sequence(p.order == nullptr ? unit / p.heads : p.order[unit / p.heads]),
        head(unit % p.heads),
        q(span_of(p.cu_seqlens, p.lengths, sequence, p.queries, p.max_seqlen)),
        k(span_of(p.cu_seqlens_k, p.lengths_k, sequence, p.keys, p.max_seqlen_k)),
        query_tiles(k.length > 0 ? divide_up(q.length, kQueries) : 0),
        key_tiles(q.length > 0 ? divide_up(k.length, kKeys) : 0),
        tile(head * p.tiles + first_tile(p.cu_seqlens, sequence, q.first, p.queries)) {}

  __device__ __forceinline__ int offset() const { return k.length - q.length; }
  // The first tile of queries that attends to a tile of keys. The last one always does.
  __device__ __forceinline__ int begin(int key_tile) const {
    return CAUSAL ? max(key_tile * kKeys - offset(), 0) / kQueries : 0;
  }
  // The last tile of keys that a tile of queries attends to, or -1 for none.
  __device__ __forceinline__ int last_key_tile(int query_tile) const {
    if (!CAUSAL) return key_tiles - 1;
    const int last = query_tile * kQueries + kQueries - 1 + offset();
    return last < 0 ? -1 : min(last / kKeys, key_tiles - 1);
  }
};

// The (sequence, head) of a group of blocks in a round. Rounds alternate in direction, because units may be sorted by
// their work.
__device__ __forceinline__ int unit_of_round(int round, int group, int groups) {
  return round * groups + (round % 2 ? groups - 1 - group : group);
}

// The block's share of the work: the (sequence, head) unit_of_round() of every round, or only of the first one if the
// others are fetched from a counter; and of each of them the tiles of keys rank, rank + blocks, and so on.
struct Share {
  int rank, group, groups, units;

  explicit __device__ __forceinline__ Share(const Parameters& p)
      : rank(blockIdx.x % p.blocks),
        group(blockIdx.x / p.blocks),
        groups(gridDim.x / p.blocks),
        units(p.sequences * p.heads) {}
};

// A tile of keys of this block. The producer warp, which fetches the work, publishes it to the other warps.
struct Task {
  Unit<true> unit;
  int key_tile;    // -1: there are no more
  uint32_t place;  // of the first tile of queries in the order of additions: see OrderedSums
};

}  // namespace hopper_backward
}  // namespace cuda
}  // namespace fasttfm
