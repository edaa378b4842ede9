// Sixteen fp32 lanes, on any instruction set.
//
// `Lanes` holds 16 floats in as many native registers as needed (NEON/SSE: 4, AVX2: 2, AVX-512: 1). Kernels are written
// once, have four independent accumulators where registers are narrow, and add in the same order on every instruction
// set. It uses the vector extensions of GCC and Clang, so there are no per-platform files.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__ARM_NEON)
#include <arm_neon.h>
#elif defined(__AVX2__)
#include <immintrin.h>
#endif

#include "common/cpu/isa.h"
#include "common/dtype.h"

// Attribute of a function that loops over rows or columns: everything that it calls, including lambdas, is inlined.
// Without it the compiler may not inline large functions, and an accumulator that a lambda captures by reference is
// then kept in memory.
#ifndef FASTTFM_KERNEL
#define FASTTFM_KERNEL __attribute__((flatten))
#endif

namespace fasttfm {
namespace FASTTFM_ISA {

#if defined(__AVX512F__)
constexpr int kRegisterLanes = 16;
#elif defined(__AVX__)
constexpr int kRegisterLanes = 8;
#else
constexpr int kRegisterLanes = 4;
#endif
constexpr int kLanes = 16;
constexpr int kRegisters = kLanes / kRegisterLanes;

typedef float RegF __attribute__((vector_size(kRegisterLanes * 4)));
typedef uint32_t RegU __attribute__((vector_size(kRegisterLanes * 4)));
typedef int32_t RegI __attribute__((vector_size(kRegisterLanes * 4)));
typedef uint16_t RegH __attribute__((vector_size(kRegisterLanes * 2)));

struct Lanes {
  RegF r[kRegisters];
};
// The result of a comparison: in each lane all bits are set, or none.
struct Mask {
  RegU r[kRegisters];
};

inline RegU bits(RegF x) { return reinterpret_cast<RegU>(x); }
inline RegF floats(RegU x) { return reinterpret_cast<RegF>(x); }
// `yes` where the mask is all ones, `no` where it is all zeros.
inline RegU select(RegU mask, RegU yes, RegU no) { return (mask & yes) | (~mask & no); }
inline RegF select(RegU mask, RegF yes, RegF no) { return floats(select(mask, bits(yes), bits(no))); }

// Applies `f` to each register. The loops have constant bounds, so the compiler keeps `Lanes` in registers.
template <class F>
inline Lanes map(const Lanes& a, F f) {
  Lanes out;
  for (int i = 0; i < kRegisters; ++i) out.r[i] = f(a.r[i]);
  return out;
}
template <class F>
inline Lanes map(const Lanes& a, const Lanes& b, F f) {
  Lanes out;
  for (int i = 0; i < kRegisters; ++i) out.r[i] = f(a.r[i], b.r[i]);
  return out;
}

inline Lanes broadcast(float value) {
  Lanes out;
  for (int i = 0; i < kRegisters; ++i) out.r[i] = value - RegF{};  // a subtraction, because it keeps the sign of -0.0f
  return out;
}
inline Lanes operator+(const Lanes& a, const Lanes& b) {
  return map(a, b, [](RegF x, RegF y) { return x + y; });
}
inline Lanes operator-(const Lanes& a, const Lanes& b) {
  return map(a, b, [](RegF x, RegF y) { return x - y; });
}
inline Lanes operator*(const Lanes& a, const Lanes& b) {
  return map(a, b, [](RegF x, RegF y) { return x * y; });
}

inline Lanes operator/(const Lanes& a, const Lanes& b) {
  return map(a, b, [](RegF x, RegF y) { return x / y; });
}

inline Mask operator<(const Lanes& a, float b) {
  Mask out;
  for (int i = 0; i < kRegisters; ++i) out.r[i] = reinterpret_cast<RegU>(a.r[i] < b);
  return out;
}
inline Lanes select(const Mask& mask, const Lanes& yes, const Lanes& no) {
  Lanes out;
  for (int i = 0; i < kRegisters; ++i) out.r[i] = select(mask.r[i], yes.r[i], no.r[i]);
  return out;
}

// a * b, rounded separately. Without this, the compiler may fuse a multiplication with a following addition, which
// rounds once.
inline Lanes product(const Lanes& a, const Lanes& b) {
  Lanes out = a * b;
#if defined(__ARM_NEON)
  for (int i = 0; i < kRegisters; ++i) asm("" : "+w"(out.r[i]));
#elif defined(__x86_64__)
  for (int i = 0; i < kRegisters; ++i) asm("" : "+v"(out.r[i]));
#endif
  return out;
}

// The larger and the smaller of two values in each lane; x if x is NaN.
#if defined(__ARM_NEON)
inline RegF larger(RegF x, RegF y) { return vmaxq_f32(x, y); }
inline RegF smaller(RegF x, RegF y) { return vminq_f32(x, y); }
#else
inline RegF larger(RegF x, RegF y) { return select(reinterpret_cast<RegU>(x < y), y, x); }
inline RegF smaller(RegF x, RegF y) { return select(reinterpret_cast<RegU>(x > y), y, x); }
#endif
inline Lanes larger(const Lanes& a, const Lanes& b) {
  return map(a, b, [](RegF x, RegF y) { return larger(x, y); });
}

// Combines the 16 lanes in the same order on every instruction set: lane i with lane i+8, then i+4, i+2, i+1.
template <class Combine>
inline float fold(const Lanes& a, Combine combine) {
  typedef float Quad __attribute__((vector_size(16)));
  Quad all;
  if constexpr (kRegisters == 4) {  // avoids a round trip through memory
    all = combine(combine(a.r[0], a.r[2]), combine(a.r[1], a.r[3]));
  } else {
    Quad quad[4];
    std::memcpy(quad, a.r, sizeof(quad));
    all = combine(combine(quad[0], quad[2]), combine(quad[1], quad[3]));
  }
  return combine(combine(all[0], all[2]), combine(all[1], all[3]));
}
inline float sum(const Lanes& a) {
  return fold(a, [](auto x, auto y) { return x + y; });
}
// If one of the lanes is NaN, the result may be any lane.
inline float largest(const Lanes& a) {
  return fold(a, [](auto x, auto y) { return x > y ? x : y; });
}

// ---- storage formats: load() and store() of 16 elements -------------------------------------------------------------
//
// load() converts exactly. store() rounds to nearest, ties to even; a NaN stays a NaN, but its payload may change.

inline Lanes load(const float* from) {
  Lanes out;
  for (int i = 0; i < kRegisters; ++i) std::memcpy(&out.r[i], from + i * kRegisterLanes, sizeof(RegF));
  return out;
}
inline void store(float* to, const Lanes& value) {
  for (int i = 0; i < kRegisters; ++i) std::memcpy(to + i * kRegisterLanes, &value.r[i], sizeof(RegF));
}

#if defined(__ARM_NEON)

// A bf16 is the upper half of an fp32. Interleaving with zeros, and separating halves, use both vector pipes, while
// shifts would use only one.
inline Lanes load(const bf16_t* from) {
  Lanes out;
  const uint16x8_t zero = vdupq_n_u16(0);
  for (int i = 0; i < kRegisters; i += 2) {
    const uint16x8_t upper = vld1q_u16(&from->bits + i * kRegisterLanes);
    out.r[i] = reinterpret_cast<RegF>(vzip1q_u16(zero, upper));
    out.r[i + 1] = reinterpret_cast<RegF>(vzip2q_u16(zero, upper));
  }
  return out;
}
inline void store(bf16_t* to, const Lanes& value) {
  for (int i = 0; i < kRegisters; i += 2) {
    const auto first = reinterpret_cast<uint16x8_t>(value.r[i]), second = reinterpret_cast<uint16x8_t>(value.r[i + 1]);
    const uint16x8_t lower = vuzp1q_u16(first, second), upper = vuzp2q_u16(first, second);
    // Rounds up if the discarded part is more than half, or exactly half and the part that is kept is odd.
    const uint16x8_t up = vcgtq_u16(vorrq_u16(lower, vandq_u16(upper, vdupq_n_u16(1))), vdupq_n_u16(0x8000));
    const uint16x8_t number = vuzp1q_u16(reinterpret_cast<uint16x8_t>(value.r[i] == value.r[i]),
                                         reinterpret_cast<uint16x8_t>(value.r[i + 1] == value.r[i + 1]));
    vst1q_u16(&to->bits + i * kRegisterLanes, vornq_u16(vsubq_u16(upper, up), number));
  }
}

inline Lanes load(const f16_t* from) {
  Lanes out;
  for (int i = 0; i < kRegisters; ++i)
    out.r[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&from->bits + i * kRegisterLanes)));
  return out;
}
inline void store(f16_t* to, const Lanes& value) {
  for (int i = 0; i < kRegisters; ++i)
    vst1_u16(&to->bits + i * kRegisterLanes, vreinterpret_u16_f16(vcvt_f16_f32(value.r[i])));
}

