// attention backward for Hopper, head dim 64: one pass with the five products. Formulas: reference.py.
//
// A block works on one (sequence, head) after another. It takes 128 keys at a time; for them it goes over all queries,
// 64 at a time. Four warpgroups share the work:
//
//   0  producer: warp 0 brings tiles in by TMA, warps 1 to 3 draw dropout's random bits
//   1, 2  64 keys each, keys by queries:  S^T = K Q^T, dP^T = V dO^T, then P^T and dS^T in registers, and from there
//         dV += P^T dO and dK += dS^T Q; dS^T is left in shared memory
//   3  dQ += dS K of all 128 keys. Its sums over keys stand in shared memory up to kOnChipQueries queries, else in the
//      workspace, each thread's own in its own place, so that nothing has to be ordered.
//
// Every sum has one fixed order.
#include <algorithm>

#include "attention/op.h"
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

constexpr int kProducerRegisters = 48, kConsumerRegisters = 200, kSumRegisters = 64;

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

template <bool ON_CHIP>
struct Memory {
  static constexpr int kStages = ON_CHIP ? 2 : 4;
  alignas(1024) char q[kStages][kQueryTileBytes];
  char dout[kStages][kQueryTileBytes];
  char k[2][kKeyTileBytes];
  char v[kKeyTileBytes];
  char dscores[kKeyTileBytes];  // [keys, queries]
  float4 sums[ON_CHIP ? kOnChipQueries * kHeadDim / 4 : 1];
  float statistics[kStages][2][kQueries];
  uint32_t kept[2][kWarpgroup];
  Barrier q_full[kStages], q_empty[kStages], k_full[2], k_empty[2], v_full, v_empty, raw, dscores_full, dscores_empty,
      kept_full[2], kept_empty;
};
static_assert(sizeof(Memory<true>) <= 227 * 1024 && sizeof(Memory<false>) <= 227 * 1024);

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
    }
    if (direct) return;
    landed.wait(raw.parity);
    raw.next();
    clear();
    fence_async();
    __syncwarp();
    if (first_lane) full.arrive();
  };
  for (int index = blockIdx.x; index < p.sequences * p.heads; index += gridDim.x) {
    const Unit<CAUSAL> unit(p, index);
    const int batch = p.cu_seqlens == nullptr ? unit.sequence : 0;
    for (int key_tile = 0; key_tile < unit.key_tiles; ++key_tile) {
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
template <bool CAUSAL, bool ON_CHIP>
__device__ __forceinline__ void draw_kept(const Parameters& p, Memory<ON_CHIP>& memory, int warp) {
  const int lane = threadIdx.x % 32;
  const uint64_t seed = static_cast<uint64_t>(*p.seed);
  const uint32_t subtracted = (p.threshold & 127) * 0x01010101u;
  const uint32_t either = p.threshold < 128 ? 0xffffffffu : 0u;
  const uint32_t top = p.threshold < 256 ? 0x80808080u : 0u;
  uint32_t parity = 1;  // of the phase in which the words were taken
  int turn = warp;
  for (int index = blockIdx.x; index < p.sequences * p.heads; index += gridDim.x) {
    const Unit<CAUSAL> unit(p, index);
    for (int key_tile = 0; key_tile < unit.key_tiles; ++key_tile)
      for (int query_tile = unit.begin(key_tile); query_tile < unit.query_tiles; ++query_tile, parity ^= 1)
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
          memory.kept_empty.wait(parity);
          auto* bytes = reinterpret_cast<uint8_t*>(memory.kept[consumer]);
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            const uint32_t both = bits[w] | bits[w] >> 20;
            bytes[4 * (32 * w + 8 * d + t) + part] = static_cast<uint8_t>(both);
            bytes[4 * (32 * w + 8 * d + 4 + t) + part] = static_cast<uint8_t>(both >> 8);
          }
          __syncwarp();
          if (lane == 0) memory.kept_full[consumer].arrive();
        }
  }
}

