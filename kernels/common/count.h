// Element counts with overflow checks. They are used for workspace sizes, which are products of several arguments that
// a caller may choose freely.
#pragma once

#include <cstdint>

#include "common/cpu/isa.h"

namespace fasttfm {

// Represents a count that does not fit into int64. The binding raises an error for it.
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
