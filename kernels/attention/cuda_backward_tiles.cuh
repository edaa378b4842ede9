// attention backward for Hopper: what its warpgroups share, and warpgroup 0, which brings tiles in, draws dropout's
// bits and adds dQ's sums up. See cuda_backward.cu.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention/cuda_ordered_sums.cuh"
#include "common/hopper.cuh"
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
  int sequences, heads, queries, keys, max_seqlen, max_seqlen_k, tiles;
  int threshold;
  float score_scale;  // in units of log2
  float dq_scale;     // of dq and dk
  float dv_scale;
  int blocks;           // of a group, which shares a (sequence, head)
  float* column_parts;  // [sequences, blocks, kColumnPlaces, 3, heads, kHeadDim], or null: see cuda_column_sums.cuh
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
      : sequence(unit / p.heads),
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
  // How far the block before has to be for an addition at a place (see cuda_ordered_sums.cuh).
  __device__ __forceinline__ uint32_t needed(uint32_t place, int rank) const {
    return place + 1 - (rank == 0 ? query_tiles : 0);
  }
};

// Which (sequence, head)s and tiles of keys are a block's: every groups-th from group on, and of each of them every
// blocks-th tile of keys from rank on. ON_CHIP: all of its keys.
template <bool ON_CHIP>
struct Share {
  int blocks, rank, group, groups, units;

  explicit __device__ __forceinline__ Share(const Parameters& p)
      : blocks(ON_CHIP ? 1 : p.blocks),
        rank(ON_CHIP ? 0 : blockIdx.x % blocks),
        group(ON_CHIP ? blockIdx.x : blockIdx.x / blocks),
        groups(ON_CHIP ? gridDim.x : gridDim.x / blocks),
        units(p.sequences * p.heads) {}
};

using Sums = OrderedSums<kSumFloats / kWarpgroup>;

// ON_CHIP: dQ's sums stand in shared memory, each thread's own in its own place.
template <bool ON_CHIP>
struct Memory {
  static constexpr int kStages = ON_CHIP ? 2 : 4;   // tiles of queries
  static constexpr int kBuffers = ON_CHIP ? 1 : 2;  // of dS and of what is kept
  using SumsMemory = std::conditional_t<ON_CHIP, float4[kOnChipQueries * kHeadDim / 4], Sums::Memory>;
  alignas(1024) char q[kStages][kQueryTileBytes];
  char dout[kStages][kQueryTileBytes];
  char k[2][kKeyTileBytes];
  char v[kKeyTileBytes];
  char dscores[kBuffers][kKeyTileBytes];  // [keys, queries]
  SumsMemory sums;
  float statistics[kStages][2][kQueries];
  uint32_t kept[kBuffers][2][kWarpgroup];  // of each of the two warpgroups
  Unit<true> unit[kThreads / 32];          // of each warp: there are no registers for it
  Barrier q_full[kStages], q_empty[kStages], k_full[2], k_empty[2], v_full, v_empty, raw, dscores_full[kBuffers],
      dscores_empty[kBuffers], kept_full[kBuffers][2], kept_empty[kBuffers];

  // One thread; then a barrier of the block.
  __device__ __forceinline__ void initialize() {
    for (int i = 0; i < kStages; ++i) {
      q_full[i].initialize(kWarpArrivals);
      q_empty[i].initialize(8 * kWarpArrivals);
    }
    for (int i = 0; i < 2; ++i) {
      k_full[i].initialize(kWarpArrivals);
      k_empty[i].initialize(4 * kWarpArrivals);
    }
    for (int i = 0; i < kBuffers; ++i) {
      dscores_full[i].initialize(8 * kWarpArrivals);
      dscores_empty[i].initialize(4 * kWarpArrivals);
      kept_full[i][0].initialize(2 * kWarpArrivals);
      kept_full[i][1].initialize(2 * kWarpArrivals);
      kept_empty[i].initialize(8 * kWarpArrivals);
    }
    v_full.initialize(kWarpArrivals);
    v_empty.initialize(8 * kWarpArrivals);
    raw.initialize(kWarpArrivals);
    if constexpr (!ON_CHIP) sums.initialize();
    fence_barriers();
  }
};
static_assert(sizeof(Memory<true>) <= 227 * 1024 && sizeof(Memory<false>) <= 227 * 1024);

