// attention backward for Hopper, head dim 128: warpgroups 1 and 2, which compute the gradients.
#pragma once

#include "attention/hopper/backward_d128/tiles.cuh"
#include "attention/hopper/shared/backward_products.cuh"
#include "attention/hopper/shared/named_barriers.h"

namespace fasttfm {
namespace cuda {
namespace hopper_backward {

// The position in ring buffers of two stages: see RingPosition.
struct Stage {
  uint32_t slot = 0, parity = 0;
  __device__ __forceinline__ Stage next() const { return {slot ^ 1, parity ^ slot}; }
  __device__ __forceinline__ Stage previous() const { return {slot ^ 1, parity ^ slot ^ 1}; }
};
static_assert(kGradientStages == 2 && kScoreStages == 2 && kKeyStages == 2);

// Half of an accumulator's 128 columns.
__device__ __forceinline__ const float (&columns_of(const float (&value)[64], int part))[32] {
  return *reinterpret_cast<const float (*)[32]>(value + 32 * part);
}

// Writes up to 64 rows of 64 columns and `more` further ones.
template <class T>
__device__ __forceinline__ void store_product_d128(const float (&value)[64], float factor, T* to, int64_t stride,
                                                   int rows, int more) {
  store_product(columns_of(value, 0), factor, to, stride, rows);
  store_product(columns_of(value, 1), factor, to + kTileColumns, stride, rows, more);
}

template <class T>
__device__ __forceinline__ void store_zeros_d128(T* to, int64_t stride, int rows, int more) {
  store_zeros(to, stride, rows);
  store_zeros(to + kTileColumns, stride, rows, more);
}

// NARROW: the head dim is between 64 and 128. TMA fills the missing columns with zeros, and they are not written.
template <class T, bool DROPOUT, Mask MASK, bool GROUPED, bool NARROW>
struct KeyWarpgroupD128 {
  const Parameters& p;
  MemoryD128<MASK, GROUPED>& memory;
  const int number;                    // 0 or 1: which half of a tile's keys and of dQ's columns the warpgroup computes
  Stage stage;                         // of dout, delta and dS of the present query tile, also of its keep bits
  RingPosition<kQueryStages> q_stage;  // of the next query tile for which S^T is issued
  Stage k_stage;
  int whole;                           // first_whole_query() of the key tile
  uint32_t k_rows, v_rows, k_columns;  // tile_address() of operands: the warpgroup's keys and values, its columns of k
  float dk[64], dv[64];

  __device__ __forceinline__ KeyWarpgroupD128(const Parameters& p, MemoryD128<MASK, GROUPED>& memory, int number)
      : p(p), memory(memory), number(number) {}

  static __device__ __forceinline__ uint32_t uniform(uint32_t value) { return warp_uniform(static_cast<int>(value)); }

  // Columns of the second tile of a row.
  __device__ __forceinline__ int more_columns() const { return NARROW ? p.head_dim - kTileColumns : kTileColumns; }

  // The stage of the query tile `tiles` before that of q_stage.
  __device__ __forceinline__ uint32_t q_slot_before(uint32_t tiles) const {
    return q_stage.slot < tiles ? q_stage.slot + kQueryStages - tiles : q_stage.slot - tiles;
  }
  // The tile_address() of a stage.
  __device__ __forceinline__ uint32_t q_address(uint32_t slot) const {
    return tile_address(memory.q) + slot * (2 * kQueryTileBytes / kAddressUnit);
  }
  __device__ __forceinline__ uint32_t dout_address(uint32_t slot) const {
    return tile_address(memory.dout) + slot * (2 * kQueryTileBytes / kAddressUnit);
  }
  __device__ __forceinline__ uint32_t dscores_address(uint32_t slot) const {
    return tile_address(memory.dscores) + slot * (kKeyTileBytes / kAddressUnit);
  }

