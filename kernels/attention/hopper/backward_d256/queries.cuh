// attention backward for Hopper, head dims 192 and 256: the kernel that computes dQ.
//
// A block has the 128 queries of a task and iterates over tiles of 64 keys. Warpgroup 0 loads tiles (warp 0) and
// fetches tasks (warp 1). Warpgroups 1 and 2 have 64 queries each: they compute S = Q K^T and dP = dO V^T, from these P
// and dS in registers, and dQ += dS K.
//
// A step processes one key tile. A warpgroup issues dQ of a step, S and dP of the next step in this order, so that the
// stage of k is released early, and the exponentials overlap with dP.
//
// Rows of q and dout past a sequence's end affect only their own rows of dQ, which are not written.
#pragma once

#include "attention/hopper/backward_d256/tiles.cuh"
#include "attention/hopper/shared/mask.cuh"

namespace fasttfm {
namespace cuda {
namespace hopper_backward {

template <int HEAD_DIM>
struct WideQueriesMemory {
  static constexpr int kKeyStages = HEAD_DIM > 192 ? 2 : 3, kValueStages = HEAD_DIM > 192 ? 1 : 2;
  using Keys = WideRing<HEAD_DIM, kKeyStages>;
  using Values = WideRing<HEAD_DIM, kValueStages>;
  alignas(1024) char q[2][Keys::kBytes];  // of warpgroups 1 and 2
  char dout[2][Keys::kBytes];
  Keys k;
  Values v;
  Mbarrier q_full[2], q_empty[2], dout_full[2], dout_empty[2];
  typename Keys::Barriers k_barriers;
  typename Values::Barriers v_barriers;
  TaskQueue queue;

  // Called by one thread.
  __device__ __forceinline__ void init() {
    for (int i = 0; i < 2; ++i) {
      q_full[i].init(kWarpArrivals);
      q_empty[i].init(4 * kWarpArrivals);
      dout_full[i].init(kWarpArrivals);
      dout_empty[i].init(4 * kWarpArrivals);
    }
    k_barriers.init(8);
    v_barriers.init(8);
    queue.init();
    fence_mbarrier_init();
  }
};

// ---- warpgroup 0 ----------------------------------------------------------------------------------------------------

// Loads tiles. Called by a whole warp.
template <int HEAD_DIM, Mask MASK, bool GROUPED>
class WideQueriesLoader {
  using Memory = WideQueriesMemory<HEAD_DIM>;

 public:
  __device__ __forceinline__ WideQueriesLoader(const Parameters& p, Memory& memory)
      : p(p), memory(memory), k(memory.k, memory.k_barriers), v(memory.v, memory.v_barriers) {}

  __device__ __forceinline__ void run() {
    TaskReader reader(memory.queue);
    uint32_t parity = 0;  // of q and dout
    for (int index = reader.next(); index < p.tasks; index = reader.next()) {
      const auto task = task_at<MASK, false, false>(p, index);
      const Tiles tiles = keys_of_task(task);
      const int row = task.unit.q.first + task.first;
      for (int tile = tiles.begin; tile < tiles.end; ++tile) {
        const bool first = tile == tiles.begin;
        if (first) load_queries(p.q, memory.q, memory.q_full, memory.q_empty, parity, task.unit, row);
        load_keys(p.k, k, task.unit, tile);
        if (first) load_queries(p.dout, memory.dout, memory.dout_full, memory.dout_empty, parity, task.unit, row);
        load_keys(p.v, v, task.unit, tile);
      }
      if (tiles.begin < tiles.end) parity ^= 1;
    }
  }

 private:
  // Loads the block's rows of q or dout.
  __device__ __forceinline__ void load_queries(const CUtensorMap& map, char (&to)[2][Memory::Keys::kBytes],
                                               Mbarrier (&full)[2], Mbarrier (&empty)[2], uint32_t parity,
                                               const Unit<MASK>& unit, int row) {
    for (int half = 0; half < 2; ++half) {
      empty[half].wait(parity ^ 1);
      start_loads(full[half], Memory::Keys::kBytes, [&](Mbarrier& landed) {
        load_wide_tile<HEAD_DIM>(map, landed, to[half], unit.head, row + half * kWideRows, batch_of(p, unit));
      });
    }
  }

  template <class Loader>
  __device__ __forceinline__ void load_keys(const CUtensorMap& map, Loader& loader, const Unit<MASK>& unit, int tile) {
    loader.load(map, key_head<GROUPED>(p, unit.head), unit.k.first + tile * kWideRows, batch_of(p, unit),
                unit.k.length - tile * kWideRows, p.cu_seqlens_k != nullptr || p.lengths_k != nullptr, 0,
                [](uint32_t, Mbarrier&) {});
  }

  const Parameters& p;
  Memory& memory;
  WideRingLoader<HEAD_DIM, Memory::kKeyStages> k;
  WideRingLoader<HEAD_DIM, Memory::kValueStages> v;
};

// ---- warpgroups 1 and 2 ----------------------------------------------------------------------------------------------

struct WideKeyStep {
  static constexpr int kKeys = kWideRows;  // for mask_step()
};

template <class T, int HEAD_DIM, Mask MASK>
struct WideQueriesWarpgroup {
  using Memory = WideQueriesMemory<HEAD_DIM>;
  const Parameters& p;
  Memory& memory;
  const int number;  // 0 or 1: which half of a task's queries the warpgroup has
  RingPosition<Memory::kKeyStages> k_stage;
  RingPosition<Memory::kValueStages> v_stage;
  float dq[HEAD_DIM / 2], scores[32], dweights[32];
  uint32_t dscores[16];
  float lse[2], delta[2];  // of the thread's rows

