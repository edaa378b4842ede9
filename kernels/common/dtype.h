// Element types that kernels read and write. Python passes the numbers below (see fasttfm/_native.py).
#pragma once

#include <cstdint>

namespace fasttfm {

enum class DType : int32_t { f32 = 0, bf16 = 1, f16 = 2 };

// Storage only: arithmetic is always fp32; the conversions are in cpu/simd.h and cuda/convert.cuh.
struct bf16_t {
  uint16_t bits;
};
struct f16_t {
  uint16_t bits;
};

// Calls `body(T{})` with the C++ type of `dtype` and returns its result.
template <class Body, class Result>
inline Result with_dtype(DType dtype, Result unknown, Body body) {
  switch (dtype) {
    case DType::f32: return body(float{});
    case DType::bf16: return body(bf16_t{});
    case DType::f16: return body(f16_t{});
  }
  return unknown;
}

}  // namespace fasttfm