// ---- results ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void exchange(uint32_t& low, uint32_t& high, int bit) {
  const bool upper = (threadIdx.x & bit) != 0;
  const uint32_t received = __shfl_xor_sync(0xffffffffu, upper ? low : high, bit);
  if (upper)
    low = received;
  else
    high = received;
}

// Writes 64 rows by 64 columns of a product of a warpgroup, as far as there are `rows`. Four threads hold a row in
// pairs of columns; they swap them for runs of 8.
template <class T>
__device__ __forceinline__ void store_product(const float (&value)[32], float factor, T* to, int64_t stride, int rows) {
  const int lane = threadIdx.x % 32, row = threadIdx.x % kWarpgroup / 32 * 16 + lane / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      uint32_t word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 16 * part + 4 * i + 2 * half;
        word[i] = narrow_word(value[at] * factor, value[at + 1] * factor, T{});
      }
      exchange(word[0], word[1], 1);
      exchange(word[2], word[3], 1);
      exchange(word[0], word[2], 2);
      exchange(word[1], word[3], 2);
      if (row + 8 * half < rows)
        *reinterpret_cast<uint4*>(to + (row + 8 * half) * stride + 32 * part + 8 * (lane % 4)) =
            make_uint4(word[0], word[1], word[2], word[3]);
    }
}

// Zeros in `rows` rows of 64. A whole warpgroup.
template <class T>
__device__ __forceinline__ void store_zeros(T* to, int64_t stride, int rows) {
  for (int i = threadIdx.x % kWarpgroup; i < 8 * rows; i += kWarpgroup)
    *reinterpret_cast<uint4*>(to + i / 8 * stride + i % 8 * 8) = make_uint4(0, 0, 0, 0);
}

template <class T>
__device__ __forceinline__ T* row_of(const Output& output, const Parameters& p, int sequence, int head, int row) {
  const int64_t batch = p.cu_seqlens == nullptr ? sequence : 0;
  return static_cast<T*>(output.data) + batch * output.sequence + head * output.head + row * output.token;
}

// ---- warpgroups 1 and 2 ----------------------------------------------------------------------------------------------

