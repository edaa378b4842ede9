#include "bias_gelu/op.h"

#include "binding.h"

namespace fasttfm {

namespace {

Status forward(const Place& place, const Tensor& x, const OptionalTensor& bias, const Tensor& y, int64_t activation) {
  if (!x.has_rows()) return bad_size("bias_gelu: x must have adjacent columns and one stride between rows");
  const BiasGeluForward params{
      .x = x.data,
      .bias = bias.data,
      .y = y.data,
      .rows = x.rows(),
      .columns = x.columns(),
      .x_stride = x.row_stride(),
      .activation = static_cast<Activation>(activation),
      .dtype = x.dtype(),
      .bias_dtype = bias.dtype(),
      .threads = place.threads,
      .device = place.device,
      .stream = place.stream,
  };
  return FASTTFM_LAUNCH(place, bias_gelu_forward, params);
}

int64_t backward_workspace(const Place& place, const Tensor& x, int64_t parts) {
  return place.is_cuda() ? parts * x.columns() : cpu::bias_gelu_workspace(x.rows(), x.columns());
}

// `parts`: into how many the rows are split on a GPU.
Status backward(const Place& place, const Tensor& dy, const Tensor& x, const OptionalTensor& bias, const Tensor& dx,
                const OptionalTensor& y, const OptionalTensor& dbias, const OptionalTensor& workspace, int64_t parts,
                int64_t activation) {
  if (!x.has_rows()) return bad_size("bias_gelu: x must have adjacent columns and one stride between rows");
  const BiasGeluBackward params{
      .dy = dy.data,
      .x = x.data,
      .bias = bias.data,
      .dx = dx.data,
      .y = y.data,
      .dbias = dbias.data,
      .workspace = static_cast<float*>(workspace.data),
      .rows = x.rows(),
      .columns = x.columns(),
      .x_stride = x.row_stride(),
      .activation = static_cast<Activation>(activation),
      .dtype = x.dtype(),
      .bias_dtype = bias.dtype(),
      .threads = place.threads,
      .parts = static_cast<int>(parts),
      .device = place.device,
      .stream = place.stream,
  };
  return FASTTFM_LAUNCH(place, bias_gelu_backward, params);
}

}  // namespace

FASTTFM_BINDING(bias_gelu) {
  bind_call(module, "bias_gelu_forward", "x, bias, y, activation", &forward);
  bind_call(module, "bias_gelu_backward_workspace", "x, parts", &backward_workspace);
  bind_call(module, "bias_gelu_backward", "dy, x, bias, dx, y, dbias, workspace, parts, activation", &backward);
}

}  // namespace fasttfm
