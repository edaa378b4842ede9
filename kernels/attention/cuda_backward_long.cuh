// attention backward for Hopper, more than kOnChipQueries queries: sums of dQ in the workspace, and steps that overlap.
// See cuda_backward.cu.
#pragma once

#include "attention/cuda_backward_products.cuh"
#include "attention/cuda_backward_tiles.cuh"
#include "attention/cuda_column_sums.cuh"
#include "attention/cuda_ordered_sums.cuh"

namespace fasttfm {
namespace cuda {
namespace {

// A cluster's blocks share a (sequence, head): see WholeHeads.
struct SharedHeads {
  int rank, blocks, group, groups;

  explicit __device__ __forceinline__ SharedHeads(const Parameters& p) : blocks(p.blocks) {
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(group));
    asm volatile("mov.u32 %0, %%nclusterid.x;" : "=r"(groups));
  }
};

struct LongMemory {
  using Share = SharedHeads;
  static constexpr int kStages = 4, kBuffers = 2;  // tiles of queries; dS and what is kept
  alignas(1024) char q[kStages][kQueryTileBytes];
  char dout[kStages][kQueryTileBytes];
  char k[2][kKeyTileBytes];
  char v[kKeyTileBytes];
  char dscores[kBuffers][kKeyTileBytes];  // [keys, queries]
  OrderedSums<kSumFloats / kWarpgroup>::Memory sums;
  float statistics[kStages][2][kQueries];
  uint32_t kept[kBuffers][2][kWarpgroup];  // of each of the two warpgroups
  Unit<true> unit[kThreads / 32];          // of each warp: there are no registers for it
  Barrier q_full[kStages], q_empty[kStages], k_full[2], k_empty[2], v_full, v_empty, raw, dscores_full[kBuffers],
      dscores_empty[kBuffers], kept_full[kBuffers][2], kept_empty[kBuffers];

