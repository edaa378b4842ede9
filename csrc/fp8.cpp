#include "fp8/op.h"

#include "binding.h"

#ifdef FASTTFM_WITH_HOPPER
namespace fasttfm {

// `e5m2`, in every function: not 0 for e5m2, 0 for e4m3. Outputs without elements are not written.
FASTTFM_FUNCTION(Status, fp8_cast_cuda, const Tensor& x, const Tensor& scale, const Tensor& amax, const Tensor& as_rows,
                 const Tensor& as_columns, int64_t padded, int e5m2, const OptionalTensor& seed,
                 const OptionalTensor& cu_seqlens, int threshold, float kept_scale) {
  return cuda::fp8_cast({
      .x = x.data,
      .scale = scale.as<float>(),
      .amax = amax.as<float>(),
      .as_rows = as_rows.data,
      .as_columns = as_columns.data,
      .rows = x.shape[0],
      .columns = x.shape[1],
      .padded = padded,
      .x_stride = x.strides[0],
      .e5m2 = e5m2,
      .dtype = x.dtype(),
      .device = context.device,
      .stream = context.stream,
      .seed = seed.as<int64_t>(),
      .cu_seqlens = cu_seqlens.as<int32_t>(),
      .sequences = cu_seqlens.given ? cu_seqlens.shape[0] - 1 : 0,
      .threshold = threshold,
      .kept_scale = kept_scale,
  });
}

FASTTFM_FUNCTION(Status, fp8_transpose_cuda, const Tensor& as_rows, const Tensor& as_columns,
                 const Tensor& cu_seqlens) {
  return cuda::fp8_transpose({
      .as_rows = as_rows.data,
      .as_columns = as_columns.data,
      .cu_seqlens = cu_seqlens.as<int32_t>(),
      .sequences = cu_seqlens.shape[0] - 1,
      .rows = as_rows.shape[0],
      .columns = as_rows.shape[1],
      .padded = as_columns.shape[1],
      .device = context.device,
      .stream = context.stream,
  });
}

FASTTFM_FUNCTION(int64_t, fp8_cast_tiles_cuda, int64_t rows, int64_t columns) {
  return cuda::fp8_cast_tiles(rows, columns);
}

FASTTFM_FUNCTION(Status, fp8_cast_many_cuda, const Tensor& table, int64_t tiles, int e5m2) {
  return cuda::fp8_cast_many({
      .table = table.as<int64_t>(),
      .count = table.shape[0],
      .tiles = tiles,
      .e5m2 = e5m2,
      .device = context.device,
      .stream = context.stream,
  });
}

FASTTFM_FUNCTION(Status, fp8_gelu_forward_cuda, const Tensor& h, const OptionalTensor& bias, const Tensor& scale,
                 const Tensor& amax, const Tensor& as_rows, int e5m2, Activation activation) {
  return cuda::fp8_gelu_forward({
      .h = h.data,
      .bias = bias.data,
      .scale = scale.as<float>(),
      .amax = amax.as<float>(),
      .as_rows = as_rows.data,
      .rows = h.shape[0],
      .columns = h.shape[1],
      .e5m2 = e5m2,
      .activation = activation,
      .dtype = h.dtype(),
      .bias_dtype = bias.dtype(),
      .device = context.device,
      .stream = context.stream,
  });
}

FASTTFM_FUNCTION(int64_t, fp8_gelu_workspace_cuda, int64_t rows, int64_t columns) {
  return cuda::fp8_gelu_workspace(rows, columns);
}

FASTTFM_FUNCTION(Status, fp8_gelu_backward_cuda, const Tensor& da, const Tensor& h, const OptionalTensor& bias,
                 const Tensor& a_scale, const Tensor& scale, const Tensor& amax, const Tensor& as_rows,
                 const Tensor& as_columns, const Tensor& a_columns, const OptionalTensor& dbias,
                 const Tensor& workspace, int e5m2, Activation activation) {
  return cuda::fp8_gelu_backward({
      .da = da.data,
      .h = h.data,
      .bias = bias.data,
      .a_scale = a_scale.as<float>(),
      .scale = scale.as<float>(),
      .amax = amax.as<float>(),
      .as_rows = as_rows.data,
      .as_columns = as_columns.data,
      .a_columns = a_columns.data,
      .dbias = dbias.data,
      .workspace = workspace.as<float>(),
      .rows = h.shape[0],
      .columns = h.shape[1],
      .padded = as_columns.shape[1],
      .e5m2 = e5m2,
      .activation = activation,
      .dtype = h.dtype(),
      .bias_dtype = bias.dtype(),
      .device = context.device,
      .stream = context.stream,
  });
}

FASTTFM_FUNCTION(Status, fp8_gelu_gemm_cuda, const Tensor& x, const Tensor& weight, const Tensor& x_inverse,
                 const Tensor& weight_inverse, const OptionalTensor& bias, const Tensor& scale, const Tensor& amax,
                 const OptionalTensor& h, const Tensor& a, Activation activation) {
  return cuda::fp8_gelu_gemm({
      .x = x.data,
      .weight = weight.data,
      .x_inverse = x_inverse.as<float>(),
      .weight_inverse = weight_inverse.as<float>(),
      .bias = bias.data,
      .scale = scale.as<float>(),
      .amax = amax.as<float>(),
      .h = h.data,
      .a = a.data,
      .rows = x.shape[0],
      .inputs = x.shape[1],
      .columns = weight.shape[0],
      .activation = activation,
      .bias_dtype = bias.dtype(),
      .device = context.device,
      .stream = context.stream,
  });
}

FASTTFM_FUNCTION(int64_t, fp8_gelu_gemm_workspace_cuda, int64_t rows, int64_t columns) {
  return cuda::fp8_gelu_gemm_workspace(rows, columns);
}

FASTTFM_FUNCTION(Status, fp8_gelu_gemm_backward_cuda, const Tensor& dy, const Tensor& weight, const Tensor& dy_inverse,
                 const Tensor& weight_inverse, const Tensor& h, const OptionalTensor& bias, const Tensor& a_scale,
                 const Tensor& scale, const Tensor& amax, const Tensor& as_rows, const Tensor& as_columns,
                 const Tensor& a_columns, const OptionalTensor& dbias, const Tensor& workspace, int e5m2,
                 Activation activation) {
  return cuda::fp8_gelu_gemm_backward({
      .dy = dy.data,
      .weight = weight.data,
      .dy_inverse = dy_inverse.as<float>(),
      .weight_inverse = weight_inverse.as<float>(),
      .h = h.data,
      .bias = bias.data,
      .a_scale = a_scale.as<float>(),
      .scale = scale.as<float>(),
      .amax = amax.as<float>(),
      .as_rows = as_rows.data,
      .as_columns = as_columns.data,
      .a_columns = a_columns.data,
      .dbias = dbias.data,
      .workspace = workspace.as<float>(),
      .rows = dy.shape[0],
      .inputs = dy.shape[1],
      .columns = weight.shape[0],
      .padded = as_columns.shape[1],
      .e5m2 = e5m2,
      .activation = activation,
      .bias_dtype = bias.dtype(),
      .device = context.device,
      .stream = context.stream,
  });
}

}  // namespace fasttfm
#endif
