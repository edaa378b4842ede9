#include "layer_norm/op.h"

#include "binding.h"
#include "common/cuda/device.h"

namespace fasttfm {

FASTTFM_FUNCTION(Status, layer_norm_forward, const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                 const Tensor& y, const OptionalTensor& statistics, float eps) {
  if (!x.has_rows()) return bad_size("layer_norm: x must have adjacent columns and one stride between rows");
  float* mean = statistics.as<float>();
  const LayerNormForward params{
      .x = x.data,
      .weight = weight.data,
      .bias = bias.data,
      .y = y.data,
      .mean = mean,
      .rstd = statistics.from<float>(x.rows()),
      .rows = x.rows(),
      .columns = x.columns(),
      .x_stride = x.row_stride(),
      .eps = eps,
      .dtype = x.dtype(),
      .parameter_dtype = weight.given ? weight.dtype() : bias.dtype(),
      .threads = context.threads,
      .device = context.device,
      .stream = context.stream,
  };
  return FASTTFM_LAUNCH(layer_norm_forward, params);
}

// The rows are shared by one block per SM.
FASTTFM_FUNCTION(int64_t, layer_norm_backward_workspace, const Tensor& x) {
  return context.is_cuda() ? 2 * cuda::multiprocessors(context.device) * x.columns()
                           : cpu::layer_norm_workspace(x.rows(), x.columns());
}

FASTTFM_FUNCTION(Status, layer_norm_backward, const Tensor& dy, const Tensor& x, const OptionalTensor& weight,
                 const Tensor& statistics, const Tensor& dx, const OptionalTensor& dweight, const OptionalTensor& dbias,
                 const Tensor& workspace) {
  if (!x.has_rows()) return bad_size("layer_norm: x must have adjacent columns and one stride between rows");
  const float* mean = statistics.as<float>();
  const LayerNormBackward params{
      .dy = dy.data,
      .x = x.data,
      .weight = weight.data,
      .mean = mean,
      .rstd = mean + x.rows(),
      .dx = dx.data,
      .dweight = dweight.data,
      .dbias = dbias.data,
      .workspace = workspace.as<float>(),
      .rows = x.rows(),
      .columns = x.columns(),
      .x_stride = x.row_stride(),
      .dtype = x.dtype(),
      .weight_dtype = weight.dtype(),
      .bias_dtype = dbias.dtype(),
      .threads = context.threads,
      .blocks = static_cast<int>(cuda::multiprocessors(context.device)),
      .device = context.device,
      .stream = context.stream,
  };
  const WithBlockMemory<LayerNormBackward> with_memory{params, cuda::block_memory(context.device)};
  return FASTTFM_LAUNCH(layer_norm_backward, with_memory);
}

#ifdef FASTTFM_WITH_CUDA
FASTTFM_FUNCTION(int64_t, layer_norm_backward_memory_cuda, int64_t columns, int64_t dtype, int64_t limit) {
  return cuda::layer_norm_backward_memory(columns, dtype, limit);
}
#endif

}  // namespace fasttfm