#else

inline RegF widen(RegH h, bf16_t) { return floats(__builtin_convertvector(h, RegU) << 16); }
inline RegH narrow(RegF x, bf16_t) {
  const RegU u = bits(x);
  const RegU rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const RegU number = reinterpret_cast<RegU>(x == x);
  return __builtin_convertvector(rounded | ~number, RegH);
}

#if defined(__AVX512F__)  // masked forms, because GCC 12 warns about the undefined operand of the plain ones

inline RegF widen(RegH h, f16_t) {
  return reinterpret_cast<RegF>(_mm512_maskz_cvtph_ps(0xffff, reinterpret_cast<__m256i>(h)));
}
inline RegH narrow(RegF x, f16_t) {
  return reinterpret_cast<RegH>(_mm512_maskz_cvtps_ph(0xffff, reinterpret_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT));
}

#elif defined(__F16C__)

inline RegF widen(RegH h, f16_t) { return reinterpret_cast<RegF>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(h))); }
inline RegH narrow(RegF x, f16_t) {
  return reinterpret_cast<RegH>(_mm256_cvtps_ph(reinterpret_cast<__m256>(x), _MM_FROUND_TO_NEAREST_INT));
}

#else

// fp16 has a narrower exponent. Shifting the bits up and multiplying by 2^112 rebiases it, and is exact for subnormals
// too.
inline RegF widen(RegH h, f16_t) {
  const RegU u = __builtin_convertvector(h, RegU);
  const RegF scaled = floats((u & 0x7fffu) << 13) * 0x1p112f;
  const RegU special = reinterpret_cast<RegU>((u & 0x7c00u) == 0x7c00u);  // infinity or NaN
  return floats(bits(scaled) | (special & 0x7f800000u) | ((u & 0x8000u) << 16));
}

