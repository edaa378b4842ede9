// A row of logits [V] on the CPU, for the losses over a vocabulary.
#pragma once

#include <limits>

#include "common/cpu/simd_math.h"

namespace fasttfm {
namespace FASTTFM_ISA {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Loads logits, adds their bias and multiplies by a factor. Lanes past the end are -infinity, so that they affect
// neither a maximum nor a sum of exponentials.
struct LogitRow {
  const float* logits;
  const float* bias;  // or null
  int64_t vocabulary;
  float factor = 1.0f;

  Lanes operator()(int64_t v, Full n) const { return at(v, n); }
  Lanes operator()(int64_t v, Tail n) const {
    float lanes[kLanes];
    store(lanes, at(v, n));
    for (int i = n.count; i < kLanes; ++i) lanes[i] = -kInfinity;
    return load(lanes);
  }
  float operator()(int64_t v) const { return (bias == nullptr ? logits[v] : logits[v] + bias[v]) * factor; }

 private:
  template <class Count>
  Lanes at(int64_t v, Count n) const {
    const Lanes x = load(logits + v, n);
    return (bias == nullptr ? x : x + load(bias + v, n)) * broadcast(factor);
  }
};

FASTTFM_KERNEL inline float largest_of(const LogitRow& row) {
  Lanes maxima = broadcast(-kInfinity);
  for_columns(row.vocabulary, [&](int64_t v, auto n) { maxima = larger(maxima, row(v, n)); });
  return largest(maxima);
}

// The sum of exp(x - shift).
FASTTFM_KERNEL inline float sum_of_exponentials(const LogitRow& row, float shift) {
  Lanes total = broadcast(0.0f);
  for_columns(row.vocabulary, [&](int64_t v, auto n) { total = total + exp(row(v, n) - broadcast(shift)); });
  return sum(total);
}

}  // namespace FASTTFM_ISA
}  // namespace fasttfm
