// Attention forward on Hopper for few keys and no dropout: the forward of cuda_forward.cuh, where a head's keys and
// values fit on chip.
//
// With one or two steps a tile, what comes before and after the steps (waits for loads, the first product and the last,
// results) takes as long as they do, and warpgroups that take turns go through it together. Here warpgroups do not know
// of each other. k and v of a head are copied once and stay until all its queries are done; the unit of work is 64
// queries of it, and a block's units go round the warpgroups: one's waits, softmax and results run beside the products
// of the others. Three rings lie between the warps that copy and the warpgroups: tiles (the queries of a head, up to
// S::kQueries, and where their keys are), steps of k and v, and q of units.
#pragma once

#include <cstdint>

#include "attention/cuda_forward_steps.cuh"
#include "attention/cuda_tiles.cuh"
#include "attention/cuda_weights.cuh"
#include "common/hopper.cuh"

namespace fasttfm {
namespace cuda {

// A tile has up to QUERIES queries; GROUPS warpgroups go over keys in steps of KEYS.
template <int HEAD_DIM, int QUERIES, int GROUPS, int KEYS, bool DROPOUT>
struct ShortShape {
  static constexpr int kHeadDim = HEAD_DIM, kQueries = QUERIES, kGroups = GROUPS, kKeys = KEYS;
  static constexpr bool kDropout = DROPOUT;
  static constexpr int kThreads = kWarpgroup * (GROUPS + 1);
  static constexpr int kParts = HEAD_DIM / kTileColumns;
  static constexpr uint32_t kQueryPart = 64 * kTileRowBytes, kQueryBytes = kParts * kQueryPart;
  static constexpr uint32_t kKeyPart = KEYS * kTileRowBytes, kKeyBytes = kParts * kKeyPart;
  static constexpr int kTiles = 8;                                          // on their way
  static constexpr int kQuerySlots = HEAD_DIM == 64 ? GROUPS + 1 : GROUPS;  // units of q
  static constexpr int kUnits = 2 * GROUPS;                                 // see ShortMemory
  static constexpr int kKeySlots = (224 * 1024 - kQuerySlots * kQueryBytes) / (2 * kKeyBytes);
  static constexpr int kMostKeys = kKeySlots * KEYS;
  static constexpr int kProducerRegisters = producer_registers(GROUPS);
  static constexpr int kConsumerRegisters = consumer_registers(GROUPS);
};

// Unit i has the barriers i % kUnits, so that the warpgroup i % kGroups alone waits for them, and for each of their
// phases; its queries lie in place i % kQuerySlots.
template <class S>
struct ShortMemory {
  static_assert(S::kQuerySlots <= S::kUnits, "a place is free when the unit kQuerySlots before is done");
  alignas(1024) char q[S::kQuerySlots][S::kQueryBytes];
  alignas(1024) char k[S::kKeySlots][S::kKeyBytes];
  alignas(1024) char v[S::kKeySlots][S::kKeyBytes];
  QueryTile tile[S::kTiles];
  Barrier tile_full[S::kTiles], tile_empty[S::kTiles];
  Barrier q_full[S::kUnits], q_empty[S::kUnits];
  Barrier k_full[S::kKeySlots], v_full[S::kKeySlots], step_empty[S::kKeySlots];

  static constexpr int kSlack = 1024;  // bytes of dynamic memory too many, to start at a multiple of that

