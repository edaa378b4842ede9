#include "few_rows/op.h"

#include "binding.h"
#include "few_rows/layers_shape.h"
#include "few_rows/plan.h"

namespace fasttfm {

// The tile, and the number of parts of K, for a GEMM of these sizes on a GPU with `processors` SMs. `partial` is not 0
// if there may be several parts.
FASTTFM_FUNCTION(int64_t, few_rows_tile, int64_t rows, int64_t columns, int64_t inner, int64_t processors,
                 int64_t partial) {
  return few_rows::plan_gemm(rows, {columns, inner, partial != 0}, processors).tile;
}

FASTTFM_FUNCTION(int64_t, few_rows_parts, int64_t rows, int64_t columns, int64_t inner, int64_t processors,
                 int64_t partial) {
  return few_rows::plan_gemm(rows, {columns, inner, partial != 0}, processors).parts;
}

// Which LayerNorms are parts of the GEMMs of layers of these sizes: 0 for none, 1 for the first, 2 for both.
FASTTFM_FUNCTION(int64_t, few_rows_folded_norms, int64_t rows, int64_t width, int64_t intermediate,
                 int64_t processors) {
  return static_cast<int64_t>(few_rows::folded_norms(rows, width, intermediate, processors));
}

// Writes the tile, the blocks that share x (0: the tile's own number) and the parts of K of the GEMMs of a layer to
// `table`: [4, 3], for qkv, out, up and down.
FASTTFM_FUNCTION(Status, few_rows_layer_plan, few_rows::FoldedNorms norms, int64_t rows, int64_t width,
                 int64_t intermediate, int64_t processors, int64_t* table) {
  const few_rows::LayerPlan plan = few_rows::plan_layer(norms, rows, width, intermediate, processors);
  for (const few_rows::Plan& each : {plan.qkv, plan.out, plan.up, plan.down}) {
    *table++ = each.tile;
    *table++ = each.cluster;
    *table++ = each.parts;
  }
  return {};
}

// The bytes of the workspace of the kernel for all layers; 0 if it does not support these sizes.
FASTTFM_FUNCTION(int64_t, few_rows_layers_workspace, int64_t width, int64_t intermediate, int64_t heads) {
  return few_rows::layers_workspace(width, intermediate, heads);
}

#ifdef FASTTFM_WITH_HOPPER
// `cluster`: 0 for the tile's own number of blocks. What follows `dependent` is for LayerNorms.
FASTTFM_FUNCTION(Status, few_rows_gemm_cuda, const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                 const OptionalTensor& y, const OptionalTensor& parts, int tile, int cluster, int part_count,
                 int activates, Activation activation, int dependent, float eps, const OptionalTensor& statistics,
                 const OptionalTensor& norms, const OptionalTensor& residual, const OptionalTensor& residual_weight,
                 const OptionalTensor& y_statistics) {
  return cuda::few_rows_gemm({
      .x = x.data,
      .weight = weight.data,
      .bias = bias.data,
      .y = y.data,
      .parts = parts.as<float>(),
      .statistics = statistics.as<float>(),
      .residual = residual.data,
      .residual_weight = residual_weight.as<float>(),
      .y_statistics = y_statistics.as<float>(),
      .norms = norms.as<float>(),
      .eps = eps,
      .rows = x.shape[0],
      .columns = weight.shape[0],
      .inner = x.shape[1],
      .tile = tile,
      .cluster = cluster,
      .part_count = part_count,
      .activates = activates,
      .activation = activation,
      .dtype = x.dtype(),
      .bias_dtype = bias.given ? bias.dtype() : x.dtype(),
      .dependent = dependent,
      .device = context.device,
      .stream = context.stream,
  });
}

FASTTFM_FUNCTION(Status, few_rows_add_norm_cuda, const Tensor& parts, const Tensor& residual,
                 const OptionalTensor& linear_bias, const OptionalTensor& weight, const OptionalTensor& bias,
                 const Tensor& y, const OptionalTensor& z, float eps, int dependent, const OptionalTensor& norms,
                 const OptionalTensor& residual_weight, const OptionalTensor& residual_bias) {
  const Tensor& parameter = weight.given ? weight : bias.given ? bias : linear_bias;
  return cuda::few_rows_add_norm({
      .parts = parts.as<float>(),
      .residual = residual.data,
      .linear_bias = linear_bias.data,
      .weight = weight.data,
      .bias = bias.data,
      .norms = norms.as<float>(),
      .residual_weight = residual_weight.data,
      .residual_bias = residual_bias.data,
      .y = y.data,
      .z = z.data,
      .rows = y.rows(),
      .columns = y.columns(),
      .part_count = static_cast<int>(parts.shape[0]),
      .eps = eps,
      .dtype = y.dtype(),
      .residual_dtype = residual.dtype(),
      .parameter_dtype = parameter.dtype(),
      .dependent = dependent,
      .device = context.device,
      .stream = context.stream,
  });
}

FASTTFM_FUNCTION(Status, few_rows_attention_cuda, const Tensor& qkv, const Tensor& out, const Tensor& cu_seqlens,
                 int64_t max_seqlen, int64_t window_left, int64_t window_right, float scale, int split_keys,
                 int dependent) {
  return cuda::few_rows_attention({
      .qkv = qkv.data,
      .out = out.data,
      .cu_seqlens = cu_seqlens.as<int32_t>(),
      .tokens = out.shape[0],
      .sequences = cu_seqlens.shape[0] - 1,
      .heads = out.shape[1],
      .head_dim = out.shape[2],
      .max_seqlen = max_seqlen,
      .window_left = window_left,
      .window_right = window_right,
      .scale = scale,
      .split_keys = split_keys,
      .dtype = qkv.dtype(),
      .dependent = dependent,
      .device = context.device,
      .stream = context.stream,
  });
}

// `keys` and `values` are [layers, sequences, heads, capacity, D]; `norm_weight` and `norm_bias` are those of the
// LayerNorm before the first layer.
FASTTFM_FUNCTION(Status, few_rows_decode_layers_cuda, const int64_t* parameters, const Tensor& x, const Tensor& y,
                 const Tensor& keys, const Tensor& values, const Tensor& lengths, const Tensor& norm_weight,
                 const Tensor& norm_bias, const Tensor& workspace, int64_t intermediate, Activation activation,
                 float eps_a, float eps_b, int polls) {
  return cuda::few_rows_layers({
      .parameters = parameters,
      .entries = kLayerParameters,
      .x = x.data,
      .y = y.data,
      .cache = {.keys = keys.data,
                .values = values.data,
                .lengths = lengths.as<int32_t>(),
                .sequences = keys.shape[1],
                .capacity = keys.shape[3],
                .norm_weight = norm_weight.data,
                .norm_bias = norm_bias.data},
      .workspace = workspace.data,
      .layers = keys.shape[0],
      .tokens = x.shape[0],
      .width = x.shape[1],
      .intermediate = intermediate,
      .heads = keys.shape[2],
      .activation = activation,
      .eps_a = eps_a,
      .eps_b = eps_b,
      .polls = polls,
      .device = context.device,
      .stream = context.stream,
  });
}
#endif

}  // namespace fasttfm