__device__ __forceinline__ void load_matrices(uint32_t* words, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void store_matrices(uint32_t address, const uint32_t* words) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

__device__ __forceinline__ float power_of_two(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// What masks the scores of 64 keys from `key` on and 64 queries from `query` on.
template <bool CAUSAL>
__device__ __forceinline__ void mask_scores(float (&scores)[32], int key, int query, int keys, int offset) {
  const bool whole = key + 64 <= keys && (!CAUSAL || key + 63 <= query + offset);
  if (whole) return;
  const int lane = threadIdx.x % 32, row = key + threadIdx.x % kWarpgroup / 32 * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int own_key = row + i % 4 / 2 * 8, own_query = query + i / 4 * 8 + lane % 4 * 2 + i % 2;
    if (own_key >= keys || (CAUSAL && own_key > own_query + offset)) scores[i] = -__int_as_float(0x7f800000);
  }
}

template <class T, bool DROPOUT, bool CAUSAL, bool ON_CHIP>
struct KeyWarpgroup {
  const Parameters& p;
  Memory<ON_CHIP>& memory;
  const int number;  // 0 or 1: which 64 keys of a tile
  RingPosition<Memory<ON_CHIP>::kStages> stage;
  RingPosition<2> k_stage;
  RingPosition<1> v_stage, step;
  float dk[32], dv[32];
  uint32_t v[16];
  uint32_t k;  // where the tile of keys stands

  __device__ __forceinline__ KeyWarpgroup(const Parameters& p, Memory<ON_CHIP>& memory, int number)
      : p(p), memory(memory), number(number) {}

  static __device__ __forceinline__ void arrive_warp(Barrier& barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier.arrive();
  }

  // Where a lane's row of the matrices of 16 rows and the columns from 0 on stands; those from 16 * c on: ^ 32 * c.
  __device__ __forceinline__ uint32_t matrix_address(const char* tile) const {
    const int lane = threadIdx.x % 32, row = number * 64 + threadIdx.x % kWarpgroup / 32 * 16 + lane % 16;
    return shared_address(tile) + row * kTileRowBytes + (lane / 16 ^ lane % 8) * 16;
  }

  // One tile of queries. `first`: it starts the sums of dk and dv.
  __device__ __forceinline__ void over_tile(const Unit<CAUSAL>& unit, int key, int query, bool first) {
    const uint32_t q = shared_address(memory.q[stage.slot]), dout = shared_address(memory.dout[stage.slot]);
    float scores[32], dweights[32];
    memory.q_full[stage.slot].wait(stage.parity);
    begin_products();
#pragma unroll
    for (int c = 0; c < 4; ++c)
      multiply<T>(scores, advance(k_major(k), c * kKMajorStep), advance(k_major(q), c * kKMajorStep), c > 0);
    commit_products();
#pragma unroll
    for (int c = 0; c < 4; ++c) multiply<T>(dweights, v + 4 * c, advance(k_major(dout), c * kKMajorStep), c > 0);
    commit_products();
    const float2* statistics = reinterpret_cast<const float2*>(memory.statistics[stage.slot]) + threadIdx.x % 4;
    uint32_t kept = 0xffffffffu;
    if constexpr (DROPOUT) {
      memory.kept_full[number].wait(step.parity);
      kept = memory.kept[number][threadIdx.x % kWarpgroup];
    }
    wait_products<1>();
    hold_registers(scores);
    // A load from shared memory has ended only when its value is used, and a barrier does not wait for it: what was
    // read is given free here, where the products have taken v.
    if (first) {
      arrive_warp(memory.v_empty);
    } else {  // dk and dv of the tile before are through with it
      constexpr int kStages = Memory<ON_CHIP>::kStages;
      arrive_warp(memory.q_empty[stage.slot == 0 ? kStages - 1 : stage.slot - 1]);
    }
    mask_scores<CAUSAL>(scores, key, query, unit.k.length, unit.offset());
    uint32_t operand[16];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 lse = statistics[4 * i];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* pair = scores + 4 * i + 2 * half;
        pair[0] = power_of_two(pair[0] * p.score_scale - lse.x);
        pair[1] = power_of_two(pair[1] * p.score_scale - lse.y);
        operand[2 * i + half] = narrow_word(keep(pair[0], kept, i, half, 0), keep(pair[1], kept, i, half, 1), T{});
      }
    }
    if constexpr (DROPOUT) arrive_warp(memory.kept_empty);  // the word is here: it was used
    begin_products();
#pragma unroll
    for (int c = 0; c < 4; ++c)
      multiply<T, Major::mn>(dv, operand + 4 * c, advance(mn_major(dout, 0), c * kMnMajorStep), c > 0 || !first);
    commit_products();
    wait_products<1>();
    hold_registers(dweights);
    asm volatile("" : "+r"(kept));  // or the compiler keeps the 32 predicates from above, in registers
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 delta = statistics[kQueries / 2 + 4 * i];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = 4 * i + 2 * half;
        dweights[at] = scores[at] * (keep(dweights[at], kept, i, half, 0) - delta.x);
        dweights[at + 1] = scores[at + 1] * (keep(dweights[at + 1], kept, i, half, 1) - delta.y);
      }
    }
    wait_products<0>();  // dv's operand gives its registers to dk's
    hold_registers(operand);
#pragma unroll
    for (int i = 0; i < 16; ++i) operand[i] = narrow_word(dweights[2 * i], dweights[2 * i + 1], T{});
    memory.dscores_empty.wait(step.parity ^ 1);
    const uint32_t to = matrix_address(memory.dscores);
#pragma unroll
    for (int c = 0; c < 4; ++c) store_matrices(to ^ 32 * c, operand + 4 * c);
    fence_async();
    arrive_warp(memory.dscores_full);
    begin_products();
