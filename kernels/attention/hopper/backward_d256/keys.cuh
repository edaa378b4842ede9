// attention backward for Hopper, head dims 192 and 256: the kernel that computes dK and dV.
//
// A block has the 64 keys of a task and iterates over the query tiles. Warpgroup 0 loads tiles (warp 0) and fetches
// tasks (warp 1). Warpgroup 1 computes S^T = K Q^T, P^T and dV += P^T dO, and passes P in 16 bits to warpgroup 2, which
// computes dP^T = V dO^T, dS^T and dK += dS^T Q. Both pass operands to their second product in registers.
//
// A step processes one query tile. A warpgroup issues the second product of a step and the first product of the next
// step together, and does its elementwise work while the other warpgroup's products are computed. Warpgroup 2 is later
// than warpgroup 1, because it waits for P.
//
// Rows of k and v past a sequence's end affect only their own rows of dK and dV, which are not written.
#pragma once

#include "attention/hopper/backward_d256/tiles.cuh"

namespace fasttfm {
namespace cuda {
namespace hopper_backward {

constexpr int kNumbersBytes = 4 * kWideRows;  // lse or delta of a query tile

template <int HEAD_DIM>
struct WideKeysMemory {
  static constexpr int kStages = HEAD_DIM > 192 ? 2 : 3;  // of q and dout
  // 32-bit words per thread of k or v that are operands in registers: all columns of 192, half of 256. Otherwise every
  // step would read them from shared memory.
  static constexpr int kWordsInRegisters = HEAD_DIM > 192 ? 32 : 48;
  using Ring = WideRing<HEAD_DIM, kStages>;
  alignas(1024) char k[Ring::kBytes];
  char v[Ring::kBytes];
  Ring q, dout;
  uint4 weights[2][4][kWarpgroup];  // P^T in the register layout of warpgroup 1
  float lse[kStages][kWideRows], delta[kStages][kWideRows];
  Mbarrier k_full, k_empty, v_full, v_empty, weights_full[2], weights_empty[2];
  typename Ring::Barriers q_barriers, dout_barriers;
  TaskQueue queue;

  // Called by one thread.
  __device__ __forceinline__ void init() {
    k_full.init(kWarpArrivals);
    v_full.init(kWarpArrivals);
    k_empty.init(4 * kWarpArrivals);
    v_empty.init(4 * kWarpArrivals);
    for (int i = 0; i < 2; ++i) {
      weights_full[i].init(4 * kWarpArrivals);
      weights_empty[i].init(4 * kWarpArrivals);
    }
    q_barriers.init(8);
    dout_barriers.init(8);
    queue.init();
    fence_mbarrier_init();
  }
};

// ---- warpgroup 0 ----------------------------------------------------------------------------------------------------

// Loads tiles. Called by a whole warp.
template <int HEAD_DIM, Mask MASK, bool GROUPED>
class WideKeysLoader {
  using Memory = WideKeysMemory<HEAD_DIM>;
  using Task = WideTask<MASK>;

 public:
  __device__ __forceinline__ WideKeysLoader(const Parameters& p, Memory& memory)
      : p(p), memory(memory), q(memory.q, memory.q_barriers), dout(memory.dout, memory.dout_barriers) {}

  __device__ __forceinline__ void run() {
    TaskReader reader(memory.queue);
    uint32_t parity = 0;  // of k and v
    for (int index = reader.next(); index < p.tasks; index = reader.next()) {
      const Task task = task_at<MASK, true, GROUPED>(p, index);
      const Tiles tiles = queries_of_task<GROUPED>(p, task);
      for (int tile = tiles.begin; tile < tiles.end; ++tile) {
        const bool first = tile == tiles.begin;
        if (first) load_keys(p.k, memory.k, memory.k_full, memory.k_empty, parity, task);
        load_queries(p.q, q, memory.lse, 0, task.unit, tile);
        if (first) load_keys(p.v, memory.v, memory.v_full, memory.v_empty, parity, task);
        load_queries(p.dout, dout, memory.delta, 1, task.unit, tile);
      }
      if (tiles.begin < tiles.end) parity ^= 1;
    }
  }

 private:
  // Loads the block's rows of k or v.
  __device__ __forceinline__ void load_keys(const CUtensorMap& map, char* to, Mbarrier& full, Mbarrier& empty,
                                            uint32_t parity, const Task& task) {
    empty.wait(parity ^ 1);
    start_loads(full, Memory::Ring::kBytes, [&](Mbarrier& landed) {
      load_wide_tile<HEAD_DIM>(map, landed, to, key_head<GROUPED>(p, task.unit.head), task.unit.k.first + task.first,
                               batch_of(p, task.unit));
    });
  }

