// The attention weights of the Hopper forward, in the register layout of wgmma's accumulator (hopper.cuh): online
// softmax, and rounding to the 16-bit operand of the wgmma with v.
#pragma once

#include <cfloat>
#include <climits>
#include <cstdint>

#include "common/cuda/approximations.cuh"
#include "common/cuda/hopper.cuh"

namespace fasttfm {
namespace cuda {

// ---- softmax --------------------------------------------------------------------------------------------------------

// r is raised only if a score exceeds it by more than this, in units of log2. So weights are at most 256.
constexpr float kHeadroom = 8.0f;
// r before the first score.
constexpr float kLowest = -FLT_MAX;

// The largest of the thread's scores in each of its two rows.
template <int COUNT>
__device__ __forceinline__ void thread_maxima(const float (&s)[COUNT], float (&top)[2]) {
  top[0] = s[0];
  top[1] = s[2];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], s[i]);
}
// The largest value of the four threads that share a row.
__device__ __forceinline__ float row_maximum(float top) {
  top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
  return fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
}

// The maximum of an integer and the bits of two floats, in one instruction. (With __vimax3_s32(), the compiler copies
// the scores.)
__device__ __forceinline__ int largest_bits(int top, float a, float b) {
  asm("{ .reg .b32 x, y; mov.b32 x, %1; mov.b32 y, %2; max.s32 x, x, y; max.s32 %0, %0, x; }"
      : "+r"(top)
      : "f"(a), "f"(b));
  return top;
}

// The state of a thread's two rows. Scores are in the layout of wgmma's accumulator (hopper.cuh).
struct RunningSoftmax {
  float reference[2] = {kLowest, kLowest};  // r, in units of log2
  float sum[2] = {0.0f, 0.0f};              // over this thread's columns
  float correction[2];                      // factor by which earlier partial sums have to be multiplied
  bool corrects;                            // whether the correction of any row of the warp is not 1
  int limit;                                // bits of a scaled score: see is_near()

  // Replaces scores by weights, exp2(scale * score - r). FIRST: it is the first step of a tile.
  template <bool FIRST, int COUNT>
  __device__ __forceinline__ void step(float (&s)[COUNT], float scale) {
    corrects = FIRST || !is_near(s, scale);
    if (corrects) raise(s, scale);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      s[i] = exp2_approx(fmaf(s[i], scale, -reference[i / 2 % 2]));
      sum[i / 2 % 2] += s[i];
    }
  }

  // Whether no score of the warp can exceed its row's r by kHeadroom. As integers, the bits of floats >= 0 are ordered
  // like the floats and are above those of negative floats, so the maximum is computed on integers, of which one
  // instruction compares three. The comparison is valid for limits >= 0; for negative limits the result is always
  // false.
  template <int COUNT>
  __device__ __forceinline__ bool is_near(const float (&s)[COUNT], float scale) const {
    int top[2] = {__float_as_int(s[0]), __float_as_int(s[2])};
#pragma unroll
    for (int i = 0; i < COUNT; i += 2) top[i / 2 % 2] = largest_bits(top[i / 2 % 2], s[i], s[i + 1]);
    const float highest = scale * __int_as_float(max(top[0], top[1]));
    return !__any_sync(0xffffffffu, __float_as_int(highest) >= limit);
  }

  // Raises r to the row's maximum where that exceeds it by kHeadroom.
  template <int COUNT>
  __device__ __forceinline__ void raise(const float (&s)[COUNT], float scale) {
    float top[2];
    thread_maxima(s, top);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      top[half] = scale * row_maximum(top[half]);
      const bool higher = top[half] > reference[half] + kHeadroom;
      correction[half] = higher ? exp2_approx(reference[half] - top[half]) : 1.0f;
      reference[half] = higher ? top[half] : reference[half];
      sum[half] *= correction[half];
    }
    const float lower = fminf(reference[0], reference[1]) + kHeadroom;
    limit = lower >= 0.0f ? __float_as_int(lower) : INT_MIN;
  }

  // ptxas hoists a wgmma wait above computations that do not depend on it, but not across a branch. This branch is
  // never taken and depends on all weights, so the softmax overlaps with the wgmma with v instead of following it.
  __device__ __forceinline__ void prevent_hoist() const {
    if (__any_sync(0xffffffffu, sum[0] + sum[1] < 0.0f)) __nanosleep(100);
  }

  template <int COUNT>
  __device__ __forceinline__ void correct(float (&o)[COUNT]) const {
    if (!corrects) return;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) o[i] *= correction[i / 2 % 2];
  }

  // Completes the row sums: adds the partial sums of the four threads of a row.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 1);
      sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 2);
    }
  }
};

template <class T, int COUNT>
__device__ __forceinline__ void pack_weights(const float (&s)[2 * COUNT], uint32_t (&weights)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) weights[i] = narrow_word(s[2 * i], s[2 * i + 1], T{});
}

}  // namespace cuda
}  // namespace fasttfm