  // One thread; then a barrier of the cluster.
  __device__ __forceinline__ void initialize() {
    initialize_tiles(*this);
    for (int i = 0; i < kBuffers; ++i) {
      dscores_full[i].initialize(8 * kWarpArrivals);
      dscores_empty[i].initialize(4 * kWarpArrivals);
    }
    sums.passed = 0;
    fence_barriers();
  }
};
static_assert(sizeof(LongMemory) <= 227 * 1024);

// The warp's own unit in shared memory, where set_unit() puts it: a whole warp.
template <bool CAUSAL>
__device__ __forceinline__ const Unit<CAUSAL>& own_unit(const LongMemory& memory) {
  return reinterpret_cast<const Unit<CAUSAL>&>(memory.unit[thread_here() / 32]);
}
template <bool CAUSAL>
__device__ __forceinline__ void set_unit(const Parameters& p, LongMemory& memory, int index) {
  const Unit<CAUSAL> unit(p, index);
  __syncwarp();
  if (threadIdx.x % 32 == 0) reinterpret_cast<Unit<CAUSAL>&>(memory.unit[thread_here() / 32]) = unit;
  __syncwarp();
}

// advance() in 32 bits: a descriptor's address does not leave its field.
__device__ __forceinline__ uint64_t further(uint64_t descriptor, uint32_t bytes) {
  return (descriptor & 0xffffffff00000000ull) | static_cast<uint32_t>(static_cast<uint32_t>(descriptor) + (bytes >> 4));
}

// ---- warpgroups 1 and 2 ----------------------------------------------------------------------------------------------

// Two numbers as a 16-bit word, 0 in the place of negative ones.
__device__ __forceinline__ uint32_t narrow_positive(float low, float high, bf16_t) {
  uint32_t word;
  asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
__device__ __forceinline__ uint32_t narrow_positive(float low, float high, f16_t) {
  uint32_t word;
  asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

// The assembler moves a wait for products up, over computations that should run beside them, but not over a branch:
// this one, which is not taken, as no computation has that NaN for its result.
__device__ __forceinline__ void stay_behind(float value) {
  if (__any_sync(0xffffffffu, __float_as_uint(value) == 0x7fc0dead)) asm volatile("nanosleep.u32 0;");
}

// Steps are tiles of queries, one after another for a tile of keys, through all tiles of keys of all units. While a
// step's P and dS are computed, products of its neighbours are under way: S of the next step is started before dS is
// written, dP after it, beside dK. Whether a weight was dropped stands in its sign.
template <class T, bool DROPOUT, bool CAUSAL>
class LongKeyWarpgroup {
 public:
  // `number`: 0 or 1, which 64 keys of a tile.
  __device__ __forceinline__ LongKeyWarpgroup(const Parameters& p, LongMemory& memory, int number)
      : p(p), memory(memory), number(number), unit(own_unit<CAUSAL>(memory)) {
    const SharedHeads share(p);
    index = share.group;
    key_tile = share.rank - p.blocks;
    set_unit<CAUSAL>(p, memory, index);
  }

  __device__ __forceinline__ void run() {
    if (!next_key_tile()) return;
    int tile = unit.begin(key_tile);
    take_keys();
    take_values();
    memory.q_full[stage.slot].wait(stage.parity);
    begin_products();
    start_scores();
    commit_products();  // dK of a step before
    start_dweights();
    for (;;) {
      const int key = key_tile * kKeys + number * 64;
      const bool first = tile == unit.begin(key_tile);
      compute(key, tile * kQueries, first);
      const bool last = tile + 1 == unit.query_tiles;
      const Place own = {unit.sequence, unit.head, unit.k.first + key, unit.k.stored - key};
      const int slot = stage.slot;
      stage.next();
      if (last) {
        if (!next_key_tile()) {
          put_dscores();
          begin_products();
          start_dk(slot, first);
          wait_products<0>();
          store(own, slot);
          return;
        }
        take_keys();
      }
      memory.q_full[stage.slot].wait(stage.parity);
      begin_products();
      start_scores();
      put_dscores();
      if (last) take_values();
      begin_products();
      start_dk(slot, first);
      start_dweights();
      if (last) {
        wait_products<0>();  // dP of the next step as well: the assembler takes its sums for read here otherwise
        hold_registers(scores);
        hold_registers(dweights);
        store(own, slot);
      }
      tile = last ? unit.begin(key_tile) : tile + 1;
      step.next();
    }
  }

 private:
  // Where a lane's row of the matrices of 16 rows and the columns from 0 on stands; those from 16 * c on: ^ 32 * c.
  __device__ __forceinline__ uint32_t matrix_address(const char* tile) const {
    const int lane = threadIdx.x % 32, row = number * 64 + threadIdx.x % kWarpgroup / 32 * 16 + lane % 16;
    return shared_address(tile) + row * kTileRowBytes + (lane / 16 ^ lane % 8) * 16;
  }

  __device__ __forceinline__ bool next_key_tile() {
    const SharedHeads share(p);
    key_tile += p.blocks;
    while (key_tile >= unit.key_tiles) {
      index += share.groups;
      if (index >= p.sequences * p.heads) return false;
      set_unit<CAUSAL>(p, memory, index);
      key_tile = share.rank;
    }
    return true;
  }

  __device__ __forceinline__ void take_keys() {
    memory.k_full[k_stage.slot].wait(k_stage.parity);
    k = shared_address(memory.k[k_stage.slot]) + number * 64 * kTileRowBytes;
    k_stage.next();
  }
  __device__ __forceinline__ void take_values() {
    memory.v_full.wait(v_stage.parity);
#pragma unroll
    for (int c = 0; c < 4; ++c) load_matrices(v + 4 * c, matrix_address(memory.v) ^ 32 * c);
    v_stage.next();
  }

  __device__ __forceinline__ void start_scores() {
    const uint32_t q = shared_address(memory.q[stage.slot]);
#pragma unroll
    for (int c = 0; c < 4; ++c)
      multiply<T>(scores, further(k_major(k), c * kKMajorStep), further(k_major(q), c * kKMajorStep), c > 0);
    commit_products();
  }
  __device__ __forceinline__ void start_dweights() {
    const uint32_t dout = shared_address(memory.dout[stage.slot]);
#pragma unroll
    for (int c = 0; c < 4; ++c) multiply<T>(dweights, v + 4 * c, further(k_major(dout), c * kKMajorStep), c > 0);
    commit_products();
  }

  // P in the place of S.
  __device__ __forceinline__ void compute_weights(const float2* lse, uint32_t dropped) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 own = lse[4 * i];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* pair = scores + 4 * i + 2 * half;
        pair[0] = power_of_two(pair[0] * p.score_scale - own.x);
        pair[1] = power_of_two(pair[1] * p.score_scale - own.y);
        if constexpr (DROPOUT) {
          const int bit = i / 2 * 8 + (1 - half) * 4 + i % 2 * 2;
          pair[0] = __uint_as_float(__float_as_uint(pair[0]) | (dropped << (31 - bit) & 0x80000000u));
          pair[1] = __uint_as_float(__float_as_uint(pair[1]) | (dropped << (30 - bit) & 0x80000000u));
        }
      }
    }
  }

