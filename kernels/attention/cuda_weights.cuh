// The weights of Hopper's attention forward, in registers as wgmma leaves scores (common/hopper.cuh): online softmax,
// dropout, and the 16-bit operand of the product with v.
#pragma once

#include <cmath>
#include <cstdint>

#include "attention/cuda_tiles.cuh"
#include "common/hopper.cuh"
#include "common/philox.h"

namespace fasttfm {
namespace cuda {

// ---- softmax ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

constexpr float kMinusInfinity = -INFINITY;
// r stays until a score is above it by this much, in units of log2: weights are <= 256.
constexpr float kHeadroom = 8.0f;

// Of a thread's two rows; registers of scores are laid out as wgmma leaves them (common/hopper.cuh).
struct RunningSoftmax {
  float reference[2] = {kMinusInfinity, kMinusInfinity};  // r, in units of log2
  float sum[2] = {0.0f, 0.0f};                            // this thread's share
  float correction[2];                                    // of what was summed up before the last step
  bool corrects;                                          // whether that is to be applied in this warp

  // Turns scores into weights, exp(scale * score - r).
  template <int COUNT>
  __device__ __forceinline__ void step(float (&s)[COUNT], float scale) {
    float top[2] = {s[0], s[2]}, base[2];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], s[i]);
    // Rarely so after a tile's first step: then the four threads of a row have nothing to tell each other.
    corrects =
        __any_sync(0xffffffffu, scale * top[0] > reference[0] + kHeadroom || scale * top[1] > reference[1] + kHeadroom);
    if (corrects) raise(top, scale);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      base[half] = reference[half] == kMinusInfinity ? 0.0f : reference[half];  // nothing attended to so far
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      s[i] = exp2_fast(fmaf(s[i], scale, -base[i / 2 % 2]));
      sum[i / 2 % 2] += s[i];
    }
  }

  // r follows the rows' maxima, of which `top` are the thread's shares.
  __device__ __forceinline__ void raise(float (&top)[2], float scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      top[half] = fmaxf(top[half], __shfl_xor_sync(0xffffffffu, top[half], 1));
      top[half] = scale * fmaxf(top[half], __shfl_xor_sync(0xffffffffu, top[half], 2));
      const bool higher = top[half] > reference[half] + kHeadroom;
      correction[half] = higher ? exp2_fast(reference[half] - top[half]) : 1.0f;
      reference[half] = higher ? top[half] : reference[half];
      sum[half] *= correction[half];
    }
  }

  // The assembler moves waits for products up to where nothing depends on them; it does not move them over a branch,
  // and this one, never taken, needs all weights: the softmax stays beside the product with v instead of coming after
  // it.
  __device__ __forceinline__ void settle() const {
    if (__any_sync(0xffffffffu, sum[0] + sum[1] < 0.0f)) asm volatile("trap;");
  }

  template <int COUNT>
  __device__ __forceinline__ void correct(float (&o)[COUNT]) const {
    if (!corrects) return;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) o[i] *= correction[i / 2 % 2];
  }

  // Sums of whole rows: the four threads of a row add up their shares.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 1);
      sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 2);
    }
  }
};

// Scores of keys from limit[half] on, counted from the thread's first key of the step, become -infinity.
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

// Which weights stay (common/philox.h). A thread's 16 weights of a row and 64 keys are the bytes of one draw, in order.
struct WeightDropout {
  uint64_t seed;
  uint32_t low, all;  // see reaches()

  WeightDropout() = default;
  __device__ __forceinline__ WeightDropout(uint64_t number, int threshold)
      : seed(number), all(threshold < 128 ? 0xffffffffu : 0u) {
    // In all four bytes: a product by 0x01010101 would be multiplied out again for every word.
    asm("prmt.b32 %0, %1, 0, 0;" : "=r"(low) : "r"(threshold < 128 ? threshold : threshold - 128));
  }

  // The top bit of each byte says whether the byte is at least the threshold: whether its seven low bits reach the
  // threshold's, or its top bit is set; and, not or, if the threshold has a top bit itself.
  __device__ __forceinline__ uint32_t reaches(uint32_t bytes) const {
    const uint32_t rest = (bytes | 0x80808080u) - low;
    return (bytes & rest) | ((bytes | rest) & all);
  }

  // For the thread's rows `query` and 8 further, and the keys from 64 * block on: a word for four weights of one row,
  // whose top bits say which are kept.
  template <int COUNT>
  __device__ __forceinline__ void draw(uint32_t (&kept)[COUNT], int sequence, int head, int query, int block) const {
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
      const Draw drawn = draw_weights(seed, static_cast<uint32_t>(sequence), static_cast<uint32_t>(head),
                                      static_cast<uint32_t>(query + i / 4 % 2 * 8),
                                      static_cast<uint32_t>(block + i / 8), threadIdx.x % 4);
#pragma unroll
      for (int word = 0; word < 4; ++word) kept[i + word] = reaches(drawn.word[word]);
    }
    hold_registers(kept);
  }
};

// Two bytes' top bits as masks of 16 bits.
template <int PAIR>
__device__ __forceinline__ uint32_t widen(uint32_t bits) {
  uint32_t mask;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(mask) : "r"(bits), "n"(PAIR == 0 ? 0x9988 : 0xbbaa));
  return mask;
}

// Packed weights, the operand a of the product with v, that are not kept become 0: words 4 * i + half and 4 * i + 2 +
// half are of one draw.
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
