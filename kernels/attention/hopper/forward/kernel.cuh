// Attention forward on Hopper: out = softmax(scale * q k^T) v, with dropout on the weights.
//
// A block has one producer warp, which loads tiles of q, k and v into shared memory by TMA, and consumer warpgroups of
// 64 queries each, which iterate over the keys from the last to the first with an online softmax (running reference r
// and sum l); scores and weights stay in registers. A step issues the wgmma of its scores before the wgmma of the
// previous step's weights with v, so that the tensor cores are busy while the softmax is computed. Two or three
// warpgroups also take turns at issuing wgmma (WarpSchedulerBarrier), so that the softmax of one overlaps with the
// wgmma of another; four warpgroups overlap without that. The kernel is persistent: a block processes one tile after
// another. A warpgroup skips tiles in which it has no queries, and steps to whose keys none of its queries attends.
//
// For a step of 64 queries and n keys a warpgroup executes 2 * 2 * 64 * n * D floating-point operations on the tensor
// cores and 64 * n exponentials. With D = 64 the special function unit (16 exponentials per clock) takes as long as the
// tensor cores (4096 operations per clock).
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/hopper/forward/memory.cuh"
#include "attention/hopper/forward/schedule.cuh"
#include "attention/hopper/forward/steps.cuh"
#include "attention/hopper/forward/weights.cuh"
#include "attention/hopper/shared/dropout.cuh"
#include "attention/hopper/shared/named_barriers.h"
#include "common/cuda/dependent.cuh"
#include "common/cuda/hopper.cuh"

namespace fasttfm {
namespace cuda {

// ---- producer -------------------------------------------------------------------------------------------------------

// The producer thread's TMA loads of q, tile by tile.
template <class S>
struct QueryCopies {
  ForwardMemory<S>& memory;
  const CUtensorMap* q_map;
  uint32_t number = 0, first_group = 0;  // see Consumer

  // Publishes a tile and loads its queries, unless it has no keys; `row` is the row of its first query. Waits until the
  // queries in their slot have been released, kQuerySlots tiles before.
  __device__ __forceinline__ void copy(const QueryTile& tile, int row, int sequence) {
    const int parts = tile.sequence < 0 || tile.blocks == 0 ? 0 : tile.parts<S>();
    const uint32_t slot = number % S::kQuerySlots, parity = number / S::kQuerySlots % 2;
#pragma unroll
    for (int i = 0; i < S::kQueryBarriers; ++i) {
      Mbarrier& full = memory.q_full[slot][i];
      memory.q_empty[slot][i].wait(parity ^ 1);
      if (i == 0) memory.tile_of(number) = tile;
      const int first = S::kSplitQueries ? part_of<S>(i, first_group) : 0;
      const int end = S::kSplitQueries ? min(first + 1, parts) : parts;
      if (first < end)
        full.arrive_expect_tx((end - first) * S::kParts * 64 * kTileRowBytes);
      else
        full.arrive();
#pragma unroll 1
      for (int part = first; part < end; ++part)
        tma_load_tile<S>(q_map, full, memory.q[slot] + (S::kSplitQueries ? i : part) * 64 * kTileRowBytes,
                         S::kQueryPart, tile.head, row + 64 * part, sequence);
    }
    first_group = tile.next_first_group<S>(first_group);
    ++number;
  }
};

// The producer thread's TMA loads of a tile's keys and values, step by step.
template <class S>
struct KeyCopies {
  ForwardMemory<S>& memory;
  const CUtensorMap *k_map, *v_map;
  RingPosition<S::kStages> k_at, v_at;
  int head, row, sequence, blocks;  // of the tile; row: of its first key