  // dS in the place of dP.
  __device__ __forceinline__ void compute_dscores(const float2* delta) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 own = delta[4 * i];
#pragma unroll
      for (int at = 4 * i; at < 4 * i + 4; ++at) {
        const float mean = at % 2 == 0 ? own.x : own.y;
        dweights[at] = DROPOUT ? fmaxf(scores[at], 0.0f) * dweights[at] - fabsf(scores[at]) * mean
                               : scores[at] * (dweights[at] - mean);
      }
    }
  }

  // From S and dP of a step, which are under way, to dS as an operand; starts dV. `first` of a tile of keys.
  __device__ __forceinline__ void compute(int key, int query, bool first) {
    const int slot = stage.slot;
    const float2* statistics = reinterpret_cast<const float2*>(memory.statistics[slot]) + threadIdx.x % 4;
    uint32_t dropped = 0;
    if constexpr (DROPOUT) {
      memory.kept_full[step.slot][number].wait(step.parity);
      dropped = ~memory.kept[step.slot][number][threadIdx.x % kWarpgroup];
    }
    wait_products<2>();
    hold_registers(scores);
    mask_scores<CAUSAL>(scores, key, query, unit.k.length, unit.offset());
    compute_weights(statistics, dropped);
    stay_behind(scores[31]);
    wait_products<1>();  // dK's operand gives its registers to dV's
    hold_registers(operand);
#pragma unroll
    for (int i = 0; i < 16; ++i)
      operand[i] = DROPOUT ? narrow_positive(scores[2 * i], scores[2 * i + 1], T{})
                           : narrow_word(scores[2 * i], scores[2 * i + 1], T{});
    if constexpr (DROPOUT) arrive_warp(memory.kept_empty[step.slot]);  // the word is here: it was used
    begin_products();
    const uint32_t dout = shared_address(memory.dout[slot]);
#pragma unroll
    for (int c = 0; c < 4; ++c)
      multiply<T, Major::mn>(dv, operand + 4 * c, further(mn_major(dout, 0), c * kMnMajorStep), c > 0 || !first);
    commit_products();
    wait_products<1>();
    hold_registers(dweights);
    // A load from shared memory has ended only when its value is used, and a barrier does not wait for it: v is given
    // free here, where products have taken it.
    if (first)
      arrive_warp(memory.v_empty);
    else  // dK of the step before is through with it
      arrive_warp(memory.q_empty[slot == 0 ? LongMemory::kStages - 1 : slot - 1]);
    compute_dscores(statistics + kQueries / 2);
    stay_behind(dweights[31]);
    wait_products<0>();  // dV's operand gives its registers to dK's
    hold_registers(operand);
#pragma unroll
    for (int i = 0; i < 16; ++i) operand[i] = narrow_word(dweights[2 * i], dweights[2 * i + 1], T{});
  }

  // Leaves dS to warpgroup 3.
  __device__ __forceinline__ void put_dscores() {
    memory.dscores_empty[step.slot].wait(step.parity ^ 1);
    const uint32_t to = matrix_address(memory.dscores[step.slot]);
#pragma unroll
    for (int c = 0; c < 4; ++c) store_matrices(to ^ 32 * c, operand + 4 * c);
    fence_async();
    arrive_warp(memory.dscores_full[step.slot]);
  }

  __device__ __forceinline__ void start_dk(int slot, bool first) {
    const uint32_t q = shared_address(memory.q[slot]);
#pragma unroll
    for (int c = 0; c < 4; ++c)
      multiply<T, Major::mn>(dk, operand + 4 * c, further(mn_major(q, 0), c * kMnMajorStep), c > 0 || !first);
    commit_products();
  }

  // Where a tile of keys has its gradients.
  struct Place {
    int sequence, head, row, rows;
  };
  // After the last step of a tile of keys, whose queries are in `slot`.
  __device__ __forceinline__ void store(const Place& at, int slot) {
    hold_registers(dk);
    hold_registers(dv);
    arrive_warp(memory.q_empty[slot]);
    store_product(dk, p.dq_scale, row_of<T>(p.dk, p, at.sequence, at.head, at.row), p.dk.token, at.rows);
    store_product(dv, p.dv_scale, row_of<T>(p.dv, p, at.sequence, at.head, at.row), p.dv.token, at.rows);
    if (p.column_parts != nullptr) {
      const int rank = SharedHeads(p).rank, place = thread_here() / 32 - 4;
      add_columns(dk, p.dq_scale, column_place(p, at.sequence, rank, place, 1, at.head));
      add_columns(dv, p.dv_scale, column_place(p, at.sequence, rank, place, 2, at.head));
    }
  }

  const Parameters& p;
  LongMemory& memory;
  const int number;
  const Unit<CAUSAL>& unit;
  int index;
  int key_tile;
  RingPosition<LongMemory::kStages> stage;
  RingPosition<2> k_stage, step;
  RingPosition<1> v_stage;
  float dk[32], dv[32], scores[32], dweights[32];
  uint32_t v[16], operand[16];
  uint32_t k;  // where the tile of keys stands
};

