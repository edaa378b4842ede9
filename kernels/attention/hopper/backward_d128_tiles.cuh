// attention backward for Hopper, head dim 128: what its warpgroups share, and warpgroup 0, which brings tiles in, adds
// dQ up and draws dropout's bits. See backward_d128.cu.
#pragma once

#include "attention/hopper/backward_d128.h"
#include "attention/hopper/backward_tiles.cuh"

namespace fasttfm {
namespace cuda {
namespace {

constexpr int kWideThreads = 3 * kWarpgroup;
constexpr int kWideSumFloats = kQueries * kWideDim;  // of dQ, per tile
constexpr int kWideSumBytes = 4 * kWideSumFloats;
constexpr int kLseBytes = 4 * kQueries;
constexpr int kKeyStages = 2, kQueryStages = 3, kGradientStages = 2, kScoreStages = 2;  // of k, q, dout and dS

constexpr int kTurns = 3;  // the first of two named barriers

struct WideParameters : Parameters {
  int* turns;  // [heads, tiles]: how many additions to a tile of dQ are done
  int parts;   // blocks that share a (sequence, head)
};

// A (sequence, head), whose tiles of keys `parts` blocks take round by round, back and forth, so that all have as much
// to do where attention is causal. For a tile of keys a block goes over the tiles of queries from the last one down:
// the blocks meet the same queries at about the same time, and the second level cache has them. Where all have the same
// tiles of queries to go over, each begins kSpread tiles further down than the one before it, and ends with those that
// it left out: so they add to a tile one after the other without having to wait for that, and not all of the last
// additions, after which dQ is written, are one block's.
constexpr int kSpread = 4;
template <bool CAUSAL>
struct WideUnit : Unit<CAUSAL> {
  int part, parts;
  bool spread;

  __device__ __forceinline__ WideUnit(const WideParameters& p, int unit)
      : Unit<CAUSAL>(p, unit), part(blockIdx.x % p.parts), parts(p.parts) {
    spread = !CAUSAL && parts * kSpread <= this->query_tiles && this->key_tiles % parts == 0;
  }

  // The tiles of queries in the order in which the block goes over them.
  __device__ __forceinline__ int first() const { return this->query_tiles - 1 - (spread ? part * kSpread : 0); }
  __device__ __forceinline__ int after(int tile) const { return (CAUSAL || tile > 0 ? tile : this->query_tiles) - 1; }
  __device__ __forceinline__ int before(int tile) const {
    return CAUSAL || tile + 1 < this->query_tiles ? tile + 1 : 0;
  }

