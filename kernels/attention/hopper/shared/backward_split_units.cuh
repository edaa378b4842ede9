// attention backward for Hopper: the schedule of kernels in which several blocks process the key tiles of one unit,
// and semaphores order their additions to dQ.
#pragma once

#include "attention/hopper/shared/backward_schedule.cuh"
#include "attention/hopper/shared/ordered_sums.cuh"

namespace fasttfm {
namespace cuda {
namespace hopper_backward {

// A (sequence, head) pair, or with GROUPED a (sequence, head of dk and dv) pair with all of its query heads, whose key
// tiles are distributed over `parts` blocks. In every round each block has one key tile; the order of the blocks
// alternates between rounds, which balances causal work. For a key tile a block iterates over the query tiles of all
// query heads from the last to the first, so the blocks of a pair access the same queries at about the same time, while
// these are in L2. If all key tiles have the same query tiles, each block starts kSpread query tiles below the previous
// block and wraps around. The blocks then add to a tile of dQ one after the other without waiting, and the last
// additions, after which dQ is written, are distributed over the blocks.
//
// Here `tile` is an index among the query tiles of all query heads: see split().
template <Mask MASK, bool GROUPED>
struct SplitUnit : Unit<MASK> {
  static constexpr bool kCausal = MASK == Mask::causal, kWindow = MASK == Mask::window, kGrouped = GROUPED;
  int part, parts;
  bool spread;

  SplitUnit() = default;
  __device__ __forceinline__ SplitUnit(const Parameters& p, int unit)
      : Unit<MASK>(p, sequence_of<GROUPED>(p, unit), unit % gradient_heads<GROUPED>(p) * heads_of_unit<GROUPED>(p)),
        part(blockIdx.x % p.blocks),
        parts(p.blocks) {
    spread = MASK == Mask::full && can_spread(parts, all_tiles(p), this->key_tiles);
  }

  __device__ __forceinline__ int all_tiles(const Parameters& p) const {
    if constexpr (GROUPED) return this->query_tiles * p.grouping.heads_per_unit;
    return this->query_tiles;
  }
  // The number of query tiles that attend to a key tile.
  __device__ __forceinline__ int count_steps(const Parameters& p, int key_tile) const {
    if constexpr (GROUPED) return (this->end(key_tile) - this->begin(key_tile)) * p.grouping.heads_per_unit;
    return this->end(key_tile) - this->begin(key_tile);
  }

  // The first query tile of a key tile, and the query tiles after and before a tile, in the block's order.
  __device__ __forceinline__ int first(const Parameters& p, int key_tile) const {
    if constexpr (kWindow) return this->end(key_tile) * heads_of_unit<GROUPED>(p) - 1;
    return all_tiles(p) - 1 - (spread ? part * kSpread : 0);
  }
  __device__ __forceinline__ int after(const Parameters& p, int tile) const {
    return (MASK != Mask::full || tile > 0 ? tile : all_tiles(p)) - 1;
  }
  __device__ __forceinline__ int before(const Parameters& p, int tile) const {
    return MASK != Mask::full || tile + 1 < all_tiles(p) ? tile + 1 : 0;
  }

  __device__ __forceinline__ int rounds() const { return divide_up(this->key_tiles, parts); }
  // Whether the block has a key tile in a round, to which queries attend.
  __device__ __forceinline__ bool has_tile(int round) const {
    const int tile = key_tile(round);
    return tile < this->key_tiles && (!kWindow || tile >= this->first_key_tile());
  }
  // The block's key tile in a round. In the last round it may be past the last tile.
  __device__ __forceinline__ int key_tile(int round) const {
    return round * parts + (round % 2 ? parts - 1 - part : part);
  }
  // The index of this block's addition to a tile of dQ. The order is by round, and within a round from the last block
  // to the first. If the blocks are spread, those that reach the tile before they wrap around come first. With a window
  // the order is that of the keys, because the block with the next key tile has two query tiles to process before the
  // ones that both have.
  __device__ __forceinline__ int addition(const Parameters& p, int round, int tile) const {
    const int of_head = tile_of<GROUPED>(p, tile);
    if constexpr (kWindow) return key_tile(round) - this->first_key_tile(of_head);
    const int before = round * parts;
    if (spread) {
      const int rank = min((all_tiles(p) - 1 - tile) / kSpread, parts - 1) - part;
      return before + (rank < 0 ? rank + parts : rank);
    }
    return before + (round % 2 ? parts - 1 : min(parts - 1, this->last_key_tile(of_head) - before)) - part;
  }
  // The index of the last addition to a tile.
  __device__ __forceinline__ int last_addition(const Parameters& p, int tile) const {
    const int of_head = tile_of<GROUPED>(p, tile);
    return this->last_key_tile(of_head) - this->first_key_tile(of_head);
  }
};

// Calls step(unit, round, query tile) for all of a block's steps, and start(unit, round) before the steps of a round.
template <Mask MASK, bool GROUPED, class Start, class Step>
__device__ __forceinline__ void for_each_step(const Parameters& p, Start start, Step step) {
  for (int unit_round = 0;; ++unit_round) {
    const int index = unit_of_round(unit_round, blockIdx.x / p.blocks, gridDim.x / p.blocks);
    if (index >= p.sequences * gradient_heads<GROUPED>(p)) break;
    const SplitUnit<MASK, GROUPED> unit(p, index);
    for (int round = 0; round < unit.rounds(); ++round) {
      if (!unit.has_tile(round)) continue;
      start(unit, round);
      const int key_tile = unit.key_tile(round);
      int tile = unit.first(p, key_tile);
      for (int left = unit.count_steps(p, key_tile); left > 0; --left, tile = unit.after(p, tile))
        step(unit, round, tile);
    }
  }
}

// A thread that adds passes counters to a thread of another warp, which releases them. A release takes about as long as
// an access to global memory, and the adding thread need not wait for it.
struct Publications {
  int *counter, done;
  Mbarrier full, empty;

  // Called by one thread, before fence_mbarrier_init().
  __device__ __forceinline__ void init() {
    full.init(1);
    empty.init(1);
  }
  // The adding thread calls it after bulk_wait(), and once with null after the last addition.
  __device__ __forceinline__ void send(int* to, int value, RingPosition<1>* position) {
    empty.wait(position->parity ^ 1);
    counter = to;
    done = value;
    full.arrive();
    position->next();
  }
  __device__ __forceinline__ void release_all() {
    for (RingPosition<1> position;; position.next()) {
      full.wait(position.parity);
      int* const to = counter;
      const int value = done;
      empty.arrive();
      if (to == nullptr) return;
      store_release(to, value);
    }
  }
};

}  // namespace hopper_backward
}  // namespace cuda
}  // namespace fasttfm
