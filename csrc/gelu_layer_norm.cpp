#include "gelu_layer_norm/op.h"

#include "binding.h"
#include "common/cuda/device.h"

namespace fasttfm {

namespace {

Status bad_rows() { return bad_size("gelu_layer_norm: x must have adjacent columns and one stride between rows"); }

int64_t forward_workspace(const Place&, const Tensor& x) {
  return cpu::gelu_layer_norm_forward_workspace(x.rows(), x.columns());
}

Status forward(const Place& place, const Tensor& x, const OptionalTensor& linear_bias, const OptionalTensor& weight,
               const OptionalTensor& bias, const Tensor& y, const Tensor& statistics, const OptionalTensor& workspace,
               double eps, int64_t activation) {
  if (!x.has_rows()) return bad_rows();
  float* mean = static_cast<float*>(statistics.data);
  const OptionalTensor& parameter = linear_bias.given ? linear_bias : weight.given ? weight : bias;
  const GeluLayerNormForward params{
      .x = x.data,
      .linear_bias = linear_bias.data,
      .weight = weight.data,
      .bias = bias.data,
      .y = y.data,
      .mean = mean,
      .rstd = mean + x.rows(),
      .workspace = static_cast<float*>(workspace.data),
      .rows = x.rows(),
      .columns = x.columns(),
      .x_stride = x.row_stride(),
      .eps = static_cast<float>(eps),
      .activation = static_cast<Activation>(activation),
      .dtype = x.dtype(),
      .parameter_dtype = parameter.dtype(),
      .threads = place.threads,
      .device = place.device,
      .stream = place.stream,
  };
  return FASTTFM_LAUNCH(place, gelu_layer_norm_forward, params);
}

// As many blocks as the GPU has multiprocessors share the rows.
int64_t backward_workspace(const Place& place, const Tensor& x) {
  return place.is_cuda() ? 3 * cuda::multiprocessors(place.device) * x.columns()
                         : cpu::gelu_layer_norm_backward_workspace(x.rows(), x.columns());
}

Status backward(const Place& place, const Tensor& dy, const Tensor& x, const OptionalTensor& linear_bias,
                const OptionalTensor& weight, const Tensor& statistics, const Tensor& dx,
                const OptionalTensor& dlinear_bias, const OptionalTensor& dweight, const OptionalTensor& dbias,
                const Tensor& workspace, int64_t activation) {
  if (!x.has_rows()) return bad_rows();
  const float* mean = static_cast<const float*>(statistics.data);
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
      .workspace = static_cast<float*>(workspace.data),
      .rows = x.rows(),
      .columns = x.columns(),
      .x_stride = x.row_stride(),
      .activation = static_cast<Activation>(activation),
      .dtype = x.dtype(),
      .linear_bias_dtype = linear_bias.dtype(),
      .weight_dtype = weight.dtype(),
      .bias_dtype = dbias.dtype(),
      .threads = place.threads,
      .blocks = static_cast<int>(cuda::multiprocessors(place.device)),
      .device = place.device,
      .stream = place.stream,
  };
  const WithBlockMemory<GeluLayerNormBackward> with_memory{params, cuda::block_memory(place.device)};
  return FASTTFM_LAUNCH(place, gelu_layer_norm_backward, with_memory);
}

}  // namespace

FASTTFM_BINDING(gelu_layer_norm) {
  bind_call(module, "gelu_layer_norm_forward_workspace", "x", &forward_workspace);
  bind_call(module, "gelu_layer_norm_forward",
            "x, linear_bias, weight, bias, y, statistics, workspace, eps, activation", &forward);
  bind_call(module, "gelu_layer_norm_backward_workspace", "x", &backward_workspace);
  bind_call(module, "gelu_layer_norm_backward",
            "dy, x, linear_bias, weight, statistics, dx, dlinear_bias, dweight, dbias, workspace, activation",
            &backward);
#ifdef FASTTFM_WITH_CUDA
  bind_workspace(module, "gelu_layer_norm_backward_memory_cuda", &cuda::gelu_layer_norm_backward_memory,
                 {"columns", "dtype", "limit"});
#endif
}

}  // namespace fasttfm
