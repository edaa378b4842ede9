// Attention forward on Hopper: out = softmax(scale * q k^T) v, with dropout on the weights.
//
// A block is one producer warp, which copies tiles of q, k and v into shared memory, and warpgroups of 64 queries each,
// which go over the keys from the last to the first: with a running reference r and sum l (online softmax), scores and
// weights in registers. A step's scores are computed before the weights of the step before are multiplied with v, so
// that the matrix units work while the softmax is computed; and two or three warpgroups take turns at issuing products,
// so that one's softmax runs beside another's products, which four do by themselves. Blocks stay on the chip and take
// tile after tile; a warpgroup that has no queries in a tile, or none that attend to a step's keys, passes on.
//
// Per step of 64 queries and n keys a warpgroup does 2 * 2 * 64 * n * D operations and 64 * n exponentials: with D = 64
// the unit for exponentials (16 per clock) takes as long as the matrix units (4096 operations per clock).
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/hopper/forward_steps.cuh"
#include "attention/hopper/forward_tiles.cuh"
#include "attention/hopper/forward_weights.cuh"
#include "common/cuda/hopper.cuh"

namespace fasttfm {
namespace cuda {

// ---- producer --------------------------------------------------------------------------------------------------------

// One thread's copies of k and v, step after step.
template <class S>
struct KeyCopies {
  ForwardMemory<S>& memory;
  const CUtensorMap *k_map, *v_map;
  RingPosition<S::kStages> k_at, v_at;

