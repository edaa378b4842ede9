// attention backward for Hopper: what its warpgroups and its two forms share, and warpgroup 0, which brings tiles in
// and draws dropout's bits. See cuda_backward.cu.
#pragma once

#include <cstdint>

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
  float* sums;              // [heads, tiles, kSumFloats] where they are not on chip
  int sequences, heads, queries, keys, max_seqlen, max_seqlen_k, tiles;
  int threshold;
  float score_scale;  // in units of log2
  float dq_scale;     // of dq and dk
  float dv_scale;
  int blocks;           // of a cluster, which shares a (sequence, head)
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
};

// Barriers of what both forms of a block's memory have.
template <class Memory>
__device__ __forceinline__ void initialize_tiles(Memory& memory) {
  for (int i = 0; i < Memory::kStages; ++i) {
    memory.q_full[i].initialize(1);
    memory.q_empty[i].initialize(8 * kWarpArrivals);
  }
  for (int i = 0; i < 2; ++i) {
    memory.k_full[i].initialize(1);
    memory.k_empty[i].initialize(4 * kWarpArrivals);
  }
  for (int i = 0; i < Memory::kBuffers; ++i) {
    memory.kept_full[i][0].initialize(2 * kWarpArrivals);
    memory.kept_full[i][1].initialize(2 * kWarpArrivals);
    memory.kept_empty[i].initialize(8 * kWarpArrivals);
  }
  memory.v_full.initialize(1);
  memory.v_empty.initialize(8 * kWarpArrivals);
  memory.raw.initialize(1);
}

// Which (sequence, head)s and tiles of keys are a block's: every groups-th from group on, and of each of them every
// blocks-th tile of keys from rank on. Here: all keys.
struct WholeHeads {
  static constexpr int rank = 0, blocks = 1;
  int group, groups;

  explicit __device__ __forceinline__ WholeHeads(const Parameters&) : group(blockIdx.x), groups(gridDim.x) {}
};

// Of a block for up to kOnChipQueries queries.
struct Memory {
  using Share = WholeHeads;
  static constexpr int kStages = 2, kBuffers = 1;  // tiles of queries; what is kept
  alignas(1024) char q[kStages][kQueryTileBytes];
  char dout[kStages][kQueryTileBytes];
  char k[2][kKeyTileBytes];
  char v[kKeyTileBytes];
  char dscores[kKeyTileBytes];  // [keys, queries]
  float4 sums[kOnChipQueries * kHeadDim / 4];
  float statistics[kStages][2][kQueries];
  uint32_t kept[kBuffers][2][kWarpgroup];  // of each of the two warpgroups
  Barrier q_full[kStages], q_empty[kStages], k_full[2], k_empty[2], v_full, v_empty, raw, dscores_full, dscores_empty,
      kept_full[kBuffers][2], kept_empty[kBuffers];

  // One thread; then a barrier of the block.
  __device__ __forceinline__ void initialize() {
    initialize_tiles(*this);
    dscores_full.initialize(8 * kWarpArrivals);
    dscores_empty.initialize(4 * kWarpArrivals);
    fence_barriers();
  }
};
static_assert(sizeof(Memory) <= 227 * 1024);

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
template <bool CAUSAL, class Memory>
__device__ __forceinline__ void bring_tiles(const Parameters& p, Memory& memory) {
  const typename Memory::Share share(p);
  const bool first_lane = threadIdx.x % 32 == 0;
  const bool foreign = p.cu_seqlens != nullptr || p.lengths != nullptr || p.lengths_k != nullptr;
  RingPosition<Memory::kStages> stage;
  RingPosition<2> k_stage;
  RingPosition<1> v_stage, raw;
  // Starts copies that bring `bytes` to `full`; if some of the rows are to be cleared, that comes in between.
  const auto bring = [&](Barrier& full, int valid, int rows, uint32_t bytes, auto start, auto clear) {
    const bool direct = !foreign || valid >= rows;
    Barrier& landed = direct ? full : memory.raw;
    if (first_lane) {
      landed.arrive_expect(bytes);
      start(landed);
    }
    if (direct) return;
    landed.wait(raw.parity);
    raw.next();
    clear();
    fence_async();
    __syncwarp();
    if (first_lane) full.arrive();
  };
  for (int index = share.group; index < p.sequences * p.heads; index += share.groups) {
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

// Keeps bits for a tile of 128 keys by 64 queries, a word for each thread of warpgroups 1 and 2: bit 8 * (i / 8) + 4 *
// (1 - half) + i % 8 / 4 * 2 + c of element i + 2 * half + c, i a multiple of 4, of its scores (see hopper.cuh for the
// layout). Of 64 keys, draw d of a query holds the bytes of keys 2 * d + {0, 1} modulo 8; word w those of warp w.
//
// A task is half the words of a warpgroup: lane (d % 2, t, part) makes byte `part` of the words of the 8 threads with
// keys 2 * d + {0, 1} and queries 2 * t + {0, 1} modulo 8, from the draws of its 4 queries. The three warps take tasks
// in turn, each at least one of every tile, so that each of them waits for every phase of kept_empty: with a barrier
// for each warpgroup, a warp could miss a phase and take the one before it for the one after it.
template <bool CAUSAL, class Memory>
__device__ __forceinline__ void draw_kept(const Parameters& p, Memory& memory, int warp) {
  const typename Memory::Share share(p);
  const int lane = threadIdx.x % 32;
  const uint64_t seed = static_cast<uint64_t>(*p.seed);
  const uint32_t subtracted = (p.threshold & 127) * 0x01010101u;
  const uint32_t either = p.threshold < 128 ? 0xffffffffu : 0u;
  const uint32_t top = p.threshold < 256 ? 0x80808080u : 0u;
  RingPosition<Memory::kBuffers> step;
  int turn = warp;
  for (int index = share.group; index < p.sequences * p.heads; index += share.groups) {
    const Unit<CAUSAL> unit(p, index);
    for (int key_tile = share.rank; key_tile < unit.key_tiles; key_tile += share.blocks)
      for (int query_tile = unit.begin(key_tile); query_tile < unit.query_tiles; ++query_tile, step.next())
        for (int task = 0; task < 4; ++task) {
          if (--turn >= 0) continue;
          turn = 2;
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

}  // namespace
}  // namespace cuda
}  // namespace fasttfm
