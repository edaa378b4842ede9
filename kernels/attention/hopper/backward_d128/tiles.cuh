// attention backward for Hopper, head dim 128: the schedule of tiles, the layout of shared memory, and warpgroup 0,
// which loads tiles, accumulates dQ and generates dropout's keep bits.
#pragma once

#include "attention/hopper/backward_d128/backward.h"
#include "attention/hopper/shared/backward_split_units.cuh"
#include "attention/hopper/shared/backward_tiles.cuh"

namespace fasttfm {
namespace cuda {
namespace hopper_backward {

constexpr int kThreadsD128 = 3 * kWarpgroup;
constexpr int kSumFloatsD128 = kQueries * kHeadDim128;  // dQ of a query tile
constexpr int kSumBytesD128 = 4 * kSumFloatsD128;
constexpr int kLseBytes = 4 * kQueries;
constexpr int kKeyStages = 2, kQueryStages = 3, kGradientStages = 2, kScoreStages = 2;  // of k, q, dout and dS

// Whether an addition to dQ is one of several, the last of several, or the only one.
enum StagingUse { kAdded, kLast, kAlone };

template <Mask MASK, bool GROUPED>
struct MemoryD128 {
  alignas(1024) char q[kQueryStages][2 * kQueryTileBytes];
  char dout[kGradientStages][2 * kQueryTileBytes];
  char k[kKeyStages][2 * kKeyTileBytes];
  char v[2 * kKeyTileBytes];
  char dscores[kScoreStages][kKeyTileBytes];  // [keys, queries]
  float4 staging[8][kWarpgroup];              // dQ columns of warpgroup 1 or 2, in register layout
  float lse[kQueryStages][kQueries], delta[kGradientStages][kQueries];
  uint32_t kept[2][kWarpgroup];
  Mbarrier q_full[kQueryStages], q_empty[kQueryStages], dout_full[kGradientStages], dout_empty[kGradientStages],
      k_full[kKeyStages], k_empty[kKeyStages], v_full, v_empty, raw, dscores_full[kScoreStages],
      dscores_empty[kScoreStages], staging_free[2], staging_done[2], kept_full[2], kept_empty[2];
  SplitUnit<MASK, GROUPED> unit[2];  // for warpgroups 1 and 2, to save registers
  int staging_use;
  Publications publications;
};
static_assert(sizeof(MemoryD128<Mask::window, true>) <= 227 * 1024);

// ---- tiles ----------------------------------------------------------------------------------------------------------

// The producer: loads tiles. Rows past a sequence's end may belong to another sequence and are replaced by zeros,
// because 0 * NaN would be NaN.
template <Mask MASK, bool GROUPED>
__device__ __forceinline__ void load_tiles_d128(const Parameters& p, MemoryD128<MASK, GROUPED>& memory) {
  const bool first_lane = threadIdx.x % 32 == 0;
  const bool foreign = p.cu_seqlens != nullptr || p.lengths != nullptr || p.lengths_k != nullptr;
  RingPosition<kQueryStages> q_stage;
  RingPosition<kGradientStages> dout_stage;
  RingPosition<kKeyStages> k_stage;
  RingPosition<1> v_stage, raw;
  // Loads `rows` rows of 128 columns, and their statistics unless that is null.
  const auto start_loads = [&](const CUtensorMap& map, Mbarrier& full, char* tile, int head, int first, int batch,
                               int valid, int rows, float* numbers, const float* statistics) {
    const bool direct = !foreign || valid >= rows;
    Mbarrier& landed = direct ? full : memory.raw;
    const int bytes = rows * kTileRowBytes;
    if (first_lane) {
      tma_load(&map, landed, shared_address(tile), 0, head, first, batch);
      tma_load(&map, landed, shared_address(tile) + bytes, kTileColumns, head, first, batch);
      if (statistics != nullptr) bulk_load(landed, shared_address(numbers), statistics, kLseBytes);
      landed.arrive_expect_tx(2 * bytes + (statistics == nullptr ? 0 : kLseBytes));
    }
    if (direct) return;
    landed.wait(raw.parity);
    raw.next();
    clear_rows(tile, valid, rows);
    clear_rows(tile + bytes, valid, rows);
    fence_proxy_async();
    __syncwarp();
    if (first_lane) full.arrive();
  };
  bool values_due = false;  // v is loaded after the first query tile, because the query tile's stage is free earlier
  for_each_step<MASK, GROUPED>(
      p,
      [&](const SplitUnit<MASK, GROUPED>& unit, int round) {
        const int key_tile = unit.key_tile(round);
        memory.k_empty[k_stage.slot].wait(k_stage.parity ^ 1);
        start_loads(p.k, memory.k_full[k_stage.slot], memory.k[k_stage.slot], key_head<GROUPED>(p, unit.head),
                    unit.k.first + key_tile * kKeys, p.cu_seqlens == nullptr ? unit.sequence : 0,
                    unit.k.length - key_tile * kKeys, kKeys, nullptr, nullptr);
        k_stage.next();
        values_due = true;
      },
      [&](const SplitUnit<MASK, GROUPED>& unit, int round, int tile) {
        const int key_tile = unit.key_tile(round), head = query_head<GROUPED>(p, unit.head, tile);
        const int batch = p.cu_seqlens == nullptr ? unit.sequence : 0;
        const int valid = unit.q.length - tile_of<GROUPED>(p, tile) * kQueries,
                  first = unit.q.first + tile_of<GROUPED>(p, tile) * kQueries;
        const float* statistics =
            p.statistics + static_cast<int64_t>(unit.tile + stored_tile<GROUPED>(p, tile)) * 2 * kQueries;
        memory.q_empty[q_stage.slot].wait(q_stage.parity ^ 1);
        start_loads(p.q, memory.q_full[q_stage.slot], memory.q[q_stage.slot], head, first, batch, valid, kQueries,
                    memory.lse[q_stage.slot], statistics);
        q_stage.next();
        memory.dout_empty[dout_stage.slot].wait(dout_stage.parity ^ 1);
        start_loads(p.dout, memory.dout_full[dout_stage.slot], memory.dout[dout_stage.slot], head, first, batch, valid,
                    kQueries, memory.delta[dout_stage.slot], statistics + kQueries);
        dout_stage.next();
        if (!values_due) return;
        memory.v_empty.wait(v_stage.parity ^ 1);
        start_loads(p.v, memory.v_full, memory.v, key_head<GROUPED>(p, unit.head), unit.k.first + key_tile * kKeys,
                    batch, unit.k.length - key_tile * kKeys, kKeys, nullptr, nullptr);
        v_stage.next();
        values_due = false;
      });
}

// ---- sums of dQ -----------------------------------------------------------------------------------------------------

// Moves partial sums of dQ from the staging tile to the workspace, in order: the first one is stored, the others are
// added. For the last one the sum is loaded into the staging tile, and warpgroups 1 and 2 write the result. Runs in one
// thread, which waits for the previous additions before its own partial sum is complete. With dropout it releases the
// counters itself, because there is no free warp.
template <bool DROPOUT, Mask MASK, bool GROUPED>
__device__ __forceinline__ void sum_dq_d128(const Parameters& p, MemoryD128<MASK, GROUPED>& memory) {
  const uint32_t staging = shared_address(memory.staging);
  RingPosition<1> step, publication;
  int *counter = nullptr, done = 0;  // published when the addition in flight is complete
  const auto finish = [&] {
    if (counter == nullptr) return;
    bulk_wait<0>();
    if (DROPOUT && p.blocks > 1) store_release(counter, done);
    if (!DROPOUT && p.blocks > 1) memory.publications.send(counter, done, &publication);
    counter = nullptr;
  };
  const auto wait_for = [&](const int* semaphore, int addition) {
    if (p.blocks > 1) {
      while (load_acquire(semaphore) < addition) {
      }
    }
    fence_proxy_async_global();
  };
  for_each_step<MASK, GROUPED>(
      p, [](const SplitUnit<MASK, GROUPED>&, int) {},
      [&](const SplitUnit<MASK, GROUPED>& unit, int round, int tile) {
        const int addition = unit.addition(p, round, tile), stored = stored_tile<GROUPED>(p, tile);
        int* semaphore = p.dq_semaphores + unit.tile + stored;
        float* sums = p.sums + static_cast<int64_t>(unit.tile + stored) * kSumFloatsD128;
        const bool last = addition == unit.last_addition(p, tile);
        for (int half = 0; half < 2; ++half) {
          float* to = sums + half * (kSumFloatsD128 / 2);
          memory.staging_use = !last ? kAdded : addition == 0 ? kAlone : kLast;
          if (!last || addition == 0) memory.staging_free[half].arrive();
          if (half == 0) {
            finish();
            if (addition > 0) wait_for(semaphore, addition);
          }
          if (last && addition > 0) {
            bulk_load(memory.staging_free[half], staging, to, kSumBytesD128 / 2);
            memory.staging_free[half].arrive_expect_tx(kSumBytesD128 / 2);
          }
          memory.staging_done[half].wait(step.parity);
          if (last) continue;
          if (addition == 0)
            bulk_store(to, staging, kSumBytesD128 / 2);
          else
            bulk_reduce_add(to, staging, kSumBytesD128 / 2);
          bulk_commit();
          bulk_wait_read<0>();
        }
        if (!last) {
          counter = semaphore;
          done = addition + 1;
        }
        step.next();
      });
  finish();
  if (!DROPOUT && p.blocks > 1) memory.publications.send(nullptr, 0, &publication);
}

// ---- dropout --------------------------------------------------------------------------------------------------------

// Generates dropout's keep bits for 64 keys by 64 queries at a time, one word for each thread of warpgroup 1 or 2, in
// the layout of draw_keep_bits(). One warp computes both tasks of a warpgroup.
template <Mask MASK>
__device__ __forceinline__ void draw_keep_bits_d128(const Parameters& p, MemoryD128<MASK, false>& memory, int number) {
  const int lane = threadIdx.x % 32;
  const uint64_t seed = static_cast<uint64_t>(*p.seed);
  const uint32_t low = (p.threshold & 127) * 0x01010101u;
  const uint32_t either = p.threshold < 128 ? 0xffffffffu : 0u;
  const uint32_t top = p.threshold < 256 ? 0x80808080u : 0u;
  const int t = lane / 4 % 4, part = lane % 4;
  auto* bytes = reinterpret_cast<uint8_t*>(memory.kept[number]) + 4 * t + part;
  uint32_t parity = 1;  // of kept_empty
  for_each_step<MASK, false>(
      p, [](const SplitUnit<MASK, false>&, int) {},
      [&](const SplitUnit<MASK, false>& unit, int round, int tile) {
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

}  // namespace hopper_backward
}  // namespace cuda
}  // namespace fasttfm