#pragma unroll
    for (int c = 0; c < 4; ++c)
      multiply<T, Major::mn>(dk, operand + 4 * c, advance(mn_major(q, 0), c * kMnMajorStep), c > 0 || !first);
    commit_products();
    stage.next();
    step.next();
  }

  static __device__ __forceinline__ float keep(float value, uint32_t kept, int i, int half, int c) {
    return !DROPOUT || (kept >> (i / 2 * 8 + (1 - half) * 4 + i % 2 * 2 + c) & 1) ? value : 0.0f;
  }

  __device__ __forceinline__ void over_unit(const Unit<CAUSAL>& unit) {
    for (int key_tile = 0; key_tile < unit.key_tiles; ++key_tile) {
      memory.k_full[k_stage.slot].wait(k_stage.parity);
      k = shared_address(memory.k[k_stage.slot]) + number * 64 * kTileRowBytes;
      memory.v_full.wait(v_stage.parity);
#pragma unroll
      for (int c = 0; c < 4; ++c) load_matrices(v + 4 * c, matrix_address(memory.v) ^ 32 * c);
      k_stage.next();
      v_stage.next();
      const int key = key_tile * kKeys + number * 64, begin = unit.begin(key_tile);
      for (int tile = begin; tile < unit.query_tiles; ++tile) over_tile(unit, key, tile * kQueries, tile == begin);
      wait_products<0>();
      hold_registers(dk);
      hold_registers(dv);
      arrive_warp(memory.q_empty[stage.slot == 0 ? Memory<ON_CHIP>::kStages - 1 : stage.slot - 1]);
      const int rows = unit.k.stored - key;
      store_product(dk, p.dq_scale, row_of<T>(p.dk, p, unit.sequence, unit.head, unit.k.first + key), p.dk.token, rows);
      store_product(dv, p.dv_scale, row_of<T>(p.dv, p, unit.sequence, unit.head, unit.k.first + key), p.dv.token, rows);
    }
    for (int key = unit.key_tiles * kKeys + number * 64; key < unit.k.stored; key += kKeys) {
      const int rows = min(unit.k.stored - key, 64);
      store_zeros(row_of<T>(p.dk, p, unit.sequence, unit.head, unit.k.first + key), p.dk.token, rows);
      store_zeros(row_of<T>(p.dv, p, unit.sequence, unit.head, unit.k.first + key), p.dv.token, rows);
    }
  }
};

// ---- warpgroup 3 -----------------------------------------------------------------------------------------------------

template <class T, bool CAUSAL, bool ON_CHIP>
__device__ __forceinline__ void sum_dq(const Parameters& p, Memory<ON_CHIP>& memory) {
  const int thread = threadIdx.x % kWarpgroup;
  const uint32_t dscores = shared_address(memory.dscores);
  RingPosition<2> k_stage;
  RingPosition<1> step;
  for (int index = blockIdx.x; index < p.sequences * p.heads; index += gridDim.x) {
    const Unit<CAUSAL> unit(p, index);
    for (int key_tile = 0; key_tile < unit.key_tiles; ++key_tile, k_stage.next()) {
      const uint32_t k = shared_address(memory.k[k_stage.slot]);
      memory.k_full[k_stage.slot].wait(k_stage.parity);
      for (int tile = unit.begin(key_tile); tile < unit.query_tiles; ++tile, step.next()) {
        float4* sums = ON_CHIP ? memory.sums : reinterpret_cast<float4*>(p.sums + int64_t(unit.tile) * kSumFloats);
        sums += static_cast<int64_t>(tile) * (kSumFloats / 4) + thread;
        float dq[32];
        if (key_tile > 0) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const float4 part = ON_CHIP ? sums[i * kWarpgroup] : __ldcg(sums + i * kWarpgroup);
            dq[4 * i] = part.x;
            dq[4 * i + 1] = part.y;
            dq[4 * i + 2] = part.z;
            dq[4 * i + 3] = part.w;
          }
        } else {
#pragma unroll
          for (int i = 0; i < 32; ++i) dq[i] = 0.0f;
        }
        memory.dscores_full.wait(step.parity);
        begin_products();
#pragma unroll
        for (int c = 0; c < 8; ++c)
          multiply<T, Major::mn, Major::mn>(dq, advance(mn_major(dscores, 0), c * kMnMajorStep),
                                            advance(mn_major(k, 0), c * kMnMajorStep), true);
        commit_products();
        wait_products<0>();
        hold_registers(dq);
        __syncwarp();
        if (thread % 32 == 0) memory.dscores_empty.arrive();
        if (key_tile < unit.last_key_tile(tile)) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const float4 part = make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
            if (ON_CHIP)
              sums[i * kWarpgroup] = part;
            else
              __stcg(sums + i * kWarpgroup, part);
          }
        } else {
          const int query = tile * kQueries;
          store_product(dq, p.dq_scale, row_of<T>(p.dq, p, unit.sequence, unit.head, unit.q.first + query), p.dq.token,
                        unit.q.stored - query);
        }
      }
      if (thread % 32 == 0) memory.k_empty[k_stage.slot].arrive();
    }
    // Rows that attend to nothing: those before the first key's, and those past the sequence's end.
    const auto zeros = [&](int begin, int end) {
      if (begin < end)
        store_zeros(row_of<T>(p.dq, p, unit.sequence, unit.head, unit.q.first + begin), p.dq.token, end - begin);
    };
    if (CAUSAL && unit.key_tiles > 0) zeros(0, min(unit.begin(0) * kQueries, unit.q.stored));
    zeros(unit.query_tiles * kQueries, unit.q.stored);
  }
}

