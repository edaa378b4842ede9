#include "distillation_loss/op.h"

#include "binding.h"

namespace fasttfm {

#define FIELD(MEMBER) FASTTFM_FIELD(DistillationLoss, MEMBER)

FASTTFM_BINDING(distillation_loss) {
  bind_launcher(module, "distillation_loss_cpu", &cpu::distillation_loss, FIELD(student), FIELD(teacher),
                FIELD(student_bias), FIELD(teacher_bias), FIELD(counted), FIELD(coefficients), FIELD(losses),
                FIELD(rows), FIELD(vocabulary), FIELD(stride), FIELD(temperature), FIELD(gradient), FIELD(threads));
}

}  // namespace fasttfm
