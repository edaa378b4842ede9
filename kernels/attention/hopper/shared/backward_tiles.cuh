// attention backward for Hopper, head dims 64 and 32: the layout of shared memory, and warpgroup 0, which loads tiles
// and generates dropout's keep bits.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention/hopper/shared/backward_schedule.cuh"
#include "attention/hopper/shared/fp8_memory.cuh"
#include "attention/hopper/shared/ordered_sums.cuh"
#include "common/cuda/hopper.cuh"
#include "common/philox.h"

namespace fasttfm {
namespace cuda {
namespace hopper_backward {

// ON_CHIP: dQ is accumulated in shared memory, where each thread has its own elements.
template <bool ON_CHIP, Mask MASK>
struct Memory {
  static constexpr int kStages = ON_CHIP ? 3 : 5;   // each holds a tile of q and one of dout, or a tile of v
  static constexpr int kBuffers = ON_CHIP ? 1 : 2;  // for dS and for dropout's keep bits
  using Sums = std::conditional_t<ON_CHIP, float4[kOnChipQueries * kHeadDim / 4],
                                  typename OrderedSums<kSumFloats / kWarpgroup>::Memory>;
  alignas(1024) char stage[kStages][kStageBytes];
  char k[2][kKeyTileBytes];
  char dscores[kBuffers][kKeyTileBytes];  // [keys, queries]
  Sums sums;
  float statistics[kStages][2][kQueries];
  uint32_t kept[kBuffers][2][kWarpgroup];  // keep bits for warpgroups 1 and 2
  Task<MASK> task[2];                      // task of the k tile in the same stage, valid when k_full completes
  Mbarrier stage_full[kStages], stage_empty[kStages], k_full[2], k_empty[2], task_full[2], raw[3],
      dscores_full[kBuffers][2], dscores_empty[kBuffers][2], kept_full[kBuffers][2], kept_empty[kBuffers][2];
  Fp8Memory fp8;

  // The tiles of a stage.
  __device__ __forceinline__ char* q(int slot) { return stage[slot]; }
  __device__ __forceinline__ char* dout(int slot) { return stage[slot] + kQueryTileBytes; }
  __device__ __forceinline__ char* v(int slot) { return stage[slot]; }

  // Called by one thread, before __syncthreads().
  __device__ __forceinline__ void init() {
    for (int i = 0; i < kStages; ++i) {
      stage_full[i].init(kWarpArrivals);
      stage_empty[i].init(8 * kWarpArrivals);
    }
    for (int i = 0; i < 2; ++i) {
      task_full[i].init(kWarpArrivals);
      k_full[i].init(kWarpArrivals);
      k_empty[i].init(4 * kWarpArrivals);
    }
    for (int i = 0; i < kBuffers; ++i) {
      for (int half = 0; half < 2; ++half) {
        dscores_full[i][half].init(4 * kWarpArrivals);
        dscores_empty[i][half].init(4 * kWarpArrivals);
        kept_full[i][half].init(3 * kWarpArrivals);
        kept_empty[i][half].init(4 * kWarpArrivals);
      }
    }
    for (Mbarrier& landed : raw) landed.init(kWarpArrivals);
    fence_mbarrier_init();
  }
};
static_assert(sizeof(Memory<true, Mask::window>) <= 227 * 1024 && sizeof(Memory<false, Mask::full>) <= 227 * 1024);

// ---- warpgroup 0: tiles ----------------------------------------------------------------------------------------------

// Zeros rows `from` to `rows` of a tile. Called by a whole warp.
__device__ __forceinline__ void clear_rows(char* tile, int from, int rows) {
  for (int i = 8 * from + threadIdx.x % 32; i < 8 * rows; i += 32)
    reinterpret_cast<uint4*>(tile)[i] = make_uint4(0, 0, 0, 0);
}

// Starts loads of `bytes` bytes in total, which complete on the mbarrier `landed`. Called by a whole warp, like the
// functions below.
template <class Start>
__device__ __forceinline__ void start_loads(Mbarrier& landed, uint32_t bytes, Start start) {
  if (threadIdx.x % 32 == 0) {
    start(landed);
    landed.arrive_expect_tx(bytes);
  } else if (kWarpArrivals > 1) {
    landed.arrive();
  }
}

// Waits for the loads on `landed`, calls clear(), which zeros some of their rows, and then arrives at `full`.
template <class Clear>
__device__ __forceinline__ void finish_loads(const Mbarrier& landed, uint32_t parity, Mbarrier& full, Clear clear) {
  landed.wait(parity);
  clear();
  fence_proxy_async();
  arrive_warp(full);
}

template <bool DROPOUT, Mask MASK, bool ON_CHIP>
__device__ __forceinline__ void publish_task(Memory<ON_CHIP, MASK>& memory, int slot, const Unit<MASK>& unit,
                                             int key_tile, uint32_t addition) {
  if (threadIdx.x % 32 == 0) {
    memory.task[slot].unit = unit;
    memory.task[slot].key_tile = key_tile;
    memory.task[slot].addition = addition;
  }
  if constexpr (DROPOUT) arrive_warp(memory.task_full[slot]);  // the warps that generate keep bits do not wait for k
}

// Increments a counter and returns its previous value; called by one thread. The compiler would compile atomicAdd() to
// a warp-aggregated atomic followed by a shuffle, which waits for the result.
__device__ __forceinline__ int atomic_increment(int* counter) {
  int before;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], 0x7fffffff;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// Loads tiles into a block's memory. Rows past a sequence's end may belong to another sequence and are replaced by
// zeros, because 0 * NaN would be NaN.
template <class BlockMemory>
class TileLoader {
 public:
  __device__ __forceinline__ TileLoader(const Parameters& p, BlockMemory& memory)
      : p(p), memory(memory), foreign(p.cu_seqlens != nullptr || p.lengths != nullptr || p.lengths_k != nullptr) {}