  __device__ __forceinline__ int rounds() const { return divide_up(this->key_tiles, parts); }
  // The block's tile of keys of a round; the last round may have none.
  __device__ __forceinline__ int key_tile(int round) const {
    return round * parts + (round % 2 ? parts - 1 - part : part);
  }
  // Which addition to a tile of dQ is this block's: round by round, from the last block to the first; if they are
  // spread, first of those that come to it before they begin anew at the last tile.
  __device__ __forceinline__ int turn(int round, int tile) const {
    const int before = round * parts;
    if (spread) {
      const int rank = min((this->query_tiles - 1 - tile) / kSpread, parts - 1) - part;
      return before + (rank < 0 ? rank + parts : rank);
    }
    return before + (round % 2 ? parts - 1 : min(parts - 1, this->last_key_tile(tile) - before)) - part;
  }
};

enum StagingUse { kAdded, kLast, kAlone };  // dQ's addition is one of several, the last of several, the only one

template <bool CAUSAL>
struct WideMemory {
  alignas(1024) char q[kQueryStages][2 * kQueryTileBytes];
  char dout[kGradientStages][2 * kQueryTileBytes];
  char k[kKeyStages][2 * kKeyTileBytes];
  char v[2 * kKeyTileBytes];
  char dscores[kScoreStages][kKeyTileBytes];  // [keys, queries]
  float4 staging[8][kWarpgroup];              // of dQ: the columns of warpgroup 1 or 2, each thread's own
  float lse[kQueryStages][kQueries], delta[kGradientStages][kQueries];
  uint32_t kept[2][kWarpgroup];
  Barrier q_full[kQueryStages], q_empty[kQueryStages], dout_full[kGradientStages], dout_empty[kGradientStages],
      k_full[kKeyStages], k_empty[kKeyStages], v_full, v_empty, raw, dscores_full[kScoreStages],
      dscores_empty[kScoreStages], staging_free[2], staging_done[2], kept_full[2], kept_empty[2];
  WideUnit<CAUSAL> unit[2];  // which warpgroups 1 and 2 are at: they have no registers for it
  int staging_use;
};
static_assert(sizeof(WideMemory<true>) <= 227 * 1024);

// Calls step(unit, round, tile of queries) for all that a block has to do, and start(unit, round) before the steps of a
// round.
template <bool CAUSAL, class Start, class Step>
__device__ __forceinline__ void for_each_step(const WideParameters& p, Start start, Step step) {
  for (int unit_round = 0;; ++unit_round) {
    const int index = unit_of_round(unit_round, blockIdx.x / p.parts, gridDim.x / p.parts);
    if (index >= p.sequences * p.heads) break;
    const WideUnit<CAUSAL> unit(p, index);
    for (int round = 0; round < unit.rounds(); ++round) {
      if (unit.key_tile(round) >= unit.key_tiles) continue;
      start(unit, round);
      int tile = unit.first();
      for (int left = unit.query_tiles - unit.begin(unit.key_tile(round)); left > 0; --left, tile = unit.after(tile))
        step(unit, round, tile);
    }
  }
}

// ---- tiles ----------------------------------------------------------------------------------------------------------

// Brings tiles to their places. Rows past a sequence's end that are others' numbers are replaced by zeros: they are
// multiplied by zeros, which a NaN would survive.
template <bool CAUSAL>
__device__ __forceinline__ void bring_wide_tiles(const WideParameters& p, WideMemory<CAUSAL>& memory) {
  const bool first_lane = threadIdx.x % 32 == 0;
  const bool foreign = p.cu_seqlens != nullptr || p.lengths != nullptr || p.lengths_k != nullptr;
  RingPosition<kQueryStages> q_stage;
  RingPosition<kGradientStages> dout_stage;
  RingPosition<kKeyStages> k_stage;
  RingPosition<1> v_stage, raw;
  // Brings `rows` rows of 128, and statistics of theirs if there are any.
  const auto bring = [&](const CUtensorMap& map, Barrier& full, char* tile, int head, int first, int batch, int valid,
                         int rows, float* numbers, const float* statistics) {
    const bool direct = !foreign || valid >= rows;
    Barrier& landed = direct ? full : memory.raw;
    const int bytes = rows * kTileRowBytes;
    if (first_lane) {
      load_box(&map, landed, shared_address(tile), 0, head, first, batch);
      load_box(&map, landed, shared_address(tile) + bytes, kTileColumns, head, first, batch);
      if (statistics != nullptr) load_bytes(landed, shared_address(numbers), statistics, kLseBytes);
      landed.arrive_expect(2 * bytes + (statistics == nullptr ? 0 : kLseBytes));
    }
    if (direct) return;
    landed.wait(raw.parity);
    raw.next();
    clear_rows(tile, valid, rows);
    clear_rows(tile + bytes, valid, rows);
    fence_async();
    __syncwarp();
    if (first_lane) full.arrive();
  };
  bool values_due = false;  // v comes after the first tile of queries, which has room before it has
  for_each_step<CAUSAL>(
      p,
      [&](const WideUnit<CAUSAL>& unit, int round) {
        const int key_tile = unit.key_tile(round);
        memory.k_empty[k_stage.slot].wait(k_stage.parity ^ 1);
        bring(p.k, memory.k_full[k_stage.slot], memory.k[k_stage.slot], unit.head, unit.k.first + key_tile * kKeys,
              p.cu_seqlens == nullptr ? unit.sequence : 0, unit.k.length - key_tile * kKeys, kKeys, nullptr, nullptr);
        k_stage.next();
        values_due = true;
      },
      [&](const WideUnit<CAUSAL>& unit, int round, int tile) {
        const int key_tile = unit.key_tile(round);
        const int batch = p.cu_seqlens == nullptr ? unit.sequence : 0;
        const int valid = unit.q.length - tile * kQueries, first = unit.q.first + tile * kQueries;
        const float* statistics = p.statistics + static_cast<int64_t>(unit.tile + tile) * 2 * kQueries;
        memory.q_empty[q_stage.slot].wait(q_stage.parity ^ 1);
        bring(p.q, memory.q_full[q_stage.slot], memory.q[q_stage.slot], unit.head, first, batch, valid, kQueries,
              memory.lse[q_stage.slot], statistics);
        q_stage.next();
        memory.dout_empty[dout_stage.slot].wait(dout_stage.parity ^ 1);
        bring(p.dout, memory.dout_full[dout_stage.slot], memory.dout[dout_stage.slot], unit.head, first, batch, valid,
              kQueries, memory.delta[dout_stage.slot], statistics + kQueries);
        dout_stage.next();
        if (!values_due) return;
        memory.v_empty.wait(v_stage.parity ^ 1);
        bring(p.v, memory.v_full, memory.v, unit.head, unit.k.first + key_tile * kKeys, batch,
              unit.k.length - key_tile * kKeys, kKeys, nullptr, nullptr);
        v_stage.next();
        values_due = false;
      });
}

// ---- sums of dQ -----------------------------------------------------------------------------------------------------

// Takes the parts of dQ from the staging tile to the workspace, each in its turn: the first is stored, the others are
// added. For the last the sum comes back into the staging tile, and warpgroups 1 and 2 write the result. One thread; it
// asks for its turn before the part is there.
template <bool CAUSAL>
__device__ __forceinline__ void sum_wide_dq(const WideParameters& p, WideMemory<CAUSAL>& memory) {
  const uint32_t staging = shared_address(memory.staging);
  RingPosition<1> step;
  int *counter = nullptr, done = 0;  // what is to be said when the addition under way has ended
  const auto finish = [&] {
    if (counter == nullptr) return;
    wait_stores<0>();
    if (p.parts > 1) send(counter, done);
    counter = nullptr;
  };
  const auto await = [&](const int* turns, int turn) {
    if (p.parts > 1) {
      while (receive(turns) < turn) {
      }
    }
    fence_async_global();
  };
  for_each_step<CAUSAL>(
      p, [](const WideUnit<CAUSAL>&, int) {},
      [&](const WideUnit<CAUSAL>& unit, int round, int tile) {
        const int turn = unit.turn(round, tile);
        int* turns = p.turns + unit.tile + tile;
        float* sums = p.sums + static_cast<int64_t>(unit.tile + tile) * kWideSumFloats;
        const bool last = turn == unit.last_key_tile(tile);
        for (int half = 0; half < 2; ++half) {
          float* to = sums + half * (kWideSumFloats / 2);
          memory.staging_use = !last ? kAdded : turn == 0 ? kAlone : kLast;
          if (!last || turn == 0) memory.staging_free[half].arrive();
          if (half == 0) {
            finish();
            if (turn > 0) await(turns, turn);
          }
          if (last && turn > 0) {
            load_bytes(memory.staging_free[half], staging, to, kWideSumBytes / 2);
            memory.staging_free[half].arrive_expect(kWideSumBytes / 2);
          }
          memory.staging_done[half].wait(step.parity);
          if (last) continue;
          if (turn == 0)
            store_bytes(to, staging, kWideSumBytes / 2);
          else
            add_bytes(to, staging, kWideSumBytes / 2);
          commit_stores();
          wait_stores_read<0>();
        }
        if (!last) {
          counter = turns;
          done = turn + 1;
        }
        step.next();
      });
  finish();
}

// ---- dropout --------------------------------------------------------------------------------------------------------

// Keeps bits for 64 keys by 64 queries at a time, a word for each thread of warpgroup 1 or 2: their order is that of
// draw_kept(), of whose tasks a warp takes the two of one warpgroup.
template <bool CAUSAL>
__device__ __forceinline__ void draw_wide_kept(const WideParameters& p, WideMemory<CAUSAL>& memory, int number) {
  const int lane = threadIdx.x % 32;
  const uint64_t seed = static_cast<uint64_t>(*p.seed);
  const uint32_t low = (p.threshold & 127) * 0x01010101u;
  const uint32_t either = p.threshold < 128 ? 0xffffffffu : 0u;
  const uint32_t top = p.threshold < 256 ? 0x80808080u : 0u;
  const int t = lane / 4 % 4, part = lane % 4;
  auto* bytes = reinterpret_cast<uint8_t*>(memory.kept[number]) + 4 * t + part;
  uint32_t parity = 1;  // of the phase in which the words were taken
  for_each_step<CAUSAL>(
      p, [](const WideUnit<CAUSAL>&, int) {},
      [&](const WideUnit<CAUSAL>& unit, int round, int tile) {
        const uint32_t block = unit.key_tile(round) * 2 + number, query = tile * kQueries + 16 * part + 2 * t;
#pragma unroll 1
        for (int task = 0; task < 2; ++task) {
          const int d = task * 2 + lane / 16;
          uint32_t bits[4] = {0, 0, 0, 0};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const Draw drawn = draw_weights(seed, unit.sequence, unit.head, query + j / 2 * 8 + j % 2, block, d);
#pragma unroll
            for (int w = 0; w < 4; ++w) bits[w] |= (reaching_bytes(drawn.word[w], low, either) & top) >> (3 - j);
          }
          memory.kept_empty[number].wait(parity);
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            const uint32_t both = bits[w] | bits[w] >> 20;
            bytes[4 * (32 * w + 8 * d)] = static_cast<uint8_t>(both);
            bytes[4 * (32 * w + 8 * d + 4)] = static_cast<uint8_t>(both >> 8);
          }
        }
        arrive_warp(memory.kept_full[number]);
        parity ^= 1;
      });
}

}  // namespace
}  // namespace cuda
}  // namespace fasttfm
