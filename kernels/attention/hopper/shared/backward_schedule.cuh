// attention backward for Hopper: the kernel parameters, and the schedule that assigns (sequence, head) pairs and tiles
// to blocks.
#pragma once

#include <cstdint>

#include "attention/hopper/shared/seqlen.cuh"
#include "attention/hopper/shared/window.h"
#include "attention/hopper/shared/work_partition.h"
#include "common/cuda/hopper.cuh"
#include "common/packed.h"

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
constexpr int kSumFloats = kQueries * kHeadDim;  // dQ of a query tile
constexpr int kColumnParts = 8;                  // partial column sums: one per warp of warpgroups 1 and 2

struct Output {
  void* data;
  int64_t sequence, token, head;  // strides in elements
};

// How gradients in FP8 are written in addition to their rows, which are Outputs: see fp8_gradients.cuh.
struct Fp8Output {
  const float* scale;  // [1]
  float* amax;         // [1]
  uint8_t* columns;    // [3 * heads * kHeadDim, padded]
  int64_t padded;
  int e5m2;
};

// The grouping of query heads that share k and v, for kernels with GROUPED. A unit of work is then a (sequence, head of
// dk and dv) pair with `heads_per_unit` consecutive query heads.
struct Grouping {
  int group;                 // heads / kv_heads
  int gradient_heads;        // of dk and dv
  int heads_per_unit;        // heads / gradient_heads
  uint32_t half_reciprocal;  // of heads_per_unit: see split()
};

struct Parameters {
  CUtensorMap q, k, v, dout;
  Output dq, dk, dv;
  const int32_t *cu_seqlens, *cu_seqlens_k, *lengths, *lengths_k;
  const int64_t* seed;
  const float* statistics;  // [heads, tiles, 2, kQueries]: lse in units of log2, and delta
  float* sums;              // [heads, tiles, kSumFloats]: partial sums of dQ, unless they are in shared memory
  uint32_t* progress;       // [kMaxBlocks]: progress of each block's additions to the sums: see OrderedSums
  int* dq_semaphores;       // [heads, tiles]: the number of completed additions to a tile of the sums: see SplitUnit
  int* order;               // [sequences]: sequences sorted by decreasing work; null: not sorted
  int* taken;               // counter from which blocks fetch (sequence, head) pairs; null: the assignment is static
  int sequences, heads, head_dim, queries, keys, max_seqlen, max_seqlen_k, tiles;
  int threshold;
  float score_scale;  // in units of log2
  float dq_scale;     // for dq and dk
  float dv_scale;
  int blocks;           // blocks per group; a group processes one (sequence, head) pair at a time
  float* column_parts;  // [sequences, blocks, kColumnParts, 3, heads, kHeadDim], or null: see column_sums.cuh
  // For Mask::window:
  Window window;
  int chunk_keys, slots;  // head dim 64: see window.h
  int* arrivals;  // [heads, tiles], head dim 64: number of warps that have stored a partial dQ for another block
  int tasks;      // head dims 192 and 256: see backward_d256/tasks.cuh, also for `slots`
  Fp8Output fp8;  // if the kernel writes FP8
  Grouping grouping;
};

// The tokens of a sequence, and the number of result rows to write for it, which includes padding.
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

// The index of a sequence's first query tile in statistics and sums. The last tile of a sequence may extend past its
// end.
__device__ __forceinline__ int first_tile(const int32_t* cu_seqlens, int sequence, int first, int queries) {
  return cu_seqlens == nullptr ? sequence * divide_up(queries, kQueries) : first / kQueries + sequence;
}