  // Loads k of step `block - 1` and v of step `block`, so k of a step is loaded before v of the preceding step. If they
  // have common mbarriers, loads both of step `block - 1`.
  __device__ __forceinline__ void copy(int block) {
    static_assert(!S::kSplitQueries || !S::kSharedStages, "the first keys precede the queries, their values do not");
    if (block > 0) {
      Mbarrier& full = memory.k_full[k_at.slot];
      (S::kSharedStages ? memory.v_empty : memory.k_empty)[k_at.slot].wait(k_at.parity ^ 1);
      full.arrive_expect_tx(S::kSharedStages ? 2 * S::kKeyBytes : S::kKeyBytes);
      load(k_map, full, memory.k[k_at.slot], block - 1);
      if (S::kSharedStages) load(v_map, full, memory.v[k_at.slot], block - 1);
      k_at.next();
    }
    if (block < blocks && !S::kSharedStages) {
      memory.v_empty[v_at.slot].wait(v_at.parity ^ 1);
      memory.v_full[v_at.slot].arrive_expect_tx(S::kKeyBytes);
      load(v_map, memory.v_full[v_at.slot], memory.v[v_at.slot], block);
      v_at.next();
    }
  }

 private:
  __device__ __forceinline__ void load(const CUtensorMap* map, Mbarrier& full, const char* to, int block) {
    tma_load_tile<S>(map, full, to, S::kKeyPart, head, row + block * S::kKeys, sequence);
  }
};

// Runs in one warp, whose first lane issues the loads. In a dependent launch it waits for the previous kernel; the
// consumers read and write nothing of it before they have a tile.
template <class S, Mask MASK>
__device__ __forceinline__ void produce(const ForwardParams& p, ForwardMemory<S>& memory, const CUtensorMap* q_map,
                                        const CUtensorMap* k_map, const CUtensorMap* v_map) {
  const bool issues = threadIdx.x % 32 == 0;
  QueryCopies<S> queries{memory, q_map};
  KeyCopies<S> keys{memory, k_map, v_map};
  TileScheduler<S, MASK> walk(p);
  griddepcontrol_wait();
  int left = 0;  // steps of the previous tile that are loaded after this tile's queries
  while (true) {
    const QueryTile tile = walk.take();
    const int sequence = p.packed() ? 0 : tile.sequence;
    if (issues) {
      if (!S::kSplitQueries || tile.sequence < 0) queries.copy(tile, walk.q_first, sequence);
      while (left > 0) keys.copy(--left);
      if (tile.sequence >= 0) {
        keys.head = tile.head / p.group;
        keys.row = walk.k_first;
        keys.sequence = sequence;
        keys.blocks = tile.blocks;
        left = S::kEarlyQueries && tile.blocks > S::kLateSteps ? S::kLateSteps : 0;
        for (int block = tile.blocks; block >= left; --block) {
          if (block == min(S::kFetchSteps, tile.blocks)) walk.fetch_next();
          keys.copy(block);
          // They have to wait for a warpgroup.
          if (S::kSplitQueries && block == tile.blocks) queries.copy(tile, walk.q_first, sequence);
        }
      }
    }
    __syncwarp();
    if (tile.sequence < 0) return;
  }
}

// ---- consumers ------------------------------------------------------------------------------------------------------

// Orders the warpgroups: they issue wgmma one after the other, round-robin.
template <class S, bool SCHEDULER_BARRIER>
struct WarpSchedulerBarrier {
  int group;
  __device__ __forceinline__ void start() const {
    if (SCHEDULER_BARRIER && group == S::kGroups - 1) named_barrier_arrive(kForwardWarpScheduler, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void sync() const {
    if (SCHEDULER_BARRIER) named_barrier_sync(kForwardWarpScheduler + group, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void arrive_next() const {
    if (SCHEDULER_BARRIER) named_barrier_arrive(kForwardWarpScheduler + (group + 1) % S::kGroups, 2 * kWarpgroup);
  }
};

// A consumer warpgroup, which processes 64 queries of each tile.
template <class T, class S, Mask MASK, bool SCHEDULER_BARRIER>
class Consumer {
  static constexpr bool kCausal = MASK == Mask::causal, kWindow = MASK == Mask::window;
  static_assert((S::kQueries - 64 + S::kKeys - 1) / S::kKeys < S::kStages, "see skip_steps()");
  static_assert(!kWindow || S::kOverlapTiles, "only run() skips steps after a warpgroup's last one");

 public:
  __device__ __forceinline__ Consumer(const ForwardParams& params, ForwardMemory<S>& shared, int number)
      : p(params),
        memory(shared),
        group(number),
        scheduler_barrier{number},
        k_tiles(static_cast<uint32_t>(k_major(shared_address(shared.k)))) {
    if (S::kDropout) dropout = WeightDropout(static_cast<uint64_t>(*p.seed), p.threshold);
  }

  // The last wgmma with v of a tile overlaps with the first softmax of the next tile. The step at the transition
  // between tiles is outside of the loop over keys, although it does the same: with one loop for both, the compiler
  // does not recognize the loop's variables as warp-uniform, and every thread computes the descriptors instead of one
  // per warp.
  __device__ __forceinline__ void run() {
    float s[S::kKeys / 2], o[S::kHeadDim / 2];
    uint32_t weights[S::kKeys / 4], kept[S::kKeys / 8];
    RunningSoftmax softmax;
    ResultRows<T> results;
    scheduler_barrier.start();
    bool starts = find_tile();
    while (starts) {
      begin_tile(s, weights, kept, softmax);
      clear(o);
      while (true) {
        while (--block >= (kWindow ? low : 0)) {
          step<false>(s, o, weights, kept, softmax);
          softmax.correct(o);
          make_operand(s, weights, kept);
        }
        results = finish(softmax);
        if constexpr (kWindow) skip_steps(after);
        release(q_empty());
        count_tile();
        if (!find_near_tile()) break;
        skip_steps(absent);
        softmax = RunningSoftmax();
        step<true>(s, o, weights, kept, softmax);
        store_results<T, S>(p, results, o);
        clear(o);
        make_operand(s, weights, kept);
        zero_missing_values();
      }
      end_tile(o, weights);
      store_results<T, S>(p, results, o);
      starts = find_tile();
    }
  }

  // Does the same as run() without overlap between tiles (see ForwardShape::kOverlapTiles).
  __device__ __forceinline__ void run_sequential() {
    scheduler_barrier.start();
    while (true) {
      q_full().wait(q_at.parity);
      if (memory.tile_of(number).sequence < 0) return;
      if (wait_for_tile()) {
        float s[S::kKeys / 2], o[S::kHeadDim / 2];
        uint32_t weights[S::kKeys / 4], kept[S::kKeys / 8];
        RunningSoftmax softmax;
        begin_tile(s, weights, kept, softmax);
        clear(o);
        while (--block >= 0) {
          step<false>(s, o, weights, kept, softmax);
          softmax.correct(o);
          make_operand(s, weights, kept);
        }
        if (!S::kSplitQueries) release(q_empty());
        end_tile(o, weights);
        const ResultRows<T> results = finish(softmax);
        count_tile();
        store_results<T, S>(p, results, o);
      } else {
        skip_tile();
      }
    }
  }

 private:
  // The index of the warpgroup's 64 queries within the tile; they may be past its end.
  __device__ __forceinline__ int part() const { return part_of<S>(group, first_group); }
  __device__ __forceinline__ Mbarrier& q_full() const { return memory.q_full[q_at.slot][S::kSplitQueries ? group : 0]; }
  __device__ __forceinline__ Mbarrier& q_empty() const {
    return memory.q_empty[q_at.slot][S::kSplitQueries ? group : 0];
  }

  // arrive_warp() with elect.sync.
  static __device__ __forceinline__ void release(Mbarrier& empty) {
    __syncwarp();
    if (kWarpArrivals > 1 || elect_one()) empty.arrive();
  }

  // The low words of the descriptors of k and v in a slot.
  __device__ __forceinline__ uint32_t k_tile(uint32_t slot) const { return k_tiles + slot * (S::kKeyBytes >> 4); }
  __device__ __forceinline__ uint32_t v_tile(uint32_t slot) const {
    constexpr uint64_t distance = offsetof(ForwardMemory<S>, v) - offsetof(ForwardMemory<S>, k);
    return k_tile(slot) + static_cast<uint32_t>(mn_major(distance, S::kKeyPart) - k_major(0));
  }

  // Waits for the current tile. Returns false if there is none, or if this warpgroup's queries attend to none of its
  // keys.
  __device__ __forceinline__ bool wait_for_tile() {
    q_full().wait(q_at.parity);
    const QueryTile tile = memory.tile_of(number);
    first = tile.first + 64 * part();
    if constexpr (kWindow) {
      if (tile.sequence < 0 || !find_window_steps(tile)) return false;
    } else {
      block = (tile.sequence < 0 ? 0 : tile.steps<S, kCausal>(first, 64)) - 1;
      if (block < 0) return false;
      absent = kCausal ? tile.blocks - 1 - block : 0;
    }
    const int place = S::kSplitQueries ? group : part();
    q_tile = static_cast<uint32_t>(k_major(shared_address(memory.q[q_at.slot]) + place * 64 * kTileRowBytes));
    k_length = tile.k_length;
    diagonal = tile.causal_keys(first) + (kWindow ? p.window.right : 0);
    if (S::kDropout) dropout.begin(tile.sequence, tile.head, first + row_in_group());
    return true;
  }

  // Finds the warpgroup's steps among those of the tile. Other warpgroups may have steps before and after them.
  __device__ __forceinline__ bool find_window_steps(const QueryTile& tile) {
    const Tiles steps = tile.window_steps<S>(p.window, first, 64);
    if (steps.begin == steps.end) return false;
    const Tiles tile_steps = tile.window_steps<S>(p.window, tile.first, S::kQueries);
    block = steps.end - 1;
    low = steps.begin;
    absent = tile_steps.end - steps.end;
    after = steps.begin - tile_steps.begin;
    return true;
  }

  __device__ __forceinline__ void count_tile() {
    first_group = memory.tile_of(number).template next_first_group<S>(first_group);
    ++number;
    q_at.next();
  }

  // Waits for the next tile in which this warpgroup's queries attend to keys. Writes the results of tiles in which they
  // attend to none.
  __device__ __forceinline__ bool find_tile() {
    while (!wait_for_tile()) {
      if (memory.tile_of(number).sequence < 0) return false;
      skip_tile();
    }
    return true;
  }
  // Does the same as find_tile() while a wgmma with v is still to be issued. Its stage must not be reused before then,
  // so its step has to be one of the last kStages steps. Also returns false if the next tile is further away than that.
  static constexpr int kNear = S::kStages - S::kSharedStages;
  __device__ __forceinline__ bool find_near_tile() {
    int passed = 0;
    if constexpr (kWindow) passed = after;
    while (!wait_for_tile()) {
      const QueryTile& tile = memory.tile_of(number);
      if (tile.sequence < 0) return false;
      passed += tile.blocks;
      if (passed >= kNear) return false;
      skip_tile();
    }
    return passed + absent < kNear;
  }
  __device__ __forceinline__ void skip_tile() {
    const QueryTile tile = memory.tile_of(number);
    skip_steps(tile.blocks);
    store_empty_rows<T, S>(p, tile, tile.first + 64 * part());
    release(q_empty());
    count_tile();
  }

  // The last wgmma with v of a tile.
  __device__ __forceinline__ void end_tile(float (&o)[S::kHeadDim / 2], uint32_t (&weights)[S::kKeys / 4]) {
    wait_values(v_slot);
    fence_operand(o);
    fence_operand(weights);
    wgmma_fence();
    issue_values<T, S>(o, weights, v_tile(v_slot));
    finish_values(o, weights, v_slot);
  }

  // The first step of a tile, if it does not overlap with the last step of the previous tile.
  __device__ __forceinline__ void begin_tile(float (&s)[S::kKeys / 2], uint32_t (&weights)[S::kKeys / 4],
                                             uint32_t (&kept)[S::kKeys / 8], RunningSoftmax& softmax) {
    skip_steps(absent);
    memory.k_full[at.slot].wait(at.parity);
    scheduler_barrier.sync();
    wgmma_fence();
    issue_scores<T, S>(s, q_tile, k_tile(at.slot));
    scheduler_barrier.arrive_next();
    draw(kept);
    softmax = RunningSoftmax();
    wgmma_wait<0>();
    finish_scores<true>(s);
    softmax.template step<true>(s, p.scale);
    make_operand(s, weights, kept);
    zero_missing_values();
  }

  // One step: computes weights from its scores, while the wgmma of the previous step's weights with v is in flight.
  // FIRST: it is the first step of its tile, and the previous step is the last one of another tile.
  template <bool FIRST>
  __device__ __forceinline__ void step(float (&s)[S::kKeys / 2], float (&o)[S::kHeadDim / 2],
                                       uint32_t (&weights)[S::kKeys / 4], uint32_t (&kept)[S::kKeys / 8],
                                       RunningSoftmax& softmax) {
    memory.k_full[at.slot].wait(at.parity);
    scheduler_barrier.sync();
    fence_operand(o);
    fence_operand(weights);
    wgmma_fence();
    issue_scores<T, S>(s, q_tile, k_tile(at.slot));
    const uint32_t v_used = v_slot;
    wait_values(v_used);
    if (!S::kSharedStages) wgmma_fence();
    issue_values<T, S>(o, weights, v_tile(v_used));
    scheduler_barrier.arrive_next();
    draw(kept);
    wgmma_wait<1>();
    finish_scores<FIRST>(s);
    softmax.template step<FIRST>(s, p.scale);
    if (S::kPreventHoist) softmax.prevent_hoist();
    finish_values(o, weights, v_used);
  }

  // Skips `count` steps whose keys only other warpgroups use. While a wgmma with v is still to be issued, `count` is at
  // most kStages - 1.
  __device__ __forceinline__ void skip_steps(int count) {
    for (; count > 0; --count) {
      scheduler_barrier.sync();
      scheduler_barrier.arrive_next();
      memory.k_full[at.slot].wait(at.parity);
      release_keys();
      if (!S::kSharedStages) memory.v_full[at.slot].wait(at.parity);
      release(memory.v_empty[at.slot]);
      at.next();
    }
  }

  // Waits for v in stage `slot`, whose step is one of the last kStages.
  __device__ __forceinline__ void wait_values(uint32_t slot) const {
    if (!S::kSharedStages) memory.v_full[slot].wait(at.parity ^ (slot >= at.slot ? 1 : 0));
  }
  __device__ __forceinline__ void release_keys() const {
    if (!S::kSharedStages) release(memory.k_empty[at.slot]);
  }

  __device__ __forceinline__ void finish_values(float (&o)[S::kHeadDim / 2], uint32_t (&weights)[S::kKeys / 4],
                                                uint32_t slot) {
    wgmma_wait<0>();
    fence_operand(o);
    fence_operand(weights);
    release(memory.v_empty[slot]);
  }

  __device__ __forceinline__ ResultRows<T> finish(RunningSoftmax& softmax) const {
    return finalize_rows<T, S>(p, memory.tile_of(number), first, softmax);
  }

  static __device__ __forceinline__ void clear(float (&o)[S::kHeadDim / 2]) {
#pragma unroll
    for (int i = 0; i < S::kHeadDim / 2; ++i) o[i] = 0.0f;
  }

  // Called when the scores of a step are complete. Only the first step of a tile can have keys past the sequence's end.
  template <bool FIRST>
  __device__ __forceinline__ void finish_scores(float (&s)[S::kKeys / 2]) {
    fence_operand(s);
    release_keys();
    if (S::kSplitQueries && block == 0) release(q_empty());
    v_slot = at.slot;
    at.next();
    if constexpr (kWindow)
      mask_window<S>(s, block, k_length, diagonal, p.window);
    else if (FIRST || kCausal)
      mask_step<S, kCausal>(s, block, k_length, diagonal);
  }

  __device__ __forceinline__ void draw(uint32_t (&kept)[S::kKeys / 8]) const {
    if (S::kDropout) dropout.draw(kept, block * (S::kKeys / 64));
  }

  // Rounds the weights to 16 bits, as the operand of the next wgmma, and sets dropped ones to 0.
  __device__ __forceinline__ void make_operand(const float (&s)[S::kKeys / 2], uint32_t (&weights)[S::kKeys / 4],
                                               const uint32_t (&kept)[S::kKeys / 8]) const {
    pack_weights<T>(s, weights);
    if (S::kDropout) keep_weights(weights, kept);
  }

  // Called before a tile's first wgmma with v. Zeros the rows of v past the sequence's end, which may contain NaN.
  __device__ __forceinline__ void zero_missing_values() {
    const int present = k_length - block * S::kKeys;
    if (present >= S::kKeys || (!p.packed() && p.lengths_k == nullptr)) return;
    wait_values(v_slot);
    clear_rows<S>(memory.v[v_slot], present, group);
  }

  const ForwardParams& p;
  ForwardMemory<S>& memory;
  const int group;
  const WarpSchedulerBarrier<S, SCHEDULER_BARRIER> scheduler_barrier;
  const uint32_t k_tiles;  // low word of the descriptor of k in stage 0
  WeightDropout dropout;
  RingPosition<S::kStages> at;        // stage of the step's k and v
  uint32_t v_slot;                    // stage of v for the next wgmma with v
  uint32_t number = 0;                // index of the tile among the block's tiles
  RingPosition<S::kQuerySlots> q_at;  // slot of the tile's queries
  uint32_t first_group = 0;           // the warpgroup that has the tile's first queries
  uint32_t q_tile;                    // low word of the descriptor of the warpgroup's queries
  int block;                          // index of the step's block of keys
  int first;                          // the warpgroup's first query of the tile
  int absent;                         // causal, window: number of steps to skip at the start of the tile
  int low, after;                     // window: block of the last step; number of steps to skip after it
  int k_length;                       // of the tile's sequence
  int diagonal;                       // causal, window: one past the last key to which its first query attends
};

template <class T, class S, Mask MASK, bool SCHEDULER_BARRIER>
__global__ void __launch_bounds__(S::kThreads, 1)
    forward_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                   const __grid_constant__ CUtensorMap v_map, const __grid_constant__ ForwardParams p) {
  extern __shared__ char dynamic_memory[];
  // Keeps the address in a uniform register; otherwise nvcc recomputes it in every step.
  const int address = warp_uniform(static_cast<int>((shared_address(dynamic_memory) + 1023) / 1024 * 1024));
  auto& memory = *static_cast<ForwardMemory<S>*>(__cvta_shared_to_generic(static_cast<size_t>(address)));
  const int warp = warp_uniform(static_cast<int>(threadIdx.x) / 32);
  if (threadIdx.x == 0) memory.init();
  if (threadIdx.x == 32) {
    prefetch_tensormap(&q_map);
    prefetch_tensormap(&k_map);
    prefetch_tensormap(&v_map);
  }
  __syncthreads();
  if (warp < 4) {
    setmaxnreg_dec<S::kProducerRegisters>();
    if (warp == 0) produce<S, MASK>(p, memory, &q_map, &k_map, &v_map);
  } else {
    setmaxnreg_inc<S::kConsumerRegisters>();
    Consumer<T, S, MASK, SCHEDULER_BARRIER> consumer(p, memory, warp / 4 - 1);
    if (S::kOverlapTiles)
      consumer.run();
    else
      consumer.run_sequential();
  }
}

// ---- launch ---------------------------------------------------------------------------------------------------------

template <class T, class S, Mask MASK, bool SCHEDULER_BARRIER>
Status launch_forward(const AttentionForward& call, int multiprocessors, const TileSchedule& schedule) {
  ForwardMaps maps;
  const Status status = make_forward_maps(&maps, call, S::kKeys);
  if (status.code != StatusCode::ok) return status;
  constexpr size_t memory = sizeof(ForwardMemory<S>) + ForwardMemory<S>::kSlack;
  static_assert(memory <= 227 * 1024, "more shared memory than an SM has");
  return launch_after(call.dependent != 0, forward_kernel<T, S, MASK, SCHEDULER_BARRIER>, dim3(multiprocessors),
                      dim3(S::kThreads), memory, call.stream, maps.q, maps.k, maps.v,
                      make_forward_params<S>(call, schedule));
}

}  // namespace cuda
}  // namespace fasttfm
