// Counter-based random numbers (Philox 4x32, 7 rounds) and their use in dropout. The specification is philox.py; every
// backend draws the same bits.
//
// One 128-bit draw has a byte for each of 16 neighbouring features. Feature f of a token corresponds to byte f % 16 of
// the draw with counter (f / 16, token, sequence, 0) and the seed as key. It is dropped if that byte is below the
// threshold, which is p * 256, rounded. Attention weights: see draw_weights().
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace fasttfm {

#ifdef FASTTFM_ISA
inline namespace FASTTFM_ISA {  // as in isa.h: every instruction set has its own copies of inline functions
#endif

// 16 random bytes; byte i is bits 8 * (i % 4) to 8 * (i % 4) + 7 of word[i / 4].
struct Draw {
  uint32_t word[4];
};

// This is assembly because nvcc would use one instruction for each half: that has a lower latency, but takes two issue
// slots.
FASTTFM_HOST_DEVICE uint64_t wide_product(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
#else
  return static_cast<uint64_t>(a) * b;
#endif
}

constexpr uint32_t kPhiloxFactor0 = 0xD2511F53u, kPhiloxFactor1 = 0xCD9E8D57u;
constexpr int kPhiloxRounds = 7;

// The keys of all rounds.
struct PhiloxKeys {
  uint32_t first[kPhiloxRounds], second[kPhiloxRounds];

  PhiloxKeys() = default;
  explicit FASTTFM_HOST_DEVICE PhiloxKeys(uint64_t seed) {
    for (uint32_t round = 0; round < kPhiloxRounds; ++round) {
      first[round] = static_cast<uint32_t>(seed) + round * 0x9E3779B9u;
      second[round] = static_cast<uint32_t>(seed >> 32) + round * 0xBB67AE85u;
    }
  }
};

FASTTFM_HOST_DEVICE uint32_t high_word(uint64_t product) { return static_cast<uint32_t>(product >> 32); }
FASTTFM_HOST_DEVICE uint32_t low_word(uint64_t product) { return static_cast<uint32_t>(product); }

// Applies the rounds from `round` on to a counter.
FASTTFM_HOST_DEVICE Draw philox_rounds(const PhiloxKeys& keys, int round, Draw counter) {
  uint32_t (&c)[4] = counter.word;
  for (; round < kPhiloxRounds; ++round) {
    const uint64_t product0 = wide_product(kPhiloxFactor0, c[0]);
    const uint64_t product1 = wide_product(kPhiloxFactor1, c[2]);
    c[0] = high_word(product1) ^ c[1] ^ keys.first[round];
    c[2] = high_word(product0) ^ c[3] ^ keys.second[round];
    c[1] = low_word(product1);
    c[3] = low_word(product0);
  }
  return counter;
}

FASTTFM_HOST_DEVICE Draw philox(uint64_t seed, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  return philox_rounds(PhiloxKeys(seed), 0, {{c0, c1, c2, c3}});
}

// The draw for 16 of the weights of an attention row. Of the 64 keys of a block, draw d (0 to 3) covers the pairs d, d
// + 4, d + 8, ...: key k corresponds to byte 2 * (k / 8 % 8) + k % 2 of draw k / 2 % 4. A row of an mma accumulator is
// distributed over threads in the same way.
FASTTFM_HOST_DEVICE Draw draw_weights(uint64_t seed, uint32_t sequence, uint32_t head, uint32_t query, uint32_t block,
                                      uint32_t d) {
  return philox(seed, 4 * block + d, query, sequence, 1 + head);
}

// In the result, the top bit of each of the four bytes is set if that byte is at least dropout's threshold. With a
// threshold below 128 this is the case if the byte's seven low bits are at least the threshold's or its top bit is set;
// otherwise, if both hold. low: the threshold's seven low bits in all four bytes; either: all ones if the threshold is
// below 128, otherwise 0.
FASTTFM_HOST_DEVICE uint32_t reaching_bytes(uint32_t bytes, uint32_t low, uint32_t either) {
  const uint32_t rest = (bytes | 0x80808080u) - low;
  return (bytes & rest) | ((bytes | rest) & either);
}

#ifdef FASTTFM_ISA
}  // namespace FASTTFM_ISA
#endif

}  // namespace fasttfm
