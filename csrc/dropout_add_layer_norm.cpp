#include "dropout_add_layer_norm/op.h"

#include "binding.h"
#include "common/cuda/device.h"
#include "fp8_cast.h"

namespace fasttfm {

namespace {

// How dropout numbers the rows of x: tokens of dense or packed sequences.
struct Rows {
  int64_t sequences, tokens_per_sequence;
  Rows(const Tensor& x, const Tensor& cu_seqlens)
      : sequences(cu_seqlens.given ? cu_seqlens.shape[0] - 1 : 0),
        tokens_per_sequence(x.dimensions > 1 ? x.shape[x.dimensions - 2] : 1) {}
};

#define INPUTS(F)                                                                                                    \
  F(const Tensor&, x), F(const Tensor&, residual), F(const OptionalTensor&, weight), F(const OptionalTensor&, bias), \
      F(const OptionalTensor&, linear_bias), F(const OptionalTensor&, cu_seqlens), F(const OptionalTensor&, seed),   \
      F(int, threshold), F(float, scale), F(float, eps)
#define FORWARD(F) INPUTS(F), F(const Tensor&, y), F(const OptionalTensor&, z), F(const OptionalTensor&, statistics)

bool has_layout(const Tensor& x, const Tensor& residual) { return x.has_rows() && residual.has_rows(); }

constexpr Status kBadLayout{
    StatusCode::bad_size,
    "dropout_add_layer_norm: x and residual must have adjacent columns and one stride between rows"};

DropoutAddLayerNormForward params_of(const CallContext& context, FORWARD(FASTTFM_PARAMETER)) {
  const Rows rows(y.given ? y : x, cu_seqlens);  // if there is a y, x may be a copy as [rows, columns]
  const Tensor& parameter = weight.given ? weight : bias.given ? bias : linear_bias;
  return {
      .x = x.data,
      .residual = residual.data,
      .weight = weight.data,
      .bias = bias.data,
      .linear_bias = linear_bias.data,
      .y = y.data,
      .z = z.data,
      .mean = statistics.as<float>(),
      .rstd = statistics.from<float>(x.rows()),
      .rows = x.rows(),
      .columns = x.columns(),
      .x_stride = x.row_stride(),
      .residual_stride = residual.row_stride(),
      .eps = eps,
      .seed = seed.as<int64_t>(),
      .cu_seqlens = cu_seqlens.as<int32_t>(),
      .sequences = rows.sequences,
      .tokens_per_sequence = rows.tokens_per_sequence,
      .threshold = threshold,
      .scale = scale,
      .dtype = x.dtype(),
      .residual_dtype = residual.dtype(),
      .parameter_dtype = parameter.dtype(),
      .threads = context.threads,
      .device = context.device,
      .stream = context.stream,
  };
}

#define BACKWARD(F)                                                                                               \
  F(const Tensor&, dy), F(const OptionalTensor&, dz), F(const Tensor&, z), F(const Tensor&, statistics),          \
      F(const OptionalTensor&, weight), F(const OptionalTensor&, cu_seqlens), F(const OptionalTensor&, seed),     \
      F(int, threshold), F(float, scale), F(const Tensor&, dresidual), F(const OptionalTensor&, dx),              \
      F(const OptionalTensor&, dweight), F(const OptionalTensor&, dbias), F(const OptionalTensor&, dlinear_bias), \
      F(const Tensor&, workspace)

DropoutAddLayerNormBackward gradient_params_of(const CallContext& context, BACKWARD(FASTTFM_PARAMETER)) {
  const Rows rows(z, cu_seqlens);
  const float* mean = statistics.as<float>();
  return {
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
      .workspace = workspace.as<float>(),
      .rows = z.rows(),
      .columns = z.columns(),
      .seed = seed.as<int64_t>(),
      .cu_seqlens = cu_seqlens.as<int32_t>(),
      .sequences = rows.sequences,
      .tokens_per_sequence = rows.tokens_per_sequence,
      .threshold = threshold,
      .scale = scale,
      .dtype = dy.dtype(),
      .residual_dtype = z.dtype(),
      .weight_dtype = weight.dtype(),
      .bias_dtype = dbias.dtype(),
      .linear_bias_dtype = dlinear_bias.dtype(),
      .threads = context.threads,
      .blocks = static_cast<int>(cuda::multiprocessors(context.device)),
      .device = context.device,
      .stream = context.stream,
  };
}

}  // namespace

FASTTFM_FUNCTION(Status, dropout_add_layer_norm_forward, FORWARD(FASTTFM_PARAMETER)) {
  if (!has_layout(x, residual)) return kBadLayout;
  return FASTTFM_LAUNCH(dropout_add_layer_norm_forward, params_of(context, FORWARD(FASTTFM_NAME)));
}

// Three sums over rows of each block: of one per SM, or of up to two in the backward that writes dx in FP8.
FASTTFM_FUNCTION(int64_t, dropout_add_layer_norm_backward_workspace, const Tensor& z) {
  return context.is_cuda() ? 6 * cuda::multiprocessors(context.device) * z.columns()
                           : cpu::dropout_add_layer_norm_workspace(z.rows(), z.columns());
}

FASTTFM_FUNCTION(Status, dropout_add_layer_norm_backward, BACKWARD(FASTTFM_PARAMETER)) {
  const WithBlockMemory<DropoutAddLayerNormBackward> with_memory{gradient_params_of(context, BACKWARD(FASTTFM_NAME)),
                                                                 cuda::block_memory(context.device)};
  return FASTTFM_LAUNCH(dropout_add_layer_norm_backward, with_memory);
}

#ifdef FASTTFM_WITH_CUDA
FASTTFM_FUNCTION(int64_t, dropout_add_layer_norm_backward_memory_cuda, int64_t columns, int64_t dtype,
                 int64_t residual_dtype, int64_t linear_bias, int64_t limit) {
  return cuda::dropout_add_layer_norm_backward_memory(columns, dtype, residual_dtype, linear_bias, limit);
}
#endif

#ifdef FASTTFM_WITH_HOPPER
// The forward that also writes y in e4m3, as rows and, if `as_columns` is given, as columns.
FASTTFM_FUNCTION(Status, dropout_add_layer_norm_fp8_cuda, INPUTS(FASTTFM_PARAMETER), const OptionalTensor& y,
                 const OptionalTensor& z, const OptionalTensor& statistics, const Tensor& y_scale,
                 const OptionalTensor& y_amax, const Tensor& as_rows, const OptionalTensor& as_columns) {
  if (!has_layout(x, residual)) return kBadLayout;
  return cuda::dropout_add_layer_norm_fp8({params_of(context, FORWARD(FASTTFM_NAME)), y_scale.as<float>(),
                                           y_amax.as<float>(), as_rows.data, as_columns.data});
}

// The backward that writes dx in FP8; `dx` of the arguments is not used.
FASTTFM_FUNCTION(Status, dropout_add_layer_norm_backward_fp8_cuda, BACKWARD(FASTTFM_PARAMETER), const Fp8Cast& cast) {
  return cuda::dropout_add_layer_norm_backward_fp8({gradient_params_of(context, BACKWARD(FASTTFM_NAME)),
                                                    cast.scale.as<float>(), cast.amax.as<float>(), cast.as_rows.data,
                                                    cast.as_columns.data, cast.e5m2});
}
#endif

}  // namespace fasttfm