// ---- the kernels -----------------------------------------------------------------------------------------------------

template <class T, bool DROPOUT, bool CAUSAL, bool ON_CHIP>
__global__ void __launch_bounds__(kThreads, 1) backward_kernel(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) char bytes[];
  auto& memory = *reinterpret_cast<Memory<ON_CHIP>*>(bytes);
  const int warpgroup = uniform(threadIdx.x / kWarpgroup);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Memory<ON_CHIP>::kStages; ++i) {
      memory.q_full[i].initialize(1);
      memory.q_empty[i].initialize(8);
    }
    for (int i = 0; i < 2; ++i) {
      memory.k_full[i].initialize(1);
      memory.k_empty[i].initialize(4);
      memory.kept_full[i].initialize(2);
    }
    memory.kept_empty.initialize(8);
    memory.v_full.initialize(1);
    memory.v_empty.initialize(8);
    memory.raw.initialize(1);
    memory.dscores_full.initialize(8);
    memory.dscores_empty.initialize(4);
    fence_barriers();
    prefetch_map(&p.q);
    prefetch_map(&p.k);
    prefetch_map(&p.v);
    prefetch_map(&p.dout);
  }
  __syncthreads();
  if (warpgroup == 0) {
    lower_registers<kProducerRegisters>();
    const int warp = uniform(threadIdx.x / 32);
    if (warp == 0)
      bring_tiles<CAUSAL>(p, memory);
    else if constexpr (DROPOUT)
      draw_kept<CAUSAL>(p, memory, warp - 1);
  } else if (warpgroup == 3) {
    lower_registers<kSumRegisters>();
    sum_dq<T, CAUSAL>(p, memory);
  } else {
    raise_registers<kConsumerRegisters>();
    KeyWarpgroup<T, DROPOUT, CAUSAL, ON_CHIP> keys(p, memory, warpgroup - 1);
    for (int index = blockIdx.x; index < p.sequences * p.heads; index += gridDim.x)
      keys.over_unit(Unit<CAUSAL>(p, index));
  }
}

constexpr int kStatisticsThreads = 256;

