#include "bias_gelu/op.h"

#include "binding.h"

namespace fasttfm {

FASTTFM_FUNCTION(Status, bias_gelu_forward, const Tensor& x, const OptionalTensor& bias, const Tensor& y,
                 Activation activation) {
  if (!x.has_rows()) return bad_size("bias_gelu: x must have adjacent columns and one stride between rows");
  const BiasGeluForward params{
      .x = x.data,
      .bias = bias.data,
      .y = y.data,
      .rows = x.rows(),
      .columns = x.columns(),
      .x_stride = x.row_stride(),
      .activation = activation,
      .dtype = x.dtype(),
      .bias_dtype = bias.dtype(),
      .threads = context.threads,
      .device = context.device,
      .stream = context.stream,
  };
  return FASTTFM_LAUNCH(bias_gelu_forward, params);
}

FASTTFM_FUNCTION(int64_t, bias_gelu_backward_workspace, const Tensor& x, int64_t parts) {
  return context.is_cuda() ? parts * x.columns() : cpu::bias_gelu_workspace(x.rows(), x.columns());
}

// `parts`: into how many parts the rows are split on a GPU.
FASTTFM_FUNCTION(Status, bias_gelu_backward, const Tensor& dy, const Tensor& x, const OptionalTensor& bias,
                 const Tensor& dx, const OptionalTensor& y, const OptionalTensor& dbias,
                 const OptionalTensor& workspace, int parts, Activation activation) {
  if (!x.has_rows()) return bad_size("bias_gelu: x must have adjacent columns and one stride between rows");
  const BiasGeluBackward params{
      .dy = dy.data,
      .x = x.data,
      .bias = bias.data,
      .dx = dx.data,
      .y = y.data,
      .dbias = dbias.data,
      .workspace = workspace.as<float>(),
      .rows = x.rows(),
      .columns = x.columns(),
      .x_stride = x.row_stride(),
      .activation = activation,
      .dtype = x.dtype(),
      .bias_dtype = bias.dtype(),
      .threads = context.threads,
      .parts = parts,
      .device = context.device,
      .stream = context.stream,
  };
  return FASTTFM_LAUNCH(bias_gelu_backward, params);
}

}  // namespace fasttfm
