// The forward of a stack of transformer layers on few tokens, for inference: overlapping kernels (few_rows/op.h), seven
// per layer. In post-LN layers, LayerNorms may be parts of the GEMMs: with the first one of a layer there are six
// kernels, with both five. The memory layout is in regions.h.
#pragma once

#include <algorithm>
#include <cstdint>

#include "few_rows/op.h"
#include "few_rows/plan.h"
#include "transformer_block/layer.h"

namespace fasttfm {
namespace cuda {

// Attention over qkv [T, 3, H, D].
inline FewRowsAttention few_rows_attention_of(const TransformerForward& call, const void* qkv, void* out) {
  FewRowsAttention attention{};
  attention.qkv = qkv;
  attention.out = out;
  attention.cu_seqlens = call.cu_seqlens;
  attention.tokens = call.tokens;
  attention.sequences = call.sequences;
  attention.heads = call.heads;
  attention.head_dim = baseline::transformer::head_dim_of(call);
  attention.max_seqlen = call.max_seqlen;
  attention.window_left = call.window_left;
  attention.window_right = call.window_right;
  attention.scale = baseline::transformer::score_scale(call);
  attention.split_keys = few_rows::splits_keys(call.sequences, call.heads, call.max_seqlen, call.processors);
  return attention;
}

class FewRowsForward {
 public:
  explicit FewRowsForward(const TransformerForward& call)
      : FewRowsForward(TransformerFoldedForward{call, nullptr, FoldedNorms::none}) {}
  explicit FewRowsForward(const TransformerFoldedForward& call)
      : call_(call),
        scratch_(baseline::transformer::forward_plan(call, kGemmWorkspace)),
        plan_(few_rows::plan_layer(call.norms, call.tokens, call.width, call.intermediate, call.processors)) {
    limit_parts(&plan_.out);
    limit_parts(&plan_.down);
  }

  // Whether LayerNorms can be folded.
  static Status check(const TransformerFoldedForward& call) {
    if (call.pre_norm)
      return {StatusCode::bad_value, "transformer_block: folded LayerNorms are those of post-LN layers"};
    if (call.norms != FoldedNorms::first && call.norms != FoldedNorms::both)
      return {StatusCode::bad_value, "transformer_block: norms: expected the first or both"};
    if (call.width % few_rows::kGroupColumns != 0)
      return bad_size("transformer_block: folded LayerNorms take a width in multiples of 64");
    if (call.tokens > few_rows::kMostFoldedElements / call.width)
      return bad_size("transformer_block: folded LayerNorms take as many tokens as fit into half of the workspace");
    return {};
  }

  template <class Range>
  Status run() {
    using namespace baseline::transformer;
    Rows x = {call_.x};
    const void* residual = call_.residual;
    for (int64_t layer = 0; layer < call_.layers && !steps_.failed(); ++layer) {
      const Range range("forward", layer);
      const bool last = layer + 1 == call_.layers, pre = call_.pre_norm != 0;
      // Rows before a LayerNorm overwrite those of the previous layer, which have been read.
      void* y = !last ? scratch(kY) : call_.norms == FoldedNorms::both ? scratch(kBranchB) : call_.y;
      void* z = !pre ? nullptr : last ? call_.z : scratch(kZ);
      project_qkv(layer, x);
      step(few_rows_attention, few_rows_attention_of(call_, scratch(kQkv), scratch(kOut)));
      const Rows x1 = project_out(layer, x, pre ? residual : x.data);
      project_up(layer, x1);
      x = project_down(layer, x1, y, z);
      residual = z;
    }
    if (x.statistics != nullptr) normalize(x);
    return steps_.status();
  }

 private:
  using Region = baseline::transformer::ForwardRegion;
  using FoldedNorms = few_rows::FoldedNorms;

  // Normalized rows, or, with statistics, rows before a LayerNorm.
  struct Rows {
    const void* data;
    float* statistics = nullptr;
    float eps = 0.0f;  // of the LayerNorm
  };