// lse in units of log2, +infinity for rows that attend to nothing or are not there, and sum(out * dout) over dropout's
// scale: a block for each tile of queries of each head, 8 threads for a row.
template <class T>
__global__ void __launch_bounds__(kStatisticsThreads)
    statistics_kernel(Parameters p, const T* dout, const T* out, const float* lse, float* statistics,
                      float delta_scale) {
  const int head = blockIdx.y, sequence = blockIdx.z;
  const Span q = span_of(p.cu_seqlens, p.lengths, sequence, p.queries, p.max_seqlen);
  const int first = blockIdx.x * kQueries;
  if (first >= q.length) return;
  const int64_t token = (p.cu_seqlens == nullptr ? static_cast<int64_t>(sequence) * p.queries : q.first);
  const float* own_lse = lse + (p.cu_seqlens == nullptr ? (static_cast<int64_t>(sequence) * p.heads + head) * p.queries
                                                        : static_cast<int64_t>(head) * p.queries + q.first);
  float* to = statistics + static_cast<int64_t>(head * p.tiles +
                                                first_tile(p.cu_seqlens, sequence, q.first, p.queries) + blockIdx.x) *
                               2 * kQueries;
#pragma unroll
  for (int part = 0; part < kQueries * 8 / kStatisticsThreads; ++part) {
    const int i = part * kStatisticsThreads + threadIdx.x, row = i / 8;
    const bool there = first + row < q.length;
    const int64_t at = ((token + first + row) * p.heads + head) * kHeadDim + i % 8 * 8;
    float a[kVector], b[kVector], sum = 0.0f;
    widen(load_packed_if(there, out + at, 0u), a);
    widen(load_packed_if(there, dout + at, 0u), b);
#pragma unroll
    for (int j = 0; j < kVector; ++j) sum += a[j] * b[j];
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (i % 8 == 0) {
      const float value = there ? own_lse[first + row] : -__int_as_float(0x7f800000);
      to[row] = value == -__int_as_float(0x7f800000) ? __int_as_float(0x7f800000) : value * 1.4426950408889634f;
      to[kQueries + row] = sum * delta_scale;
    }
  }
}

// ---- launchers -------------------------------------------------------------------------------------------------------

Status map_of(CUtensorMap* map, const AttentionCall& call, const void* data, const int64_t (&strides)[3],
              int64_t tokens, int rows) {
  const bool packed = call.cu_seqlens != nullptr;
  return make_tensor_map(map, {data,
                               call.dtype,
                               {kHeadDim, call.heads, tokens, packed ? 1 : call.sequences},
                               {strides[2], strides[1], strides[0]},
                               {kTileColumns, 1, rows, 1}});
}

int64_t tiles_of(int64_t sequences, int64_t queries, bool packed) {
  return packed ? queries / kQueries + sequences : sequences * ((queries + kQueries - 1) / kQueries);
}

template <class T, bool DROPOUT, bool CAUSAL>
Status launch_backward(const AttentionBackward& call, const Parameters& p, int processors) {
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(call.sequences * call.heads, processors)));
  if (call.max_seqlen <= kOnChipQueries)
    return launch(backward_kernel<T, DROPOUT, CAUSAL, true>, grid, dim3(kThreads), sizeof(Memory<true>), call.stream,
                  p);
  return launch(backward_kernel<T, DROPOUT, CAUSAL, false>, grid, dim3(kThreads), sizeof(Memory<false>), call.stream,
                p);
}

template <class T>
Status launch_typed(const AttentionBackward& call, const Parameters& p, float* statistics) {
  int processors = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, call.device);
  if (error != cudaSuccess) return status_of(error);
  const dim3 grid(static_cast<unsigned>((std::min(call.max_seqlen, call.queries) + kQueries - 1) / kQueries),
                  static_cast<unsigned>(call.heads), static_cast<unsigned>(call.sequences));
  if (grid.x > 0) {
    const float delta_scale = call.dropout_scale > 0 ? 1 / call.dropout_scale : 0.0f;
    const Status status =
        launch(statistics_kernel<T>, grid, dim3(kStatisticsThreads), 0, call.stream, p,
               static_cast<const T*>(call.dout), static_cast<const T*>(call.out), call.lse, statistics, delta_scale);
    if (status.code != StatusCode::ok) return status;
  }
  const bool causal = call.window_right == 0;
  if (call.seed != nullptr)
    return causal ? launch_backward<T, true, true>(call, p, processors)
                  : launch_backward<T, true, false>(call, p, processors);
  return causal ? launch_backward<T, false, true>(call, p, processors)
                : launch_backward<T, false, false>(call, p, processors);
}

}  // namespace