// What is known without GROUPED is a constant here, so that kernels without it have no code for groups.
template <bool GROUPED>
__device__ __forceinline__ int heads_of_unit(const Parameters& p) {
  return GROUPED ? p.grouping.heads_per_unit : 1;
}
// Calls body(0), body(1) and so on for the query heads of a unit.
template <bool GROUPED, class Body>
__device__ __forceinline__ void for_each_head(const Parameters& p, Body body) {
  if constexpr (GROUPED)
    for (int member = 0; member < p.grouping.heads_per_unit; ++member) body(member);
  else
    body(0);
}
template <bool GROUPED>
__device__ __forceinline__ int gradient_heads(const Parameters& p) {
  return GROUPED ? p.grouping.gradient_heads : p.heads;
}
// The head of k and v that a query head attends to.
template <bool GROUPED>
__device__ __forceinline__ int key_head(const Parameters& p, int head) {
  return GROUPED ? head / p.grouping.group : head;
}
// A unit's query tile: its index among the tiles of its head, and which of the unit's query heads it is.
template <bool GROUPED>
__device__ __forceinline__ int tile_of(const Parameters& p, int tile) {
  if constexpr (GROUPED) return split(tile, p.grouping.heads_per_unit, p.grouping.half_reciprocal).tile;
  return tile;
}
template <bool GROUPED>
__device__ __forceinline__ int member_of(const Parameters& p, int tile) {
  if constexpr (GROUPED) return split(tile, p.grouping.heads_per_unit, p.grouping.half_reciprocal).member;
  return 0;
}
// The query head of a query tile, of a unit whose first query head is `head`.
template <bool GROUPED>
__device__ __forceinline__ int query_head(const Parameters& p, int head, int tile) {
  if constexpr (GROUPED) return head + member_of<true>(p, tile);
  return head;
}
// The index of a query tile in statistics and sums, counted from Unit::tile.
template <bool GROUPED>
__device__ __forceinline__ int stored_tile(const Parameters& p, int tile) {
  if constexpr (GROUPED) return member_of<true>(p, tile) * p.tiles + tile_of<true>(p, tile);
  return tile;
}
// The head of dk and dv of a unit's first query head.
template <bool GROUPED>
__device__ __forceinline__ int gradient_head(const Parameters& p, int head) {
  return tile_of<GROUPED>(p, head);
}

template <bool GROUPED>
__device__ __forceinline__ int sequence_of(const Parameters& p, int unit) {
  return p.order == nullptr ? unit / gradient_heads<GROUPED>(p) : p.order[unit / gradient_heads<GROUPED>(p)];
}

// The part of Unit that only windows need: the window, and the chunk of keys that a block processes.
template <Mask MASK>
struct UnitWindow {};
template <>
struct UnitWindow<Mask::window> {
  Window window;
  Tiles chunk;        // head dim 64: key tiles
  bool has_next;      // whether another block processes the next chunk
  Tiles query_range;  // head dim 64: query tiles of the task's key tile
};

// A (sequence, head) pair, and which query tiles attend to which key tiles. Of several query heads that share k and v
// it is the first one.
template <Mask MASK>
struct Unit : UnitWindow<MASK> {
  static constexpr bool kCausal = MASK == Mask::causal, kWindow = MASK == Mask::window;
  static constexpr bool kGrouped = false;  // one head of dk and dv for each query head
  int sequence, head;
  StoredSpan q, k;
  int query_tiles, key_tiles, tile;  // tile: index of the first one in statistics and sums

  Unit() = default;
  __device__ __forceinline__ Unit(const Parameters& p, int unit)
      : Unit(p, sequence_of<false>(p, unit), unit % p.heads) {}
  __device__ __forceinline__ Unit(const Parameters& p, int own_sequence, int own_head)
      : sequence(own_sequence),
        head(own_head),
        q(span_of(p.cu_seqlens, p.lengths, sequence, p.queries, p.max_seqlen)),
        k(span_of(p.cu_seqlens_k, p.lengths_k, sequence, p.keys, p.max_seqlen_k)),
        query_tiles(k.length > 0 ? divide_up(q.length, kQueries) : 0),
        key_tiles(q.length > 0 ? divide_up(k.length, kKeys) : 0),
        tile(head * p.tiles + first_tile(p.cu_seqlens, sequence, q.first, p.queries)) {
    if constexpr (kWindow) this->window = p.window;
  }

  __device__ __forceinline__ int offset() const { return k.length - q.length; }
  // The number of steps of a task's key tile.
  __device__ __forceinline__ int count_steps(const Parameters&, int key_tile) const {
    if constexpr (kWindow) return this->query_range.end - this->query_range.begin;
    return end(key_tile) - begin(key_tile);
  }
  // Window: the query tiles that attend to a key tile.
  __device__ __forceinline__ Tiles queries_of(int key_tile) const {
    return attending_tiles<kQueries>(this->window, key_tile * kKeys, kKeys, q.length, k.length);
  }
  // The first query tile that attends to a key tile, and the tile after the last one.
  __device__ __forceinline__ int begin(int key_tile) const {
    if constexpr (kWindow) return queries_of(key_tile).begin;
    return kCausal ? max(key_tile * kKeys - offset(), 0) / kQueries : 0;
  }
  __device__ __forceinline__ int end(int key_tile) const {
    if constexpr (kWindow) return queries_of(key_tile).end;
    return query_tiles;
  }
  // The first key tile to which any query attends. Queries attend to every key tile after it.
  __device__ __forceinline__ int first_key_tile() const {
    if constexpr (kWindow) return first_attended_key(this->window, q.length, k.length) / kKeys;
    return 0;
  }
  // Window: the key tiles to which a query tile attends.
  __device__ __forceinline__ Tiles keys_of(int query_tile) const {
    return attended_tiles<kKeys>(this->window, query_tile * kQueries, kQueries, q.length, k.length);
  }
  // The first and the last key tile to which a query tile attends; the last one is -1 if there is none.
  __device__ __forceinline__ int first_key_tile(int query_tile) const {
    if constexpr (kWindow) return keys_of(query_tile).begin;
    return 0;
  }
  __device__ __forceinline__ int last_key_tile(int query_tile) const {
    if constexpr (kWindow) return keys_of(query_tile).end - 1;
    if (!kCausal) return key_tiles - 1;
    const int last = query_tile * kQueries + kQueries - 1 + offset();
    return last < 0 ? -1 : min(last / kKeys, key_tiles - 1);
  }
};