  // Loads a tile of q and lse (`which` = 0), or a tile of dout and delta (1).
  template <class Loader>
  __device__ __forceinline__ void load_queries(const CUtensorMap& map, Loader& loader,
                                               float (&numbers)[Memory::kStages][kWideRows], int which,
                                               const Unit<MASK>& unit, int tile) {
    const int stored = unit.tile + stored_tile<GROUPED>(p, tile), first = tile_of<GROUPED>(p, tile) * kWideRows;
    const float* statistics = p.statistics + (static_cast<int64_t>(stored) * 2 + which) * kWideRows;
    loader.load(map, query_head<GROUPED>(p, unit.head, tile), unit.q.first + first, batch_of(p, unit),
                unit.q.length - first, p.cu_seqlens != nullptr || p.lengths != nullptr, kNumbersBytes,
                [&](uint32_t slot, Mbarrier& landed) {
                  bulk_load(landed, shared_address(numbers[slot]), statistics, kNumbersBytes);
                });
  }

  const Parameters& p;
  Memory& memory;
  WideRingLoader<HEAD_DIM, Memory::kStages> q, dout;
};

// ---- warpgroups 1 and 2 ----------------------------------------------------------------------------------------------

// Warpgroup 1, which computes dV (VALUES), or 2, which computes dK. The first product of a step is S^T or dP^T, the
// second one adds to dV or dK.
template <class T, int HEAD_DIM, Mask MASK, bool GROUPED, bool VALUES>
class WideKeysWarpgroup {
  using Memory = WideKeysMemory<HEAD_DIM>;
  using Task = WideTask<MASK>;

 public:
  __device__ __forceinline__ WideKeysWarpgroup(const Parameters& p, Memory& memory)
      : p(p),
        memory(memory),
        first(VALUES ? memory.q : memory.dout),
        second(VALUES ? memory.dout : memory.q),
        first_barriers(VALUES ? memory.q_barriers : memory.dout_barriers),
        second_barriers(VALUES ? memory.dout_barriers : memory.q_barriers) {}

  __device__ __forceinline__ void run() {
    TaskReader reader(memory.queue);
    uint32_t parity = 0;  // of k and v
    for (int index = reader.next(); index < p.tasks; index = reader.next()) {
      const Task task = task_at<MASK, true, GROUPED>(p, index);
      const Tiles tiles = queries_of_task<GROUPED>(p, task);
      const bool computed = tiles.begin < tiles.end;
      if (computed) {
        (VALUES ? memory.k_full : memory.v_full).wait(parity);
        parity ^= 1;
        load_rows();
        process_steps(task.unit, tiles, task.first);
      }
      if (task.first >= 0)
        store_wide<T, HEAD_DIM>(p, VALUES ? p.dv : p.dk, task.unit, gradient_head<GROUPED>(p, task.unit.head),
                                task.unit.k, task.first, VALUES ? p.dv_scale : p.dq_scale, computed, sums);
    }
  }

 private:
  __device__ __forceinline__ void process_steps(const Unit<MASK>& unit, const Tiles& tiles, int key) {
    int tile = warp_uniform(tiles.begin);
    const int last = warp_uniform(tiles.end - 1);
    begin_first();
    finish_first(unit, key, tile, tile == last);
#pragma unroll 1
    for (; tile < last; ++tile) {
      const uint32_t slot = begin_second(tile > tiles.begin);
      begin_first();
      wgmma_wait<1>();
      finish_second(slot);
      finish_first(unit, key, tile + 1, tile + 1 == last);
    }
    const uint32_t slot = begin_second(tile > tiles.begin);
    wgmma_wait<0>();
    finish_second(slot);
  }

  // Loads the columns of k or v that are operands in registers. The others are operands in shared memory.
  __device__ __forceinline__ void load_rows() {
    const int lane = threadIdx.x % 32, row = threadIdx.x % kWarpgroup / 32 * 16 + lane % 16;
    const uint32_t from =
        shared_address(VALUES ? memory.k : memory.v) + row * kTileRowBytes + (lane / 16 ^ lane % 8) * 16;
#pragma unroll
    for (int c = 0; c < Memory::kWordsInRegisters / 4; ++c)
      ldmatrix_x4(rows + 4 * c, (from ^ 32 * (c % 4)) + c / 4 * kWideTileBytes);
  }