int64_t attention_backward_workspace(int64_t sequences, int64_t heads, int64_t queries, int64_t max_seqlen) {
  const int64_t tiles = std::max(tiles_of(sequences, queries, true), tiles_of(sequences, queries, false));
  return heads * tiles * (2 * kQueries + (max_seqlen > kOnChipQueries ? kSumFloats : 0));
}

Status attention_backward(const AttentionBackward& call) {
  if (call.head_dim != kHeadDim) return bad_size("head_dim is not 64");
  if (call.kv_heads != call.heads) return bad_size("kv_heads differs from heads");
  if (call.window_left != -1 || call.window_right > 0) return bad_size("window is neither all keys nor causal");
  if (call.sequences == 0 || call.heads == 0) return {};
  if (call.sequences > 65535 || call.heads > 65535) return bad_size("more than 65535 sequences or heads");
  const DeviceGuard guard(call.device);
  const bool packed = call.cu_seqlens != nullptr;
  const int64_t tiles = tiles_of(call.sequences, call.queries, packed);
  Parameters p{};
  const int64_t dout_strides[3] = {call.queries * call.heads * kHeadDim, call.heads * kHeadDim, kHeadDim};
  const int64_t q_strides[3] = {call.q_sequence_stride, call.q_token_stride, call.q_head_stride};
  const int64_t k_strides[3] = {call.k_sequence_stride, call.k_token_stride, call.k_head_stride};
  const int64_t v_strides[3] = {call.v_sequence_stride, call.v_token_stride, call.v_head_stride};
  Status status{};
  if (call.queries > 0) {
    status = map_of(&p.q, call, call.q, q_strides, call.queries, kQueries);
    if (status.code == StatusCode::ok) status = map_of(&p.dout, call, call.dout, dout_strides, call.queries, kQueries);
  }
  if (call.keys > 0) {
    if (status.code == StatusCode::ok) status = map_of(&p.k, call, call.k, k_strides, call.keys, kKeys);
    if (status.code == StatusCode::ok) status = map_of(&p.v, call, call.v, v_strides, call.keys, kKeys);
  }
  if (status.code != StatusCode::ok) return status;
  p.dq = {call.dq, call.dq_sequence_stride, call.dq_token_stride, call.dq_head_stride};
  p.dk = {call.dk, call.dk_sequence_stride, call.dk_token_stride, call.dk_head_stride};
  p.dv = {call.dv, call.dv_sequence_stride, call.dv_token_stride, call.dv_head_stride};
  p.cu_seqlens = call.cu_seqlens;
  p.cu_seqlens_k = call.cu_seqlens_k;
  p.lengths = call.lengths;
  p.lengths_k = call.lengths_k;
  p.seed = call.seed;
  p.statistics = call.workspace;
  p.sums = call.workspace + call.heads * tiles * 2 * kQueries;
  p.sequences = static_cast<int>(call.sequences);
  p.heads = static_cast<int>(call.heads);
  p.queries = static_cast<int>(call.queries);
  p.keys = static_cast<int>(call.keys);
  p.max_seqlen = static_cast<int>(call.max_seqlen);
  p.max_seqlen_k = static_cast<int>(call.max_seqlen_k);
  p.tiles = static_cast<int>(tiles);
  p.threshold = call.threshold;
  p.score_scale = call.scale * 1.4426950408889634f;
  p.dq_scale = call.scale * call.dropout_scale;
  p.dv_scale = call.dropout_scale;
  return call.dtype == DType::bf16  ? launch_typed<bf16_t>(call, p, call.workspace)
         : call.dtype == DType::f16 ? launch_typed<f16_t>(call, p, call.workspace)
                                    : unknown_dtype();
}

}  // namespace cuda
}  // namespace fasttfm