// In fp16's normal range the mantissa is rounded as an integer and the exponent is rebiased. Below that range, adding
// 0.5 rounds to multiples of the smallest subnormal.
inline RegH narrow(RegF x, f16_t) {
  const RegU u = bits(x);
  const RegU sign = (u >> 16) & 0x8000u;
  const RegU magnitude = u & 0x7fffffffu;
  const RegU normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  const RegU subnormal = bits(floats(magnitude) + 0.5f) - 0x3f000000u;  // the sum's last place is 2^-24
  const RegU tiny = reinterpret_cast<RegU>(magnitude < 0x38800000u);    // below 2^-14
  const RegU huge = reinterpret_cast<RegU>(magnitude >= 0x477ff000u);   // rounds to infinity
  const RegU nan = reinterpret_cast<RegU>(magnitude > 0x7f800000u);
  RegU half = select(tiny, subnormal, normal);
  half = select(huge, RegU{} + 0x7c00u, half);
  half = select(nan, RegU{} + 0x7e00u, half);
  return __builtin_convertvector(half | sign, RegH);
}

#endif

template <class T>
inline Lanes load(const T* from) {
  Lanes out;
  for (int i = 0; i < kRegisters; ++i) {
    RegH h;
    std::memcpy(&h, from + i * kRegisterLanes, sizeof(h));
    out.r[i] = widen(h, T{});
  }
  return out;
}
template <class T>
inline void store(T* to, const Lanes& value) {
  for (int i = 0; i < kRegisters; ++i) {
    const RegH h = narrow(value.r[i], T{});
    std::memcpy(to + i * kRegisterLanes, &h, sizeof(h));
  }
}

#endif

// Prefetches memory for a read in the near future.
template <class T>
inline void prefetch(const T* from) {
  __builtin_prefetch(from);
}

// ---- rows of any length ---------------------------------------------------------------------------------------------

// The number of lanes of a block of 16 columns that are inside of the row: all of them, or the first `count` in the
// row's last block.
struct Full {};
struct Tail {
  int count;
};

// Calls body(column, lanes) for each block of up to 16 columns, with Full{} for all but a partial last block. A body
// that is a generic lambda compiles to a full-width loop and a separate tail.
template <class Body>
inline void for_columns(int64_t columns, Body body) {
  int64_t column = 0;
  for (; column + kLanes <= columns; column += kLanes) body(column, Full{});
  if (column < columns) body(column, Tail{static_cast<int>(columns - column)});
}

template <class T>
inline Lanes load(const T* from, Full) {
  return load(from);
}
// A kernel has a copy of its body for a row's tail. On x86 without AVX2, where sixteen lanes are four registers and
// 16-bit types have no instructions, tails call functions that are not inlined: that takes a third off the compiler's
// time, and rows whose length is not a multiple of 16 take up to a quarter longer.
#if defined(__x86_64__) && !defined(__AVX2__)
#define FASTTFM_TAIL __attribute__((noinline))
#else
#define FASTTFM_TAIL inline
#endif
// Lanes past the end are zero.
template <class T>
FASTTFM_TAIL Lanes load(const T* from, Tail tail) {
  T buffer[kLanes] = {};
  std::memcpy(buffer, from, static_cast<size_t>(tail.count) * sizeof(T));
  return load(buffer);
}
template <class T>
inline void store(T* to, const Lanes& value, Full) {
  store(to, value);
}
template <class T>
FASTTFM_TAIL void store(T* to, const Lanes& value, Tail tail) {
  T buffer[kLanes];
  store(buffer, value);
  std::memcpy(to, buffer, static_cast<size_t>(tail.count) * sizeof(T));
}
constexpr uint32_t kLaneIndex[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
// Zeros the lanes past the end, for terms that would not be zero there (e.g. x - mean).
inline Lanes keep(const Lanes& value, Full) { return value; }
inline Lanes keep(const Lanes& value, Tail tail) {
  Lanes out;
  for (int i = 0; i < kRegisters; ++i) {
    RegU index;
    std::memcpy(&index, kLaneIndex + i * kRegisterLanes, sizeof(index));
    const RegU inside = reinterpret_cast<RegU>(index < static_cast<uint32_t>(tail.count));
    out.r[i] = floats(bits(value.r[i]) & inside);
  }
  return out;
}

}  // namespace FASTTFM_ISA
}  // namespace fasttfm
