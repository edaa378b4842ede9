// attention backward for Hopper, head dim 64, for long sequences: warpgroups 1 to 3.
#pragma once

#include "attention/hopper/backward_d64/long_tiles.cuh"
#include "attention/hopper/backward_d64/sums.cuh"
#include "attention/hopper/shared/backward_keys.cuh"

namespace fasttfm {
namespace cuda {
namespace hopper_backward {

// Warpgroup 3: computes dQ = dS K of a step and passes it to add_dq_long() through a staging tile, or, if it is the
// last addition, adds the sum of the others and writes dQ.
template <class T, class G, Mask MASK, bool GROUPED>
__device__ __forceinline__ void multiply_dq_long(const Parameters& p, LongMemory<MASK, GROUPED>& memory) {
  RingPosition<2> k_stage;
  RingPosition<LongMemory<MASK, GROUPED>::kBuffers> step;
  RingPosition<LongMemory<MASK, GROUPED>::kStagings> staged;
  uint32_t loaded_parity = 0;  // one bit per staging tile
  for (;;) {
    memory.k_full[k_stage.slot].wait(k_stage.parity);
    const LongTask<MASK, GROUPED>& task = memory.task[k_stage.slot];
    const SplitUnit<MASK, GROUPED>& unit = task.unit;
    const int key_tile = task.key_tile;
    if (key_tile < 0) return;
    int tile = unit.first(p, key_tile);
    for (int left = unit.count_steps(p, key_tile); left > 0;
         --left, tile = unit.after(p, tile), step.next(), staged.next()) {
      const int addition = unit.addition(p, task.round, tile);
      const bool last = addition == unit.last_addition(p, tile);
      float dq[32];
      multiply_dscores<T>(dq, memory, k_stage.slot, step, false);
      memory.staging_empty[staged.slot].wait(staged.parity ^ 1);
      SharedSums<32> staging(memory.staging[staged.slot][0]);
      if (!last) {
        staging.store(dq, 0);
        fence_proxy_async();
        arrive_warp(memory.staging_full[staged.slot]);
        continue;
      }
      if (addition > 0) {
        memory.loaded[staged.slot].wait(loaded_parity >> staged.slot & 1);
        loaded_parity ^= 1 << staged.slot;
        float sum[32];
        staging.load(sum, 0);
#pragma unroll
        for (int i = 0; i < 32; ++i) dq[i] += sum[i];
        // The loads are complete, because their values were used; late_loads.py checks this in the SASS.
        fence_operand(dq);
      }
      arrive_warp(memory.staging_full[staged.slot]);
      const int query = tile_of<GROUPED>(p, tile) * kQueries;
      if constexpr (!kFp8<G>) {
        store_product(dq, p.dq_scale,
                      row_of<G>(p.dq, p, unit.sequence, query_head<GROUPED>(p, unit.head, tile), unit.q.first + query),
                      p.dq.token, unit.q.stored - query);
        __syncwarp();  // otherwise the compiler assumes that warps diverge here
      }
      if (p.column_parts != nullptr)
        add_columns(dq, p.dq_scale,
                    column_part(p, unit.sequence, unit.part, reload_tid() % kWarpgroup / 32, 0, unit.head));
      if constexpr (kFp8<G>)
        store_fp8(dq, p.dq_scale, p, memory.fp8, p.dq,
                  {unit.sequence, unit.head, unit.q.first + query, unit.q.stored - query}, 0);
    }
    if (key_tile == 0) store_zero_rows<G, kHeadDim, GROUPED>(p, static_cast<const Unit<MASK>&>(unit));
    arrive_warp(memory.k_empty[k_stage.slot]);
    k_stage.next();
  }
}

// Warpgroups 1 and 2. While P of a step is computed, dK of the previous step is in flight, and while dS is computed, dV
// of this step; then S and dP of the next step are issued, and dK of this one. P and dS have operand registers of their
// own.
template <class T, class G, Mask MASK, bool GROUPED>
class LongKeyWarpgroup : KeyTiles<T, G, kHeadDim, MASK, LongMemory<MASK, GROUPED>> {
  static constexpr int kStages = LongMemory<MASK, GROUPED>::kStages;
  using Base = KeyTiles<T, G, kHeadDim, MASK, LongMemory<MASK, GROUPED>>;
  using Base::first_key, Base::scheduler_barrier_arrive, Base::has_keys, Base::load_values, Base::next_key_tile,
      Base::key_rows, Base::store_dscores, Base::store_gradient, Base::scheduler_barrier_sync, Base::unit,
      Base::q_address, Base::dout_address;
  using Base::k, Base::key_tile, Base::memory, Base::number, Base::p, Base::stage, Base::step, Base::v, Base::whole;

 public:
  __device__ __forceinline__ LongKeyWarpgroup(const Parameters& p, LongMemory<MASK, GROUPED>& memory, int number)
      : Base(p, memory, number) {}

  __device__ __forceinline__ void run() {
    if (number == 1) scheduler_barrier_arrive();
    next_key_tile();
    while (key_tile >= 0) {
      if (has_keys()) {
        process_key_tiles();
      } else {
        Base::skip_key_tile([] {});
        next_key_tile();
      }
    }
  }