  bool folds_first() const { return call_.norms != FoldedNorms::none; }
  bool folds_both() const { return call_.norms == FoldedNorms::both; }

  // Parts of K are in the workspace: those of the GEMM before a LayerNorm's kernel, in the first half if the other has
  // statistics.
  void limit_parts(few_rows::Plan* plan) const {
    if (folds_both()) return;
    const int64_t most = kGemmWorkspace / (folds_first() ? 2 : 1) / (4 * call_.tokens * call_.width);
    plan->parts = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(plan->parts, most)));
  }
  void* scratch(Region region) const {
    return baseline::transformer::at(call_.scratch, scratch_.regions[region].offset);
  }
  // A quarter of the workspace.
  float* workspace(int64_t quarter) const {
    void* start = scratch(baseline::transformer::kForwardWorkspace);
    return static_cast<float*>(baseline::transformer::at(start, quarter * (kGemmWorkspace / 4)));
  }
  float* parts() const { return workspace(0); }
  float* statistics() const { return workspace(0); }    // of rows before LayerNorm b
  float* statistics_a() const { return workspace(2); }  // and before LayerNorm a,
  float* norms_a() const { return workspace(3); }       // whose mean and rstd these are
  const void* parameter(int64_t layer, TransformerParameter which) const {
    return baseline::transformer::address_in(call_.parameters, layer, which);
  }
  const void* folded(int64_t layer, int which) const {
    return reinterpret_cast<const void*>(call_.folded[layer * kTransformerFolded + which]);
  }

  template <class Launcher, class Params>
  void step(Launcher launcher, Params params) {
    params.dtype = call_.dtype;
    params.dependent = steps_.dependent();
    baseline::transformer::set_device(call_, &params);
    steps_(launcher, params);
  }

  FewRowsProduct product(const void* x, const void* weight, int64_t columns, int64_t inner,
                         const few_rows::Plan& plan) const {
    FewRowsProduct product{};
    product.x = x;
    product.weight = weight;
    product.bias_dtype = DType::f32;
    product.rows = call_.tokens;
    product.columns = columns;
    product.inner = inner;
    product.tile = plan.tile;
    product.cluster = plan.cluster;
    product.part_count = plan.parts;
    return product;
  }

  void project_qkv(int64_t layer, const Rows& x) {
    const bool folds = folds_both();
    const void* weight = folds ? folded(layer, kFoldedQkvWeight) : parameter(layer, kQkvWeight);
    auto qkv = product(x.data, weight, 3 * call_.width, call_.width, plan_.qkv);
    qkv.bias = folds ? folded(layer, kFoldedQkvBias) : parameter(layer, kQkvBias);
    if (!folds) qkv.bias_dtype = call_.dtype;
    qkv.statistics = x.statistics;
    qkv.eps = x.eps;
    qkv.y = scratch(baseline::transformer::kQkv);
    step(few_rows_product, qkv);
  }

  void project_up(int64_t layer, const Rows& x) {
    const bool folds = folds_first();
    const void* weight = folds ? folded(layer, kFoldedUpWeight) : parameter(layer, kUpWeight);
    auto up = product(x.data, weight, call_.intermediate, call_.width, plan_.up);
    up.bias = folds ? folded(layer, kFoldedUpBias) : parameter(layer, kUpBias);
    if (!folds) up.bias_dtype = call_.parameter_dtype;
    up.statistics = x.statistics;
    up.eps = x.eps;
    if (call_.norms == FoldedNorms::first) up.norms = norms_a();
    up.activates = 1;
    up.activation = call_.activation;
    up.y = scratch(baseline::transformer::kA);
    step(few_rows_product, up);
  }

