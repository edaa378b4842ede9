// Applies a function to each element of an array. Tests use it to reach the building blocks of the CPU kernels:
// identity from one dtype to another tests load() and store(); the others, for fp32 only, are the functions of
// simd_math.h.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/status.h"

namespace fasttfm {

enum class ElementFunction : int32_t { identity = 0, exp = 1, erf = 2, tanh = 3, exp2_in_range = 4 };

struct Elementwise {
  const void* x;  // [count], x_dtype
  void* y;        // [count], y_dtype
  int64_t count;
  DType x_dtype;
  DType y_dtype;
  ElementFunction function;
  int threads;
};

namespace cpu {
Status elementwise(const Elementwise&);
}  // namespace cpu

}  // namespace fasttfm
