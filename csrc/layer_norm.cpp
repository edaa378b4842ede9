#include "layer_norm/op.h"

#include "binding.h"
#include "common/cuda/device.h"

namespace fasttfm {

namespace {

Status forward(const Place& place, const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
               const Tensor& y, const Tensor& statistics, double eps) {
  if (!x.has_rows()) return bad_size("layer_norm: x must have adjacent columns and one stride between rows");
  float* mean = static_cast<float*>(statistics.data);
  const LayerNormForward params{
      .x = x.data,
      .weight = weight.data,
      .bias = bias.data,
      .y = y.data,
      .mean = mean,
      .rstd = mean + x.rows(),
      .rows = x.rows(),
      .columns = x.columns(),
      .x_stride = x.row_stride(),
      .eps = static_cast<float>(eps),
      .dtype = x.dtype(),
      .parameter_dtype = weight.given ? weight.dtype() : bias.dtype(),
      .threads = place.threads,
      .device = place.device,
      .stream = place.stream,
  };
  return FASTTFM_LAUNCH(place, layer_norm_forward, params);
}

// As many blocks as the GPU has multiprocessors share the rows.
int64_t backward_workspace(const Place& place, const Tensor& x) {
  return place.is_cuda() ? 2 * cuda::multiprocessors(place.device) * x.columns()
                         : cpu::layer_norm_workspace(x.rows(), x.columns());
}

Status backward(const Place& place, const Tensor& dy, const Tensor& x, const OptionalTensor& weight,
                const Tensor& statistics, const Tensor& dx, const OptionalTensor& dweight, const OptionalTensor& dbias,
                const Tensor& workspace) {
  if (!x.has_rows()) return bad_size("layer_norm: x must have adjacent columns and one stride between rows");
  const float* mean = static_cast<const float*>(statistics.data);
  const WithBlockMemory<LayerNormBackward> params{{
                                                      .dy = dy.data,
                                                      .x = x.data,
                                                      .weight = weight.data,
                                                      .mean = mean,
                                                      .rstd = mean + x.rows(),
                                                      .dx = dx.data,
                                                      .dweight = dweight.data,
                                                      .dbias = dbias.data,
                                                      .workspace = static_cast<float*>(workspace.data),
                                                      .rows = x.rows(),
                                                      .columns = x.columns(),
                                                      .x_stride = x.row_stride(),
                                                      .dtype = x.dtype(),
                                                      .weight_dtype = weight.dtype(),
                                                      .bias_dtype = dbias.dtype(),
                                                      .threads = place.threads,
                                                      .blocks = static_cast<int>(cuda::multiprocessors(place.device)),
                                                      .device = place.device,
                                                      .stream = place.stream,
                                                  },
                                                  cuda::block_memory(place.device)};
  return FASTTFM_LAUNCH(place, layer_norm_backward, params);
}

}  // namespace

FASTTFM_BINDING(layer_norm) {
  bind_call(module, "layer_norm_forward", "x, weight, bias, y, statistics, eps", &forward);
  bind_call(module, "layer_norm_backward_workspace", "x", &backward_workspace);
  bind_call(module, "layer_norm_backward", "dy, x, weight, statistics, dx, dweight, dbias, workspace", &backward);
#ifdef FASTTFM_WITH_CUDA
  bind_workspace(module, "layer_norm_backward_memory_cuda", &cuda::layer_norm_backward_memory,
                 {"columns", "dtype", "limit"});
#endif
}

}  // namespace fasttfm
