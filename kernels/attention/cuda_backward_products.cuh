// attention backward for Hopper, up to kOnChipQueries queries: warpgroups 1 and 2, which work on keys, and 3, which
// sums dQ up. See cuda_backward.cu.
#pragma once

#include "attention/cuda_backward_tiles.cuh"
#include "attention/cuda_column_sums.cuh"

namespace fasttfm {
namespace cuda {
namespace {

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

template <class T, bool DROPOUT, bool CAUSAL>
struct KeyWarpgroup {
  const Parameters& p;
  Memory& memory;
  const int number;  // 0 or 1: which 64 keys of a tile
  RingPosition<Memory::kStages> stage;
  RingPosition<2> k_stage;
  RingPosition<1> v_stage, step;
  float dk[32], dv[32];
  uint32_t v[16];
  uint32_t k;  // where the tile of keys stands

  __device__ __forceinline__ KeyWarpgroup(const Parameters& p, Memory& memory, int number)
      : p(p), memory(memory), number(number) {}

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
      memory.kept_full[0][number].wait(step.parity);
      kept = memory.kept[0][number][threadIdx.x % kWarpgroup];
    }
    wait_products<1>();
    hold_registers(scores);
    // A load from shared memory has ended only when its value is used, and a barrier does not wait for it: what was
    // read is given free here, where the products have taken v.
    if (first) {
      arrive_warp(memory.v_empty);
    } else {  // dk and dv of the tile before are through with it
      arrive_warp(memory.q_empty[stage.slot == 0 ? Memory::kStages - 1 : stage.slot - 1]);
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
    if constexpr (DROPOUT) arrive_warp(memory.kept_empty[0]);  // the word is here: it was used
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
      arrive_warp(memory.q_empty[stage.slot == 0 ? Memory::kStages - 1 : stage.slot - 1]);
      const int rows = unit.k.stored - key;
      store_product(dk, p.dq_scale, row_of<T>(p.dk, p, unit.sequence, unit.head, unit.k.first + key), p.dk.token, rows);
      store_product(dv, p.dv_scale, row_of<T>(p.dv, p, unit.sequence, unit.head, unit.k.first + key), p.dv.token, rows);
      if (p.column_parts != nullptr) {
        const int place = thread_here() / 32 - 4;
        add_columns(dk, p.dq_scale, column_place(p, unit.sequence, 0, place, 1, unit.head));
        add_columns(dv, p.dv_scale, column_place(p, unit.sequence, 0, place, 2, unit.head));
      }
    }
    for (int key = unit.key_tiles * kKeys + number * 64; key < unit.k.stored; key += kKeys) {
      const int rows = min(unit.k.stored - key, 64);
      store_zeros(row_of<T>(p.dk, p, unit.sequence, unit.head, unit.k.first + key), p.dk.token, rows);
      store_zeros(row_of<T>(p.dv, p, unit.sequence, unit.head, unit.k.first + key), p.dv.token, rows);
    }
  }
};

// ---- warpgroup 3 -----------------------------------------------------------------------------------------------------

template <class T, bool CAUSAL>
__device__ __forceinline__ void sum_dq(const Parameters& p, Memory& memory) {
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
        float4* sums = memory.sums + tile * (kSumFloats / 4) + thread;
        float dq[32];
        if (key_tile > 0) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const float4 part = sums[i * kWarpgroup];
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
        arrive_warp(memory.dscores_empty);
        if (key_tile < unit.last_key_tile(tile)) {
#pragma unroll
          for (int i = 0; i < 8; ++i)
            sums[i * kWarpgroup] = make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
        } else {
          const int query = tile * kQueries;
          store_product(dq, p.dq_scale, row_of<T>(p.dq, p, unit.sequence, unit.head, unit.q.first + query), p.dq.token,
                        unit.q.stored - query);
          if (p.column_parts != nullptr)
            add_columns(dq, p.dq_scale, column_place(p, unit.sequence, 0, thread / 32, 0, unit.head));
        }
      }
      arrive_warp(memory.k_empty[k_stage.slot]);
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

}  // namespace
}  // namespace cuda
}  // namespace fasttfm
