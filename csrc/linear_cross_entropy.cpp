#include "linear_cross_entropy/op.h"

#include "binding.h"

namespace fasttfm {

#define FIELD(MEMBER) FASTTFM_FIELD(LinearCrossEntropy, MEMBER)

FASTTFM_BINDING(linear_cross_entropy) {
  bind_launcher(module, "linear_cross_entropy_cpu", &cpu::linear_cross_entropy, FIELD(logits), FIELD(bias),
                FIELD(labels), FIELD(coefficients), FIELD(seed), FIELD(losses), FIELD(correct), FIELD(samples),
                FIELD(rows), FIELD(first_row), FIELD(vocabulary), FIELD(stride), FIELD(ignore_index),
                FIELD(label_smoothing), FIELD(z_loss), FIELD(temperature), FIELD(gradient), FIELD(threads));
}

}  // namespace fasttfm
