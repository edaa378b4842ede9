// attention backward for Hopper, head dims 192 and 256: the tasks that both kernels divide their work into, and the
// queue from which blocks fetch them.
#pragma once

#include "attention/hopper/shared/backward_tiles.cuh"
#include "attention/hopper/shared/window.h"
#include "common/cuda/hopper.cuh"

namespace fasttfm {
namespace cuda {
namespace hopper_backward {

constexpr int kWideRows = 64;  // of a tile
template <bool OF_KEYS>
constexpr int kTaskRows = OF_KEYS ? kWideRows : 2 * kWideRows;

// ---- tasks ----------------------------------------------------------------------------------------------------------

// kTaskRows queries of a (sequence, head) pair, or kTaskRows keys, with GROUPED of several query heads. Packed
// sequences have Parameters::slots tasks per head, some of which have no rows: see first_slot().
template <Mask MASK>
struct WideTask {
  Unit<MASK> unit;
  int first;  // of the task's rows in the sequence; may be negative if cu_seqlens is invalid, and there are no rows
              // then
};

// The sequence, (first query) head and index in the sequence of a task. Without a mask, tasks of a (sequence, head)
// pair follow one another, because they read the same tiles, which are then in L2. If causal, tasks with more work come
// first: low keys and high queries.
struct TaskPlace {
  int sequence, head, tile;
};
template <Mask MASK, bool OF_KEYS, bool GROUPED>
__device__ __forceinline__ TaskPlace place_of(const Parameters& p, int index) {
  constexpr bool kCausal = MASK == Mask::causal, kReversed = kCausal && !OF_KEYS;
  const int32_t* bounds = OF_KEYS ? p.cu_seqlens_k : p.cu_seqlens;
  const int size = OF_KEYS ? p.keys : p.queries;
  const int heads = gradient_heads < OF_KEYS && GROUPED > (p),
            heads_per_unit = heads_of_unit < OF_KEYS && GROUPED > (p);
  if (bounds != nullptr) {
    const int head = index / p.slots, slot = index - head * p.slots;
    const Chunk chunk =
        chunk_of_slot(bounds, p.sequences, size, kTaskRows<OF_KEYS>, kReversed ? p.slots - 1 - slot : slot);
    return {chunk.sequence, head * heads_per_unit, chunk.index};
  }
  const int tiles = divide_up(size, kTaskRows<OF_KEYS>), units = p.sequences * heads;
  const int tile = kCausal ? index / units : index % tiles, unit = kCausal ? index % units : index / tiles;
  return {unit / heads, unit % heads * heads_per_unit, kReversed ? tiles - 1 - tile : tile};
}

template <Mask MASK, bool OF_KEYS, bool GROUPED>
__device__ __forceinline__ WideTask<MASK> task_at(const Parameters& p, int index) {
  const TaskPlace place = place_of<MASK, OF_KEYS, GROUPED>(p, index);
  return {Unit<MASK>(p, place.sequence, place.head), place.tile * kTaskRows<OF_KEYS>};
}

// The query tiles of all query heads (see split()) that attend to a task's keys, and the key tiles to which a task's
// queries attend.
template <bool GROUPED, Mask MASK>
__device__ __forceinline__ Tiles queries_of_task(const Parameters& p, const WideTask<MASK>& task) {
  const Unit<MASK>& unit = task.unit;
  if (task.first < 0 || task.first >= unit.k.length) return {0, 0};
  const int begin = MASK == Mask::causal ? max(task.first - unit.offset(), 0) / kWideRows : 0;
  const int heads_per_unit = heads_of_unit<GROUPED>(p);
  return {min(begin, unit.query_tiles) * heads_per_unit, unit.query_tiles * heads_per_unit};
}
template <Mask MASK>
__device__ __forceinline__ Tiles keys_of_task(const WideTask<MASK>& task) {
  const Unit<MASK>& unit = task.unit;
  if (task.first < 0 || task.first >= unit.q.length) return {0, 0};
  int end = unit.k.length;
  if (MASK == Mask::causal) end = max(min(end, min(task.first + kTaskRows<false>, unit.q.length) + unit.offset()), 0);
  return {0, divide_up(end, kWideRows)};
}

// ---- the queue ------------------------------------------------------------------------------------------------------

// The indices of the next tasks. A warp of the block calls fetch_all(), which fetches them from a counter in global
// memory. The warps that process tasks have a TaskReader each.
struct TaskQueue {
  static constexpr int kReaders = 9;  // warps: 8 that compute, 1 that loads
  int index[2];
  Mbarrier full[2], empty[2];

  __device__ __forceinline__ void init() {
    for (int i = 0; i < 2; ++i) {
      full[i].init(kWarpArrivals);
      empty[i].init(kReaders * kWarpArrivals);
    }
  }
};

struct TaskReader {
  TaskQueue& queue;
  RingPosition<2> at;

  __device__ __forceinline__ explicit TaskReader(TaskQueue& queue) : queue(queue) {}

  // The index of the next task; Parameters::tasks or more if there are no more. Called by a whole warp.
  __device__ __forceinline__ int next() {
    queue.full[at.slot].wait(at.parity);
    const int index = warp_uniform(queue.index[at.slot]);
    arrive_warp(queue.empty[at.slot]);
    at.next();
    return index;
  }
};

// Called by a whole warp.
__device__ __forceinline__ void fetch_all(const Parameters& p, TaskQueue& queue) {
  RingPosition<2> at;
  int index = 0;
  do {
    queue.empty[at.slot].wait(at.parity ^ 1);
    if (threadIdx.x % 32 == 0) {
      index = atomic_increment(p.taken);
      queue.index[at.slot] = index;
    }
    arrive_warp(queue.full[at.slot]);
    index = warp_uniform(index);
    at.next();
  } while (index < p.tasks);
}

}  // namespace hopper_backward
}  // namespace cuda
}  // namespace fasttfm
