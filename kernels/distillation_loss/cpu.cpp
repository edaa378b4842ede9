// Divergence of a block of student logits from the teacher's on the CPU: three sweeps over each pair of rows.
#include "distillation_loss/op.h"

#include <cmath>

#include "common/parallel.h"
#include "common/vocabulary_row.h"

namespace fasttfm {
namespace FASTTFM_ISA {
namespace {

float log_sum_exp(const LogitRow& row) {
  const float largest = largest_of(row);
  return largest + std::log(sum_of_exponentials(row, largest));
}

// The sum of q * (log q - log p); and T * factor * (p - q) over the student's logits, where the gradient is wanted.
FASTTFM_KERNEL float divergence(const DistillationLoss& p, int64_t n, float* gradient, float factor) {
  const float inverse = 1.0f / p.temperature;
  const LogitRow student{p.student + n * p.stride, p.student_bias, p.vocabulary, inverse};
  const LogitRow teacher{p.teacher + n * p.stride, p.teacher_bias, p.vocabulary, inverse};
  const Lanes student_lse = broadcast(log_sum_exp(student)), teacher_lse = broadcast(log_sum_exp(teacher));
  const Lanes slope = broadcast(p.temperature * factor);
  Lanes total = broadcast(0.0f);
  for_columns(p.vocabulary, [&](int64_t v, auto count) {
    const Lanes log_p = student(v, count) - student_lse, log_q = teacher(v, count) - teacher_lse;
    const Lanes q = exp(log_q);
    const Lanes term = q * (log_q - log_p);
    total = total + map(q, term, [](RegF share, RegF r) {  // 0 * infinity is not 0 here
              return select(reinterpret_cast<RegU>(share == 0.0f), RegF{}, r);
            });
    if (gradient != nullptr) store(gradient + v, slope * (exp(log_p) - q), count);
  });
  return sum(total);
}

void distil_row(const DistillationLoss& p, int64_t n) {
  float* gradient = p.gradient ? p.student + n * p.stride : nullptr;
  if (p.counted[n] == 0) {
    p.losses[n] = 0.0f;
    if (gradient != nullptr) std::memset(gradient, 0, static_cast<size_t>(p.stride) * sizeof(float));
    return;
  }
  const float factor = p.coefficients != nullptr ? p.coefficients[n] : 1.0f;
  p.losses[n] = p.temperature * p.temperature * divergence(p, n, gradient, factor);
  if (gradient != nullptr)
    std::memset(gradient + p.vocabulary, 0, static_cast<size_t>(p.stride - p.vocabulary) * sizeof(float));
}

}  // namespace

Status distillation_loss(const DistillationLoss& p) {
  if (p.vocabulary < 1) return bad_size("distillation_loss: vocabulary must be at least 1");
  if (p.stride < p.vocabulary) return bad_size("distillation_loss: stride must be at least vocabulary");
  parallel_items(p.rows, p.threads, [&](int64_t n) { distil_row(p, n); });
  return {};
}

}  // namespace FASTTFM_ISA
}  // namespace fasttfm

FASTTFM_CPU_LAUNCHER(distillation_loss, DistillationLoss)