  // Starts the loads of k and v of a key tile. publish(slot) publishes the task of the tile.
  template <bool GROUPED, Mask MASK, class Publish>
  __device__ __forceinline__ void load_keys(const Unit<MASK>& unit, int key_tile, Publish publish) {
    const int first_key = unit.k.first + key_tile * kKeys, batch = batch_of(unit);
    const int head = key_head<GROUPED>(p, unit.head);
    valid_keys = unit.k.length - key_tile * kKeys;
    clear_keys = foreign && valid_keys < kKeys;
    k = memory.k[k_stage.slot];
    v = memory.v(stage.slot);
    k_full = &memory.k_full[k_stage.slot];
    v_full = &memory.stage_full[stage.slot];
    memory.k_empty[k_stage.slot].wait(k_stage.parity ^ 1);
    publish(k_stage.slot);
    start_loads(clear_keys ? memory.raw[0] : *k_full, kKeyTileBytes,
                [&](Mbarrier& landed) { tma_load(&p.k, landed, shared_address(k), 0, head, first_key, batch); });
    memory.stage_empty[stage.slot].wait(stage.parity ^ 1);
    start_loads(clear_keys ? memory.raw[1] : *v_full, kKeyTileBytes,
                [&](Mbarrier& landed) { tma_load(&p.v, landed, shared_address(v), 0, head, first_key, batch); });
    k_stage.next();
    stage.next();
  }

