// Eight elements at a time between memory and fp32 registers: one 16-byte access for 16-bit types, two for fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/dtype.h"

namespace fasttfm {
namespace cuda {

constexpr int kVector = 8;  // elements per vector, and what sizes and strides must be multiples of

// A vector as it lies in memory: kept packed while it waits, to save registers.
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

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(bf16_t x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }
__device__ __forceinline__ float widen(f16_t x) { return __half2float(__ushort_as_half(x.bits)); }

__device__ __forceinline__ void narrow(float x, float& to) { to = x; }
__device__ __forceinline__ void narrow(float x, bf16_t& to) { to.bits = __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
__device__ __forceinline__ void narrow(float x, f16_t& to) { to.bits = __half_as_ushort(__float2half_rn(x)); }

template <class T>
__device__ __forceinline__ void widen(const Packed<T>& from, float (&to)[kVector]) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) to[i] = widen(from.element[i]);
}
template <class T>
__device__ __forceinline__ Packed<T> narrow(const float (&from)[kVector]) {
  Packed<T> to;
#pragma unroll
  for (int i = 0; i < kVector; ++i) narrow(from[i], to.element[i]);
  return to;
}

// A parameter vector whose type is known at run time only; `fallback` stands in for a null pointer. The branch is the same for all threads.
__device__ __forceinline__ void load_parameter(const void* from, DType dtype, int64_t offset, float fallback,
                                               float (&to)[kVector]) {
  if (from == nullptr) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) to[i] = fallback;
  } else if (dtype == DType::f32) {
    widen(load_packed(static_cast<const float*>(from) + offset), to);
  } else if (dtype == DType::bf16) {
    widen(load_packed(static_cast<const bf16_t*>(from) + offset), to);
  } else {
    widen(load_packed(static_cast<const f16_t*>(from) + offset), to);
  }
}

}  // namespace cuda
}  // namespace fasttfm