  // Zeros the dropped weights of P^T. Bit positions in a word of keep bits are numbered i2 i1 (1 - half) i0 c (see
  // draw_keep_bits()). First i1 and c are swapped, so that the bits of a pair, c = 0 and 1, have the same position in
  // neighbouring bytes; from there prmt replicates each over 16 bits.
  static __device__ __forceinline__ void drop(const uint32_t (&weights)[16], uint32_t kept, uint32_t (&left)[16]) {
    const uint32_t other = (kept ^ kept >> 7) & 0x00aa00aau;
    kept ^= other ^ other << 7;
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t signs = kept << (7 - (i / 2 % 2 + i % 2 * 2 + (1 - half) * 4));
        uint32_t mask;
        asm("prmt.b32 %0, %1, 0, %2;" : "=r"(mask) : "r"(signs), "r"(i / 4 ? 0xbbaa : 0x9988));
        left[2 * i + half] = weights[2 * i + half] & mask;
      }
  }

  // product = keys queries^T for 64 rows of a key tile and a query tile.
  static __device__ __forceinline__ void multiply_rows(float (&product)[32], uint32_t keys, uint32_t queries) {
    const uint64_t a = k_major_at(keys), b = k_major_at(queries);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < 8; ++c)
      wgmma<T>(product, advance(a, c / 4 * kKeyTileBytes + c % 4 * kKMajorStep),
               advance(b, c / 4 * kQueryTileBytes + c % 4 * kKMajorStep), c > 0);
  }
  // sum += operand rows, or sum = operand rows.
  static __device__ __forceinline__ void multiply_columns(float (&sum)[64], const uint32_t (&operand)[16],
                                                          uint32_t rows, bool add) {
    const uint64_t b = mn_major_at(rows, kQueryTileBytes);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < 4; ++c) wgmma<T, Major::mn>(sum, operand + 4 * c, advance(b, c * kMnMajorStep), c > 0 || add);
  }

  // Issues S^T = K Q^T of the next query tile.
  __device__ __forceinline__ void begin_scores(float (&scores)[32]) {
    memory.q_full[q_stage.slot].wait(q_stage.parity);
    multiply_rows(scores, varying(k_rows, q_stage.slot), q_address(q_stage.slot));
    q_stage.next();
  }