  // Starts the loads of q, dout and the statistics of a query tile of one of the unit's query heads, and finishes those
  // that have rows to clear.
  template <Mask MASK>
  __device__ __forceinline__ void load_queries(const Unit<MASK>& unit, int query_tile, int member = 0) {
    const int valid = unit.q.length - query_tile * kQueries, first = unit.q.first + query_tile * kQueries;
    const int batch = batch_of(unit), head = unit.head + member;
    const bool whole = !foreign || valid >= kQueries;
    char *q = memory.q(stage.slot), *dout = memory.dout(stage.slot);
    Mbarrier& full = memory.stage_full[stage.slot];
    memory.stage_empty[stage.slot].wait(stage.parity ^ 1);
    start_loads(whole ? full : memory.raw[2], 2 * kQueryTileBytes + kStatisticsBytes, [&](Mbarrier& landed) {
      tma_load(&p.q, landed, shared_address(q), 0, head, first, batch);
      tma_load(&p.dout, landed, shared_address(dout), 0, head, first, batch);
      bulk_load(landed, shared_address(memory.statistics[stage.slot]),
                p.statistics + static_cast<int64_t>(unit.tile + member * p.tiles + query_tile) * 2 * kQueries,
                kStatisticsBytes);
    });
    if (clear_keys) {  // the first query tile: all three loads are in flight
      finish_loads(memory.raw[0], raw_keys.parity, *k_full, [&] { clear_rows(k, valid_keys, kKeys); });
      finish_loads(memory.raw[1], raw_keys.parity, *v_full, [&] { clear_rows(v, valid_keys, kKeys); });
      raw_keys.next();
      clear_keys = false;
    }
    if (!whole) {
      finish_loads(memory.raw[2], raw_queries.parity, full, [&] {
        clear_rows(q, valid, kQueries);
        clear_rows(dout, valid, kQueries);
      });
      raw_queries.next();
    }
    stage.next();
  }

  // Publishes that there are no more key tiles.
  template <class Publish>
  __device__ __forceinline__ void finish(Publish publish) {
    memory.k_empty[k_stage.slot].wait(k_stage.parity ^ 1);
    publish(k_stage.slot);
    arrive_warp(memory.k_full[k_stage.slot]);
  }

 private:
  template <Mask MASK>
  __device__ __forceinline__ int batch_of(const Unit<MASK>& unit) const {
    return p.cu_seqlens == nullptr ? unit.sequence : 0;
  }

