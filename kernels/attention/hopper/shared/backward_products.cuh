// attention backward for Hopper, head dims 64 and 32: warpgroups 1 and 2, which compute dK and dV.
#pragma once

#include "attention/hopper/shared/backward_keys.cuh"

namespace fasttfm {
namespace cuda {
namespace hopper_backward {

// A step processes one query tile for one key tile; the pipeline continues across key tiles and units. While P and dS
// of a step are computed, wgmma of the previous and the next step are in flight: S of the next step is issued before dS
// is stored, and dP after it, together with dK. The sign bit of a weight is set if dropout drops it.
template <class T, class G, int HEAD_DIM, bool DROPOUT, Mask MASK, bool ON_CHIP>
class KeyWarpgroup : KeyTiles<T, G, HEAD_DIM, MASK, Memory<ON_CHIP, MASK>> {
  static constexpr int kStages = Memory<ON_CHIP, MASK>::kStages;
  using Base = KeyTiles<T, G, HEAD_DIM, MASK, Memory<ON_CHIP, MASK>>;
  using Base::first_key, Base::scheduler_barrier_arrive, Base::has_keys, Base::load_values, Base::next_key_tile,
      Base::key_rows, Base::store_dscores, Base::store_gradient, Base::scheduler_barrier_sync, Base::unit,
      Base::q_address, Base::dout_address;
  using Base::k, Base::key_tile, Base::memory, Base::number, Base::p, Base::stage, Base::step, Base::v, Base::whole;

 public:
  __device__ __forceinline__ KeyWarpgroup(const Parameters& p, Memory<ON_CHIP, MASK>& memory, int number)
      : Base(p, memory, number) {}

  __device__ __forceinline__ void run() {
    if (number == 1) scheduler_barrier_arrive();
    next_key_tile();
    while (key_tile >= 0) {
      if (has_keys()) {
        process_key_tiles();
      } else {
        Base::skip_key_tile([&] {
          if constexpr (DROPOUT) {
            memory.kept_full[step.slot][number].wait(step.parity);
            arrive_warp(memory.kept_empty[step.slot][number]);
          }
        });
        next_key_tile();
      }
    }
  }

 private:
  // Processes key tiles until one has no keys for this warpgroup, or until there are no more.
  __device__ __forceinline__ void process_key_tiles() {
    int tile = task_begin(unit(), key_tile);
    load_values(stage);
    stage.next();
    memory.stage_full[stage.slot].wait(stage.parity);
    const int start = warp_uniform(stage.slot);
    wgmma_fence();
    start_scores(start, warp_uniform(k));
    wgmma_commit();  // an empty wgmma group in place of dK's, for the waits that count groups
    start_dweights(start);
    for (;;) {
      __syncwarp();  // otherwise the compiler assumes that warps diverge here
      // The addresses of wgmma operands are warp-uniform, but the compiler does not see that in this loop.
      const int slot = warp_uniform(stage.slot);
      const int key = first_key();
      const bool first = tile == task_begin(unit(), key_tile);
      compute(slot, key, tile * kQueries, first);
      const bool last = tile + 1 == task_end(unit(), key_tile);
      GradientRows gradient_rows;
      stage.next();
      const RingPosition<kStages> values = stage;  // stage of v, if there is a next key tile
      if (last) {
        stage.next();
        gradient_rows = key_rows();
        next_key_tile();
        if (key_tile < 0 || !has_keys()) {
          stage = values;
          store_dscores(operand);
          wgmma_fence();
          start_dk(slot, first);
          store_dv(gradient_rows);
          wgmma_wait<0>();
          store_dk(gradient_rows, slot);
          step.next();
          return;
        }
      }
      const uint32_t keys = warp_uniform(k);
      const int next = warp_uniform(stage.slot);
      if (!ON_CHIP) {
        memory.stage_full[next].wait(stage.parity);
        wgmma_fence();
        start_scores(next, keys);
      }
      store_dscores(operand);
      if (last) load_values(values);
      wgmma_fence();
      start_dk(slot, first);
      if (ON_CHIP) {
        memory.stage_full[next].wait(stage.parity);
        wgmma_fence();
        start_scores(next, keys);
      }
      start_dweights(next);
      if (last) {
        wgmma_wait<0>();  // also for dP of the next step; otherwise ptxas assumes that its accumulators are read here
        fence_operand(scores);
        fence_operand(dweights);
        store_dk(gradient_rows, slot);
        store_dv(gradient_rows);
      }
      tile = last ? task_begin(unit(), key_tile) : tile + 1;
      step.next();
    }
  }

  __device__ __forceinline__ void start_scores(int slot, uint32_t keys) {
    const uint64_t a = k_major_at(varying(keys, slot)), b = k_major_at(q_address(slot));
#pragma unroll
    for (int c = 0; c < HEAD_DIM / 16; ++c)
      wgmma<T>(scores, advance(a, c * kKMajorStep), advance(b, c * kKMajorStep), c > 0);
    wgmma_commit();
  }
  __device__ __forceinline__ void start_dweights(int slot) {
    const uint64_t dout = k_major_at(dout_address(slot));
#pragma unroll
    for (int c = 0; c < HEAD_DIM / 16; ++c) wgmma<T>(dweights, v + 4 * c, advance(dout, c * kKMajorStep), c > 0);
    wgmma_commit();
  }

