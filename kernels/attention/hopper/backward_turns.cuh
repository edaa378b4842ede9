// attention backward for Hopper: kernels whose blocks share a (sequence, head) and add to dQ in turns.
#pragma once

#include "attention/hopper/backward_schedule.cuh"

namespace fasttfm {
namespace cuda {
namespace hopper_backward {

// A (sequence, head) whose tiles of keys are shared by `parts` blocks. They take tiles in rounds of alternating
// direction, which balances causal work. For a tile of keys a block iterates over the tiles of queries from the last
// one to the first, so the blocks reach the same queries at about the same time and find them in L2. If all blocks have
// the same tiles of queries, each starts kSpread tiles below the previous block and ends with the tiles that it
// skipped. So the blocks add to a tile of dQ one after the other without waiting, and the last additions, after which
// dQ is written, are spread over the blocks.
template <Mask MASK>
struct TurnUnit : Unit<MASK> {
  static constexpr bool kCausal = MASK == Mask::causal, kWindow = MASK == Mask::window;
  int part, parts;
  bool spread;

  TurnUnit() = default;
  __device__ __forceinline__ TurnUnit(const Parameters& p, int unit)
      : Unit<MASK>(p, unit), part(blockIdx.x % p.blocks), parts(p.blocks) {
    spread = MASK == Mask::full && can_spread(parts, this->query_tiles, this->key_tiles);
  }

  // The tiles of queries of a tile of keys in the block's order.
  __device__ __forceinline__ int first(int key_tile) const {
    if constexpr (kWindow) return this->end(key_tile) - 1;
    return this->query_tiles - 1 - (spread ? part * kSpread : 0);
  }
  __device__ __forceinline__ int after(int tile) const {
    return (MASK != Mask::full || tile > 0 ? tile : this->query_tiles) - 1;
  }
  __device__ __forceinline__ int before(int tile) const {
    return MASK != Mask::full || tile + 1 < this->query_tiles ? tile + 1 : 0;
  }

  __device__ __forceinline__ int rounds() const { return divide_up(this->key_tiles, parts); }
  // Whether the block has a tile of keys with queries in a round.
  __device__ __forceinline__ bool has_tile(int round) const {
    const int tile = key_tile(round);
    return tile < this->key_tiles && (!kWindow || tile >= this->first_key_tile());
  }
  // The block's tile of keys in a round; the last round may have none.
  __device__ __forceinline__ int key_tile(int round) const {
    return round * parts + (round % 2 ? parts - 1 - part : part);
  }
  // The index of this block's addition to a tile of dQ: round by round, from the last block to the first. If the blocks
  // are spread, those that reach the tile before they wrap around to the last tile come first. With a window the order
  // is that of the keys: the block with the next tile of keys has two tiles of queries before those that they share.
  __device__ __forceinline__ int turn(int round, int tile) const {
    if constexpr (kWindow) return key_tile(round) - this->first_key_tile(tile);
    const int before = round * parts;
    if (spread) {
      const int rank = min((this->query_tiles - 1 - tile) / kSpread, parts - 1) - part;
      return before + (rank < 0 ? rank + parts : rank);
    }
    return before + (round % 2 ? parts - 1 : min(parts - 1, this->last_key_tile(tile) - before)) - part;
  }
  __device__ __forceinline__ int last_turn(int tile) const {
    return this->last_key_tile(tile) - this->first_key_tile(tile);
  }
};

// Calls step(unit, round, tile of queries) for all of a block's steps, and start(unit, round) before the steps of a
// round.
template <Mask MASK, class Start, class Step>
__device__ __forceinline__ void for_each_step(const Parameters& p, Start start, Step step) {
  for (int unit_round = 0;; ++unit_round) {
    const int index = unit_of_round(unit_round, blockIdx.x / p.blocks, gridDim.x / p.blocks);
    if (index >= p.sequences * p.heads) break;
    const TurnUnit<MASK> unit(p, index);
    for (int round = 0; round < unit.rounds(); ++round) {
      if (!unit.has_tile(round)) continue;
      start(unit, round);
      const int key_tile = unit.key_tile(round);
      int tile = unit.first(key_tile);
      for (int left = unit.end(key_tile) - unit.begin(key_tile); left > 0; --left, tile = unit.after(tile))
        step(unit, round, tile);
    }
  }
}

}  // namespace hopper_backward
}  // namespace cuda
}  // namespace fasttfm