// ---- warpgroup 3 -----------------------------------------------------------------------------------------------------

// Zeros where nothing is computed: for queries that attend to nothing, those before the first key's, and for rows past
// the sequence's end.
template <class T, bool CAUSAL>
__device__ __forceinline__ void store_rest(const Parameters& p, const Unit<CAUSAL>& unit) {
  const auto zeros = [&](const Output& output, const Span& span, int begin, int end) {
    if (begin < end)
      store_zeros(row_of<T>(output, p, unit.sequence, unit.head, span.first + begin), output.token, end - begin);
  };
  if (CAUSAL && unit.key_tiles > 0) zeros(p.dq, unit.q, 0, min(unit.begin(0) * kQueries, unit.q.stored));
  zeros(p.dq, unit.q, unit.query_tiles * kQueries, unit.q.stored);
  zeros(p.dk, unit.k, unit.key_tiles * kKeys, unit.k.stored);
  zeros(p.dv, unit.k, unit.key_tiles * kKeys, unit.k.stored);
}

template <class T, bool CAUSAL>
__device__ __forceinline__ void sum_long_dq(const Parameters& p, LongMemory& memory) {
  OrderedSums<kSumFloats / kWarpgroup> sums(memory.sums, 1);
  const Unit<CAUSAL>& unit = own_unit<CAUSAL>(memory);
  RingPosition<2> k_stage, step;
  uint32_t place = 0;  // of the round's first tile
  for (int index = SharedHeads(p).group; index < p.sequences * p.heads; index += SharedHeads(p).groups) {
    set_unit<CAUSAL>(p, memory, index);
    for (int round = 0; round < unit.key_tiles; round += p.blocks, place += unit.query_tiles) {
      const int key_tile = round + SharedHeads(p).rank;
      if (key_tile >= unit.key_tiles) continue;
      memory.k_full[k_stage.slot].wait(k_stage.parity);
      for (int tile = unit.begin(key_tile); tile < unit.query_tiles; ++tile, step.next()) {
        float* sum = p.sums + static_cast<int64_t>(unit.tile + tile) * kSumFloats;
        const bool last = key_tile == unit.last_key_tile(tile), load = last && key_tile > 0;
        float dq[32];
        if (load) sums.load(dq, sum, place + tile, SharedHeads(p).rank == 0 ? unit.query_tiles : 0);
        memory.dscores_full[step.slot].wait(step.parity);
        const uint32_t dscores = shared_address(memory.dscores[step.slot]);
        uint32_t k = shared_address(memory.k[k_stage.slot]);
        asm volatile("" : "+r"(k));  // or the compiler keeps descriptors of all its parts, in registers
        begin_products();
#pragma unroll
        for (int c = 0; c < 8; ++c)
          multiply<T, Major::mn, Major::mn>(dq, further(mn_major(dscores, 0), c * kMnMajorStep),
                                            further(mn_major(k, 0), c * kMnMajorStep), c > 0 || load);
        commit_products();
        wait_products<0>();
        hold_registers(dq);
        arrive_warp(memory.dscores_empty[step.slot]);
        if (last) {
          const int query = tile * kQueries;
          store_product(dq, p.dq_scale, row_of<T>(p.dq, p, unit.sequence, unit.head, unit.q.first + query), p.dq.token,
                        unit.q.stored - query);
          if (p.column_parts != nullptr)
            add_columns(
                dq, p.dq_scale,
                column_place(p, unit.sequence, SharedHeads(p).rank, thread_here() % kWarpgroup / 32, 0, unit.head));
        } else {
          sums.add(dq, sum, place + tile, SharedHeads(p).rank == 0 ? unit.query_tiles : 0, key_tile == 0);
        }
      }
      arrive_warp(memory.k_empty[k_stage.slot]);
      k_stage.next();
    }
    if (SharedHeads(p).rank == 0) store_rest<T>(p, unit);
  }
  sums.finish(place);
}

}  // namespace
}  // namespace cuda
}  // namespace fasttfm