 private:
  // Processes key tiles until one has no keys for this warpgroup, or until there are no more.
  __device__ __forceinline__ void process_key_tiles() {
    load_values(stage);
    stage.next();
    start_scores();
    wgmma_commit();  // an empty wgmma group in place of that of dK
    int tile = unit().first(p, key_tile), left = unit().count_steps(p, key_tile);
    bool first = true;
    for (;;) {
      __syncwarp();  // otherwise the compiler assumes that warps diverge here
      const int slot = warp_uniform(stage.slot);
      compute_weights(slot, tile_of<GROUPED>(p, tile) * kQueries);
      start_dv(slot, first);
      stage.next();
      compute_dscores(slot);
      if (--left > 0) {
        start_scores();
        store_dscores(dscores);
        start_dk(slot, first);
        tile = unit().after(p, tile);
        first = false;
        step.next();
        continue;
      }
      const GradientRows gradient_rows = key_rows();
      store_dscores(dscores);
      start_dk(slot, first);
      step.next();
      next_key_tile();
      if (key_tile < 0 || !has_keys()) {
        finish_gradients(slot);
        store_gradients(gradient_rows);
        return;
      }
      load_values(stage);
      stage.next();
      finish_gradients(slot);
      if (kFp8<G>)
        store_gradients(gradient_rows);  // before S and dP have accumulators, because rounding needs their registers
      start_scores();
      wgmma_commit();  // an empty wgmma group in place of that of dK
      if (!kFp8<G>) store_gradients(gradient_rows);
      tile = unit().first(p, key_tile);
      left = unit().count_steps(p, key_tile);
      first = true;
    }
  }

  // Issues S^T and dP^T of the query tile in the current stage.
  __device__ __forceinline__ void start_scores() {
    memory.stage_full[stage.slot].wait(stage.parity);
    const int slot = warp_uniform(stage.slot);
    const uint64_t q = k_major_at(q_address(slot)), dout = k_major_at(dout_address(slot));
    const uint64_t keys = k_major_at(varying(k, slot));
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < 4; ++c) wgmma<T>(scores, advance(keys, c * kKMajorStep), advance(q, c * kKMajorStep), c > 0);
    wgmma_commit();
#pragma unroll
    for (int c = 0; c < 4; ++c) wgmma<T>(dweights, v + 4 * c, advance(dout, c * kKMajorStep), c > 0);
    wgmma_commit();
  }

  // Issues dV and dK of the step whose queries are in `slot`.
  __device__ __forceinline__ void start_dv(int slot, bool first) {
    const uint64_t dout = mn_major_at(dout_address(slot), 0);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < 4; ++c)
      wgmma<T, Major::mn>(dv, weights + 4 * c, advance(dout, c * kMnMajorStep), c > 0 || !first);
    wgmma_commit();
  }
  __device__ __forceinline__ void start_dk(int slot, bool first) {
    const uint64_t q = mn_major_at(q_address(slot), 0);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < 4; ++c) wgmma<T, Major::mn>(dk, dscores + 4 * c, advance(q, c * kMnMajorStep), c > 0 || !first);
    wgmma_commit();
  }

  // Called after the last step of a key tile; the queries of that step are in stage `slot`.
  __device__ __forceinline__ void finish_gradients(int slot) {
    wgmma_wait<0>();
    fence_operand(weights);
    fence_operand(dscores);
    fence_operand(dk);
    fence_operand(dv);
    arrive_warp(memory.stage_empty[slot]);
  }
  __device__ __forceinline__ void store_gradients(const GradientRows& at) {
    store_gradient(dk, p.dq_scale, p.dk, at, 1);
    store_gradient(dv, p.dv_scale, p.dv, at, 2);
  }

  // Loads lse (0) or delta (1) of the thread's queries. Volatile, so that the loads stay before the next wait and their
  // latency overlaps it.
  __device__ __forceinline__ void load_statistics(float (&value)[16], int slot, int which) const {
    const uint32_t from = shared_address(memory.statistics[slot][which]) + threadIdx.x % 4 * 8;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                   : "=f"(value[2 * i]), "=f"(value[2 * i + 1])
                   : "r"(from + 32 * i));
  }

  // Computes P of a step, also as 16-bit operands. In flight are, in this order, dV of the previous step, S and dP of
  // this one, and dK of the previous one.
  __device__ __forceinline__ void compute_weights(int slot, int query) {
    float lse[16];
    wgmma_wait<2>();  // for dV and S
    fence_operand(scores);
    fence_operand(weights);
    load_statistics(lse, slot, 0);
    scheduler_barrier_sync();
    mask_scores<MASK>(scores, first_key(), query, unit(), whole);
#pragma unroll
    for (int i = 0; i < 32; ++i) scores[i] = exp2_approx(scores[i] * p.score_scale - lse[i / 4 * 2 + i % 2]);
    prevent_hoist(scores[31]);
    scheduler_barrier_arrive();
#pragma unroll
    for (int i = 0; i < 16; ++i) weights[i] = narrow_word(scores[2 * i], scores[2 * i + 1], T{});
  }

  // Computes dS of a step, as 16-bit operands. In flight are, in this order, dP, dK of the previous step, and dV.
  __device__ __forceinline__ void compute_dscores(int slot) {
    float delta[16];
    load_statistics(delta, slot, 1);
    wgmma_wait<2>();  // for dP
    fence_operand(dweights);
#pragma unroll
    for (int i = 0; i < 32; ++i) dweights[i] = scores[i] * (dweights[i] - delta[i / 4 * 2 + i % 2]);
    prevent_hoist(dweights[31]);
    wgmma_wait<1>();  // for dK
    fence_operand(dscores);
    arrive_warp(memory.stage_empty[slot == 0 ? kStages - 1 : slot - 1]);  // of the previous step, or v
#pragma unroll
    for (int i = 0; i < 16; ++i) dscores[i] = narrow_word(dweights[2 * i], dweights[2 * i + 1], T{});
  }

  float dk[32], dv[32], scores[32], dweights[32];
  uint32_t weights[16], dscores[16];
};

}  // namespace hopper_backward
}  // namespace cuda
}  // namespace fasttfm
