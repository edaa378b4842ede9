// attention backward for Hopper: what its warpgroups share, and warpgroup 0, which brings tiles in and draws dropout's
// bits. See backward_d64.cu.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention/hopper/ordered_sums.cuh"
#include "common/cuda/hopper.cuh"
#include "common/philox.h"

namespace fasttfm {
namespace cuda {
namespace {

constexpr int kHeadDim = 64;
constexpr int kQueries = 64;  // of a tile
constexpr int kKeys = 128;    // of a tile; 64 for each of the two warpgroups
constexpr int kOnChipQueries = 512;
constexpr int kThreads = 4 * kWarpgroup;
constexpr int kQueryTileBytes = kQueries * kTileRowBytes;
constexpr int kKeyTileBytes = kKeys * kTileRowBytes;
constexpr int kStageBytes = 2 * kQueryTileBytes;
static_assert(kStageBytes == kKeyTileBytes);
constexpr int kStatisticsBytes = 2 * kQueries * 4;
constexpr int kSumFloats = kQueries * kHeadDim;  // of dQ, per tile
constexpr int kMostBlocks = 256;                 // of the grid
constexpr int kColumnPlaces = 8;                 // warps that work on the rows of a tile of keys

struct Output {
  void* data;
  int64_t sequence, token, head;  // strides in elements
};

struct Parameters {
  CUtensorMap q, k, v, dout;
  Output dq, dk, dv;
  const int32_t *cu_seqlens, *cu_seqlens_k, *lengths, *lengths_k;
  const int64_t* seed;
  const float* statistics;  // [heads, tiles, 2, kQueries]
  float* sums;              // [heads, tiles, kSumFloats]: dQ's, not over all keys yet, where they are not on chip
  uint32_t* passed;         // [kMostBlocks]: how far each block is with them
  int* order;               // [sequences]: which one comes when, those with most work first; null: as they are
  int* taken;               // how many (sequence, head)s blocks have come back for; null: their shares are fixed
  int sequences, heads, queries, keys, max_seqlen, max_seqlen_k, tiles;
  int threshold;
  float score_scale;  // in units of log2
  float dq_scale;     // of dq and dk
  float dv_scale;
  int blocks;           // of a group, which shares a (sequence, head)
  float* column_parts;  // [sequences, blocks, kColumnPlaces, 3, heads, kHeadDim], or null: see column_sums.cuh
};

// Tokens of one sequence: the first row, how many count, and how many rows of results belong to it.
struct Span {
  int first, length, stored;
};

__device__ __forceinline__ Span span_of(const int32_t* cu_seqlens, const int32_t* lengths, int sequence, int size,
                                        int longest) {
  if (cu_seqlens != nullptr) {
    const int first = min(max(cu_seqlens[sequence], 0), size);
    const int length = min(max(min(cu_seqlens[sequence + 1], size) - first, 0), longest);
    return {first, length, length};
  }
  return {0, lengths == nullptr ? size : min(max(lengths[sequence], 0), size), size};
}

__device__ __forceinline__ int divide_up(int a, int b) { return (a + b - 1) / b; }

// First tile of a sequence in statistics and sums: tiles reach past a sequence's end.
__device__ __forceinline__ int first_tile(const int32_t* cu_seqlens, int sequence, int first, int queries) {
  return cu_seqlens == nullptr ? sequence * divide_up(queries, kQueries) : first / kQueries + sequence;
}

// One (sequence, head), and which tiles of queries meet which tiles of keys.
template <bool CAUSAL>
struct Unit {
  int sequence, head;
  Span q, k;
  int query_tiles, key_tiles, tile;  // tile: the first in statistics and sums

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
  // First tile of queries that attends to a tile of keys. The last one always does.
  __device__ __forceinline__ int begin(int key_tile) const {
    return CAUSAL ? max(key_tile * kKeys - offset(), 0) / kQueries : 0;
  }
  // Last tile of keys that a tile of queries attends to; -1: none.
  __device__ __forceinline__ int last_key_tile(int query_tile) const {
    if (!CAUSAL) return key_tiles - 1;
    const int last = query_tile * kQueries + kQueries - 1 + offset();
    return last < 0 ? -1 : min(last / kKeys, key_tiles - 1);
  }
};

// The (sequence, head) that a group of blocks has in a round: back and forth, for those with most work may come first.
__device__ __forceinline__ int unit_of_round(int round, int group, int groups) {
  return round * groups + (round % 2 ? groups - 1 - group : group);
}

// Which (sequence, head)s and tiles of keys are this block's: unit_of_round() of every round, or, if they are handed
// out, of the first one; and of each of them every blocks-th tile of keys from rank on.
struct Share {
  int rank, group, groups, units;

