// attention backward for Hopper: warpgroups 1 and 2, which work on keys, and 3, which sums dQ up. See backward_d64.cu.
#pragma once

#include "attention/hopper/backward_tiles.cuh"
#include "attention/hopper/column_sums.cuh"
#include "common/cuda/approximations.cuh"

namespace fasttfm {
namespace cuda {
namespace {

// advance() in 32 bits: a descriptor's address does not leave its field.
__device__ __forceinline__ uint64_t further(uint64_t descriptor, uint32_t bytes) {
  return (descriptor & 0xffffffff00000000ull) | static_cast<uint32_t>(static_cast<uint32_t>(descriptor) + (bytes >> 4));
}

// ---- results ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void exchange(uint32_t& low, uint32_t& high, int bit) {
  const bool upper = (thread_here() & bit) != 0;
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
  const int lane = thread_here() % 32, row = thread_here() % kWarpgroup / 32 * 16 + lane / 4;
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
      if (row + 8 * half < rows)  // as four stores the compiler would write them otherwise
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to + (row + 8 * half) * stride + 32 * part +
                                                                      8 * (lane % 4)),
                     "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
                     : "memory");
    }
}

// Zeros in `rows` rows of 64. A whole warpgroup, or so many THREADS.
template <int THREADS = kWarpgroup, class T>
__device__ __forceinline__ void store_zeros(T* to, int64_t stride, int rows) {
  for (int i = threadIdx.x % THREADS; i < 8 * rows; i += THREADS)
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
template <class T, bool DROPOUT, bool CAUSAL, bool ON_CHIP>
class KeyWarpgroup {
  static constexpr int kStages = Memory<ON_CHIP>::kStages;

 public:
  // `number`: 0 or 1, which 64 keys of a tile.
  __device__ __forceinline__ KeyWarpgroup(const Parameters& p, Memory<ON_CHIP>& memory, int number)
      : p(p), memory(memory), number(number) {}

  __device__ __forceinline__ void run() {
    if (number == 1) give_turn();
    next_key_tile();
    while (key_tile >= 0) {
      if (has_keys()) {
        over_key_tiles();
      } else {
        pass_key_tile();
        next_key_tile();
      }
    }
  }

 private:
  // A sequence's last tile of keys may have some for one of the warpgroups alone.
  __device__ __forceinline__ bool has_keys() const { return first_key() < unit().k.length; }
  __device__ __forceinline__ int first_key() const { return key_tile * kKeys + number * 64; }

  // Takes part in the steps of a tile of keys that has none for this warpgroup: nothing is added to dQ.
  __device__ __forceinline__ void pass_key_tile() {
    memory.stage_full[stage.slot].wait(stage.parity);
    arrive_warp(memory.stage_empty[stage.slot]);
    stage.next();
    const int row = unit().k.first + first_key(), rows = min(unit().k.stored - first_key(), 64);
    store_zeros(row_of<T>(p.dk, p, unit().sequence, unit().head, row), p.dk.token, rows);
    store_zeros(row_of<T>(p.dv, p, unit().sequence, unit().head, row), p.dv.token, rows);
#pragma unroll
    for (int i = 0; i < 16; ++i) operand[i] = 0;
    const int end = unit().query_tiles;  // when the last step is put, another task may be told
    for (int tile = unit().begin(key_tile); tile < end; ++tile) {
      if constexpr (DROPOUT) {
        memory.kept_full[step.slot][number].wait(step.parity);
        arrive_warp(memory.kept_empty[step.slot][number]);
      }
      memory.stage_full[stage.slot].wait(stage.parity);
      take_turn();
      give_turn();
      put_dscores();
      arrive_warp(memory.stage_empty[stage.slot]);
      stage.next();
      step.next();
    }
  }

  // The steps from a tile of keys on, until one comes that has none for this warpgroup, or there are no more.
  __device__ __forceinline__ void over_key_tiles() {
    int tile = unit().begin(key_tile);
    take_values(stage);
    stage.next();
    memory.stage_full[stage.slot].wait(stage.parity);
    const int start = uniform(stage.slot);
    begin_products();
    start_scores(start, uniform(k));
    commit_products();  // dK of a step before
    start_dweights(start);
    for (;;) {
      __syncwarp();  // or the compiler takes warps for diverged here
      // Where products take operands from is the same in all threads; in this loop the compiler would not know it.
      const int slot = uniform(stage.slot);
      const int key = first_key();
      const bool first = tile == unit().begin(key_tile);
      compute(slot, key, tile * kQueries, first);
      const bool last = tile + 1 == unit().query_tiles;
      Place own;
      stage.next();
      const RingPosition<kStages> values = stage;  // if there is a next tile of keys
      if (last) {
        stage.next();
        own = {unit().sequence, unit().head, unit().k.first + key, unit().k.stored - key};
        next_key_tile();
        if (key_tile < 0 || !has_keys()) {
          stage = values;
          put_dscores();
          begin_products();
          start_dk(slot, first);
          store_dv(own);
          wait_products<0>();
          store_dk(own, slot);
          step.next();
          return;
        }
      }
      const uint32_t keys = uniform(k);
      const int next = uniform(stage.slot);
      if (!ON_CHIP) {
        memory.stage_full[next].wait(stage.parity);
        begin_products();
        start_scores(next, keys);
      }
      put_dscores();
      if (last) take_values(values);
      begin_products();
      start_dk(slot, first);
      if (ON_CHIP) {
        memory.stage_full[next].wait(stage.parity);
        begin_products();
        start_scores(next, keys);
      }
      start_dweights(next);
      if (last) {
        wait_products<0>();  // dP of the next step as well: the assembler takes its sums for read here otherwise
        hold_registers(scores);
        hold_registers(dweights);
        store_dk(own, slot);
        store_dv(own);
      }
      tile = last ? unit().begin(key_tile) : tile + 1;
      step.next();
    }
  }

  // Where a lane's row of the matrices of 16 rows and the columns from 0 on stands; those from 16 * c on: ^ 32 * c.
  __device__ __forceinline__ uint32_t matrix_address(const char* tile) const {
    const int lane = threadIdx.x % 32, row = number * 64 + threadIdx.x % kWarpgroup / 32 * 16 + lane % 16;
    return shared_address(tile) + row * kTileRowBytes + (lane / 16 ^ lane % 8) * 16;
  }

  // The two warpgroups compute weights by turns, in every step: one's products run meanwhile.
  __device__ __forceinline__ void take_turn() const { sync_named(kFirstTurn + number, 2 * kWarpgroup); }
  __device__ __forceinline__ void give_turn() const { arrive_named(kFirstTurn + 1 - number, 2 * kWarpgroup); }
  static constexpr int kFirstTurn = 2;  // the number of the hardware's barrier; 1 is warpgroup 3's

  __device__ __forceinline__ void next_key_tile() {
    memory.k_full[k_stage.slot].wait(k_stage.parity);
    task = &memory.task[k_stage.slot];
    key_tile = task->key_tile;
    k = shared_address(memory.k[k_stage.slot]) + number * 64 * kTileRowBytes;
    k_stage.next();
  }
  __device__ __forceinline__ void take_values(const RingPosition<kStages>& at) {
    memory.stage_full[at.slot].wait(at.parity);
#pragma unroll
    for (int c = 0; c < 4; ++c) load_matrices(v + 4 * c, matrix_address(memory.v(at.slot)) ^ 32 * c);
  }
  __device__ __forceinline__ const Unit<CAUSAL>& unit() const { return unit_of<CAUSAL>(*task); }

  __device__ __forceinline__ void start_scores(int slot, uint32_t keys) {
    const uint32_t q = shared_address(memory.q(slot));
#pragma unroll
    for (int c = 0; c < 4; ++c)
      multiply<T>(scores, further(k_major(keys), c * kKMajorStep), further(k_major(q), c * kKMajorStep), c > 0);
    commit_products();
  }
  __device__ __forceinline__ void start_dweights(int slot) {
    const uint32_t dout = shared_address(memory.dout(slot));
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
  __device__ __forceinline__ void compute_dscores(const float2 (&delta)[8]) {
#pragma unroll
    for (int at = 0; at < 32; ++at) {
      const float mean = at % 2 == 0 ? delta[at / 4].x : delta[at / 4].y;
      dweights[at] = DROPOUT ? fmaxf(scores[at], 0.0f) * dweights[at] - fabsf(scores[at]) * mean
                             : scores[at] * (dweights[at] - mean);
    }
  }

  // From S and dP of a step, which are under way, to dS as an operand; starts dV. `first` of a tile of keys.
  __device__ __forceinline__ void compute(int slot, int key, int query, bool first) {
    const float2* statistics = reinterpret_cast<const float2*>(memory.statistics[slot]) + threadIdx.x % 4;
    uint32_t dropped = 0;
    if constexpr (DROPOUT) {
      memory.kept_full[step.slot][number].wait(step.parity);
      dropped = ~memory.kept[step.slot][number][threadIdx.x % kWarpgroup];
    }
    wait_products<ON_CHIP ? 1 : 2>();
    hold_registers(scores);
    const auto give_free = [&] { arrive_warp(memory.stage_empty[slot == 0 ? kStages - 1 : slot - 1]); };
    if (ON_CHIP && !first) give_free();  // dK of the step before is through with it
    take_turn();
    mask_scores<CAUSAL>(scores, key, query, unit().k.length, unit().offset());
    compute_weights(statistics, dropped);
    if constexpr (!ON_CHIP) {
      stay_behind(scores[31]);
      wait_products<1>();  // dK's operand gives its registers to dV's
    }
    hold_registers(operand);
#pragma unroll
    for (int i = 0; i < 16; ++i)
      operand[i] = DROPOUT ? narrow_positive(scores[2 * i], scores[2 * i + 1], T{})
                           : narrow_word(scores[2 * i], scores[2 * i + 1], T{});
    give_turn();
    float2 delta[8];  // loaded before the products, which would hold the loads up
#pragma unroll
    for (int i = 0; i < 8; ++i) delta[i] = statistics[kQueries / 2 + 4 * i];
    if constexpr (DROPOUT) arrive_warp(memory.kept_empty[step.slot][number]);  // the word is here: it was used
    begin_products();
    const uint32_t dout = shared_address(memory.dout(slot));
#pragma unroll
    for (int c = 0; c < 4; ++c)
      multiply<T, Major::mn>(dv, operand + 4 * c, further(mn_major(dout, 0), c * kMnMajorStep), c > 0 || !first);
    commit_products();
    wait_products<1>();
    hold_registers(dweights);
    // A load from shared memory has ended only when its value is used, and a barrier does not wait for it: v is given
    // free here, where products have taken it.
    if (!ON_CHIP || first) give_free();
    compute_dscores(delta);
    stay_behind(dweights[31]);
    wait_products<0>();  // dV's operand gives its registers to dK's
    hold_registers(operand);
#pragma unroll
    for (int i = 0; i < 16; ++i) operand[i] = narrow_word(dweights[2 * i], dweights[2 * i + 1], T{});
  }

  // Leaves dS to warpgroup 3.
  __device__ __forceinline__ void put_dscores() {
    memory.dscores_empty[step.slot][number].wait(step.parity ^ 1);
    const uint32_t to = matrix_address(memory.dscores[step.slot]);
#pragma unroll
    for (int c = 0; c < 4; ++c) store_matrices(to ^ 32 * c, operand + 4 * c);
    fence_async();
    arrive_warp(memory.dscores_full[step.slot][number]);
  }

  __device__ __forceinline__ void start_dk(int slot, bool first) {
    const uint32_t q = shared_address(memory.q(slot));
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
  __device__ __forceinline__ void store_dk(const Place& at, int slot) {
    hold_registers(dk);
    arrive_warp(memory.stage_empty[slot]);
    store_product(dk, p.dq_scale, row_of<T>(p.dk, p, at.sequence, at.head, at.row), p.dk.token, at.rows);
    store_columns(dk, p.dq_scale, at, 1);
  }
  // dV is there before dK: products may be under way.
  __device__ __forceinline__ void store_dv(const Place& at) {
    hold_registers(dv);
    store_product(dv, p.dv_scale, row_of<T>(p.dv, p, at.sequence, at.head, at.row), p.dv.token, at.rows);
    store_columns(dv, p.dv_scale, at, 2);
  }
  __device__ __forceinline__ void store_columns(const float (&value)[32], float factor, const Place& at, int which) {
    if (p.column_parts == nullptr) return;
    add_columns(value, factor, column_place(p, at.sequence, Share(p).rank, thread_here() / 32 - 4, which, at.head));
  }

  const Parameters& p;
  Memory<ON_CHIP>& memory;
  const int number;
  const Task* task;
  int key_tile;
  RingPosition<kStages> stage;
  RingPosition<2> k_stage;
  RingPosition<Memory<ON_CHIP>::kBuffers> step;
  float dk[32], dv[32], scores[32], dweights[32];
  uint32_t v[16], operand[16];
  uint32_t k;  // where the tile of keys stands
};

// ---- warpgroup 3 -----------------------------------------------------------------------------------------------------

// Zeros where nothing is computed: for queries that attend to nothing, those before the first key's, and for rows past
// the sequence's end. Of a (sequence, head) that has queries and keys: the rest has its zeros by statistics_kernel().
template <class T, bool CAUSAL>
__device__ __forceinline__ void store_rest(const Parameters& p, const Unit<CAUSAL>& unit) {
  const auto zeros = [&](const Output& output, const Span& span, int begin, int end) {
    if (begin < end)
      store_zeros(row_of<T>(output, p, unit.sequence, unit.head, span.first + begin), output.token, end - begin);
  };
  if (CAUSAL) zeros(p.dq, unit.q, 0, min(unit.begin(0) * kQueries, unit.q.stored));
  zeros(p.dq, unit.q, unit.query_tiles * kQueries, unit.q.stored);
  zeros(p.dk, unit.k, unit.key_tiles * kKeys, unit.k.stored);
  zeros(p.dv, unit.k, unit.key_tiles * kKeys, unit.k.stored);
}

// Sums of one block in shared memory, each thread's in its own place.
class OwnSums {
 public:
  explicit __device__ __forceinline__ OwnSums(float4* sums) : sums_(sums) {}

  __device__ __forceinline__ void load(float (&value)[32], int tile) const {
    const float4* from = sums_ + tile * (kSumFloats / 4) + thread_here() % kWarpgroup;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 part = from[i * kWarpgroup];
      value[4 * i] = part.x;
      value[4 * i + 1] = part.y;
      value[4 * i + 2] = part.z;
      value[4 * i + 3] = part.w;
    }
  }
  __device__ __forceinline__ void store(const float (&value)[32], int tile) {
    float4* to = sums_ + tile * (kSumFloats / 4) + thread_here() % kWarpgroup;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      to[i * kWarpgroup] = make_float4(value[4 * i], value[4 * i + 1], value[4 * i + 2], value[4 * i + 3]);
  }

 private:
  float4* sums_;
};

template <class T, bool CAUSAL, bool ON_CHIP>
__device__ __forceinline__ void sum_dq(const Parameters& p, Memory<ON_CHIP>& memory) {
  const int rank = ON_CHIP ? 0 : blockIdx.x % p.blocks;
  uint32_t* told = p.passed + blockIdx.x;
  auto sums = [&] {
    if constexpr (ON_CHIP)
      return OwnSums(memory.sums);
    else
      return OrderedSums<kSumFloats / kWarpgroup>(memory.sums, 1, told, rank == 0 ? told + p.blocks - 1 : told - 1);
  }();
  RingPosition<2> k_stage;
  RingPosition<Memory<ON_CHIP>::kBuffers> step;
  for (;;) {
    memory.k_full[k_stage.slot].wait(k_stage.parity);
    const Task& task = memory.task[k_stage.slot];
    const Unit<CAUSAL>& unit = unit_of<CAUSAL>(task);
    const int key_tile = task.key_tile;
    const uint32_t place = task.place;
    if (key_tile < 0) {
      if constexpr (!ON_CHIP) sums.finish(place);
      return;
    }
    for (int tile = unit.begin(key_tile); tile < unit.query_tiles; ++tile, step.next()) {
      float* sum = p.sums + static_cast<int64_t>(unit.tile + tile) * kSumFloats;
      const bool last = key_tile == unit.last_key_tile(tile), load = (last || ON_CHIP) && key_tile > 0;
      const uint32_t dscores = shared_address(memory.dscores[uniform(step.slot)]);
      const uint32_t k = shared_address(memory.k[uniform(k_stage.slot)]);
      float dq[32];
      if (load) {
        if constexpr (ON_CHIP)
          sums.load(dq, tile);
        else
          sums.load(dq, sum, place + tile, rank == 0 ? unit.query_tiles : 0);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        memory.dscores_full[step.slot][half].wait(step.parity);
        begin_products();
#pragma unroll
        for (int c = 4 * half; c < 4 * half + 4; ++c)
          multiply<T, Major::mn, Major::mn>(dq, further(mn_major(dscores, 0), c * kMnMajorStep),
                                            further(mn_major(k, 0), c * kMnMajorStep), c > 0 || load);
        commit_products();
      }
      wait_products<1>();
      arrive_warp(memory.dscores_empty[step.slot][0]);
      wait_products<0>();
      hold_registers(dq);
      arrive_warp(memory.dscores_empty[step.slot][1]);
      if (last) {
        const int query = tile * kQueries;
        store_product(dq, p.dq_scale, row_of<T>(p.dq, p, unit.sequence, unit.head, unit.q.first + query), p.dq.token,
                      unit.q.stored - query);
        __syncwarp();  // or the compiler takes warps for diverged here, and gives up uniform registers everywhere
        if (p.column_parts != nullptr)
          add_columns(dq, p.dq_scale,
                      column_place(p, unit.sequence, rank, thread_here() % kWarpgroup / 32, 0, unit.head));
      } else if constexpr (ON_CHIP) {
        sums.store(dq, tile);
      } else {
        sums.add(dq, sum, place + tile, rank == 0 ? unit.query_tiles : 0, key_tile == 0);
      }
    }
    if (key_tile == 0) store_rest<T>(p, unit);
    arrive_warp(memory.k_empty[k_stage.slot]);
    k_stage.next();
  }
}

}  // namespace
}  // namespace cuda
}  // namespace fasttfm