// The index of the (sequence, head) pair that a group of blocks processes in a round. The order of the groups
// alternates between rounds, which balances the load if pairs are sorted by their work.
__device__ __forceinline__ int unit_of_round(int round, int group, int groups) {
  return round * groups + (round % 2 ? groups - 1 - group : group);
}

// The work that is assigned to a block: the (sequence, head) pairs unit_of_round() of every round, or only of the first
// round if the following pairs are fetched from a counter; and of each pair every key tile whose index is rank modulo
// blocks.
struct Share {
  int rank, group, groups, units;

  explicit __device__ __forceinline__ Share(const Parameters& p)
      : rank(blockIdx.x % p.blocks),
        group(blockIdx.x / p.blocks),
        groups(gridDim.x / p.blocks),
        units(p.sequences * p.heads) {}
};

// The windowed backward for head dim 64: the chunk of keys with the given index. Within a head, chunks of higher keys
// have lower indices, so they are fetched earlier and a block may wait for them.
__device__ __forceinline__ Unit<Mask::window> chunk_unit(const Parameters& p, int index) {
  const Chunk chunk = chunk_of_slot(p.cu_seqlens_k, p.sequences, p.keys, p.chunk_keys, p.slots - 1 - index / p.heads);
  Unit<Mask::window> unit(p, chunk.sequence, index % p.heads);
  const int tiles = p.chunk_keys / kKeys, begin = chunk.index * tiles, end = begin + tiles;
  unit.chunk = {max(begin, unit.first_key_tile()), min(end, unit.key_tiles)};
  unit.has_next = chunk.followed && end < unit.key_tiles;
  return unit;
}

// The (sequence, head) pair, or its chunk of keys, with the given index; and the number of indices.
template <Mask MASK>
__device__ __forceinline__ Unit<MASK> unit_at(const Parameters& p, int index) {
  if constexpr (MASK == Mask::window)
    return chunk_unit(p, index);
  else
    return Unit<MASK>(p, index);
}
template <Mask MASK>
__device__ __forceinline__ int count_units(const Parameters& p, const Share& share) {
  return MASK == Mask::window ? p.slots * p.heads : share.units;
}

// The block's first key tile of a unit, and the end of the unit's key tiles.
template <Mask MASK>
__device__ __forceinline__ int first_key_tile(const Unit<MASK>& unit, const Share& share) {
  if constexpr (MASK == Mask::window)
    return unit.chunk.begin;
  else
    return share.rank;
}
template <Mask MASK>
__device__ __forceinline__ int end_key_tile(const Unit<MASK>& unit) {
  if constexpr (MASK == Mask::window)
    return unit.chunk.end;
  else
    return unit.key_tiles;
}

// A key tile for this block. The producer warp, which fetches work, publishes it to the other warps.
template <Mask MASK>
struct Task {
  Unit<MASK> unit;
  int key_tile;       // -1: there are no more
  uint32_t addition;  // index of the first query tile in the order of additions: see OrderedSums
};

// begin() and end() of a task's key tile. For windows the producer computes them.
template <Mask MASK>
__device__ __forceinline__ int task_begin(const Unit<MASK>& unit, int key_tile) {
  if constexpr (MASK == Mask::window)
    return unit.query_range.begin;
  else
    return unit.begin(key_tile);
}
template <Mask MASK>
__device__ __forceinline__ int task_end(const Unit<MASK>& unit, int key_tile) {
  if constexpr (MASK == Mask::window)
    return unit.query_range.end;
  else
    return unit.end(key_tile);
}

}  // namespace hopper_backward
}  // namespace cuda
}  // namespace fasttfm