  // One thread.
  __device__ __forceinline__ void initialize() {
    constexpr int warps = 4 * kWarpArrivals;  // of a warpgroup
    for (int i = 0; i < S::kTiles; ++i) {
      tile_full[i].initialize(1);
      tile_empty[i].initialize(S::kGroups * warps + 1);
    }
    for (int i = 0; i < S::kUnits; ++i) {
      q_full[i].initialize(1);
      q_empty[i].initialize(warps);
    }
    for (int i = 0; i < S::kKeySlots; ++i) {
      k_full[i].initialize(1);
      v_full[i].initialize(1);
      step_empty[i].initialize(S::kGroups * warps);
    }
    fence_barriers();
  }
};

// Where the units of a block stand: all who have to do with them count them alike. Units without keys are not counted.
template <class S>
struct UnitPosition {
  RingPosition<S::kUnits> at;
  uint32_t place = 0;  // of its queries
  __device__ __forceinline__ void next() {
    at.next();
    place = place + 1 == S::kQuerySlots ? 0 : place + 1;
  }
};

// The first query behind a tile's.
template <class S>
__device__ __forceinline__ int tile_end(const QueryTile& tile) {
  return min(tile.first + S::kQueries, tile.rows);
}

// ---- producers -------------------------------------------------------------------------------------------------------

// One warp, whose first lane issues the copies: takes tiles, and copies their k and v, the last keys first.
template <class S, bool CAUSAL>
__device__ __forceinline__ void produce_steps(const ForwardParams& p, ShortMemory<S>& memory, const CUtensorMap* k_map,
                                              const CUtensorMap* v_map) {
  const bool issues = threadIdx.x % 32 == 0;
  RingPosition<S::kTiles> tile_at;
  RingPosition<S::kKeySlots> at;
  TileWalk<S, CAUSAL> walk(p);
  while (true) {
    const QueryTile tile = walk.take();
    if (issues) {
      memory.tile_empty[tile_at.slot].wait(tile_at.parity ^ 1);
      memory.tile[tile_at.slot] = tile;
      memory.tile_full[tile_at.slot].arrive();
      const int sequence = p.packed() ? 0 : tile.sequence;
      const int head = tile.head / p.group, first = p.packed() ? walk.k_first : 0;
      for (int block = tile.sequence < 0 ? -1 : tile.blocks - 1; block >= 0; --block) {
        memory.step_empty[at.slot].wait(at.parity ^ 1);
        load_tile<S>(k_map, memory.k_full[at.slot], memory.k[at.slot], S::kKeyBytes, S::kKeyPart, head,
                     first + block * S::kKeys, sequence);
        load_tile<S>(v_map, memory.v_full[at.slot], memory.v[at.slot], S::kKeyBytes, S::kKeyPart, head,
                     first + block * S::kKeys, sequence);
        at.next();
      }
    }
    __syncwarp();
    if (tile.sequence < 0) return;
    tile_at.next();
  }
}

// One thread: copies the queries of all units.
template <class S, bool CAUSAL>
__device__ __forceinline__ void produce_queries(const ForwardParams& p, ShortMemory<S>& memory,
                                                const CUtensorMap* q_map) {
  RingPosition<S::kTiles> tile_at;
  UnitPosition<S> unit;
  RingPosition<S::kUnits> done;  // the unit that had the place before
  for (uint32_t number = 0;; tile_at.next()) {
    memory.tile_full[tile_at.slot].wait(tile_at.parity);
    const QueryTile tile = memory.tile[tile_at.slot];
    if (tile.sequence < 0) return;
    const int sequence = p.packed() ? 0 : tile.sequence, origin = p.packed() ? tile.origin : 0;
    for (int first = tile.first; first < tile_end<S>(tile); first += 64) {
      if (tile.template steps<S, CAUSAL>(first, 64) == 0) continue;
      if (number >= S::kQuerySlots) {
        memory.q_empty[done.slot].wait(done.parity);
        done.next();
      }
      load_tile<S>(q_map, memory.q_full[unit.at.slot], memory.q[unit.place], S::kQueryBytes, S::kQueryPart, tile.head,
                   origin + first, sequence);
      unit.next();
      ++number;
    }
    memory.tile_empty[tile_at.slot].arrive();
  }
}

// ---- consumers -------------------------------------------------------------------------------------------------------

// A warpgroup of the block.
template <class T, class S, bool CAUSAL>
class UnitConsumer {
 public:
  __device__ __forceinline__ UnitConsumer(const ForwardParams& params, ShortMemory<S>& shared, int number)
      : p(params), memory(shared), group(number) {
    if (S::kDropout) dropout = WeightDropout(static_cast<uint64_t>(*p.seed), p.threshold);
  }

