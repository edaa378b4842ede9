#include "distillation_loss/op.h"

#include "binding.h"

namespace fasttfm {

// `student` and `teacher` are blocks of logits; the other tensors have an element for each row of the call, of which
// the block's start at `first_row`.
FASTTFM_FUNCTION(Status, distillation_loss_cpu, const Tensor& student, const Tensor& teacher,
                 const OptionalTensor& student_bias, const OptionalTensor& teacher_bias, const Tensor& counted,
                 const OptionalTensor& coefficients, const Tensor& losses, int64_t first_row, int64_t vocabulary,
                 float temperature, int gradient) {
  return cpu::distillation_loss({
      .student = student.as<float>(),
      .teacher = teacher.as<float>(),
      .student_bias = student_bias.as<float>(),
      .teacher_bias = teacher_bias.as<float>(),
      .counted = counted.from<int32_t>(first_row),
      .coefficients = coefficients.from<float>(first_row),
      .losses = losses.from<float>(first_row),
      .rows = student.shape[0],
      .vocabulary = vocabulary,
      .stride = student.strides[0],
      .temperature = temperature,
      .gradient = gradient,
      .threads = context.threads,
  });
}

}  // namespace fasttfm
