// Sixteen fp32 lanes, on any instruction set.
//
// `Lanes` holds 16 floats in as many native registers as that takes (NEON/SSE: 4, AVX2: 2, AVX-512: 1), so kernels are
// written once, keep four or more independent accumulators in flight where registers are narrow, and add up in the same
// order everywhere. Built on GCC/Clang vector extensions: no per-platform file.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __ARM_NEON
#include <arm_neon.h>
#endif

#include "common/dtype.h"
#include "common/isa.h"

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
typedef uint16_t RegH __attribute__((vector_size(kRegisterLanes * 2)));

struct Lanes {
  RegF r[kRegisters];
};

// Applies `f` register by register. The loops have constant bounds: the compiler keeps `Lanes` in registers.
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
  for (int i = 0; i < kRegisters; ++i) out.r[i] = RegF{} + value;
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

// Sum of the 16 lanes, always in the same order.
inline float sum(const Lanes& a) {
  float lane[kLanes];
  std::memcpy(lane, a.r, sizeof(lane));
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
  return lane[0];
}

// ---- storage formats -------------------------------------------------------------------------------------------------

inline RegU bits(RegF x) { return reinterpret_cast<RegU>(x); }
inline RegF floats(RegU x) { return reinterpret_cast<RegF>(x); }
inline RegU select(RegU mask, RegU yes, RegU no) { return (mask & yes) | (~mask & no); }

inline RegU zero_extend(RegH h) {
#ifdef __ARM_NEON  // GCC 12 takes __builtin_convertvector apart into scalars here
  return reinterpret_cast<RegU>(vmovl_u16(reinterpret_cast<uint16x4_t>(h)));
#else
  return __builtin_convertvector(h, RegU);
#endif
}

inline RegF widen(RegH h, bf16_t) { return floats(zero_extend(h) << 16); }

// Round to nearest, ties to even. A NaN becomes the NaN of all ones: a mask and an or, where keeping its payload costs twice that.
inline RegH narrow(RegF x, bf16_t) {
  const RegU u = bits(x);
  const RegU rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const RegU number = reinterpret_cast<RegU>(x == x);
  return __builtin_convertvector(rounded | ~number, RegH);
}

// fp16 has a narrower exponent: moving the bits up and multiplying by 2^112 rebiases it and makes subnormals exact.
inline RegF widen(RegH h, f16_t) {
  const RegU u = zero_extend(h);
  const RegF scaled = floats((u & 0x7fffu) << 13) * 0x1p112f;
  const RegU special = reinterpret_cast<RegU>((u & 0x7c00u) == 0x7c00u);  // infinity or NaN
  return floats(bits(scaled) | (special & 0x7f800000u) | ((u & 0x8000u) << 16));
}

// Adding and removing a power of two chosen from the exponent rounds to 11 bits (ties to even) and, below fp16's normal
// range, to multiples of its smallest subnormal; then the exponent is rebiased.
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
template <>
inline Lanes load<float>(const float* from) {
  Lanes out;
  for (int i = 0; i < kRegisters; ++i) std::memcpy(&out.r[i], from + i * kRegisterLanes, sizeof(RegF));
  return out;
}

template <class T>
inline void store(T* to, const Lanes& value) {
  for (int i = 0; i < kRegisters; ++i) {
    const RegH h = narrow(value.r[i], T{});
    std::memcpy(to + i * kRegisterLanes, &h, sizeof(h));
  }
}
template <>
inline void store<float>(float* to, const Lanes& value) {
  for (int i = 0; i < kRegisters; ++i) std::memcpy(to + i * kRegisterLanes, &value.r[i], sizeof(RegF));
}

// How many of a block's 16 lanes are in the row: all of them (known when compiling), or the last block's first few.
struct Full {};
struct Tail {
  int count;
};

// Calls body(column, lanes) for each block of up to 16 columns, with Full{} for all but a partial last block: a body written as a
// generic lambda compiles to a full-width loop and one tail.
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
// Lanes past the end read as zero.
template <class T>
inline Lanes load(const T* from, Tail tail) {
  T buffer[kLanes] = {};
  std::memcpy(buffer, from, static_cast<size_t>(tail.count) * sizeof(T));
  return load(buffer);
}
template <class T>
inline void store(T* to, const Lanes& value, Full) {
  store(to, value);
}
template <class T>
inline void store(T* to, const Lanes& value, Tail tail) {
  T buffer[kLanes];
  store(buffer, value);
  std::memcpy(to, buffer, static_cast<size_t>(tail.count) * sizeof(T));
}
// Zero in the lanes past the end: for terms that are not zero there by themselves (x - mean, say).
inline Lanes keep(const Lanes& value, Full) { return value; }
inline Lanes keep(const Lanes& value, Tail tail) {
  float buffer[kLanes];
  store(buffer, value);
  return load(buffer, tail);
}

}  // namespace FASTTFM_ISA
}  // namespace fasttfm