  // The rows after attention, which are the input of the up projection.
  Rows project_out(int64_t layer, const Rows& x, const void* residual) {
    using namespace baseline::transformer;
    auto out = product(scratch(kOut), parameter(layer, kOutWeight), call_.width, call_.width, plan_.out);
    if (folds_first()) {
      const Rows z1 = {scratch(kY1), statistics_a(), call_.eps_a};
      out.bias = folds_both() ? folded(layer, kFoldedOutBias) : parameter(layer, kOutBias);
      if (!folds_both()) out.bias_dtype = call_.parameter_dtype;
      add(out, folds_both() ? folded(layer, kFoldedResidualA) : nullptr, x, z1);
      return z1;
    }
    out.parts = parts();
    step(few_rows_product, out);
    auto norm = add_norm(layer, residual, plan_.out.parts, kNormAWeight, call_.eps_a);
    norm.linear_bias = parameter(layer, kOutBias);
    norm.y = scratch(kY1);
    norm.z = call_.pre_norm ? scratch(kZ1) : nullptr;
    step(few_rows_add_norm, norm);
    return {scratch(kY1)};
  }

  // The rows after the layer, in y, and, in a pre-LN model, the stream in z.
  Rows project_down(int64_t layer, const Rows& x1, void* y, void* z) {
    using namespace baseline::transformer;
    auto down = product(scratch(kA), parameter(layer, kDownWeight), call_.width, call_.intermediate, plan_.down);
    if (folds_both()) {
      const Rows rows = {y, statistics(), call_.eps_b};
      down.bias = folded(layer, kFoldedDownBias);
      add(down, folded(layer, kFoldedResidualB), x1, rows);
      return rows;
    }
    down.parts = parts();
    step(few_rows_product, down);
    auto norm = add_norm(layer, call_.pre_norm ? scratch(kZ1) : x1.data, plan_.down.parts, kNormBWeight, call_.eps_b);
    norm.linear_bias = parameter(layer, kDownBias);
    if (x1.statistics != nullptr) {
      norm.norms = norms_a();
      norm.residual_weight = parameter(layer, kNormAWeight);
      norm.residual_bias = parameter(layer, kNormABias);
    }
    norm.y = y;
    norm.z = z;
    step(few_rows_add_norm, norm);
    return {y};
  }

  // Adds LayerNorm(residual) to the GEMM's result, without the LayerNorm's bias, which is part of that of the GEMM.
  void add(FewRowsProduct added, const void* weight, const Rows& residual, const Rows& z) {
    added.residual = residual.data;
    added.statistics = residual.statistics;
    added.eps = residual.eps;
    added.residual_weight = static_cast<const float*>(weight);
    added.y = const_cast<void*>(z.data);
    added.y_statistics = z.statistics;
    step(few_rows_product, added);
  }

  // The LayerNorm whose weight is at `weight`, with the bias in the next column.
  FewRowsAddNorm add_norm(int64_t layer, const void* residual, int part_count, int weight, float eps) const {
    FewRowsAddNorm norm{};
    norm.parts = parts();
    norm.residual = residual;
    norm.weight = parameter(layer, static_cast<TransformerParameter>(weight));
    norm.bias = parameter(layer, static_cast<TransformerParameter>(weight + 1));
    norm.rows = call_.tokens;
    norm.columns = call_.width;
    norm.part_count = part_count;
    norm.eps = eps;
    norm.residual_dtype = call_.residual_dtype;
    norm.parameter_dtype = call_.parameter_dtype;
    return norm;
  }

  void normalize(const Rows& z) {
    auto norm = add_norm(call_.layers - 1, z.data, 0, kNormBWeight, z.eps);
    norm.y = call_.y;
    step(few_rows_add_norm, norm);
  }

  const TransformerFoldedForward call_;
  const baseline::transformer::ScratchPlan<baseline::transformer::kForwardRegions> scratch_;
  few_rows::LayerPlan plan_;
  baseline::transformer::Steps steps_;
};

}  // namespace cuda
}  // namespace fasttfm
