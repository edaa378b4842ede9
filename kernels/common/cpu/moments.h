// Mean and variance of a row in fp32, with the accuracy of a two-pass algorithm but usually in one pass.
#pragma once

#include <cstdint>

#include "common/cpu/simd.h"

namespace fasttfm {
namespace FASTTFM_ISA {

// The mean is mean + correction, where correction is the rounding error of mean. It matters if the mean is large and
// the variance small: then x - mean is exact, and (x - mean) - correction has the precision of the row.
struct Moments {
  float mean, correction, variance;
};

// `row(column, lanes)` returns a block of the row, with zeros past its end as in load().
//
// The deviations d are relative to a pivot: mean = pivot + mean(d), variance = mean(d^2) - mean(d)^2. The cancellation
// is harmless as long as mean(d)^2 is at most the variance. The mean of the row's first block satisfies this for all
// but unusual rows; for those, a second pass uses the mean from the first pass as the pivot.
template <class Row>
inline Moments moments(int64_t columns, Row row) {
  const float inverse_columns = 1.0f / static_cast<float>(columns);
  const int64_t first = columns < kLanes ? columns : kLanes;
  float pivot = 0.0f;
  for_columns(first, [&](int64_t c, auto n) { pivot = sum(row(c, n)) / static_cast<float>(first); });

  Moments out{};
  for (int pass = 0; pass < 2; ++pass) {
    Lanes deviations = broadcast(0.0f), squares = broadcast(0.0f);
    for_columns(columns, [&](int64_t c, auto n) {
      const Lanes d = keep(row(c, n) - broadcast(pivot), n);
      deviations = deviations + d;
      squares = squares + d * d;
    });
    const float shift = sum(deviations) * inverse_columns;
    const float mean_square = sum(squares) * inverse_columns;
    out.mean = pivot + shift;
    out.correction = (pivot - out.mean) + shift;
    out.variance = mean_square - shift * shift;
    if (shift * shift <= out.variance) break;
    pivot = out.mean;
  }
  if (out.variance < 0.0f) out.variance = 0.0f;
  return out;
}

}  // namespace FASTTFM_ISA
}  // namespace fasttfm
