#include "gated_activation/op.h"

#include "binding.h"
#include "common/cuda/device.h"

namespace fasttfm {

namespace {

int64_t backward_parts(const CallContext& context, int64_t columns) {
#ifdef FASTTFM_WITH_CUDA
  if (context.is_cuda()) return cuda::gated_activation_parts(columns, cuda::multiprocessors(context.device));
#endif
  return 0;
}

}  // namespace

FASTTFM_FUNCTION(Status, gated_activation_forward, const Tensor& x, const OptionalTensor& bias, const Tensor& y,
                 Activation activation, int gate_first) {
  if (!x.has_rows()) return bad_size("gated_activation: x must have adjacent columns and one stride between rows");
  const GatedActivationForward params{
      .x = x.data,
      .bias = bias.data,
      .y = y.data,
      .rows = x.rows(),
      .columns = x.columns() / 2,
      .x_stride = x.row_stride(),
      .activation = activation,
      .gate_first = gate_first,
      .dtype = x.dtype(),
      .bias_dtype = bias.dtype(),
      .threads = context.threads,
      .device = context.device,
      .stream = context.stream,
  };
  return FASTTFM_LAUNCH(gated_activation_forward, params);
}

FASTTFM_FUNCTION(int64_t, gated_activation_backward_workspace, const Tensor& x) {
  const int64_t columns = x.columns() / 2;
  return context.is_cuda() ? 2 * backward_parts(context, columns) * columns
                           : cpu::gated_activation_workspace(x.rows(), columns);
}

FASTTFM_FUNCTION(Status, gated_activation_backward, const Tensor& dy, const Tensor& x, const OptionalTensor& bias,
                 const Tensor& dx, const OptionalTensor& dbias, const OptionalTensor& workspace, Activation activation,
                 int gate_first) {
  if (!x.has_rows()) return bad_size("gated_activation: x must have adjacent columns and one stride between rows");
  const int64_t columns = x.columns() / 2;
  const GatedActivationBackward params{
      .dy = dy.data,
      .x = x.data,
      .bias = bias.data,
      .dx = dx.data,
      .dbias = dbias.data,
      .workspace = workspace.as<float>(),
      .rows = x.rows(),
      .columns = columns,
      .x_stride = x.row_stride(),
      .activation = activation,
      .gate_first = gate_first,
      .dtype = x.dtype(),
      .bias_dtype = bias.dtype(),
      .threads = context.threads,
      .parts = static_cast<int>(backward_parts(context, columns)),
      .device = context.device,
      .stream = context.stream,
  };
  return FASTTFM_LAUNCH(gated_activation_backward, params);
}

}  // namespace fasttfm
