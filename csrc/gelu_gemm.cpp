#include "gelu_gemm/op.h"

#include "binding.h"

#ifdef FASTTFM_WITH_HOPPER
namespace fasttfm {

FASTTFM_FUNCTION(int64_t, gelu_gemm_workspace_cuda, int64_t rows, int64_t columns) {
  return cuda::gelu_gemm_workspace(rows, columns);
}

FASTTFM_FUNCTION(Status, gelu_gemm_forward_cuda, const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                 const OptionalTensor& h, const OptionalTensor& derivative, const Tensor& a, Activation activation) {
  if (!x.has_rows()) return bad_size("gelu_gemm: x must have adjacent columns and one stride between rows");
  const ActivatedGemm product = {
      .x = x.data,
      .weight = weight.data,
      .bias = bias.data,
      .a = a.data,
      .rows = x.rows(),
      .inputs = x.columns(),
      .columns = weight.shape[0],
      .x_stride = x.row_stride(),
      .activation = activation,
      .dtype = x.dtype(),
      .bias_dtype = bias.dtype(),
      .device = context.device,
      .stream = context.stream,
  };
  return cuda::gelu_gemm_forward({product, h.data, derivative.data});
}

FASTTFM_FUNCTION(Status, gelu_gemm_backward_cuda, const Tensor& dy, const Tensor& weight, const OptionalTensor& bias,
                 const OptionalTensor& h, const OptionalTensor& derivative, const Tensor& dh, const OptionalTensor& a,
                 const OptionalTensor& dbias, const Tensor& workspace, Activation activation) {
  if (!dy.has_rows()) return bad_size("gelu_gemm: dy must have adjacent columns and one stride between rows");
  return cuda::gelu_gemm_backward({
      .dy = dy.data,
      .weight = weight.data,
      .bias = bias.data,
      .h = h.data,
      .derivative = derivative.data,
      .dh = dh.data,
      .a = a.data,
      .dbias = dbias.data,
      .workspace = workspace.as<float>(),
      .rows = dy.rows(),
      .outputs = dy.columns(),
      .columns = weight.shape[1],
      .dy_stride = dy.row_stride(),
      .activation = activation,
      .dtype = dh.dtype(),
      .bias_dtype = bias.given ? bias.dtype() : dbias.dtype(),
      .device = context.device,
      .stream = context.stream,
  });
}

}  // namespace fasttfm
#endif