  explicit __device__ __forceinline__ Share(const Parameters& p)
      : rank(blockIdx.x % p.blocks),
        group(blockIdx.x / p.blocks),
        groups(gridDim.x / p.blocks),
        units(p.sequences * p.heads) {}
};

// A tile of keys of this block's share, of which the copying warp, which alone knows what comes, tells the others.
struct Task {
  Unit<true> unit;
  int key_tile;    // -1: there are no more
  uint32_t place;  // of the first tile of queries in the order of additions: see ordered_sums.cuh
};

// ON_CHIP: dQ's sums stand in shared memory, each thread's own in its own place.
template <bool ON_CHIP>
struct Memory {
  static constexpr int kStages = ON_CHIP ? 3 : 5;   // each a tile of queries with its gradients, or of values
  static constexpr int kBuffers = ON_CHIP ? 1 : 2;  // of dS and of what is kept
  using Sums = std::conditional_t<ON_CHIP, float4[kOnChipQueries * kHeadDim / 4],
                                  typename OrderedSums<kSumFloats / kWarpgroup>::Memory>;
  alignas(1024) char stage[kStages][kStageBytes];
  char k[2][kKeyTileBytes];
  char dscores[kBuffers][kKeyTileBytes];  // [keys, queries]
  Sums sums;
  float statistics[kStages][2][kQueries];
  uint32_t kept[kBuffers][2][kWarpgroup];  // of each of the two warpgroups
  Task task[2];                            // of the next tile of keys: there with k
  Barrier stage_full[kStages], stage_empty[kStages], k_full[2], k_empty[2], told[2], raw[3], dscores_full[kBuffers][2],
      dscores_empty[kBuffers][2], kept_full[kBuffers][2], kept_empty[kBuffers][2];

  // Of a stage.
  __device__ __forceinline__ char* q(int slot) { return stage[slot]; }
  __device__ __forceinline__ char* dout(int slot) { return stage[slot] + kQueryTileBytes; }
  __device__ __forceinline__ char* v(int slot) { return stage[slot]; }

