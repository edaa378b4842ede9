#include "gated_activation/op.h"

#include "binding.h"
#include "common/cuda/device.h"

namespace fasttfm {

namespace {

Status forward(const Place& place, const Tensor& x, const OptionalTensor& bias, const Tensor& y, int64_t activation,
               int64_t gate_first) {
  if (!x.has_rows()) return bad_size("gated_activation: x must have adjacent columns and one stride between rows");
  const GatedActivationForward params{
      .x = x.data,
      .bias = bias.data,
      .y = y.data,
      .rows = x.rows(),
      .columns = x.columns() / 2,
      .x_stride = x.row_stride(),
      .activation = static_cast<Activation>(activation),
      .gate_first = static_cast<int>(gate_first),
      .dtype = x.dtype(),
      .bias_dtype = bias.dtype(),
      .threads = place.threads,
      .device = place.device,
      .stream = place.stream,
  };
  return FASTTFM_LAUNCH(place, gated_activation_forward, params);
}

int64_t backward_parts(const Place& place, int64_t columns) {
#ifdef FASTTFM_WITH_CUDA
  if (place.is_cuda()) return cuda::gated_activation_parts(columns, cuda::multiprocessors(place.device));
#endif
  return 0;
}

int64_t backward_workspace(const Place& place, const Tensor& x) {
  const int64_t columns = x.columns() / 2;
  return place.is_cuda() ? 2 * backward_parts(place, columns) * columns
                         : cpu::gated_activation_workspace(x.rows(), columns);
}

Status backward(const Place& place, const Tensor& dy, const Tensor& x, const OptionalTensor& bias, const Tensor& dx,
                const OptionalTensor& dbias, const OptionalTensor& workspace, int64_t activation, int64_t gate_first) {
  if (!x.has_rows()) return bad_size("gated_activation: x must have adjacent columns and one stride between rows");
  const int64_t columns = x.columns() / 2;
  const GatedActivationBackward params{
      .dy = dy.data,
      .x = x.data,
      .bias = bias.data,
      .dx = dx.data,
      .dbias = dbias.data,
      .workspace = static_cast<float*>(workspace.data),
      .rows = x.rows(),
      .columns = columns,
      .x_stride = x.row_stride(),
      .activation = static_cast<Activation>(activation),
      .gate_first = static_cast<int>(gate_first),
      .dtype = x.dtype(),
      .bias_dtype = bias.dtype(),
      .threads = place.threads,
      .parts = static_cast<int>(backward_parts(place, columns)),
      .device = place.device,
      .stream = place.stream,
  };
  return FASTTFM_LAUNCH(place, gated_activation_backward, params);
}

}  // namespace

FASTTFM_BINDING(gated_activation) {
  bind_call(module, "gated_activation_forward", "x, bias, y, activation, gate_first", &forward);
  bind_call(module, "gated_activation_backward_workspace", "x", &backward_workspace);
  bind_call(module, "gated_activation_backward", "dy, x, bias, dx, dbias, workspace, activation, gate_first",
            &backward);
}

}  // namespace fasttfm
