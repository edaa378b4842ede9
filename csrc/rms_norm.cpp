#include "rms_norm/op.h"

#include "binding.h"
#include "common/cuda/device.h"

namespace fasttfm {

FASTTFM_FUNCTION(Status, rms_norm_forward, const Tensor& x, const OptionalTensor& weight, const Tensor& y,
                 const Tensor& rstd, float eps) {
  if (!x.has_rows()) return bad_size("rms_norm: x must have adjacent columns and one stride between rows");
  const RmsNormForward params{
      .x = x.data,
      .weight = weight.data,
      .y = y.data,
      .rstd = rstd.as<float>(),
      .rows = x.rows(),
      .columns = x.columns(),
      .x_stride = x.row_stride(),
      .eps = eps,
      .dtype = x.dtype(),
      .weight_dtype = weight.dtype(),
      .threads = context.threads,
      .device = context.device,
      .stream = context.stream,
  };
  return FASTTFM_LAUNCH(rms_norm_forward, params);
}

// The rows are shared by one block per SM.
FASTTFM_FUNCTION(int64_t, rms_norm_backward_workspace, const Tensor& x) {
  return context.is_cuda() ? cuda::multiprocessors(context.device) * x.columns()
                           : cpu::rms_norm_workspace(x.rows(), x.columns());
}

FASTTFM_FUNCTION(Status, rms_norm_backward, const Tensor& dy, const Tensor& x, const OptionalTensor& weight,
                 const Tensor& rstd, const Tensor& dx, const OptionalTensor& dweight, const Tensor& workspace) {
  if (!x.has_rows()) return bad_size("rms_norm: x must have adjacent columns and one stride between rows");
  const RmsNormBackward params{
      .dy = dy.data,
      .dz = nullptr,
      .x = x.data,
      .weight = weight.data,
      .rstd = rstd.as<float>(),
      .dx = dx.data,
      .dweight = dweight.data,
      .workspace = workspace.as<float>(),
      .rows = x.rows(),
      .columns = x.columns(),
      .x_stride = x.row_stride(),
      .dtype = x.dtype(),
      .weight_dtype = weight.dtype(),
      .threads = context.threads,
      .blocks = static_cast<int>(cuda::multiprocessors(context.device)),
      .device = context.device,
      .stream = context.stream,
  };
  const WithBlockMemory<RmsNormBackward> with_memory{params, cuda::block_memory(context.device)};
  return FASTTFM_LAUNCH(rms_norm_backward, with_memory);
}

#ifdef FASTTFM_WITH_CUDA
FASTTFM_FUNCTION(int64_t, rms_norm_backward_memory_cuda, int64_t columns, int64_t dtype, int64_t limit) {
  return cuda::rms_norm_backward_memory(columns, dtype, limit);
}
#endif

}  // namespace fasttfm
