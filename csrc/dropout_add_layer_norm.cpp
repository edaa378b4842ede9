#include "dropout_add_layer_norm/op.h"

#include "binding.h"
#include "common/cuda/device.h"

namespace fasttfm {

namespace {

// How dropout numbers the rows of x: tokens of dense or packed sequences.
struct Rows {
  int64_t sequences, tokens_per_sequence;
  Rows(const Tensor& x, const Tensor& cu_seqlens)
      : sequences(cu_seqlens.given ? cu_seqlens.shape[0] - 1 : 0),
        tokens_per_sequence(x.dimensions > 1 ? x.shape[x.dimensions - 2] : 1) {}
};

Status forward(const Place& place, const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
               const OptionalTensor& bias, const OptionalTensor& linear_bias, const OptionalTensor& cu_seqlens,
               const OptionalTensor& seed, int64_t threshold, double scale, double eps, const Tensor& y,
               const OptionalTensor& z, const Tensor& statistics) {
  if (!x.has_rows() || !residual.has_rows())
    return bad_size("dropout_add_layer_norm: x and residual must have adjacent columns and one stride between rows");
  const Rows rows(y, cu_seqlens);  // x may be a copy as [rows, columns]
  const Tensor& parameter = weight.given ? weight : bias.given ? bias : linear_bias;
  float* mean = static_cast<float*>(statistics.data);
  const DropoutAddLayerNormForward params{
      .x = x.data,
      .residual = residual.data,
      .weight = weight.data,
      .bias = bias.data,
      .linear_bias = linear_bias.data,
      .y = y.data,
      .z = z.data,
      .mean = mean,
      .rstd = mean + x.rows(),
      .rows = x.rows(),
      .columns = x.columns(),
      .x_stride = x.row_stride(),
      .residual_stride = residual.row_stride(),
      .eps = static_cast<float>(eps),
      .seed = static_cast<const int64_t*>(seed.data),
      .cu_seqlens = static_cast<const int32_t*>(cu_seqlens.data),
      .sequences = rows.sequences,
      .tokens_per_sequence = rows.tokens_per_sequence,
      .threshold = static_cast<int>(threshold),
      .scale = static_cast<float>(scale),
      .dtype = x.dtype(),
      .residual_dtype = residual.dtype(),
      .parameter_dtype = parameter.dtype(),
      .threads = place.threads,
      .device = place.device,
      .stream = place.stream,
  };
  return FASTTFM_LAUNCH(place, dropout_add_layer_norm_forward, params);
}

// As many blocks as the GPU has multiprocessors share the rows.
int64_t backward_workspace(const Place& place, const Tensor& z) {
  return place.is_cuda() ? 3 * cuda::multiprocessors(place.device) * z.columns()
                         : cpu::dropout_add_layer_norm_workspace(z.rows(), z.columns());
}

Status backward(const Place& place, const Tensor& dy, const OptionalTensor& dz, const Tensor& z,
                const Tensor& statistics, const OptionalTensor& weight, const OptionalTensor& cu_seqlens,
                const OptionalTensor& seed, int64_t threshold, double scale, const Tensor& dresidual,
                const OptionalTensor& dx, const OptionalTensor& dweight, const OptionalTensor& dbias,
                const OptionalTensor& dlinear_bias, const Tensor& workspace) {
  const Rows rows(z, cu_seqlens);
  const float* mean = static_cast<const float*>(statistics.data);
  const WithBlockMemory<DropoutAddLayerNormBackward> params{
      {
          .dy = dy.data,
          .dz = dz.data,
          .z = z.data,
          .weight = weight.data,
          .mean = mean,
          .rstd = mean + z.rows(),
          .dresidual = dresidual.data,
          .dx = dx.data,
          .dweight = dweight.data,
          .dbias = dbias.data,
          .dlinear_bias = dlinear_bias.data,
          .workspace = static_cast<float*>(workspace.data),
          .rows = z.rows(),
          .columns = z.columns(),
          .seed = static_cast<const int64_t*>(seed.data),
          .cu_seqlens = static_cast<const int32_t*>(cu_seqlens.data),
          .sequences = rows.sequences,
          .tokens_per_sequence = rows.tokens_per_sequence,
          .threshold = static_cast<int>(threshold),
          .scale = static_cast<float>(scale),
          .dtype = dy.dtype(),
          .residual_dtype = z.dtype(),
          .weight_dtype = weight.dtype(),
          .bias_dtype = dbias.dtype(),
          .linear_bias_dtype = dlinear_bias.dtype(),
          .threads = place.threads,
          .blocks = static_cast<int>(cuda::multiprocessors(place.device)),
          .device = place.device,
          .stream = place.stream,
      },
      cuda::block_memory(place.device)};
  return FASTTFM_LAUNCH(place, dropout_add_layer_norm_backward, params);
}

}  // namespace

#define FP8(MEMBER) FASTTFM_FIELD(DropoutAddLayerNormFp8, MEMBER)

FASTTFM_BINDING(dropout_add_layer_norm) {
  bind_call(module, "dropout_add_layer_norm_forward",
            "x, residual, weight, bias, linear_bias, cu_seqlens, seed, threshold, scale, eps, y, z, statistics",
            &forward);
  bind_call(module, "dropout_add_layer_norm_backward_workspace", "z", &backward_workspace);
  bind_call(module, "dropout_add_layer_norm_backward",
            "dy, dz, z, statistics, weight, cu_seqlens, seed, threshold, scale, dresidual, dx, dweight, dbias, "
            "dlinear_bias, workspace",
            &backward);
#ifdef FASTTFM_WITH_CUDA
  bind_workspace(module, "dropout_add_layer_norm_backward_memory_cuda", &cuda::dropout_add_layer_norm_backward_memory,
                 {"columns", "dtype", "residual_dtype", "linear_bias", "limit"});
#endif
#ifdef FASTTFM_WITH_HOPPER
  bind_launcher(module, "dropout_add_layer_norm_fp8_cuda", &cuda::dropout_add_layer_norm_fp8, FP8(x), FP8(residual),
                FP8(weight), FP8(bias), FP8(linear_bias), FP8(y), FP8(z), FP8(mean), FP8(rstd), FP8(rows), FP8(columns),
                FP8(x_stride), FP8(residual_stride), FP8(eps), FP8(seed), FP8(cu_seqlens), FP8(sequences),
                FP8(threshold), FP8(scale), FP8(dtype), FP8(residual_dtype), FP8(parameter_dtype), FP8(device),
                FP8(stream), FP8(y_scale), FP8(y_amax), FP8(as_rows), FP8(as_columns));
#endif
}

}  // namespace fasttfm
