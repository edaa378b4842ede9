// The forward of a stack of transformer layers on few tokens, for inference: seven overlapping kernels per layer
// (few_rows/op.h). The memory layout is in regions.h.
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
      : call_(call), scratch_(baseline::transformer::forward_plan(call, kGemmWorkspace)) {
    const int64_t width = call.width, inner = call.intermediate;
    qkv_ = plan(3 * width, width, false);
    out_ = plan(width, width, true);
    up_ = plan(inner, width, false);
    down_ = plan(width, inner, true);
  }

  template <class Range>
  Status run() {
    const void *x = call_.x, *residual = call_.residual;
    for (int64_t layer = 0; layer < call_.layers && !steps_.failed(); ++layer) {
      const Range range("forward", layer);
      const bool last = layer + 1 == call_.layers, pre = call_.pre_norm != 0;
      void* y = last ? call_.y : scratch(baseline::transformer::kY);
      void* z = !pre ? nullptr : last ? call_.z : scratch(baseline::transformer::kZ);
      attention_block(layer, x, pre ? residual : x);
      feed_forward_block(layer, y, z);
      x = y;
      residual = z;
    }
    return steps_.status();
  }

 private:
  using Region = baseline::transformer::ForwardRegion;

  few_rows::Plan plan(int64_t columns, int64_t inner, bool partial) const {
    few_rows::Plan found = few_rows::plan_product(call_.tokens, {columns, inner, partial}, call_.processors);
    const int64_t most = kGemmWorkspace / (4 * call_.tokens * columns);  // number of parts that fit into the workspace
    if (partial) found.parts = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(found.parts, most)));
    return found;
  }
  void* scratch(Region region) const {
    return baseline::transformer::at(call_.scratch, scratch_.regions[region].offset);
  }
  const void* parameter(int64_t layer, TransformerParameter which) const {
    return baseline::transformer::address_in(call_.parameters, layer, which);
  }
  float* parts() const { return static_cast<float*>(scratch(baseline::transformer::kForwardWorkspace)); }

  template <class Launcher, class Params>
  void step(Launcher launcher, Params params) {
    params.dtype = call_.dtype;
    params.dependent = steps_.dependent();
    baseline::transformer::set_device(call_, &params);
    steps_(launcher, params);
  }

  FewRowsProduct product(const void* x, const void* weight, int64_t columns, int64_t inner,
                         const few_rows::Plan& found) const {
    FewRowsProduct product{};
    product.x = x;
    product.weight = weight;
    product.rows = call_.tokens;
    product.columns = columns;
    product.inner = inner;
    product.tile = found.tile;
    product.part_count = found.parts;
    return product;
  }

  FewRowsAddNorm add_norm(const void* residual, const few_rows::Plan& found) const {
    FewRowsAddNorm norm{};
    norm.parts = parts();
    norm.residual = residual;
    norm.rows = call_.tokens;
    norm.columns = call_.width;
    norm.part_count = found.parts;
    norm.residual_dtype = call_.residual_dtype;
    norm.parameter_dtype = call_.parameter_dtype;
    return norm;
  }

  void attention_block(int64_t layer, const void* x, const void* residual) {
    using namespace baseline::transformer;
    auto qkv = product(x, parameter(layer, kQkvWeight), 3 * call_.width, call_.width, qkv_);
    qkv.bias = parameter(layer, kQkvBias);
    qkv.bias_dtype = call_.dtype;
    qkv.y = scratch(kQkv);
    step(few_rows_product, qkv);

    step(few_rows_attention, few_rows_attention_of(call_, scratch(kQkv), scratch(kOut)));

    auto out = product(scratch(kOut), parameter(layer, kOutWeight), call_.width, call_.width, out_);
    out.parts = parts();
    step(few_rows_product, out);

    auto norm = add_norm(residual, out_);
    norm.linear_bias = parameter(layer, kOutBias);
    norm.weight = parameter(layer, kNormAWeight);
    norm.bias = parameter(layer, kNormABias);
    norm.eps = call_.eps_a;
    norm.y = scratch(kY1);
    norm.z = call_.pre_norm ? scratch(kZ1) : nullptr;
    step(few_rows_add_norm, norm);
  }

  void feed_forward_block(int64_t layer, void* y, void* z) {
    using namespace baseline::transformer;
    auto up = product(scratch(kY1), parameter(layer, kUpWeight), call_.intermediate, call_.width, up_);
    up.bias = parameter(layer, kUpBias);
    up.bias_dtype = call_.parameter_dtype;
    up.activates = 1;
    up.activation = call_.activation;
    up.y = scratch(kA);
    step(few_rows_product, up);

    auto down = product(scratch(kA), parameter(layer, kDownWeight), call_.width, call_.intermediate, down_);
    down.parts = parts();
    step(few_rows_product, down);

    auto norm = add_norm(call_.pre_norm ? scratch(kZ1) : scratch(kY1), down_);
    norm.linear_bias = parameter(layer, kDownBias);
    norm.weight = parameter(layer, kNormBWeight);
    norm.bias = parameter(layer, kNormBBias);
    norm.eps = call_.eps_b;
    norm.y = y;
    norm.z = z;
    step(few_rows_add_norm, norm);
  }

  const TransformerForward& call_;
  const baseline::transformer::ScratchPlan<baseline::transformer::kForwardRegions> scratch_;
  few_rows::Plan qkv_, out_, up_, down_;
  baseline::transformer::Steps steps_;
};

}  // namespace cuda
}  // namespace fasttfm