  __device__ __forceinline__ void run() {
    for (;; tile_at.next()) {
      memory.tile_full[tile_at.slot].wait(tile_at.parity);
      if (tile().sequence < 0) return;
      if (!pass_units()) release_steps(tile().blocks);
      arrive_warp(memory.tile_empty[tile_at.slot]);
    }
  }

 private:
  using Position = RingPosition<S::kKeySlots>;

  __device__ __forceinline__ const QueryTile& tile() const { return memory.tile[tile_at.slot]; }

  // All units of the tile; computes those that are this warpgroup's, and says whether there was one.
  __device__ __forceinline__ bool pass_units() {
    const int end = tile_end<S>(tile()), last = min(end, tile().q_length);
    bool any = false;
    for (int first = tile().first; first < end; first += 64) {
      const int steps = tile().template steps<S, CAUSAL>(first, 64);
      if (steps == 0) {
        if (static_cast<int>((first / 64 + tile_at.slot) % S::kGroups) == group) store_nothing<T, S>(p, tile(), first);
        continue;
      }
      if (static_cast<int>(unit.at.slot % S::kGroups) == group) {
        compute(first, steps, first + 64 * S::kGroups >= last);
        any = true;
      }
      unit.next();
    }
    return any;
  }

  // Steps that the warpgroup does not compute: it must not miss a phase of a barrier that it waits for.
  __device__ __forceinline__ void release_steps(int count) {
    for (; count > 0; --count) {
      memory.k_full[step_at.slot].wait(step_at.parity);
      memory.v_full[step_at.slot].wait(step_at.parity);
      arrive_warp(memory.step_empty[step_at.slot]);
      step_at.next();
    }
  }

  // 64 queries from `first` on, which attend to keys of `steps` steps. ends: it is the warpgroup's last unit of the
  // tile, and lets go of steps one by one.
  __device__ __forceinline__ void compute(int first, int steps, bool ends) {
    float s[S::kKeys / 2], o[S::kHeadDim / 2], factor[2];
    uint32_t weights[S::kKeys / 4], kept[S::kKeys / 8];
    RunningSoftmax softmax;
    int absent = CAUSAL ? tile().blocks - steps : 0;
    if (ends) {
      release_steps(absent);
      absent = 0;
    }
    Position at = step_at;
    for (; absent > 0; --absent) at.next();
    const uint32_t q = shared_address(memory.q[unit.place]);
    const int k_length = tile().k_length, diagonal = tile().causal_keys(first);
    int block = steps - 1;

    memory.q_full[unit.at.slot].wait(unit.at.parity);
    memory.k_full[at.slot].wait(at.parity);
    begin_products();
    issue_scores<T, S>(s, q, shared_address(memory.k[at.slot]));
    draw(kept, first, block);
    wait_products<0>();
    take_scores(s, block, k_length, diagonal);
    softmax.step(s, p.scale);
    make_operand(s, weights, kept);
    clear_absent(at, k_length - block * S::kKeys);

    for (bool add = false; --block >= 0; add = true) {
      const Position before = at;
      at.next();
      memory.k_full[at.slot].wait(at.parity);
      memory.v_full[before.slot].wait(before.parity);
      hold_registers(o);
      hold_registers(weights);
      begin_products();
      issue_scores<T, S>(s, q, shared_address(memory.k[at.slot]));
      issue_values<T, S>(o, weights, shared_address(memory.v[before.slot]), add);
      draw(kept, first, block);
      wait_products<1>();
      take_scores(s, block, k_length, diagonal);
      softmax.step(s, p.scale);
      softmax.settle();
      wait_products<0>();
      hold_registers(o);
      hold_registers(weights);
      if (ends) arrive_warp(memory.step_empty[before.slot]);
      softmax.correct(o);
      make_operand(s, weights, kept);
    }

    memory.v_full[at.slot].wait(at.parity);
    hold_registers(o);
    hold_registers(weights);
    begin_products();
    issue_values<T, S>(o, weights, shared_address(memory.v[at.slot]), steps > 1);
    const int row = first + row_in_group();
    conclude<S>(p, tile(), row, softmax, factor);
    wait_products<0>();
    hold_registers(o);
    hold_registers(weights);
    if (ends) {
      arrive_warp(memory.step_empty[at.slot]);
      step_at = at;
      step_at.next();
    }
    store_results<T, S>(p, tile(), row, factor, o);
  }