  __device__ __forceinline__ WideQueriesWarpgroup(const Parameters& p, Memory& memory, int number)
      : p(p), memory(memory), number(number) {}

  __device__ __forceinline__ void load_statistics(const Unit<MASK>& unit, int first) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_in_group() + 8 * half;
      const bool there = first + row < unit.q.length;
      const float* row_statistics =
          p.statistics + static_cast<int64_t>(unit.tile + first / kWideRows) * (2 * kWideRows) + row;
      lse[half] = there ? row_statistics[0] : __int_as_float(0x7f800000);
      delta[half] = there ? row_statistics[kWideRows] : 0.0f;
    }
  }

  __device__ __forceinline__ void begin_scores() {
    memory.k_barriers.full[k_stage.slot].wait(k_stage.parity);
    multiply_wide_rows<T, HEAD_DIM>(scores, shared_address(memory.q[number]),
                                    shared_address(memory.k.tile[warp_uniform(k_stage.slot)]));
    wgmma_commit();
  }
  __device__ __forceinline__ void begin_dweights() {
    memory.v_barriers.full[v_stage.slot].wait(v_stage.parity);
    multiply_wide_rows<T, HEAD_DIM>(dweights, shared_address(memory.dout[number]),
                                    shared_address(memory.v.tile[warp_uniform(v_stage.slot)]));
    wgmma_commit();
  }

  // Replaces scores by P = exp(S - lse).
  __device__ __forceinline__ void compute_weights(const Unit<MASK>& unit, int tile, int first) {
    mask_step<WideKeyStep, MASK == Mask::causal>(scores, tile, unit.k.length, first + unit.offset() + 1);
    uint32_t word[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      scores[i] = exp2_approx(scores[i] * p.score_scale - lse[i / 2 % 2]);
      word[i] = __float_as_uint(scores[i]);
    }
    prevent_sink(word, k_stage.slot);
  }
  // dS = P (dP - delta) in 16 bits.
  __device__ __forceinline__ void compute_dscores() {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float of_row = delta[i % 2];
      dscores[i] = narrow_word(scores[2 * i] * (dweights[2 * i] - of_row),
                               scores[2 * i + 1] * (dweights[2 * i + 1] - of_row), T{});
    }
  }

  // Waits for S and dP of a key tile, which are in flight as two wgmma groups, and computes P while dP is in flight. dQ
  // of the previous tile, if there is one, is in the first group.
  __device__ __forceinline__ void finish_products(const Unit<MASK>& unit, int tile, int first, bool has_previous,
                                                  bool last) {
    wgmma_wait<1>();
    fence_operand(scores);
    if (has_previous) release_previous_keys();
    if (last) arrive_warp(memory.q_empty[number]);
    compute_weights(unit, tile, first);
    wgmma_wait<0>();
    fence_operand(dweights);
    if (last) arrive_warp(memory.dout_empty[number]);
    arrive_warp(memory.v_barriers.empty[v_stage.slot]);
    v_stage.next();
  }
  __device__ __forceinline__ void release_previous_keys() {
    arrive_warp(memory.k_barriers.empty[(k_stage.slot + Memory::kKeyStages - 1) % Memory::kKeyStages]);
  }

  // Issues dQ += dS K of a key tile whose P and dP are complete.
  __device__ __forceinline__ void begin_dq(bool add) {
    compute_dscores();
    multiply_wide_columns<T>(dq, dscores, shared_address(memory.k.tile[warp_uniform(k_stage.slot)]), add);
    k_stage.next();
  }

  // Iterates over the key tiles of a task. first: the warpgroup's first query. No wgmma is in flight at the end of an
  // iteration: otherwise ptxas would serialize them (C7514).
  __device__ __forceinline__ void process_steps(const Unit<MASK>& unit, const Tiles& tiles, int first,
                                                uint32_t parity) {
    load_statistics(unit, first);
    int tile = warp_uniform(tiles.begin);
    const int last = warp_uniform(tiles.end - 1);
    memory.q_full[number].wait(parity);
    begin_scores();
    memory.dout_full[number].wait(parity);
    begin_dweights();
    finish_products(unit, tile, first, false, tile == last);
#pragma unroll 1
    for (; tile < last; ++tile) {
      begin_dq(tile > tiles.begin);
      begin_scores();
      begin_dweights();
      finish_products(unit, tile + 1, first, true, tile + 1 == last);
      fence_operand(dq);
      fence_operand(dscores);
    }
    begin_dq(tile > tiles.begin);
    wgmma_commit();
    wgmma_wait<0>();
    fence_operand(dq);
    release_previous_keys();
  }

  __device__ __forceinline__ void run() {
    TaskReader reader(memory.queue);
    uint32_t parity = 0;
    for (int index = reader.next(); index < p.tasks; index = reader.next()) {
      const auto task = task_at<MASK, false, false>(p, index);
      const Tiles tiles = keys_of_task(task);
      const bool computed = tiles.begin < tiles.end;
      const int first = task.first + number * kWideRows;
      if (computed) {
        process_steps(task.unit, tiles, first, parity);
        parity ^= 1;
      }
      if (task.first >= 0)
        store_wide<T, HEAD_DIM>(p, p.dq, task.unit, task.unit.head, task.unit.q, first, p.dq_scale, computed, dq);
    }
  }
};

}  // namespace hopper_backward
}  // namespace cuda
}  // namespace fasttfm
