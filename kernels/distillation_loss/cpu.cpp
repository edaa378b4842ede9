// Divergence of a block of student logits from the teacher's on the CPU, with three passes over each pair of rows.
#include "distillation_loss/op.h"

#include <cmath>

#include "common/cpu/parallel.h"
#include "vocabulary/cpu_row.h"

namespace fasttfm {
namespace FASTTFM_ISA {
namespace {

// Returns the sum of q * (log q - log p). If `gradient` is not null, writes T * factor * (p - q) to it.
FASTTFM_KERNEL float divergence(const DistillationLoss& p, int64_t n, float* gradient, float factor) {
  const float inverse = 1.0f / p.temperature;
  const LogitRow student{p.student + n * p.stride, p.student_bias, p.vocabulary, inverse};
  const LogitRow teacher{p.teacher + n * p.stride, p.teacher_bias, p.vocabulary, inverse};
  const float student_largest = largest_of(student), teacher_largest = largest_of(teacher);
  const float student_sum = sum_of_exponentials(student, student_largest);
  const float teacher_sum = sum_of_exponentials(teacher, teacher_largest);
  const Lanes offset = broadcast(std::log(student_sum) - std::log(teacher_sum));
  const Lanes p_scale = broadcast(1.0f / student_sum), q_scale = broadcast(1.0f / teacher_sum);
  const Lanes slope = broadcast(p.temperature * factor);
  Lanes total = broadcast(0.0f);
  for_columns(p.vocabulary, [&](int64_t v, auto count) {
    const Lanes s = student(v, count) - broadcast(student_largest), t = teacher(v, count) - broadcast(teacher_largest);
    const Lanes q = exp(t) * q_scale;
    total = total + map(q, q * ((t - s) + offset), [](RegF share, RegF term) {  // 0 * infinity is not 0
              return select(reinterpret_cast<RegU>(share == 0.0f), RegF{}, term);
            });
    // p is rounded in the same way as q, so that their difference is exactly zero where it should be.
    if (gradient != nullptr) store(gradient + v, slope * (product(exp(s), p_scale) - q), count);
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