  // Scores of a step are there; those of the last one have been the last use of q.
  __device__ __forceinline__ void take_scores(float (&s)[S::kKeys / 2], int block, int k_length, int diagonal) const {
    hold_registers(s);
    if (block == 0) arrive_warp(memory.q_empty[unit.at.slot]);
    mask_step<S, CAUSAL>(s, block, k_length, diagonal);
  }

  __device__ __forceinline__ void draw(uint32_t (&kept)[S::kKeys / 8], int first, int block) const {
    if (S::kDropout) dropout.draw(kept, tile().sequence, tile().head, first + row_in_group(), block * (S::kKeys / 64));
  }

  // 16-bit weights; those that dropout does not keep are 0.
  __device__ __forceinline__ void make_operand(const float (&s)[S::kKeys / 2], uint32_t (&weights)[S::kKeys / 4],
                                               const uint32_t (&kept)[S::kKeys / 8]) const {
    pack_weights<T>(s, weights);
    if (S::kDropout) keep_weights(weights, kept);
  }

  // Before the first product with v, of which `present` rows are the sequence's.
  __device__ __forceinline__ void clear_absent(const Position& at, int present) const {
    if (present >= S::kKeys || (!p.packed() && p.lengths_k == nullptr)) return;
    memory.v_full[at.slot].wait(at.parity);
    clear_rows<S>(memory.v[at.slot], present, group);
  }

  const ForwardParams& p;
  ShortMemory<S>& memory;
  const int group;
  WeightDropout dropout;
  RingPosition<S::kTiles> tile_at;
  Position step_at;  // of the tile's first step that the warpgroup has not let go of
  UnitPosition<S> unit;
};

template <class T, class S, bool CAUSAL>
__global__ void __launch_bounds__(S::kThreads, 1)
    short_forward_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                         const __grid_constant__ CUtensorMap v_map, const __grid_constant__ ForwardParams p) {
  extern __shared__ char dynamic_memory[];
  auto& memory =
      *reinterpret_cast<ShortMemory<S>*>(dynamic_memory + (1024 - shared_address(dynamic_memory) % 1024) % 1024);
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
  if (threadIdx.x == 0) memory.initialize();
  if (threadIdx.x == 32) {
    prefetch_map(&q_map);
    prefetch_map(&k_map);
    prefetch_map(&v_map);
  }
  __syncthreads();
  wait_for_launches();
  if (warp < 4) {
    lower_registers<S::kProducerRegisters>();
    if (warp == 0) produce_steps<S, CAUSAL>(p, memory, &k_map, &v_map);
    if (warp == 1 && elected()) produce_queries<S, CAUSAL>(p, memory, &q_map);
  } else {
    raise_registers<S::kConsumerRegisters>();
    UnitConsumer<T, S, CAUSAL>(p, memory, warp / 4 - 1).run();
  }
}

template <class T, class S, bool CAUSAL, bool EARLY>
Status launch_short_forward(const AttentionForward& call, int multiprocessors, const Deal& deal) {
  ForwardMaps maps;
  const Status status = make_forward_maps(&maps, call, 64, S::kKeys);
  if (status.code != StatusCode::ok) return status;
  constexpr size_t memory = sizeof(ShortMemory<S>) + ShortMemory<S>::kSlack;
  static_assert(memory <= 227 * 1024, "more shared memory than a multiprocessor has");
  if (EARLY)
    return launch_early(short_forward_kernel<T, S, CAUSAL>, dim3(multiprocessors), dim3(S::kThreads), memory,
                        call.stream, maps.q, maps.k, maps.v, make_forward_params<S>(call, deal));
  return launch(short_forward_kernel<T, S, CAUSAL>, dim3(multiprocessors), dim3(S::kThreads), memory, call.stream,
                maps.q, maps.k, maps.v, make_forward_params<S>(call, deal));
}

}  // namespace cuda
}  // namespace fasttfm
