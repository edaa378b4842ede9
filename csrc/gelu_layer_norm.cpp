#include "gelu_layer_norm/op.h"

#include "binding.h"
#include "common/cuda/device.h"

namespace fasttfm {

constexpr Status kBadRows{StatusCode::bad_size,
                          "gelu_layer_norm: x must have adjacent columns and one stride between rows"};

FASTTFM_FUNCTION(int64_t, gelu_layer_norm_forward_workspace, const Tensor& x) {
  return cpu::gelu_layer_norm_forward_workspace(x.rows(), x.columns());
}

FASTTFM_FUNCTION(Status, gelu_layer_norm_forward, const Tensor& x, const OptionalTensor& linear_bias,
                 const OptionalTensor& weight, const OptionalTensor& bias, const Tensor& y, const Tensor& statistics,
                 const OptionalTensor& workspace, float eps, Activation activation) {
  if (!x.has_rows()) return kBadRows;
  float* mean = statistics.as<float>();
  const OptionalTensor& parameter = linear_bias.given ? linear_bias : weight.given ? weight : bias;
  const GeluLayerNormForward params{
      .x = x.data,
      .linear_bias = linear_bias.data,
      .weight = weight.data,
      .bias = bias.data,
      .y = y.data,
      .mean = mean,
      .rstd = mean + x.rows(),
      .workspace = workspace.as<float>(),
      .rows = x.rows(),
      .columns = x.columns(),
      .x_stride = x.row_stride(),
      .eps = eps,
      .activation = activation,
      .dtype = x.dtype(),
      .parameter_dtype = parameter.dtype(),
      .threads = context.threads,
      .device = context.device,
      .stream = context.stream,
  };
  return FASTTFM_LAUNCH(gelu_layer_norm_forward, params);
}

// The rows are shared by one block per SM.
FASTTFM_FUNCTION(int64_t, gelu_layer_norm_backward_workspace, const Tensor& x) {
  return context.is_cuda() ? 3 * cuda::multiprocessors(context.device) * x.columns()
                           : cpu::gelu_layer_norm_backward_workspace(x.rows(), x.columns());
}

FASTTFM_FUNCTION(Status, gelu_layer_norm_backward, const Tensor& dy, const Tensor& x, const OptionalTensor& linear_bias,
                 const OptionalTensor& weight, const Tensor& statistics, const Tensor& dx,
                 const OptionalTensor& dlinear_bias, const OptionalTensor& dweight, const OptionalTensor& dbias,
                 const Tensor& workspace, Activation activation) {
  if (!x.has_rows()) return kBadRows;
  const float* mean = statistics.as<float>();
  const GeluLayerNormBackward params{
      .dy = dy.data,
      .x = x.data,
      .linear_bias = linear_bias.data,
      .weight = weight.data,
      .mean = mean,
      .rstd = mean + x.rows(),
      .dx = dx.data,
      .dlinear_bias = dlinear_bias.data,
      .dweight = dweight.data,
      .dbias = dbias.data,
      .workspace = workspace.as<float>(),
      .rows = x.rows(),
      .columns = x.columns(),
      .x_stride = x.row_stride(),
      .activation = activation,
      .dtype = x.dtype(),
      .linear_bias_dtype = linear_bias.dtype(),
      .weight_dtype = weight.dtype(),
      .bias_dtype = dbias.dtype(),
      .threads = context.threads,
      .blocks = static_cast<int>(cuda::multiprocessors(context.device)),
      .device = context.device,
      .stream = context.stream,
  };
  const WithBlockMemory<GeluLayerNormBackward> with_memory{params, cuda::block_memory(context.device)};
  return FASTTFM_LAUNCH(gelu_layer_norm_backward, with_memory);
}

#ifdef FASTTFM_WITH_CUDA
FASTTFM_FUNCTION(int64_t, gelu_layer_norm_backward_memory_cuda, int64_t columns, int64_t dtype, int64_t limit) {
  return cuda::gelu_layer_norm_backward_memory(columns, dtype, limit);
}
#endif

}  // namespace fasttfm
