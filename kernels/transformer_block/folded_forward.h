// The forward of a stack of post-LN layers on few tokens, for inference, five overlapping kernels per layer: the
// LayerNorms are parts of the GEMMs (few_rows/product_residual.cuh). The memory layout is in regions.h.
#pragma once

#include <cstdint>

#include "few_rows/op.h"
#include "few_rows/plan.h"
#include "transformer_block/few_rows_forward.h"
#include "transformer_block/layer.h"

namespace fasttfm {
namespace cuda {

class FoldedForward {
 public:
  explicit FoldedForward(const TransformerFoldedForward& call)
      : call_(call),
        scratch_(baseline::transformer::forward_plan(call, kGemmWorkspace)),
        plan_(few_rows::plan_layer(call.tokens, call.width, call.intermediate, call.processors)) {}

  // Statistics of the tokens that the kernels for few rows take fit into the workspace.
  static Status check(const TransformerFoldedForward& call) {
    if (call.pre_norm)
      return {StatusCode::bad_value, "transformer_block: folded LayerNorms are those of post-LN layers"};
    if (call.width % few_rows::kGroupColumns != 0)
      return bad_size("transformer_block: folded LayerNorms take a width in multiples of 64");
    return {};
  }

  template <class Range>
  Status run() {
    using namespace baseline::transformer;
    Rows x = {call_.x, nullptr, 0.0f};
    for (int64_t layer = 0; layer < call_.layers && !steps_.failed(); ++layer) {
      const Range range("forward", layer);
      // z of a layer overwrites that of the previous one, which has been read.
      const bool last = layer + 1 == call_.layers;
      const Rows z1 = {scratch(kY1), statistics(1), call_.eps_a};
      const Rows z = {scratch(last ? kBranchB : kY), statistics(0), call_.eps_b};
      project_qkv(layer, x);
      step(few_rows_attention, few_rows_attention_of(call_, scratch(kQkv), scratch(kOut)));
      add_product(scratch(kOut), parameter(layer, kOutWeight), plan_.out, layer, kFoldedOutBias, x, z1);
      project_up(layer, z1);
      add_product(scratch(kA), parameter(layer, kDownWeight), plan_.down, layer, kFoldedDownBias, z1, z);
      x = z;
    }
    normalize(x);
    return steps_.status();
  }

 private:
  using Region = baseline::transformer::ForwardRegion;

  // Rows before a LayerNorm; without statistics, normalized rows.
  struct Rows {
    const void* data;
    float* statistics;
    float eps;  // of the LayerNorm
  };

  void* scratch(Region region) const {
    return baseline::transformer::at(call_.scratch, scratch_.regions[region].offset);
  }
  // Those of z (0) and z1 (1) are the halves of the workspace.
  float* statistics(int64_t which) const {
    void* workspace = scratch(baseline::transformer::kForwardWorkspace);
    return static_cast<float*>(baseline::transformer::at(workspace, which * (kGemmWorkspace / 2)));
  }
  const void* parameter(int64_t layer, TransformerParameter which) const {
    return baseline::transformer::address_in(call_.parameters, layer, which);
  }
  template <class T>
  const T* folded(int64_t layer, int which) const {
    return reinterpret_cast<const T*>(call_.folded[layer * kTransformerFolded + which]);
  }

  template <class Launcher, class Params>
  void step(Launcher launcher, Params params) {
    params.dtype = call_.dtype;
    params.dependent = steps_.dependent();
    baseline::transformer::set_device(call_, &params);
    steps_(launcher, params);
  }

  // `normalized`: the rows of which the GEMM applies the LayerNorm.
  FewRowsProduct product(const void* x, const void* weight, const few_rows::Plan& plan, int64_t layer,
                         TransformerFolded bias, const Rows& normalized) const {
    FewRowsProduct product{};
    product.x = x;
    product.weight = weight;
    product.bias = folded<float>(layer, bias);
    product.bias_dtype = DType::f32;
    product.statistics = normalized.statistics;
    product.eps = normalized.eps;
    product.rows = call_.tokens;
    product.columns = product.inner = call_.width;
    product.tile = plan.tile;
    product.cluster = plan.cluster;
    product.part_count = plan.parts;
    return product;
  }

  void project_qkv(int64_t layer, const Rows& x) {
    auto qkv = product(x.data, folded<void>(layer, kFoldedQkvWeight), plan_.qkv, layer, kFoldedQkvBias, x);
    qkv.columns = 3 * call_.width;
    qkv.y = scratch(baseline::transformer::kQkv);
    step(few_rows_product, qkv);
  }

  void project_up(int64_t layer, const Rows& z1) {
    auto up = product(z1.data, folded<void>(layer, kFoldedUpWeight), plan_.up, layer, kFoldedUpBias, z1);
    up.columns = call_.intermediate;
    up.activates = 1;
    up.activation = call_.activation;
    up.y = scratch(baseline::transformer::kA);
    step(few_rows_product, up);
  }

  // z = x weight^T + LayerNorm(residual), with the bias at `bias` and the residual's weight in the next column.
  void add_product(const void* x, const void* weight, const few_rows::Plan& plan, int64_t layer, TransformerFolded bias,
                   const Rows& residual, const Rows& z) {
    auto added = product(x, weight, plan, layer, bias, residual);
    if (bias == kFoldedDownBias) added.inner = call_.intermediate;
    added.residual = residual.data;
    added.residual_weight = folded<float>(layer, bias + 1);
    added.y = const_cast<void*>(z.data);
    added.y_statistics = z.statistics;
    step(few_rows_product, added);
  }

  void normalize(const Rows& z) {
    FewRowsAddNorm norm{};
    norm.residual = z.data;
    norm.weight = parameter(call_.layers - 1, kNormBWeight);
    norm.bias = parameter(call_.layers - 1, kNormBBias);
    norm.y = call_.y;
    norm.rows = call_.tokens;
    norm.columns = call_.width;
    norm.eps = z.eps;
    norm.residual_dtype = call_.dtype;
    norm.parameter_dtype = call_.parameter_dtype;
    step(few_rows_add_norm, norm);
  }

  const TransformerFoldedForward& call_;
  const baseline::transformer::ScratchPlan<baseline::transformer::kForwardRegions> scratch_;
  const few_rows::LayerPlan plan_;
  baseline::transformer::Steps steps_;
};

}  // namespace cuda
}  // namespace fasttfm
