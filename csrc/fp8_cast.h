// The cast of a result to FP8, as a parameter of the functions that write it.
#pragma once

#include "binding.h"

namespace fasttfm {

// `as_rows` and `as_columns` get the result and its transpose; `amax` is updated. `e5m2`: not 0 for e5m2, 0 for e4m3.
#define FP8_CAST(F) \
  F(const Tensor&, scale) F(const Tensor&, amax) F(const Tensor&, as_rows) F(const Tensor&, as_columns) F(int, e5m2)
FASTTFM_STRUCT(Fp8Cast, FP8_CAST)
#undef FP8_CAST

}  // namespace fasttfm