  // Overwrites S with P.
  __device__ __forceinline__ void compute_weights(const float2* lse, uint32_t dropped) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 lse_pair = lse[4 * i];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* pair = scores + 4 * i + 2 * half;
        pair[0] = exp2_approx(pair[0] * p.score_scale - lse_pair.x);
        pair[1] = exp2_approx(pair[1] * p.score_scale - lse_pair.y);
        if constexpr (DROPOUT) {
          const int bit = i / 2 * 8 + (1 - half) * 4 + i % 2 * 2;
          pair[0] = __uint_as_float(__float_as_uint(pair[0]) | (dropped << (31 - bit) & 0x80000000u));
          pair[1] = __uint_as_float(__float_as_uint(pair[1]) | (dropped << (30 - bit) & 0x80000000u));
        }
      }
    }
  }

  // Overwrites dP with dS.
  __device__ __forceinline__ void compute_dscores(const float2 (&delta)[8]) {
#pragma unroll
    for (int at = 0; at < 32; ++at) {
      const float mean = at % 2 == 0 ? delta[at / 4].x : delta[at / 4].y;
      dweights[at] = DROPOUT ? fmaxf(scores[at], 0.0f) * dweights[at] - fabsf(scores[at]) * mean
                             : scores[at] * (dweights[at] - mean);
    }
  }

  // Computes dS of a step as a 16-bit wgmma operand from S and dP, whose wgmma are in flight, and issues dV. `first`:
  // the step is the first one of a key tile.
  __device__ __forceinline__ void compute(int slot, int key, int query, bool first) {
    const float2* statistics = reinterpret_cast<const float2*>(memory.statistics[slot]) + threadIdx.x % 4;
    uint32_t dropped = 0;
    if constexpr (DROPOUT) {
      memory.kept_full[step.slot][number].wait(step.parity);
      dropped = ~memory.kept[step.slot][number][threadIdx.x % kWarpgroup];
    }
    wgmma_wait<ON_CHIP ? 1 : 2>();
    fence_operand(scores);
    const auto give_free = [&] { arrive_warp(memory.stage_empty[slot == 0 ? kStages - 1 : slot - 1]); };
    if (ON_CHIP && !first) give_free();  // dK of the previous step has read the stage
    scheduler_barrier_sync();
    mask_scores<MASK>(scores, key, query, unit(), whole);
    compute_weights(statistics, dropped);
    if constexpr (!ON_CHIP) {
      prevent_hoist(scores[31]);
      wgmma_wait<1>();  // dV's operand reuses the registers of dK's
    }
    fence_operand(operand);
#pragma unroll
    for (int i = 0; i < 16; ++i)
      operand[i] = DROPOUT ? narrow_relu(scores[2 * i], scores[2 * i + 1], T{})
                           : narrow_word(scores[2 * i], scores[2 * i + 1], T{});
    scheduler_barrier_arrive();
    float2 delta[8];  // loaded before the wgmma, which would delay the loads
#pragma unroll
    for (int i = 0; i < 8; ++i) delta[i] = statistics[kQueries / 2 + 4 * i];
    if constexpr (DROPOUT)
      arrive_warp(memory.kept_empty[step.slot][number]);  // the word was used, so its load is complete
    wgmma_fence();
    const uint64_t dout = mn_major_at(dout_address(slot), 0);
#pragma unroll
    for (int c = 0; c < 4; ++c)
      wgmma<T, Major::mn>(dv, operand + 4 * c, advance(dout, c * kMnMajorStep), c > 0 || !first);
    wgmma_commit();
    wgmma_wait<1>();
    fence_operand(dweights);
    // A load from shared memory is complete only when its value is used; arriving at an mbarrier does not wait for it.
    // So v's stage is released here, where wgmma have used the loaded registers.
    if (!ON_CHIP || first) give_free();
    compute_dscores(delta);
    prevent_hoist(dweights[31]);
    wgmma_wait<0>();  // dK's operand reuses the registers of dV's
    fence_operand(operand);
#pragma unroll
    for (int i = 0; i < 16; ++i) operand[i] = narrow_word(dweights[2 * i], dweights[2 * i + 1], T{});
  }

  __device__ __forceinline__ void start_dk(int slot, bool first) {
    const uint64_t q = mn_major_at(q_address(slot), 0);
#pragma unroll
    for (int c = 0; c < 4; ++c) wgmma<T, Major::mn>(dk, operand + 4 * c, advance(q, c * kMnMajorStep), c > 0 || !first);
    wgmma_commit();
  }

  // Called after the last step of a key tile; the queries of that step are in stage `slot`.
  __device__ __forceinline__ void store_dk(const GradientRows& at, int slot) {
    fence_operand(dk);
    arrive_warp(memory.stage_empty[slot]);
    store_gradient(dk, p.dq_scale, p.dk, at, 1);
  }
  // dV is complete before dK, so this may be called while wgmma of dK are in flight.
  __device__ __forceinline__ void store_dv(const GradientRows& at) {
    fence_operand(dv);
    store_gradient(dv, p.dv_scale, p.dv, at, 2);
  }
  float dk[HEAD_DIM / 2], dv[HEAD_DIM / 2], scores[32], dweights[32];
  uint32_t operand[16];
};

}  // namespace hopper_backward
}  // namespace cuda
}  // namespace fasttfm
