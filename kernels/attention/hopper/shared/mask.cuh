// Masks of scores in the register layout of wgmma's accumulator (hopper.cuh).
#pragma once

#include <cmath>

#include "attention/hopper/shared/window.h"
#include "common/cuda/hopper.cuh"

namespace fasttfm {
namespace cuda {

constexpr float kMinusInfinity = -INFINITY;

// Sets the scores of keys from limit[half] on to -infinity. Limits are relative to the thread's first key of the step.
template <int COUNT>
__device__ __forceinline__ void mask_scores(float (&s)[COUNT], const int (&limit)[2]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i)
    if (i / 4 * 8 + i % 2 >= limit[i / 2 % 2]) s[i] = kMinusInfinity;
}

// The thread's index in its warpgroup. Reads threadIdx.x again at each call, so that it occupies no register in
// between.
__device__ __forceinline__ int thread_in_group() { return static_cast<int>(reload_tid() % kWarpgroup); }

// The first of the thread's two rows among the warpgroup's 64 queries; the second one is 8 rows below.
__device__ __forceinline__ int row_in_group() {
  const int number = thread_in_group();
  return number / 32 * 16 + number % 32 / 4;
}

// Sets the scores of keys before limit[half] to -infinity.
template <int COUNT>
__device__ __forceinline__ void mask_scores_before(float (&s)[COUNT], const int (&limit)[2]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i)
    if (i / 4 * 8 + i % 2 < limit[i / 2 % 2]) s[i] = kMinusInfinity;
}

// Sets the scores of keys outside of the queries' windows to -infinity. end: one past the last key of the window of the
// warpgroup's first query, which may be past the sequence's end. Most steps need only one of the two comparisons, or
// none.
template <class S>
__device__ __forceinline__ void mask_window(float (&s)[S::kKeys / 2], int block, int k_length, int end,
                                            const Window& window) {
  const int key = block * S::kKeys, span = window.left + window.right + 1;
  const int column = key + thread_in_group() % 4 * 2, row = end + row_in_group();
  if (key + S::kKeys > min(end, k_length)) {
    const int limit[2] = {min(row, k_length) - column, min(row + 8, k_length) - column};
    mask_scores(s, limit);
  }
  if (key < end + 63 - span) {
    const int limit[2] = {row - span - column, row + 8 - span - column};
    mask_scores_before(s, limit);
  }
}

// Sets the scores of keys past the sequence's end, and if causal of keys after the query's position, to -infinity.
// diagonal: the number of keys to which the warpgroup's first query attends, if causal.
template <class S, bool CAUSAL>
__device__ __forceinline__ void mask_step(float (&s)[S::kKeys / 2], int block, int k_length, int diagonal) {
  const int key = block * S::kKeys;
  // Returns if all queries attend to all of the step's keys.
  if (key + S::kKeys <= (CAUSAL ? min(k_length, diagonal) : k_length)) return;
  int limit[2];
#pragma unroll
  for (int half = 0; half < 2; ++half)
    limit[half] =
        (CAUSAL ? min(k_length, diagonal + row_in_group() + 8 * half) : k_length) - key - thread_in_group() % 4 * 2;
  mask_scores(s, limit);
}

}  // namespace cuda
}  // namespace fasttfm
