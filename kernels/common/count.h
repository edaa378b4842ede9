// Counts of elements that cannot wrap. Workspace sizes that are products of several numbers are computed with them: a
// caller may pass any numbers.
#pragma once

#include <cstdint>

#include "common/cpu/isa.h"

namespace fasttfm {

// A count that int64 does not hold. The binding turns it into an error.
constexpr int64_t kTooMany = INT64_MAX;

namespace FASTTFM_ISA {

struct Count {
  int64_t value;

  constexpr Count(int64_t number) : value(number) {}  // not explicit, so that numbers and counts mix
};

inline Count operator+(Count a, Count b) {
  int64_t sum;
  return __builtin_add_overflow(a.value, b.value, &sum) ? kTooMany : sum;
}
inline Count operator*(Count a, Count b) {
  int64_t product;
  return __builtin_mul_overflow(a.value, b.value, &product) ? kTooMany : product;
}

}  // namespace FASTTFM_ISA
}  // namespace fasttfm
