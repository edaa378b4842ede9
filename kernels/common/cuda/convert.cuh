// Loads, stores and conversions of eight elements at a time: one 16-byte access for 16-bit types, two for fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/dtype.h"

namespace fasttfm {
namespace cuda {

constexpr int kVector = 8;  // elements per vector; sizes and strides must be multiples of it

// A vector in its storage type, which takes fewer registers than fp32 until it is used.
template <class T>
struct alignas(16) Packed {
  T element[kVector];
};

template <class T>
__device__ __forceinline__ Packed<T> load_packed(const T* from) {
  return *reinterpret_cast<const Packed<T>*>(from);
}
template <class T>
__device__ __forceinline__ void store_packed(T* to, const Packed<T>& value) {
  *reinterpret_cast<Packed<T>*>(to) = value;
}

// Loads from global memory with predicated instructions; if not `loads`, every word is `otherwise`. A branch around
// each vector of a row would cost about as much as the conversion of its elements.
template <class T>
__device__ __forceinline__ Packed<T> load_packed_if(bool loads, const T* from, uint32_t otherwise = 0) {
  Packed<T> value;
  auto* word = reinterpret_cast<uint32_t*>(&value);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(value)) / 16; ++i)
    asm("{ .reg .pred p; setp.ne.b32 p, %4, 0; mov.b32 %0, %6; mov.b32 %1, %6; mov.b32 %2, %6; mov.b32 %3, %6;"
        " @p ld.global.v4.b32 {%0, %1, %2, %3}, [%5]; }"
        : "=&r"(word[4 * i]), "=&r"(word[4 * i + 1]), "=&r"(word[4 * i + 2]), "=&r"(word[4 * i + 3])
        : "r"(static_cast<int>(loads)), "l"(reinterpret_cast<const char*>(from) + 16 * i), "r"(otherwise));
  return value;
}
template <class T>
__device__ __forceinline__ void store_packed_if(bool stores, T* to, const Packed<T>& value) {
  const auto* word = reinterpret_cast<const uint32_t*>(&value);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(value)) / 16; ++i)
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %0, 0; @p st.global.v4.b32 [%1], {%2, %3, %4, %5}; }" ::"r"(
                     static_cast<int>(stores)),
                 "l"(reinterpret_cast<char*>(to) + 16 * i), "r"(word[4 * i]), "r"(word[4 * i + 1]),
                 "r"(word[4 * i + 2]), "r"(word[4 * i + 3])
                 : "memory");
}

// A load from shared memory that the compiler must not merge with an earlier load of the same address, so that the
// value occupies no registers in between.
template <class T>
__device__ __forceinline__ Packed<T> reload_packed(const Packed<T>* shared) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  Packed<T> value;
  auto* word = reinterpret_cast<uint32_t*>(&value);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(value)) / 16; ++i)
    asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[4 * i]), "=r"(word[4 * i + 1]), "=r"(word[4 * i + 2]), "=r"(word[4 * i + 3])
                 : "r"(address + 16 * i));
  return value;
}

__device__ __forceinline__ uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Starts a cp.async copy of one vector to shared memory, which is complete after cp_async_wait<N>() in the same thread.
template <class T>
__device__ __forceinline__ void cp_async(uint32_t shared, const T* global) {
#pragma unroll
  for (int offset = 0; offset < static_cast<int>(sizeof(Packed<T>)); offset += 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared + offset),
                 "l"(reinterpret_cast<const char*>(global) + offset)
                 : "memory");
}
// cp.async.commit_group: the thread's copies since the last call form a group.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most PENDING of the thread's latest groups are in flight.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Conversions between fp32 and the two elements of a 32-bit word, of which the low half has the lower address. They are
// written for words, because in conversions of single elements the compiler extracts each half twice.
__device__ __forceinline__ float2 widen_word(uint32_t word, bf16_t) {
  return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}
__device__ __forceinline__ float2 widen_word(uint32_t word, f16_t) {
  return __half22float2(*reinterpret_cast<const __half2*>(&word));
}
__device__ __forceinline__ uint32_t narrow_word(float low, float high, bf16_t) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ uint32_t narrow_word(float low, float high, f16_t) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

template <class T>
__device__ __forceinline__ void widen(const Packed<T>& from, float (&to)[kVector]) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) to[i] = from.element[i];
  } else {
    const uint4 words = *reinterpret_cast<const uint4*>(&from);
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = widen_word(word[i], T{});
      to[2 * i] = pair.x;
      to[2 * i + 1] = pair.y;
    }
  }
}

template <class T>
__device__ __forceinline__ Packed<T> narrow(const float (&from)[kVector]) {
  Packed<T> to;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) to.element[i] = from[i];
  } else {
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = narrow_word(from[2 * i], from[2 * i + 1], T{});
    *reinterpret_cast<uint4*>(&to) = make_uint4(word[0], word[1], word[2], word[3]);
  }
  return to;
}

__device__ __forceinline__ uint32_t word_of(float value, float) { return __float_as_uint(value); }
template <class T>
__device__ __forceinline__ uint32_t word_of(float value, T type) {
  return narrow_word(value, value, type);
}

// Loads a parameter vector; `fallback` if the pointer is null or `loads` is false.
template <class P>
__device__ __forceinline__ void load_parameter(bool loads, const P* from, int offset, float fallback,
                                               float (&to)[kVector]) {
  widen(load_packed_if(loads && from != nullptr, from + offset, word_of(fallback, P{})), to);
}

// Loads a parameter vector whose type is only known at run time.
__device__ __forceinline__ void load_parameter(const void* from, DType dtype, int offset, float fallback,
                                               float (&to)[kVector]) {
  if (dtype == DType::f32)
    load_parameter(true, static_cast<const float*>(from), offset, fallback, to);
  else if (dtype == DType::bf16)
    load_parameter(true, static_cast<const bf16_t*>(from), offset, fallback, to);
  else
    load_parameter(true, static_cast<const f16_t*>(from), offset, fallback, to);
}

// Stores one element of a tensor whose type is only known at run time.
__device__ __forceinline__ void store_as(DType dtype, void* to, int64_t index, float value) {
  if (dtype == DType::f32)
    static_cast<float*>(to)[index] = value;
  else if (dtype == DType::bf16)
    static_cast<bf16_t*>(to)[index].bits = static_cast<uint16_t>(narrow_word(value, 0.0f, bf16_t{}));
  else
    static_cast<f16_t*>(to)[index].bits = static_cast<uint16_t>(narrow_word(value, 0.0f, f16_t{}));
}

}  // namespace cuda
}  // namespace fasttfm
