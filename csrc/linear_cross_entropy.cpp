#include "linear_cross_entropy/op.h"

#include "binding.h"

namespace fasttfm {

// `logits` is a block of rows; labels, coefficients and outputs have an element for each row of the call, of which the
// block's start at `first_row`.
FASTTFM_FUNCTION(Status, linear_cross_entropy_cpu, const Tensor& logits, const OptionalTensor& bias,
                 const Tensor& labels, const OptionalTensor& coefficients, const OptionalTensor& seed,
                 const Tensor& losses, const OptionalTensor& correct, const OptionalTensor& samples, int64_t first_row,
                 int64_t vocabulary, int64_t ignore_index, float label_smoothing, float z_loss, float temperature,
                 int gradient) {
  return cpu::linear_cross_entropy({
      .logits = logits.as<float>(),
      .bias = bias.as<float>(),
      .labels = labels.from<int64_t>(first_row),
      .coefficients = coefficients.from<float>(first_row),
      .seed = seed.as<int64_t>(),
      .losses = losses.from<float>(first_row),
      .correct = correct.from<bool>(first_row),
      .samples = samples.from<int64_t>(first_row),
      .rows = logits.shape[0],
      .first_row = first_row,
      .vocabulary = vocabulary,
      .stride = logits.strides[0],
      .ignore_index = ignore_index,
      .label_smoothing = label_smoothing,
      .z_loss = z_loss,
      .temperature = temperature,
      .gradient = gradient,
      .threads = context.threads,
  });
}

}  // namespace fasttfm
