// The attention weights of the Hopper forward, in the register layout of wgmma's accumulator (hopper.cuh): online
// softmax, dropout, and rounding to the 16-bit operand of the wgmma with v.
#pragma once

#include <cfloat>
#include <climits>
#include <cmath>
#include <cstdint>

#include "attention/hopper/forward_tiles.cuh"
#include "common/cuda/approximations.cuh"
#include "common/cuda/hopper.cuh"
#include "common/philox.h"

namespace fasttfm {
namespace cuda {

// ---- softmax ---------------------------------------------------------------------------------------------------------

constexpr float kMinusInfinity = -INFINITY;
// r is raised only when a score exceeds it by this much, in units of log2. So weights are at most 256.
constexpr float kHeadroom = 8.0f;
// r before the first score.
constexpr float kLowest = -FLT_MAX;

// The maximum of an integer and the bits of two floats, in one instruction. (__vimax3_s32() of the bits would cost
// copies of the scores.)
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
  float correction[2];                      // factor for what was summed before the last step
  bool corrects;                            // whether any row of the warp needs it
  int limit;                                // bits of a score, see is_near()

  // Turns scores into weights, exp(scale * score - r). FIRST: they are the first of a tile.
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

  // Whether no score in the warp can exceed its row's r by kHeadroom. The bits of floats >= 0 are ordered like the
  // floats, and above the bits of negative floats read as integers; one integer instruction takes the maximum of three.
  // So the comparison works for limits >= 0. For lower limits the answer is always false.
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
    float top[2] = {s[0], s[2]};
#pragma unroll
    for (int i = 0; i < COUNT; ++i) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], s[i]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      top[half] = fmaxf(top[half], __shfl_xor_sync(0xffffffffu, top[half], 1));
      top[half] = scale * fmaxf(top[half], __shfl_xor_sync(0xffffffffu, top[half], 2));
      const bool higher = top[half] > reference[half] + kHeadroom;
      correction[half] = higher ? exp2_approx(reference[half] - top[half]) : 1.0f;
      reference[half] = higher ? top[half] : reference[half];
      sum[half] *= correction[half];
    }
    const float lower = fminf(reference[0], reference[1]) + kHeadroom;
    limit = lower >= 0.0f ? __float_as_int(lower) : INT_MIN;
  }

  // ptxas hoists a wgmma wait above computations that do not depend on it, but not across a branch. This branch is
  // never taken and depends on all weights. So the softmax overlaps with the wgmma with v instead of following it.
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

// Sets the scores of keys from limit[half] on, counted from the thread's first key of the step, to -infinity.
template <int COUNT>
__device__ __forceinline__ void mask_scores(float (&s)[COUNT], const int (&limit)[2]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i)
    if (i / 4 * 8 + i % 2 >= limit[i / 2 % 2]) s[i] = kMinusInfinity;
}

template <class T, int COUNT>
__device__ __forceinline__ void pack_weights(const float (&s)[2 * COUNT], uint32_t (&weights)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) weights[i] = narrow_word(s[2 * i], s[2 * i + 1], T{});
}

// ---- dropout ---------------------------------------------------------------------------------------------------------

// Dropout of the weights (philox.h). The 16 weights that a thread has in a row and 64 keys are decided by the bytes of
// one draw, in order. Of Philox's first three rounds, the part that depends on the row is computed once per tile, and
// the part that depends on the keys once for both rows of the thread.
struct WeightDropout {
  PhiloxKeys keys;
  uint32_t low, either;               // see reaching_bytes()
  uint32_t head_part, sequence_part;  // of rounds 1 and 2
  uint32_t row_high[2], row_low[2];   // the product in round 2, for both rows

  WeightDropout() = default;
  __device__ __forceinline__ WeightDropout(uint64_t seed, int threshold)
      : keys(seed), either(threshold < 128 ? 0xffffffffu : 0u) {
    // Keeps the round keys in uniform registers; otherwise nvcc recomputes them for every draw.
#pragma unroll
    for (int round = 0; round < kPhiloxRounds; ++round) {
      keys.first[round] = warp_uniform(keys.first[round]);
      keys.second[round] = warp_uniform(keys.second[round]);
    }
    // Replicates the byte. nvcc would recompute a multiplication by 0x01010101 for every word.
    asm("prmt.b32 %0, %1, 0, 0;" : "=r"(low) : "r"(threshold < 128 ? threshold : threshold - 128));
  }

  // Starts a tile: the thread's rows are `query` and `query` + 8.
  __device__ __forceinline__ void begin(int sequence, int head, int query) {
    const uint64_t product = wide_product(kPhiloxFactor1, static_cast<uint32_t>(sequence));
    head_part = static_cast<uint32_t>(1 + head) ^ keys.second[0];
    sequence_part = low_word(product) ^ keys.first[1];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t row = static_cast<uint32_t>(query + 8 * half) ^ high_word(product) ^ keys.first[0];
      const uint64_t of_row = wide_product(kPhiloxFactor0, row);
      row_high[half] = high_word(of_row) ^ keys.second[1];
      row_low[half] = low_word(of_row) ^ keys.second[2];
    }
  }

  // Draws for the keys from 64 * block on. Each word of `kept` is for four weights of one row; the top bits of its
  // bytes say which are kept. The draws are those of draw_weights().
  template <int COUNT>
  __device__ __forceinline__ void draw(uint32_t (&kept)[COUNT], int block) const {
#pragma unroll
    for (int i = 0; i < COUNT; i += 8) {
      const uint32_t number = static_cast<uint32_t>(4 * (block + i / 8)) + threadIdx.x % 4;
      const uint64_t first = wide_product(kPhiloxFactor0, number);
      const uint64_t second = wide_product(kPhiloxFactor1, high_word(first) ^ head_part);
      const uint64_t third = wide_product(kPhiloxFactor0, high_word(second) ^ sequence_part);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint64_t of_row = wide_product(kPhiloxFactor1, row_high[half] ^ low_word(first));
        const Draw drawn = philox_rounds(keys, 3,
                                         {{high_word(of_row) ^ low_word(second) ^ keys.first[2], low_word(of_row),
                                           high_word(third) ^ row_low[half], low_word(third)}});
#pragma unroll
        for (int word = 0; word < 4; ++word) kept[i + 4 * half + word] = reaching_bytes(drawn.word[word], low, either);
      }
    }
    fence_operand(kept);
  }
};

// Expands the top bits of two bytes to two 16-bit masks.
template <int PAIR>
__device__ __forceinline__ uint32_t widen(uint32_t bits) {
  uint32_t mask;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(mask) : "r"(bits), "n"(PAIR == 0 ? 0x9988 : 0xbbaa));
  return mask;
}

// Zeros the dropped weights in the packed operand a of the wgmma with v. Words 4 * i + half and 4 * i + 2 + half are
// decided by one draw.
template <int COUNT>
__device__ __forceinline__ void keep_weights(uint32_t (&weights)[2 * COUNT], const uint32_t (&kept)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const int first = i / 8 * 16 + i % 4 * 4 + i / 4 % 2;
    weights[first] &= widen<0>(kept[i]);
    weights[first + 2] &= widen<1>(kept[i]);
  }
}

}  // namespace cuda
}  // namespace fasttfm