  // One thread; then a barrier of the block.
  __device__ __forceinline__ void initialize() {
    for (int i = 0; i < kStages; ++i) {
      stage_full[i].initialize(kWarpArrivals);
      stage_empty[i].initialize(8 * kWarpArrivals);
    }
    for (int i = 0; i < 2; ++i) {
      told[i].initialize(kWarpArrivals);
      k_full[i].initialize(kWarpArrivals);
      k_empty[i].initialize(4 * kWarpArrivals);
    }
    for (int i = 0; i < kBuffers; ++i) {
      for (int half = 0; half < 2; ++half) {
        dscores_full[i][half].initialize(4 * kWarpArrivals);
        dscores_empty[i][half].initialize(4 * kWarpArrivals);
        kept_full[i][half].initialize(3 * kWarpArrivals);
        kept_empty[i][half].initialize(4 * kWarpArrivals);
      }
    }
    for (Barrier& landed : raw) landed.initialize(kWarpArrivals);
    fence_barriers();
  }
};
static_assert(sizeof(Memory<true>) <= 227 * 1024 && sizeof(Memory<false>) <= 227 * 1024);

template <bool CAUSAL>
__device__ __forceinline__ const Unit<CAUSAL>& unit_of(const Task& task) {
  return reinterpret_cast<const Unit<CAUSAL>&>(task.unit);
}

// ---- warpgroup 0: tiles ----------------------------------------------------------------------------------------------

__device__ __forceinline__ void load_bytes(Barrier& full, uint32_t shared, const void* global, uint32_t bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(full.address())
               : "memory");
}

// Zeros in rows `from` to `rows` of a tile. A whole warp.
__device__ __forceinline__ void clear_rows(char* tile, int from, int rows) {
  for (int i = 8 * from + threadIdx.x % 32; i < 8 * rows; i += 32)
    reinterpret_cast<uint4*>(tile)[i] = make_uint4(0, 0, 0, 0);
}

// Starts copies that bring `bytes` to `landed`. This and what follows: a whole warp.
template <class Start>
__device__ __forceinline__ void bring(Barrier& landed, uint32_t bytes, Start start) {
  if (threadIdx.x % 32 == 0) {
    start(landed);
    landed.arrive_expect(bytes);
  } else if (kWarpArrivals > 1) {
    landed.arrive();
  }
}

// Hands over to `full` what has landed elsewhere, when some of its rows are cleared.
template <class Clear>
__device__ __forceinline__ void hand_over(const Barrier& landed, uint32_t parity, Barrier& full, Clear clear) {
  landed.wait(parity);
  clear();
  fence_async();
  arrive_warp(full);
}

template <bool DROPOUT, bool CAUSAL, bool ON_CHIP>
__device__ __forceinline__ void tell(Memory<ON_CHIP>& memory, int slot, const Unit<CAUSAL>& unit, int key_tile,
                                     uint32_t place) {
  if (threadIdx.x % 32 == 0) {
    reinterpret_cast<Unit<CAUSAL>&>(memory.task[slot].unit) = unit;
    memory.task[slot].key_tile = key_tile;
    memory.task[slot].place = place;
  }
  if constexpr (DROPOUT) arrive_warp(memory.told[slot]);  // only those who draw do not wait for k
}

// The number before it is counted up, by one thread. Of atomicAdd(), the compiler makes one for the warp, with an
// exchange behind it that waits for the answer.
__device__ __forceinline__ int take_one(int* counter) {
  int before;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], 0x7fffffff;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// Brings tiles to their places, and tells of tiles of keys. Rows past a sequence's end that are others' numbers are
// replaced by zeros: they are multiplied by zeros, which a NaN would survive. Who has a (sequence, head) on chip may
// come back for the next one; it asks early, as the answer takes its time.
template <bool DROPOUT, bool CAUSAL, bool ON_CHIP>
__device__ __forceinline__ void bring_tiles(const Parameters& p, Memory<ON_CHIP>& memory) {
  const Share share(p);
  const bool foreign = p.cu_seqlens != nullptr || p.lengths != nullptr || p.lengths_k != nullptr;
  RingPosition<Memory<ON_CHIP>::kStages> stage;
  RingPosition<2> k_stage;
  RingPosition<1> raw_keys, raw_queries;
  uint32_t place = 0;
  int index = share.group, taken = 0;
  for (int round = 0; index < share.units; ++round) {
    if (ON_CHIP && p.taken != nullptr && threadIdx.x % 32 == 0) taken = take_one(p.taken);
    const Unit<CAUSAL> unit(p, index);
    const int batch = p.cu_seqlens == nullptr ? unit.sequence : 0;
    for (int key_tile = share.rank; key_tile - share.rank < unit.key_tiles;
         key_tile += p.blocks, place += unit.query_tiles) {
      if (key_tile >= unit.key_tiles) continue;
      const int valid_keys = unit.k.length - key_tile * kKeys, first_key = unit.k.first + key_tile * kKeys;
      const bool whole_keys = !foreign || valid_keys >= kKeys;
      char *k = memory.k[k_stage.slot], *v = memory.v(stage.slot);
      Barrier &k_full = memory.k_full[k_stage.slot], &v_full = memory.stage_full[stage.slot];
      memory.k_empty[k_stage.slot].wait(k_stage.parity ^ 1);
      tell<DROPOUT>(memory, k_stage.slot, unit, key_tile, place);
      bring(whole_keys ? k_full : memory.raw[0], kKeyTileBytes,
            [&](Barrier& landed) { load_box(&p.k, landed, shared_address(k), 0, unit.head, first_key, batch); });
      memory.stage_empty[stage.slot].wait(stage.parity ^ 1);
      bring(whole_keys ? v_full : memory.raw[1], kKeyTileBytes,
            [&](Barrier& landed) { load_box(&p.v, landed, shared_address(v), 0, unit.head, first_key, batch); });
      k_stage.next();
      stage.next();
      for (int query_tile = unit.begin(key_tile); query_tile < unit.query_tiles; ++query_tile) {
        const int valid = unit.q.length - query_tile * kQueries, first = unit.q.first + query_tile * kQueries;
        const bool whole = !foreign || valid >= kQueries;
        char *q = memory.q(stage.slot), *dout = memory.dout(stage.slot);
        Barrier& full = memory.stage_full[stage.slot];
        memory.stage_empty[stage.slot].wait(stage.parity ^ 1);
        bring(whole ? full : memory.raw[2], 2 * kQueryTileBytes + kStatisticsBytes, [&](Barrier& landed) {
          load_box(&p.q, landed, shared_address(q), 0, unit.head, first, batch);
          load_box(&p.dout, landed, shared_address(dout), 0, unit.head, first, batch);
          load_bytes(landed, shared_address(memory.statistics[stage.slot]),
                     p.statistics + static_cast<int64_t>(unit.tile + query_tile) * 2 * kQueries, kStatisticsBytes);
        });
        if (!whole_keys && query_tile == unit.begin(key_tile)) {  // all three copies are under way
          hand_over(memory.raw[0], raw_keys.parity, k_full, [&] { clear_rows(k, valid_keys, kKeys); });
          hand_over(memory.raw[1], raw_keys.parity, v_full, [&] { clear_rows(v, valid_keys, kKeys); });
          raw_keys.next();
        }
        if (!whole) {
          hand_over(memory.raw[2], raw_queries.parity, full, [&] {
            clear_rows(q, valid, kQueries);
            clear_rows(dout, valid, kQueries);
          });
          raw_queries.next();
        }
        stage.next();
      }
    }
    index = ON_CHIP && p.taken != nullptr ? share.groups + uniform(taken)
                                          : unit_of_round(round + 1, share.group, share.groups);
  }
  memory.k_empty[k_stage.slot].wait(k_stage.parity ^ 1);
  tell<DROPOUT>(memory, k_stage.slot, Unit<CAUSAL>{}, -1, place);
  arrive_warp(memory.k_full[k_stage.slot]);
}

// ---- warpgroup 0: dropout --------------------------------------------------------------------------------------------

// The top bit of each byte from one number, the rest from the other.
__device__ __forceinline__ uint32_t top_bits(uint32_t top, uint32_t rest) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, 0x80808080, 0xe4;" : "=r"(result) : "r"(top), "r"(rest));
  return result;
}

// Keeps bits for a tile of 128 keys by 64 queries, a word for each thread of warpgroups 1 and 2: bit 8 * (i / 8) + 4 *
// (1 - half) + i % 8 / 4 * 2 + c of element i + 2 * half + c, i a multiple of 4, of its scores (see hopper.cuh for the
// layout). Of 64 keys, draw d of a query holds the bytes of keys 2 * d + {0, 1} modulo 8; word w those of warp w.
//
// A task is half the words of a warpgroup: lane (d % 2, t, part) makes byte `part` of the words of the 8 threads with
// keys 2 * d + {0, 1} and queries 2 * t + {0, 1} modulo 8, from the draws of its 4 queries. The three warps take tasks
// in turn. Each takes part in every phase, also where it has no task: it could take the phase before one that it missed
// for the one after it.
template <bool CAUSAL, bool ON_CHIP>
__device__ __forceinline__ void draw_kept(const Parameters& p, Memory<ON_CHIP>& memory, int warp) {
  const int lane = threadIdx.x % 32;
  const uint64_t seed = static_cast<uint64_t>(*p.seed);
  const uint32_t low = __byte_perm(p.threshold & 127, 0, 0);  // as a product it would be computed each time
  uint32_t either = p.threshold < 128 ? 0xffffffffu : 0u;
  asm("" : "+r"(either));  // else it is selected each time
  const uint32_t any = p.threshold < 256 ? 0xf0f0f0f0u : 0u;
  RingPosition<Memory<ON_CHIP>::kBuffers> step;
  RingPosition<2> k_stage;
  int turn = warp;
  for (;; k_stage.next()) {
    memory.told[k_stage.slot].wait(k_stage.parity);
    const int key_tile = memory.task[k_stage.slot].key_tile;
    if (key_tile < 0) return;
    const Unit<CAUSAL> unit = unit_of<CAUSAL>(memory.task[k_stage.slot]);
    for (int query_tile = unit.begin(key_tile); query_tile < unit.query_tiles; ++query_tile, step.next())
      for (int consumer = 0; consumer < 2; ++consumer) {
        int half = -1;  // of the words, if it is this warp's turn at one
        for (int i = 0; i < 2; ++i)
          if (--turn < 0) {
            turn = 2;
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

}  // namespace
}  // namespace cuda
}  // namespace fasttfm