// The warp's own unit in shared memory, where set_unit() puts it: a whole warp.
template <bool CAUSAL, bool ON_CHIP>
__device__ __forceinline__ const Unit<CAUSAL>& own_unit(const Memory<ON_CHIP>& memory) {
  return reinterpret_cast<const Unit<CAUSAL>&>(memory.unit[thread_here() / 32]);
}
template <bool CAUSAL, bool ON_CHIP>
__device__ __forceinline__ void set_unit(const Parameters& p, Memory<ON_CHIP>& memory, int index) {
  const Unit<CAUSAL> unit(p, index);
  __syncwarp();
  if (threadIdx.x % 32 == 0) reinterpret_cast<Unit<CAUSAL>&>(memory.unit[thread_here() / 32]) = unit;
  __syncwarp();
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

// Brings tiles to their places. Rows past a sequence's end that are others' numbers are replaced by zeros: they are
// multiplied by zeros, which a NaN would survive.
template <bool CAUSAL, bool ON_CHIP>
__device__ __forceinline__ void bring_tiles(const Parameters& p, Memory<ON_CHIP>& memory) {
  const Share<ON_CHIP> share(p);
  const bool first_lane = threadIdx.x % 32 == 0;
  const bool foreign = p.cu_seqlens != nullptr || p.lengths != nullptr || p.lengths_k != nullptr;
  RingPosition<Memory<ON_CHIP>::kStages> stage;
  RingPosition<2> k_stage;
  RingPosition<1> v_stage, raw;
  // Starts copies that bring `bytes` to `full`; if some of the rows are to be cleared, that comes in between.
  const auto bring = [&](Barrier& full, int valid, int rows, uint32_t bytes, auto start, auto clear) {
    const bool direct = !foreign || valid >= rows;
    Barrier& landed = direct ? full : memory.raw;
    if (first_lane) {
      landed.arrive_expect(bytes);
      start(landed);
    } else if (kWarpArrivals > 1) {
      landed.arrive();
    }
    if (direct) return;
    landed.wait(raw.parity);
    raw.next();
    clear();
    fence_async();
    arrive_warp(full);
  };
  for (int index = share.group; index < share.units; index += share.groups) {
    const Unit<CAUSAL> unit(p, index);
    const int batch = p.cu_seqlens == nullptr ? unit.sequence : 0;
    for (int key_tile = share.rank; key_tile < unit.key_tiles; key_tile += share.blocks) {
      const int valid_keys = unit.k.length - key_tile * kKeys, first_key = unit.k.first + key_tile * kKeys;
      char *k = memory.k[k_stage.slot], *v = memory.v;
      memory.k_empty[k_stage.slot].wait(k_stage.parity ^ 1);
      bring(
          memory.k_full[k_stage.slot], valid_keys, kKeys, kKeyTileBytes,
          [&](Barrier& full) { load_box(&p.k, full, shared_address(k), 0, unit.head, first_key, batch); },
          [&] { clear_rows(k, valid_keys, kKeys); });
      memory.v_empty.wait(v_stage.parity ^ 1);
      bring(
          memory.v_full, valid_keys, kKeys, kKeyTileBytes,
          [&](Barrier& full) { load_box(&p.v, full, shared_address(v), 0, unit.head, first_key, batch); },
          [&] { clear_rows(v, valid_keys, kKeys); });
      k_stage.next();
      v_stage.next();
      for (int query_tile = unit.begin(key_tile); query_tile < unit.query_tiles; ++query_tile) {
        const int valid = unit.q.length - query_tile * kQueries, first = unit.q.first + query_tile * kQueries;
        char *q = memory.q[stage.slot], *dout = memory.dout[stage.slot];
        memory.q_empty[stage.slot].wait(stage.parity ^ 1);
        bring(
            memory.q_full[stage.slot], valid, kQueries, 2 * kQueryTileBytes + kStatisticsBytes,
            [&](Barrier& full) {
              load_box(&p.q, full, shared_address(q), 0, unit.head, first, batch);
              load_box(&p.dout, full, shared_address(dout), 0, unit.head, first, batch);
              load_bytes(full, shared_address(memory.statistics[stage.slot]),
                         p.statistics + static_cast<int64_t>(unit.tile + query_tile) * 2 * kQueries, kStatisticsBytes);
            },
            [&] {
              clear_rows(q, valid, kQueries);
              clear_rows(dout, valid, kQueries);
            });
        stage.next();
      }
    }
  }
}

// ---- warpgroup 0: dropout --------------------------------------------------------------------------------------------

template <bool ON_CHIP>
constexpr int kDrawing = ON_CHIP ? 3 : 2;  // warps

// Keeps bits for a tile of 128 keys by 64 queries, a word for each thread of warpgroups 1 and 2: bit 8 * (i / 8) + 4 *
// (1 - half) + i % 8 / 4 * 2 + c of element i + 2 * half + c, i a multiple of 4, of its scores (see hopper.cuh for the
// layout). Of 64 keys, draw d of a query holds the bytes of keys 2 * d + {0, 1} modulo 8; word w those of warp w.
//
// A task is half the words of a warpgroup: lane (d % 2, t, part) makes byte `part` of the words of the 8 threads with
// keys 2 * d + {0, 1} and queries 2 * t + {0, 1} modulo 8, from the draws of its 4 queries. The warps take tasks in
// turn, each at least one of every tile, so that each of them waits for every phase of kept_empty: with a barrier for
// each warpgroup, a warp could miss a phase and take the one before it for the one after it.
template <bool CAUSAL, bool ON_CHIP>
__device__ __forceinline__ void draw_kept(const Parameters& p, Memory<ON_CHIP>& memory, int warp) {
  const Share<ON_CHIP> share(p);
  const int lane = threadIdx.x % 32;
  const uint64_t seed = static_cast<uint64_t>(*p.seed);
  const uint32_t subtracted = (p.threshold & 127) * 0x01010101u;
  const uint32_t either = p.threshold < 128 ? 0xffffffffu : 0u;
  const uint32_t top = p.threshold < 256 ? 0x80808080u : 0u;
  const Unit<CAUSAL>& unit = own_unit<CAUSAL>(memory);
  RingPosition<Memory<ON_CHIP>::kBuffers> step;
  int turn = warp;
  for (int index = share.group; index < share.units; index += share.groups) {
    set_unit<CAUSAL>(p, memory, index);
    for (int key_tile = share.rank; key_tile < unit.key_tiles; key_tile += share.blocks)
      for (int query_tile = unit.begin(key_tile); query_tile < unit.query_tiles; ++query_tile, step.next())
        for (int task = 0; task < 4; ++task) {
          if (--turn >= 0) continue;
          turn = kDrawing<ON_CHIP> - 1;
          const int consumer = task / 2, d = task % 2 * 2 + lane / 16, t = lane / 4 % 4, part = lane % 4;
          const uint32_t block = key_tile * 2 + consumer, query = query_tile * kQueries + 16 * part + 2 * t;
          uint32_t bits[4] = {0, 0, 0, 0};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const Draw drawn = draw_weights(seed, unit.sequence, unit.head, query + j / 2 * 8 + j % 2, block, d);
#pragma unroll
            for (int w = 0; w < 4; ++w) {
              const uint32_t x = drawn.word[w], z = (x | 0x80808080u) - subtracted;
              bits[w] |= (((x & z) | (either & (x | z))) & top) >> (3 - j);
            }
          }
          memory.kept_empty[step.slot].wait(step.parity ^ 1);
          auto* bytes = reinterpret_cast<uint8_t*>(memory.kept[step.slot][consumer]);
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            const uint32_t both = bits[w] | bits[w] >> 20;
            bytes[4 * (32 * w + 8 * d + t) + part] = static_cast<uint8_t>(both);
            bytes[4 * (32 * w + 8 * d + 4 + t) + part] = static_cast<uint8_t>(both >> 8);
          }
          arrive_warp(memory.kept_full[step.slot][consumer]);
        }
  }
}