  __device__ __forceinline__ void begin_first() {
    first_barriers.full[stage.slot].wait(stage.parity);
    multiply_wide_rows<T, HEAD_DIM, Memory::kWordsInRegisters>(product, shared_address(VALUES ? memory.k : memory.v),
                                                               shared_address(first.tile[warp_uniform(stage.slot)]),
                                                               rows);
    wgmma_commit();
  }
  // Waits for the first product of a query tile and computes the operand of the second one. `last`: whether it is the
  // task's last tile.
  __device__ __forceinline__ void finish_first(const Unit<MASK>& unit, int key, int tile, bool last) {
    wgmma_wait<0>();
    fence_operand(product);
    if (last) arrive_warp(VALUES ? memory.k_empty : memory.v_empty);
    if constexpr (VALUES)
      compute_weights(unit, key, tile);
    else
      compute_dscores();
    arrive_warp(first_barriers.empty[stage.slot]);  // lse and delta were used, so their loads are complete
  }
  // Issues the second product and returns its stage.
  __device__ __forceinline__ uint32_t begin_second(bool add) {
    second_barriers.full[stage.slot].wait(stage.parity);
    const int slot = warp_uniform(stage.slot);
    multiply_wide_columns<T>(sums, operand, shared_address(second.tile[slot]), add);
    wgmma_commit();
    stage.next();
    return slot;
  }
  __device__ __forceinline__ void finish_second(uint32_t slot) {
    fence_operand(sums);
    fence_operand(operand);
    arrive_warp(second_barriers.empty[slot]);
  }

  // P^T = exp(S^T - lse) of a query tile in 16 bits, as the operand of dV and for warpgroup 2.
  __device__ __forceinline__ void compute_weights(const Unit<MASK>& unit, int key, int tile) {
    mask_scores<MASK>(product, key, tile_of<GROUPED>(p, tile) * kWideRows, unit, first_whole_query<MASK>(key, unit));
    const float2* statistics = reinterpret_cast<const float2*>(memory.lse[stage.slot]) + threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 lse = statistics[4 * i];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* pair = product + 4 * i + 2 * half;
        operand[2 * i + half] = narrow_word(exp2_approx(pair[0] * p.score_scale - lse.x),
                                            exp2_approx(pair[1] * p.score_scale - lse.y), T{});
      }
    }
    memory.weights_empty[weights_stage.slot].wait(weights_stage.parity ^ 1);
    uint4* to = memory.weights[weights_stage.slot][0] + threadIdx.x % kWarpgroup;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      to[i * kWarpgroup] = make_uint4(operand[4 * i], operand[4 * i + 1], operand[4 * i + 2], operand[4 * i + 3]);
    arrive_warp(memory.weights_full[weights_stage.slot]);
    weights_stage.next();
  }

  // dS^T = P^T (dP^T - delta) of a query tile in 16 bits, as the operand of dK.
  __device__ __forceinline__ void compute_dscores() {
    memory.weights_full[weights_stage.slot].wait(weights_stage.parity);
    const uint4* from = memory.weights[weights_stage.slot][0] + threadIdx.x % kWarpgroup;
    const float2* statistics = reinterpret_cast<const float2*>(memory.delta[stage.slot]) + threadIdx.x % 4;
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const uint4 words = from[part * kWarpgroup];
      const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = 2 * part + j / 2;  // columns 8 * i to 8 * i + 7
        const float2 delta = statistics[4 * i], weight = widen_word(word[j], T{});
        const float* pair = product + 4 * i + 2 * (j % 2);
        operand[4 * part + j] = narrow_word(weight.x * (pair[0] - delta.x), weight.y * (pair[1] - delta.y), T{});
      }
    }
    prevent_sink(operand, weights_stage.slot);  // the loads are complete before the arrivals
    arrive_warp(memory.weights_empty[weights_stage.slot]);
    weights_stage.next();
  }

  const Parameters& p;
  Memory& memory;
  typename Memory::Ring &first, &second;
  typename Memory::Ring::Barriers &first_barriers, &second_barriers;
  RingPosition<Memory::kStages> stage;
  RingPosition<2> weights_stage;
  float sums[HEAD_DIM / 2], product[32];
  uint32_t operand[16], rows[Memory::kWordsInRegisters];
};

}  // namespace hopper_backward
}  // namespace cuda
}  // namespace fasttfm
