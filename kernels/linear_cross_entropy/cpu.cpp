// Cross entropy of a block of logits on the CPU, with three or four passes over each row.
#include "linear_cross_entropy/op.h"

#include <cmath>

#include "common/cpu/parallel.h"
#include "common/philox.h"
#include "vocabulary/cpu_row.h"

namespace fasttfm {
namespace FASTTFM_ISA {
namespace {

constexpr uint32_t kSamplingCounter = 0xffffffffu;  // kernels/vocabulary/cross_entropy.py

FASTTFM_KERNEL float sum_of_logits(const LogitRow& row) {
  Lanes total = broadcast(0.0f);
  for_columns(row.vocabulary, [&](int64_t v, auto n) { total = total + keep(row(v, n), n); });
  return sum(total);
}

// Whether the label is the argmax: every other token has a smaller logit or, after the label, an equal one. False if
// there is a NaN.
bool is_correct(const LogitRow& row, int64_t label) {
  const float at_label = row(label);
  for (int64_t v = 0; v < row.vocabulary; ++v) {
    const float x = row(v);
    if (!(x < at_label || (x == at_label && v >= label))) return false;
  }
  return true;
}

// The first token at which the running sum of exp(x - largest) exceeds the target.
FASTTFM_KERNEL int64_t sample(const LogitRow& row, float largest, float target) {
  int64_t token = row.vocabulary - 1;
  float before = 0.0f;
  bool sampled = false;
  for_columns(row.vocabulary, [&](int64_t v, auto n) {
    if (sampled) return;
    const Lanes shares = exp(row(v, n) - broadcast(largest));
    const float after = before + sum(shares);
    if (target < after) {
      float lanes[kLanes];
      store(lanes, shares);
      int lane = 0;
      for (float running = before + lanes[0]; lane < kLanes - 1 && running <= target; running += lanes[lane]) ++lane;
      token = v + lane < row.vocabulary ? v + lane : row.vocabulary - 1;
      sampled = true;
    }
    before = after;
  });
  return token;
}

inline float uniform(uint64_t seed, int64_t row) {
  const auto low = static_cast<uint32_t>(row), high = static_cast<uint32_t>(row >> 32);
  return (static_cast<float>(philox(seed, low, high, 0, kSamplingCounter).word[0] >> 9) + 0.5f) * 0x1p-23f;
}

// g = factor * (exp(x - lse) * (1 + 2 z lse) - s / V - (1 - s) [v = label]), where exp(x - lse) is computed as exp(x -
// largest) / total.
FASTTFM_KERNEL void write_gradient(const LinearCrossEntropy& p, int64_t n, float largest, float total) {
  float* g = p.logits + n * p.stride;
  const LogitRow row{g, p.bias, p.vocabulary};
  const float factor = p.coefficients != nullptr ? p.coefficients[n] : 1.0f;
  const float lse = largest + std::log(total);
  const Lanes slope = broadcast(factor * (1.0f + 2.0f * p.z_loss * lse) / total);
  const Lanes spread = broadcast(factor * p.label_smoothing / static_cast<float>(p.vocabulary));
  for_columns(p.vocabulary, [&](int64_t v, auto count) {
    store(g + v, exp(row(v, count) - broadcast(largest)) * slope - spread, count);
  });
  g[p.labels[n]] -= factor * (1.0f - p.label_smoothing);
  std::memset(g + p.vocabulary, 0, static_cast<size_t>(p.stride - p.vocabulary) * sizeof(float));
}

void ignored_row(const LinearCrossEntropy& p, int64_t n) {
  p.losses[n] = 0.0f;
  if (p.correct != nullptr) p.correct[n] = false;
  if (p.samples != nullptr) p.samples[n] = p.ignore_index;
  if (p.gradient) std::memset(p.logits + n * p.stride, 0, static_cast<size_t>(p.stride) * sizeof(float));
}

void counted_row(const LinearCrossEntropy& p, int64_t n) {
  const LogitRow row{p.logits + n * p.stride, p.bias, p.vocabulary};
  const int64_t label = p.labels[n];
  const float largest = largest_of(row);
  const float total = sum_of_exponentials(row, largest);
  const float at_label = row(label), log_total = std::log(total), lse = largest + log_total;
  float loss = (largest - at_label) + log_total + p.z_loss * lse * lse;
  if (p.label_smoothing != 0.0f)
    loss += p.label_smoothing * (at_label - sum_of_logits(row) / static_cast<float>(p.vocabulary));
  p.losses[n] = loss;
  if (p.correct != nullptr) p.correct[n] = is_correct(row, label);
  if (p.samples != nullptr) {
    LogitRow tempered = row;
    tempered.factor = 1.0f / p.temperature;
    const float top = largest * tempered.factor;
    const float end = p.temperature == 1.0f ? total : sum_of_exponentials(tempered, top);
    p.samples[n] = sample(tempered, top, uniform(static_cast<uint64_t>(*p.seed), p.first_row + n) * end);
  }
  if (p.gradient) write_gradient(p, n, largest, total);
}

}  // namespace

Status linear_cross_entropy(const LinearCrossEntropy& p) {
  if (p.vocabulary < 1) return bad_size("linear_cross_entropy: vocabulary must be at least 1");
  if (p.stride < p.vocabulary) return bad_size("linear_cross_entropy: stride must be at least vocabulary");
  parallel_items(p.rows, p.threads, [&](int64_t n) {
    if (p.labels[n] == p.ignore_index)
      ignored_row(p, n);
    else
      counted_row(p, n);
  });
  return {};
}

}  // namespace FASTTFM_ISA
}  // namespace fasttfm

FASTTFM_CPU_LAUNCHER(linear_cross_entropy, LinearCrossEntropy)