// ---- warpgroup 0: sums -----------------------------------------------------------------------------------------------

// How far the block has come with dQ's sums, and where it hears of the one before it.
__device__ __forceinline__ uint32_t* told(const Parameters& p) { return p.passed + blockIdx.x; }
__device__ __forceinline__ const uint32_t* heard(const Parameters& p, int rank) {
  return rank == 0 ? told(p) + p.blocks - 1 : told(p) - 1;
}

// Takes the block's turns at adding what warpgroup 3 leaves. A whole warp, of which one thread adds.
template <bool CAUSAL>
__device__ __forceinline__ void add_sums(const Parameters& p, Memory<false>& memory) {
  const Share<false> share(p);
  const Unit<CAUSAL>& unit = own_unit<CAUSAL>(memory);
  Sums::Adder adder(memory.sums, told(p), heard(p, share.rank));
  uint32_t place = 0;  // of the round's first tile
  for (int index = share.group; index < share.units; index += share.groups) {
    set_unit<CAUSAL>(p, memory, index);
    for (int round = 0; round < unit.key_tiles; round += share.blocks, place += unit.query_tiles) {
      const int key_tile = round + share.rank;
      if (key_tile >= unit.key_tiles || threadIdx.x % 32 != 0) continue;
      for (int tile = unit.begin(key_tile); tile < unit.query_tiles; ++tile)
        if (key_tile != unit.last_key_tile(tile))
          adder.add(p.sums + static_cast<int64_t>(unit.tile + tile) * kSumFloats, place + tile,
                    unit.needed(place + tile, share.rank), key_tile == 0);
    }
  }
  if (threadIdx.x % 32 == 0) adder.end(place);
}

}  // namespace
}  // namespace cuda
}  // namespace fasttfm
