// Dropout of rows on the CPU (philox.h), a span of columns at a time.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/cpu/simd.h"
#include "common/packed.h"
#include "common/philox.h"

namespace fasttfm {
namespace FASTTFM_ISA {

constexpr int64_t kDropoutSpan = 256;  // columns

// Calls body(first, width) for each span of a row's columns.
template <class Body>
inline void for_spans(int64_t columns, Body body) {
  for (int64_t first = 0; first < columns; first += kDropoutSpan)
    body(first, columns - first < kDropoutSpan ? columns - first : kDropoutSpan);
}

// A mask of the bytes above the limit, among 16 bytes.
inline Mask above(const uint8_t* bytes, uint8_t limit) {
  Mask mask;
#if defined(__ARM_NEON)
  const int8x16_t all = vreinterpretq_s8_u8(vcgtq_u8(vld1q_u8(bytes), vdupq_n_u8(limit)));
  const int16x8_t half[2] = {vmovl_s8(vget_low_s8(all)), vmovl_s8(vget_high_s8(all))};
  for (int i = 0; i < 2; ++i) {
    mask.r[2 * i] = reinterpret_cast<RegU>(vmovl_s16(vget_low_s16(half[i])));
    mask.r[2 * i + 1] = reinterpret_cast<RegU>(vmovl_s16(vget_high_s16(half[i])));
  }
#else
  typedef uint8_t RegB __attribute__((vector_size(kRegisterLanes)));
  for (int i = 0; i < kRegisters; ++i) {
    RegB byte;
    std::memcpy(&byte, bytes + i * kRegisterLanes, sizeof(byte));
    mask.r[i] = reinterpret_cast<RegU>(__builtin_convertvector(byte, RegI) > static_cast<int32_t>(limit));
  }
#endif
  return mask;
}

// The dropout parameters, which are the same for all rows. Threshold (1 to 256) and scale are defined in philox.py.
struct Dropout {
  uint64_t seed;
  RowPositions positions;
  int threshold;
  float scale;

  // The keep mask of one span of one row.
  class Span {
   public:
    // This is not inlined, so that all kernels share one copy.
    __attribute__((noinline)) void draw(const Dropout& dropout, RowPosition position, int64_t first) {
      limit_ = static_cast<uint8_t>(dropout.threshold - 1);
      scale_ = dropout.scale;
      const auto block = static_cast<uint32_t>(first / 16);
      for (uint32_t i = 0; i < kDropoutSpan / 16; ++i)  // independent draws: the compiler vectorizes four of them
        draws_[i] = philox(dropout.seed, block + i, position.token, position.sequence, 0);
    }

    // Applies dropout to the 16 elements from column first + offset on: scales the kept ones and zeros the others.
    Lanes operator()(const Lanes& value, int64_t offset) const {
      return select(kept(offset), value * broadcast(scale_), broadcast(0.0f));
    }

   private:
    // Words are little-endian, so the span's bytes are in the order of its columns.
    Mask kept(int64_t offset) const { return above(reinterpret_cast<const uint8_t*>(draws_) + offset, limit_); }

    Draw draws_[kDropoutSpan / 16];
    uint8_t limit_;
    float scale_;
  };
};

// Used in place of Dropout if nothing is dropped.
struct NoDropout {
  struct Positions {
    RowPosition operator()(int64_t) const { return {}; }
  } positions;

  struct Span {
    void draw(const NoDropout&, RowPosition, int64_t) {}
    Lanes operator()(const Lanes& value, int64_t) const { return value; }
  };
};

// Calls body(Dropout), or body(NoDropout) if the params struct has no seed.
template <class Params, class Body>
inline Status with_dropout(const Params& p, Body body) {
  if (p.seed == nullptr) return body(NoDropout{});
  const RowPositions positions{p.cu_seqlens, p.sequences, p.tokens_per_sequence};
  return body(Dropout{static_cast<uint64_t>(*p.seed), positions, p.threshold, p.scale});
}

}  // namespace FASTTFM_ISA
}  // namespace fasttfm