  const Parameters& p;
  BlockMemory& memory;
  const bool foreign;
  RingPosition<BlockMemory::kStages> stage;
  RingPosition<2> k_stage;
  RingPosition<1> raw_keys, raw_queries;
  // These belong to the key tile whose loads were started last.
  char *k, *v;
  Mbarrier *k_full, *v_full;
  int valid_keys;
  bool clear_keys;
};

// The producer: loads tiles and publishes tasks. With ON_CHIP the block may fetch its next (sequence, head) pair from a
// counter; it does so early, to hide the latency of the atomic.
template <bool DROPOUT, bool GROUPED, Mask MASK, bool ON_CHIP>
__device__ __forceinline__ void load_tiles(const Parameters& p, Memory<ON_CHIP, MASK>& memory) {
  const Share share(p);
  const int units = count_units<MASK>(p, share);
  TileLoader<Memory<ON_CHIP, MASK>> loader(p, memory);
  uint32_t addition = 0;
  int index = share.group, taken = 0;
  for (int round = 0; index < units; ++round) {
    if (ON_CHIP && p.taken != nullptr && threadIdx.x % 32 == 0) taken = atomic_increment(p.taken);
    Unit<MASK> unit = unit_at<MASK>(p, index);
    for (int key_tile = first_key_tile(unit, share); key_tile - share.rank < end_key_tile(unit);
         key_tile += p.blocks, addition += unit.query_tiles) {
      if (key_tile >= end_key_tile(unit)) continue;
      if constexpr (MASK == Mask::window) unit.query_range = unit.queries_of(key_tile);
      loader.template load_keys<GROUPED>(
          unit, key_tile, [&](int slot) { publish_task<DROPOUT>(memory, slot, unit, key_tile, addition); });
      for (int query_tile = task_begin(unit, key_tile); query_tile < task_end(unit, key_tile); ++query_tile)
        loader.load_queries(unit, query_tile);
    }
    index = ON_CHIP && p.taken != nullptr ? share.groups + warp_uniform(taken)
                                          : unit_of_round(round + 1, share.group, share.groups);
  }
  loader.finish([&](int slot) { publish_task<DROPOUT>(memory, slot, Unit<MASK>{}, -1, addition); });
}

// ---- warpgroup 0: dropout --------------------------------------------------------------------------------------------

// Combines the top bit of each byte of one word with the other bits of another.
__device__ __forceinline__ uint32_t top_bits(uint32_t top, uint32_t rest) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, 0x80808080, 0xe4;" : "=r"(result) : "r"(top), "r"(rest));
  return result;
}

// Generates dropout's keep bits for tiles of 128 keys by 64 queries, one word for each thread of warpgroups 1 and 2.
// Bit 8 * (i / 8) + 4 * (1 - half) + i % 8 / 4 * 2 + c of a word belongs to element i + 2 * half + c of the thread's
// scores, where i is a multiple of 4 (hopper.cuh describes the layout). Within 64 keys, draw d of a query holds the
// bytes of keys 2 * d + {0, 1} modulo 8, and word w of the draw holds those of warp w.
//
// A task is half of the words of a warpgroup: lane (d % 2, t, part) computes byte `part` of the words of the 8 threads
// with keys 2 * d + {0, 1} and queries 2 * t + {0, 1} modulo 8, from the draws of its 4 queries. Tasks are assigned to
// the three warps round-robin. A warp without a task still waits for and arrives at every phase of the mbarriers: after
// a missed phase, the parity would not distinguish the previous phase from the next one.
template <Mask MASK, bool ON_CHIP>
__device__ __forceinline__ void draw_keep_bits(const Parameters& p, Memory<ON_CHIP, MASK>& memory, int warp) {
  const int lane = threadIdx.x % 32;
  const uint64_t seed = static_cast<uint64_t>(*p.seed);
  const uint32_t low = __byte_perm(p.threshold & 127, 0, 0);  // a multiplication would be recomputed each time
  uint32_t either = p.threshold < 128 ? 0xffffffffu : 0u;
  asm("" : "+r"(either));  // otherwise nvcc recomputes it each time
  const uint32_t any = p.threshold < 256 ? 0xf0f0f0f0u : 0u;
  RingPosition<Memory<ON_CHIP, MASK>::kBuffers> step;
  RingPosition<2> k_stage;
  int tasks_to_skip = warp;
  for (;; k_stage.next()) {
    memory.task_full[k_stage.slot].wait(k_stage.parity);
    const int key_tile = memory.task[k_stage.slot].key_tile;
    if (key_tile < 0) return;
    const Unit<MASK> unit = memory.task[k_stage.slot].unit;
    for (int query_tile = task_begin(unit, key_tile); query_tile < task_end(unit, key_tile); ++query_tile, step.next())
      for (int consumer = 0; consumer < 2; ++consumer) {
        int half = -1;  // which half of the words this warp computes, if any
        for (int i = 0; i < 2; ++i)
          if (--tasks_to_skip < 0) {
            tasks_to_skip = 2;
            half = i;
          }
        const int d = half * 2 + lane / 16, t = lane / 4 % 4, part = lane % 4;
        uint32_t bits[4];
        if (half >= 0) {
          const uint32_t block = key_tile * 2 + consumer, query = query_tile * kQueries + 16 * part + 2 * t;
          Draw drawn[4];
#pragma unroll
          for (int j = 0; j < 4; ++j)
            drawn[j] = draw_weights(seed, unit.sequence, unit.head, query + j / 2 * 8 + j % 2, block, d);
#pragma unroll
          for (int w = 0; w < 4; ++w) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const uint32_t reached = reaching_bytes(drawn[j].word[w], low, either);
              bits[w] = j == 0 ? reached : top_bits(reached, bits[w] >> 1);
            }
            bits[w] &= any;
          }
        }
        memory.kept_empty[step.slot][consumer].wait(step.parity ^ 1);
        if (half >= 0) {
          auto* bytes = reinterpret_cast<uint8_t*>(memory.kept[step.slot][consumer]);
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            const uint32_t both = bits[w] | bits[w] >> 20;
            bytes[4 * (32 * w + 8 * d + t) + part] = static_cast<uint8_t>(both);
            bytes[4 * (32 * w + 8 * d + 4 + t) + part] = static_cast<uint8_t>(both >> 8);
          }
        }
        arrive_warp(memory.kept_full[step.slot][consumer]);
      }
  }
}

}  // namespace hopper_backward
}  // namespace cuda
}  // namespace fasttfm
