#include "rms_norm/op.h"

#include "binding.h"
#include "common/cuda/device.h"

namespace fasttfm {

namespace {

Status forward(const Place& place, const Tensor& x, const OptionalTensor& weight, const Tensor& y, const Tensor& rstd,
               double eps) {
  if (!x.has_rows()) return bad_size("rms_norm: x must have adjacent columns and one stride between rows");
  const RmsNormForward params{
      .x = x.data,
      .weight = weight.data,
      .y = y.data,
      .rstd = static_cast<float*>(rstd.data),
      .rows = x.rows(),
      .columns = x.columns(),
      .x_stride = x.row_stride(),
      .eps = static_cast<float>(eps),
      .dtype = x.dtype(),
      .weight_dtype = weight.dtype(),
      .threads = place.threads,
      .device = place.device,
      .stream = place.stream,
  };
  return FASTTFM_LAUNCH(place, rms_norm_forward, params);
}

// As many blocks as the GPU has multiprocessors share the rows.
int64_t backward_workspace(const Place& place, const Tensor& x) {
  return place.is_cuda() ? cuda::multiprocessors(place.device) * x.columns()
                         : cpu::rms_norm_workspace(x.rows(), x.columns());
}

Status backward(const Place& place, const Tensor& dy, const Tensor& x, const OptionalTensor& weight, const Tensor& rstd,
                const Tensor& dx, const OptionalTensor& dweight, const Tensor& workspace) {
  if (!x.has_rows()) return bad_size("rms_norm: x must have adjacent columns and one stride between rows");
  const RmsNormBackward params{
      .dy = dy.data,
      .x = x.data,
      .weight = weight.data,
      .rstd = static_cast<const float*>(rstd.data),
      .dx = dx.data,
      .dweight = dweight.data,
      .workspace = static_cast<float*>(workspace.data),
      .rows = x.rows(),
      .columns = x.columns(),
      .x_stride = x.row_stride(),
      .dtype = x.dtype(),
      .weight_dtype = weight.dtype(),
      .threads = place.threads,
      .blocks = static_cast<int>(cuda::multiprocessors(place.device)),
      .device = place.device,
      .stream = place.stream,
  };
  const WithBlockMemory<RmsNormBackward> with_memory{params, cuda::block_memory(place.device)};
  return FASTTFM_LAUNCH(place, rms_norm_backward, with_memory);
}

}  // namespace

FASTTFM_BINDING(rms_norm) {
  bind_call(module, "rms_norm_forward", "x, weight, y, rstd, eps", &forward);
  bind_call(module, "rms_norm_backward_workspace", "x", &backward_workspace);
  bind_call(module, "rms_norm_backward", "dy, x, weight, rstd, dx, dweight, workspace", &backward);
#ifdef FASTTFM_WITH_CUDA
  bind_workspace(module, "rms_norm_backward_memory_cuda", &cuda::rms_norm_backward_memory,
                 {"columns", "dtype", "limit"});
#endif
}

}  // namespace fasttfm