  // Of a tile's keys, the first of which is `row`.
  __device__ __forceinline__ void copy(const QueryTile& tile, int head, int row, int sequence) {
    const auto load = [&](const CUtensorMap* map, Barrier& full, const char* to, int block) {
      load_boxes<S>(map, full, to, S::kKeyPart, head, row + block * S::kKeys, sequence);
    };
    for (int block = tile.blocks - 1; S::kTogether && block >= 0; --block) {
      Barrier& full = memory.k_full[k_at.slot];
      memory.v_empty[k_at.slot].wait(k_at.parity ^ 1);
      full.arrive_expect(2 * S::kKeyBytes);
      load(k_map, full, memory.k[k_at.slot], block);
      load(v_map, full, memory.v[k_at.slot], block);
      k_at.next();
    }
    for (int block = tile.blocks; !S::kTogether && block >= 0; --block) {  // k comes before v of the step before
      if (block > 0) {
        memory.k_empty[k_at.slot].wait(k_at.parity ^ 1);
        memory.k_full[k_at.slot].arrive_expect(S::kKeyBytes);
        load(k_map, memory.k_full[k_at.slot], memory.k[k_at.slot], block - 1);
        k_at.next();
      }
      if (block < tile.blocks) {
        memory.v_empty[v_at.slot].wait(v_at.parity ^ 1);
        memory.v_full[v_at.slot].arrive_expect(S::kKeyBytes);
        load(v_map, memory.v_full[v_at.slot], memory.v[v_at.slot], block);
        v_at.next();
      }
    }
  }
};

// One warp; its first lane issues the copies.
template <class S, bool CAUSAL>
__device__ __forceinline__ void produce(const ForwardParams& p, ForwardMemory<S>& memory, const CUtensorMap* q_map,
                                        const CUtensorMap* k_map, const CUtensorMap* v_map) {
  const bool issues = threadIdx.x % 32 == 0;
  RingPosition<S::kQuerySlots> at;
  KeyCopies<S> keys{memory, k_map, v_map};
  TileWalk<S, CAUSAL> walk(p);
  for (uint32_t number = 0;; ++number) {
    const QueryTile tile = walk.take();
    if (issues) {
      memory.q_empty[at.slot].wait(at.parity ^ 1);
      memory.tile_of(number) = tile;
      if (tile.sequence < 0 || tile.blocks == 0) {
        memory.q_full[at.slot].arrive();
      } else {
        const int sequence = p.packed() ? 0 : tile.sequence;
        memory.q_full[at.slot].arrive_expect(tile.parts<S>() * S::kParts * 64 * kTileRowBytes);
#pragma unroll 1
        for (int part = 0; part < tile.parts<S>(); ++part)
          load_boxes<S>(q_map, memory.q_full[at.slot], memory.q[at.slot] + part * 64 * kTileRowBytes, S::kQueryPart,
                        tile.head, walk.q_first + 64 * part, sequence);
        keys.copy(tile, tile.head / p.group, walk.k_first, sequence);
      }
    }
    __syncwarp();
    if (tile.sequence < 0) return;
    at.next();
  }
}

// ---- consumers -------------------------------------------------------------------------------------------------------

// Turns at issuing products go round the warpgroups.
template <class S, bool TURNS>
struct Turns {
  static constexpr int kFirst = 1;  // named barriers
  int group;
  __device__ __forceinline__ void start() const {
    if (TURNS && group == S::kGroups - 1) arrive_named(kFirst, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void take() const {
    if (TURNS) sync_named(kFirst + group, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void pass() const {
    if (TURNS) arrive_named(kFirst + (group + 1) % S::kGroups, 2 * kWarpgroup);
  }
};

// A warpgroup of the block: 64 queries of each tile.
template <class T, class S, bool CAUSAL, bool TURNS>
class Consumer {
  static_assert((S::kQueries - 64 + S::kKeys - 1) / S::kKeys < S::kStages, "see pass_steps()");

 public:
  __device__ __forceinline__ Consumer(const ForwardParams& params, ForwardMemory<S>& shared, int number)
      : p(params),
        memory(shared),
        group(number),
        turns{number},
        k_tiles(static_cast<uint32_t>(k_major(shared_address(shared.k)))) {
    if (S::kDropout) dropout = WeightDropout(static_cast<uint64_t>(*p.seed), p.threshold);
  }

  // A tile's last product with v comes beside the first softmax of the next tile. Tiles change outside of the loop over
  // keys, although a step is the same there: in one loop for both the compiler no longer sees that its variables are
  // the same in all threads, and descriptors are made by each thread instead of once a warp.
  __device__ __forceinline__ void run() {
    float s[S::kKeys / 2], o[S::kHeadDim / 2];
    uint32_t weights[S::kKeys / 4], kept[S::kKeys / 8];
    RunningSoftmax softmax;
    ResultRows<T> results;
    turns.start();
    bool starts = find_tile();
    while (starts) {
      begin_tile(s, weights, kept, softmax);
      clear(o);
      while (true) {
        while (--block >= 0) {
          step<false>(s, o, weights, kept, softmax);
          softmax.correct(o);
          make_operand(s, weights, kept);
        }
        results = finish(softmax);
        leave_tile();
        if (!find_near_tile()) break;
        pass_steps(absent);
        softmax = RunningSoftmax();
        step<true>(s, o, weights, kept, softmax);
        store_results<T, S>(p, results, o);
        clear(o);
        make_operand(s, weights, kept);
        clear_absent();
      }
      end_tile(o, weights);
      store_results<T, S>(p, results, o);
      starts = find_tile();
    }
  }

  // The same, one tile after the other (ForwardShape::kOverlaps).
  __device__ __forceinline__ void run_apart() {
    turns.start();
    while (true) {
      memory.q_full[q_at.slot].wait(q_at.parity);
      if (memory.tile_of(number).sequence < 0) return;
      if (meet_tile()) {
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
        release(memory.q_empty[q_at.slot]);
        end_tile(o, weights);
        const ResultRows<T> results = finish(softmax);
        count_tile();
        store_results<T, S>(p, results, o);
      } else {
        pass_tile();
      }
    }
  }

 private:
  // Which 64 of the tile's queries are the warpgroup's, if there are so many. Tiles go round the warpgroups: the first
  // queries of one are for the warpgroup after the one that has the last queries of the tile before. After a tile for
  // all of them it is the next one's turn, too: causal, their work is unequal.
  __device__ __forceinline__ int part() const {
    return static_cast<int>((static_cast<uint32_t>(group) + S::kGroups - turn) % S::kGroups);
  }

  static __device__ __forceinline__ void release(Barrier& empty) {
    __syncwarp();
    if (elected()) empty.arrive();
  }

  // Steps of k and v in shared memory, as q_tile.
  __device__ __forceinline__ uint32_t k_tile(uint32_t slot) const { return k_tiles + slot * (S::kKeyBytes >> 4); }
  __device__ __forceinline__ uint32_t v_tile(uint32_t slot) const {
    constexpr uint64_t distance = offsetof(ForwardMemory<S>, v) - offsetof(ForwardMemory<S>, k);
    return k_tile(slot) + static_cast<uint32_t>(mn_major(distance, S::kKeyPart) - k_major(0));
  }

  // Waits for the tile whose turn it is; false: there is none, or none of its keys is for this warpgroup.
  __device__ __forceinline__ bool meet_tile() {
    memory.q_full[q_at.slot].wait(q_at.parity);
    const QueryTile tile = memory.tile_of(number);
    first = tile.first + 64 * part();
    block = (tile.sequence < 0 ? 0 : tile.steps<S, CAUSAL>(first, 64)) - 1;
    if (block < 0) return false;
    absent = CAUSAL ? tile.blocks - 1 - block : 0;
    q_tile = static_cast<uint32_t>(k_major(shared_address(memory.q[q_at.slot]) + part() * 64 * kTileRowBytes));
    k_length = tile.k_length;
    diagonal = tile.causal_keys(first);
    if (S::kDropout) dropout.begin(tile.sequence, tile.head, first + row_in_group());
    return true;
  }

  __device__ __forceinline__ void leave_tile() {
    release(memory.q_empty[q_at.slot]);
    count_tile();
  }
  __device__ __forceinline__ void count_tile() {
    const int parts = memory.tile_of(number).template parts<S>();
    turn = (turn + static_cast<uint32_t>(parts == S::kGroups ? 1 : parts)) % S::kGroups;
    ++number;
    q_at.next();
  }

  // The same as meet_tile() for the next tile that has keys; writes the results of those that have none.
  __device__ __forceinline__ bool find_tile() {
    while (!meet_tile()) {
      if (memory.tile_of(number).sequence < 0) return false;
      pass_tile();
    }
    return true;
  }
  // The same while a product with v is to come, whose step has to stay one of the last kStages, also when k of the next
  // one is there: false, too, if the tile is further away.
  static constexpr int kNear = S::kStages - S::kTogether;
  __device__ __forceinline__ bool find_near_tile() {
    int passed = 0;
    while (!meet_tile()) {
      const QueryTile& tile = memory.tile_of(number);
      if (tile.sequence < 0) return false;
      passed += tile.blocks;
      if (passed >= kNear) return false;
      pass_tile();
    }
    return passed + absent < kNear;
  }
  __device__ __forceinline__ void pass_tile() {
    const QueryTile tile = memory.tile_of(number);
    pass_steps(tile.blocks);
    store_nothing<T, S>(p, tile, tile.first + 64 * part());
    leave_tile();
  }

  // The last product of a tile.
  __device__ __forceinline__ void end_tile(float (&o)[S::kHeadDim / 2], uint32_t (&weights)[S::kKeys / 4]) {
    wait_values(v_slot);
    hold_registers(o);
    hold_registers(weights);
    begin_products();
    issue_values<T, S>(o, weights, v_tile(v_slot));
    finish_values(o, weights, v_slot);
  }

  // The first step after a tile that was not the warpgroup's.
  __device__ __forceinline__ void begin_tile(float (&s)[S::kKeys / 2], uint32_t (&weights)[S::kKeys / 4],
                                             uint32_t (&kept)[S::kKeys / 8], RunningSoftmax& softmax) {
    pass_steps(absent);
    memory.k_full[at.slot].wait(at.parity);
    turns.take();
    begin_products();
    issue_scores<T, S>(s, q_tile, k_tile(at.slot));
    turns.pass();
    draw(kept);
    softmax = RunningSoftmax();
    wait_products<0>();
    take_scores<true>(s);
    softmax.template step<true>(s, p.scale);
    make_operand(s, weights, kept);
    clear_absent();
  }

  // A step: its scores become weights, and beside that the weights of the step before are multiplied with v. FIRST: of
  // its tile, after the last one of another.
  template <bool FIRST>
  __device__ __forceinline__ void step(float (&s)[S::kKeys / 2], float (&o)[S::kHeadDim / 2],
                                       uint32_t (&weights)[S::kKeys / 4], uint32_t (&kept)[S::kKeys / 8],
                                       RunningSoftmax& softmax) {
    memory.k_full[at.slot].wait(at.parity);
    turns.take();
    hold_registers(o);
    hold_registers(weights);
    begin_products();
    issue_scores<T, S>(s, q_tile, k_tile(at.slot));
    const uint32_t v_used = v_slot;
    wait_values(v_used);
    if (!S::kTogether) begin_products();
    issue_values<T, S>(o, weights, v_tile(v_used));
    turns.pass();
    draw(kept);
    wait_products<1>();
    take_scores<FIRST>(s);
    softmax.template step<FIRST>(s, p.scale);
    if (S::kSettles) softmax.settle();
    finish_values(o, weights, v_used);
  }

  // Steps of keys that are for other warpgroups alone. While a product with v is to come, at most kStages - 1 of them.
  __device__ __forceinline__ void pass_steps(int count) {
    for (; count > 0; --count) {
      turns.take();
      turns.pass();
      memory.k_full[at.slot].wait(at.parity);
      release_keys();
      if (!S::kTogether) memory.v_full[at.slot].wait(at.parity);
      release(memory.v_empty[at.slot]);
      at.next();
    }
  }

  // Of the product that is to come: its step is one of the last kStages.
  __device__ __forceinline__ void wait_values(uint32_t slot) const {
    if (!S::kTogether) memory.v_full[slot].wait(at.parity ^ (slot >= at.slot ? 1 : 0));
  }
  __device__ __forceinline__ void release_keys() const {
    if (!S::kTogether) release(memory.k_empty[at.slot]);
  }

  __device__ __forceinline__ void finish_values(float (&o)[S::kHeadDim / 2], uint32_t (&weights)[S::kKeys / 4],
                                                uint32_t slot) {
    wait_products<0>();
    hold_registers(o);
    hold_registers(weights);
    release(memory.v_empty[slot]);
  }

  __device__ __forceinline__ ResultRows<T> finish(RunningSoftmax& softmax) const {
    return conclude<T, S>(p, memory.tile_of(number), first, softmax);
  }

  static __device__ __forceinline__ void clear(float (&o)[S::kHeadDim / 2]) {
#pragma unroll
    for (int i = 0; i < S::kHeadDim / 2; ++i) o[i] = 0.0f;
  }

  // Of a step, which are there now. All keys are there but for a tile's first step.
  template <bool FIRST>
  __device__ __forceinline__ void take_scores(float (&s)[S::kKeys / 2]) {
    hold_registers(s);
    release_keys();
    v_slot = at.slot;
    at.next();
    if (FIRST || CAUSAL) mask_step<S, CAUSAL>(s, block, k_length, diagonal);
  }

  __device__ __forceinline__ void draw(uint32_t (&kept)[S::kKeys / 8]) const {
    if (S::kDropout) dropout.draw(kept, block * (S::kKeys / 64));
  }

  // 16-bit weights; those that dropout does not keep are 0.
  __device__ __forceinline__ void make_operand(const float (&s)[S::kKeys / 2], uint32_t (&weights)[S::kKeys / 4],
                                               const uint32_t (&kept)[S::kKeys / 8]) const {
    pack_weights<T>(s, weights);
    if (S::kDropout) keep_weights(weights, kept);
  }

  // Before the first product with v: rows of other sequences, or of none, are no values.
  __device__ __forceinline__ void clear_absent() {
    const int present = k_length - block * S::kKeys;
    if (present >= S::kKeys || (!p.packed() && p.lengths_k == nullptr)) return;
    wait_values(v_slot);
    clear_rows<S>(memory.v[v_slot], present, group);
  }

  const ForwardParams& p;
  ForwardMemory<S>& memory;
  const int group;
  const Turns<S, TURNS> turns;
  const uint32_t k_tiles;  // the first of them, as q_tile
  WeightDropout dropout;
  RingPosition<S::kStages> at;        // the step's
  uint32_t v_slot;                    // where v of the product to come is
  uint32_t number = 0;                // the tile's, counted from the block's first
  RingPosition<S::kQuerySlots> q_at;  // where its queries are
  uint32_t turn = 0;                  // the warpgroup that has its first queries
  uint32_t q_tile;                    // the warpgroup's queries of it, a descriptor's lower word
  int block;                          // of keys, the step's
  int first;                          // the warpgroup's first query of the tile
  int absent;                         // causal: steps of the tile before the warpgroup's first
  int k_length;                       // of the tile's sequence
  int diagonal;                       // causal: how many keys the warpgroup's first query attends to
};

template <class T, class S, bool CAUSAL, bool TURNS>
__global__ void __launch_bounds__(S::kThreads, 1)
    forward_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                   const __grid_constant__ CUtensorMap v_map, const __grid_constant__ ForwardParams p) {
  extern __shared__ char dynamic_memory[];
  // In a uniform register: nvcc may compute it again in every step.
  const int address = uniform(static_cast<int>((shared_address(dynamic_memory) + 1023) / 1024 * 1024));
  auto& memory = *static_cast<ForwardMemory<S>*>(__cvta_shared_to_generic(static_cast<size_t>(address)));
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
  if (threadIdx.x == 0) memory.initialize();
  if (threadIdx.x == 32) {
    prefetch_map(&q_map);
    prefetch_map(&k_map);
    prefetch_map(&v_map);
  }
  __syncthreads();
  if (warp < 4) {
    lower_registers<S::kProducerRegisters>();
    if (warp == 0) produce<S, CAUSAL>(p, memory, &q_map, &k_map, &v_map);
  } else {
    raise_registers<S::kConsumerRegisters>();
    Consumer<T, S, CAUSAL, TURNS> consumer(p, memory, warp / 4 - 1);
    if (S::kOverlaps)
      consumer.run();
    else
      consumer.run_apart();
  }
}

// ---- launch ----------------------------------------------------------------------------------------------------------

template <class T, class S, bool CAUSAL, bool TURNS>
Status launch_forward(const AttentionForward& call, int multiprocessors, const Deal& deal) {
  ForwardMaps maps;
  const Status status = make_forward_maps(&maps, call, S::kKeys);
  if (status.code != StatusCode::ok) return status;
  constexpr size_t memory = sizeof(ForwardMemory<S>) + ForwardMemory<S>::kSlack;
  static_assert(memory <= 227 * 1024, "more shared memory than a multiprocessor has");
  return launch(forward_kernel<T, S, CAUSAL, TURNS>, dim3(multiprocessors), dim3(S::kThreads), memory, call.stream,
                maps.q, maps.k, maps.v, make_forward_params<S>(call, deal));
}

}  // namespace cuda
}  // namespace fasttfm