  // Issues dK += dS^T Q of the present query tile, from the warpgroup's own rows of dS^T in shared memory.
  __device__ __forceinline__ void begin_dk(uint32_t q_slot, bool add) {
    const uint64_t dscores = k_major_at(dscores_address(stage.slot) + number * (64 * kTileRowBytes / kAddressUnit));
    const uint64_t q = mn_major_at(q_address(q_slot), kQueryTileBytes);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < 4; ++c)
      wgmma<T, Major::k, Major::mn>(dk, advance(dscores, c * kKMajorStep), advance(q, c * kMnMajorStep), c > 0 || add);
  }

  // Issues 64 columns of dQ = dS K of a query tile, whose dS is in stage `at`.
  __device__ __forceinline__ void begin_dq(float (&dq)[32], const Stage& at) {
    memory.dscores_full[at.slot].wait(at.parity);
    const uint64_t dscores = mn_major_at(dscores_address(at.slot), 0);
    const uint64_t k = mn_major_at(varying(k_columns, at.slot), 0);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < 8; ++c)
      wgmma<T, Major::mn, Major::mn>(dq, advance(dscores, c * kMnMajorStep), advance(k, c * kMnMajorStep), c > 0);
  }

  // Passes the completed dQ of a query tile, whose dS is in stage `slot`, to sum_dq_d128() through the staging tile, or
  // writes it if it is the last addition. BEFORE: it is the query tile before `present`.
  template <bool BEFORE>
  __device__ __forceinline__ void accumulate_dq(float (&dq)[32], int present, uint32_t slot) {
    const SplitUnit<MASK, GROUPED>& unit = memory.unit[number];
    arrive_warp(memory.dscores_empty[slot]);
    memory.staging_free[number].wait(slot);
    const int use = memory.staging_use;
    float4* staging = memory.staging[0] + threadIdx.x % kWarpgroup;
    if (use == kAdded) {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        staging[i * kWarpgroup] = make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
      fence_proxy_async();
      arrive_warp(memory.staging_done[number]);
      return;
    }
    if (use == kLast) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float4 part = staging[i * kWarpgroup];
        dq[4 * i] += part.x;
        dq[4 * i + 1] += part.y;
        dq[4 * i + 2] += part.z;
        dq[4 * i + 3] += part.w;
      }
    }
    fence_operand(dq);  // the loads are complete, because their values were used; late_loads.py checks this in the SASS
    arrive_warp(memory.staging_done[number]);
    const int tile = BEFORE ? unit.before(p, present) : present, query = tile_of<GROUPED>(p, tile) * kQueries;
    store_product(dq, p.dq_scale,
                  row_of<T>(p.dq, p, unit.sequence, query_head<GROUPED>(p, unit.head, tile), unit.q.first + query) +
                      number * kTileColumns,
                  p.dq.token, unit.q.stored - query, number == 0 ? kTileColumns : more_columns());
  }

  // Computes P^T = exp(S^T - lse) of a query tile in 16 bits, and `left`, the same after dropout.
  __device__ __forceinline__ void compute_weights(float (&scores)[32], uint32_t (&weights)[16], uint32_t (&left)[16],
                                                  int key, int tile, uint32_t q_slot, uint32_t slot) {
    const SplitUnit<MASK, GROUPED>& unit = memory.unit[number];
    mask_scores<MASK>(scores, key, tile_of<GROUPED>(p, tile) * kQueries, unit, whole);
    const float2* statistics = reinterpret_cast<const float2*>(memory.lse[q_slot]) + threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 lse = statistics[4 * i];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* pair = scores + 4 * i + 2 * half;
        weights[2 * i + half] = narrow_word(exp2_approx(pair[0] * p.score_scale - lse.x),
                                            exp2_approx(pair[1] * p.score_scale - lse.y), T{});
      }
    }
    if constexpr (DROPOUT) {
      memory.kept_full[number].wait(slot);
      drop(weights, memory.kept[number][threadIdx.x % kWarpgroup], left);
    }
    prevent_sink(DROPOUT ? left : weights, slot);
    if constexpr (DROPOUT) arrive_warp(memory.kept_empty[number]);  // the word was used, so its load is complete
  }

  // Computes dS^T = P^T (dP^T - delta) in 16 bits; with dropout, left * dP^T - P^T * delta.
  __device__ __forceinline__ void compute_dscores(const float (&dweights)[32], const uint32_t (&weights)[16],
                                                  const uint32_t (&left)[16], uint32_t (&dscores)[16]) {
    const float2* statistics = reinterpret_cast<const float2*>(memory.delta[stage.slot]) + threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 delta = statistics[4 * i];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* pair = dweights + 4 * i + 2 * half;
        const float2 weight = widen_word(weights[2 * i + half], T{});
        if constexpr (DROPOUT) {
          const float2 kept = widen_word(left[2 * i + half], T{});
          dscores[2 * i + half] =
              narrow_word(kept.x * pair[0] - weight.x * delta.x, kept.y * pair[1] - weight.y * delta.y, T{});
        } else {
          dscores[2 * i + half] = narrow_word(weight.x * (pair[0] - delta.x), weight.y * (pair[1] - delta.y), T{});
        }
      }
    }
  }

  // Issues dP^T = V dO^T of a query tile.
  __device__ __forceinline__ void begin_dweights(float (&dweights)[32], const Stage& at) {
    memory.dout_full[at.slot].wait(at.parity);
    multiply_rows(dweights, varying(v_rows, at.slot), dout_address(at.slot));
  }

  // Issues dV += P^T dO of a query tile, with P^T after dropout.
  __device__ __forceinline__ void begin_dv(uint32_t (&weights)[16], uint32_t (&left)[16], const Stage& at, bool add) {
    multiply_columns(dv, DROPOUT ? left : weights, dout_address(at.slot), add);
  }

  // The two warpgroups alternate: one issues wgmma while the other does elementwise work.
  __device__ __forceinline__ void scheduler_barrier_sync() const {
    named_barrier_sync(kBackwardD128WarpScheduler + number, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void scheduler_barrier_arrive() const {
    named_barrier_arrive(kBackwardD128WarpScheduler + 1 - number, 2 * kWarpgroup);
  }

  // Stores dS^T in shared memory for both warpgroups.
  __device__ __forceinline__ void store_dscores(const uint32_t (&dscores)[16]) {
    memory.dscores_empty[stage.slot].wait(stage.parity ^ 1);
    const int lane = threadIdx.x % 32, row = number * 64 + threadIdx.x % kWarpgroup / 32 * 16 + lane % 16;
    const uint32_t to =
        opaque(shared_address(memory.dscores[stage.slot]) + row * kTileRowBytes + (lane / 16 ^ lane % 8) * 16);
#pragma unroll
    for (int c = 0; c < 4; ++c) stmatrix_x4(to ^ 32 * c, dscores + 4 * c);
    fence_proxy_async();
    arrive_warp(memory.dscores_full[stage.slot]);
  }

  // Processes a query tile. FIRST: it is the first one of the key tile. AFTER: the number of query tiles that follow
  // (2: two or more). On entry its weights are complete; its dP^T (in `dweights`), dV, and S^T of the next tile (in
  // `scores`) are in flight. Computes dS and the weights of the next tile. After scheduler_barrier_sync() it issues dK,
  // dQ of the previous tile, dP and dV of the next tile, and S of the tile after that.
  template <bool FIRST, int AFTER>
  __device__ __forceinline__ void process_query_tile(float (&dweights)[32], float (&scores)[32],
                                                     uint32_t (&weights)[16], uint32_t (&left)[16], int key, int tile) {
    constexpr bool LAST = AFTER == 0;
    const SplitUnit<MASK, GROUPED>& unit = memory.unit[number];
    uint32_t dscores[16];
    wgmma_wait<LAST ? 0 : 1>();
    fence_operand(dweights);
    fence_operand(dv);
    if constexpr (LAST) arrive_warp(memory.v_empty);
    compute_dscores(dweights, weights, left, dscores);
    store_dscores(dscores);
    arrive_warp(memory.dout_empty[stage.slot]);  // delta was used, so its load is complete
    const Stage next = stage.next(), previous = stage.previous();
    const uint32_t q_slot = q_slot_before(LAST ? 1 : 2);
    if constexpr (!LAST) {
      wgmma_wait<0>();
      fence_operand(scores);
      compute_weights(scores, weights, left, key, unit.after(p, tile), q_slot_before(1), next.slot);
    }
    scheduler_barrier_sync();
    begin_dk(q_slot, !FIRST);
    if constexpr (!FIRST) begin_dq(scores, previous);
    wgmma_commit();
    if constexpr (LAST) {
      begin_dq(dweights, stage);
      wgmma_commit();
      scheduler_barrier_arrive();
    } else {
      begin_dweights(dweights, next);
      begin_dv(weights, left, next, true);
      wgmma_commit();
    }
    wgmma_wait<1>();
    fence_operand(dk);
    fence_operand(scores);
    arrive_warp(memory.q_empty[q_slot]);
    if constexpr (!FIRST) accumulate_dq<true>(scores, tile, previous.slot);
    if constexpr (LAST) {
      wgmma_wait<0>();
      fence_operand(dweights);
      arrive_warp(memory.k_empty[k_stage.slot]);
    } else {
      if constexpr (AFTER > 1) {
        begin_scores(scores);
        wgmma_commit();
      }
      scheduler_barrier_arrive();
    }
    stage = next;
  }

  // Processes one key tile.
  __device__ __forceinline__ void process_key_tile(int key_tile) {
    const SplitUnit<MASK, GROUPED>& unit = memory.unit[number];
    const int key = key_tile * kKeys + number * 64;
    int tile = unit.first(p, key_tile),
        after = warp_uniform(unit.count_steps(p, key_tile) - 1);  // number of query tiles that follow
    float dweights[32], scores[32];
    uint32_t weights[16], left[16];
    whole = warp_uniform(first_whole_query<MASK>(key, unit));
    stage = {uniform(stage.slot), uniform(stage.parity)};
    q_stage.slot = uniform(q_stage.slot);
    q_stage.parity = uniform(q_stage.parity);
    k_stage = {uniform(k_stage.slot), uniform(k_stage.parity)};
    k_rows = tile_address(memory.k) + (k_stage.slot * 2 * kKeyTileBytes + number * 64 * kTileRowBytes) / kAddressUnit;
    k_columns = tile_address(memory.k) + (k_stage.slot * 2 + number) * (kKeyTileBytes / kAddressUnit);
    v_rows = tile_address(memory.v) + number * (64 * kTileRowBytes / kAddressUnit);
    memory.k_full[k_stage.slot].wait(k_stage.parity);
    begin_scores(scores);
    wgmma_commit();
    wgmma_wait<0>();
    fence_operand(scores);
    compute_weights(scores, weights, left, key, tile, q_slot_before(1), stage.slot);
    memory.v_full.wait(k_stage.slot);  // one stage, so its parity is that of the number of key tiles
    scheduler_barrier_sync();
    begin_dweights(dweights, stage);
    begin_dv(weights, left, stage, false);
    wgmma_commit();
    const auto over = [&](auto first, auto following) {
      process_query_tile<decltype(first)::value, decltype(following)::value>(dweights, scores, weights, left, key,
                                                                             tile);
      if (decltype(following)::value > 0) tile = warp_uniform(unit.after(p, tile));
    };
    constexpr std::true_type first;
    constexpr std::false_type not_first;
    constexpr std::integral_constant<int, 0> last;
    constexpr std::integral_constant<int, 1> one_after;
    constexpr std::integral_constant<int, 2> more_after;
    if (after == 0) {
      scheduler_barrier_arrive();
      over(first, last);
    } else {
      begin_scores(scores);
      wgmma_commit();
      scheduler_barrier_arrive();
      if (after == 1) {
        over(first, one_after);
      } else {
        over(first, more_after);
#pragma unroll 1
        for (; after > 2; --after) over(not_first, more_after);
        over(not_first, one_after);
      }
      over(not_first, last);
    }
    k_stage = k_stage.next();
    const int rows = unit.k.stored - key;
    store_product_d128(dk, p.dq_scale,
                       row_of<T>(p.dk, p, unit.sequence, gradient_head<GROUPED>(p, unit.head), unit.k.first + key),
                       p.dk.token, rows, more_columns());
    store_product_d128(dv, p.dv_scale,
                       row_of<T>(p.dv, p, unit.sequence, gradient_head<GROUPED>(p, unit.head), unit.k.first + key),
                       p.dv.token, rows, more_columns());
    // Waits for the staging tile until the other warpgroup's previous dQ has been read from it.
    accumulate_dq<false>(dweights, tile, stage.previous().slot);
  }

  // Writes zeros to the gradients of `rows` keys from `key` on.
  __device__ __forceinline__ void store_zero_keys(const SplitUnit<MASK, GROUPED>& unit, int key, int rows) {
    const int more = more_columns();
    store_zeros_d128(row_of<T>(p.dk, p, unit.sequence, gradient_head<GROUPED>(p, unit.head), unit.k.first + key),
                     p.dk.token, rows, more);
    store_zeros_d128(row_of<T>(p.dv, p, unit.sequence, gradient_head<GROUPED>(p, unit.head), unit.k.first + key),
                     p.dv.token, rows, more);
  }

  __device__ __forceinline__ void process_unit(int index) {
    named_barrier_sync(kBackwardD128Unit + number, kWarpgroup);
    if (threadIdx.x % kWarpgroup == 0) memory.unit[number] = SplitUnit<MASK, GROUPED>(p, index);
    named_barrier_sync(kBackwardD128Unit + number, kWarpgroup);
    const SplitUnit<MASK, GROUPED>& unit = memory.unit[number];
    for (int round = 0; round < unit.rounds(); ++round)
      if (unit.has_tile(round)) process_key_tile(unit.key_tile(round));
    if (unit.part > 0) return;
    for (int key = unit.key_tiles * kKeys + number * 64; key < unit.k.stored; key += kKeys)
      store_zero_keys(unit, key, min(unit.k.stored - key, 64));
    if (MASK == Mask::window && unit.key_tiles > 0)
      for (int key = number * 64; key < unit.first_key_tile() * kKeys; key += kKeys) store_zero_keys(unit, key, 64);
    if (number > 0) return;
    // Queries that attend to no keys, which are the first ones if causal, and rows past the sequence's end.
    const auto zeros = [&](int begin, int end) {
      for_each_head<GROUPED>(p, [&](int member) {
        if (begin < end)
          store_zeros_d128(row_of<T>(p.dq, p, unit.sequence, unit.head + member, unit.q.first + begin), p.dq.token,
                           end - begin, more_columns());
      });
    };
    if (MASK != Mask::full && unit.key_tiles > 0)
      zeros(0, min(unit.begin(unit.first_key_tile()) * kQueries, unit.q.stored));
    zeros(unit.query_tiles * kQueries, unit.q.stored);
  }
};

}  // namespace hopper_backward
}  // namespace cuda
}  // namespace fasttfm
