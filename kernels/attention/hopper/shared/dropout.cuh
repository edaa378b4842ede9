// Dropout of the attention weights in the registers of the Hopper forward.
#pragma once

#include <cstdint>

#include "common/cuda/hopper.cuh"
#include "common/philox.h"

namespace fasttfm {
namespace cuda {

// Generates the keep bits of the weights (philox.h). Within 64 keys, the 16 weights of a row that a thread holds
// correspond to the bytes of one draw, in order. In Philox's first three rounds, the values that depend only on the row
// are computed once per tile, and the values that depend only on the keys once for both rows of the thread.
struct WeightDropout {
  PhiloxKeys keys;
  uint32_t low, either;               // see reaching_bytes()
  uint32_t head_part, sequence_part;  // inputs of rounds 1 and 2
  uint32_t row_high[2], row_low[2];   // the row's product in round 2, for both rows

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

  // Draws for the keys from 64 * block on, with the same results as draw_weights(). Each word of `kept` is for four
  // weights of one row; the top bit of each byte is set if its weight is kept.
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

// Zeros the dropped weights in the packed operand A of the wgmma with v. A word of `kept` applies to two words of the
// operand, which are two apart.
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
