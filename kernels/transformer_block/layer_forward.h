// A stack of transformer layers, forward: a sequence of other ops' kernels. The memory layout is in regions.h.
#pragma once

#include "attention/op.h"
#include "dropout_add_layer_norm/op.h"
#include "transformer_block/layer.h"

namespace fasttfm {
namespace FASTTFM_ISA {
namespace transformer {

// The addresses of one layer's tensors.
struct ForwardTensors {
  const void* x;         // normalized, in a pre-LN model
  const void* residual;  // to which the attention block's output is added
  void *qkv, *out, *branch_a, *y1, *z1, *left, *a, *branch_b, *y, *z, *workspace;
  float *lse, *statistics_a, *statistics_b;
};

template <class Device>
class Forward {
 public:
  explicit Forward(const TransformerForward& call)
      : call_(call), kept_(kept_plan(call)), scratch_(forward_plan(call, Device::forward_workspace(call))) {}

  Status run() {
    return run_layers([this](int64_t layer, const ForwardTensors& tensors) {
      attention_block(layer, tensors);
      feed_forward_block(layer, tensors);
    });
  }

 protected:
  // Calls `run_layer` with the number and the tensors of each layer.
  template <class RunLayer>
  Status run_layers(RunLayer run_layer) {
    const void *x = call_.x, *residual = call_.residual;
    reset_tile_counters();
    for (int64_t layer = 0; layer < call_.layers && !steps_.failed(); ++layer) {
      const typename Device::Range range("forward", layer);
      ForwardTensors tensors = tensors_of(layer);
      tensors.x = x;
      tensors.residual = call_.pre_norm ? residual : x;
      run_layer(layer, tensors);
      x = tensors.y;
      residual = tensors.z;
    }
    return steps_.status();
  }

  void* scratch(ForwardRegion region) const { return at(call_.scratch, scratch_.regions[region].offset); }
  void* kept(int64_t layer, KeptRegion region) const { return in_layer(call_, kept_, layer, region); }
  const void* parameter(int64_t layer, TransformerParameter which) const {
    return address_in(call_.parameters, layer, which);
  }

  // Sets the tile counters of all layers' attention to 0, before the first kernel: each attention follows directly
  // after the kernel on which it depends.
  void reset_tile_counters() { steps_.prepare(Device::reset_tile_counters(call_, tile_counters())); }
  int32_t* tile_counters() const { return static_cast<int32_t*>(scratch(kTileCounters)); }

  ForwardTensors tensors_of(int64_t layer) const {
    const bool last = layer + 1 == call_.layers, training = call_.training != 0, pre = call_.pre_norm != 0;
    const auto address = [&](bool is_kept, KeptRegion kept_region, ForwardRegion region) {
      return is_kept ? kept(layer, kept_region) : scratch(region);
    };
    const auto next = [&](BetweenRegion between, ForwardRegion region) {
      return training ? between_layers(call_, kept_, layer, between) : scratch(region);
    };
    ForwardTensors tensors{};
    tensors.qkv = address(training, kKeptQkv, kQkv);
    tensors.out = address(training, kKeptOut, kOut);
    tensors.lse = static_cast<float*>(address(training, kKeptLse, kLse));
    tensors.branch_a = scratch(kBranchA);
    tensors.y1 = address(training && !call_.recompute, kKeptY1, kY1);
    tensors.z1 = training || pre ? address(training, kKeptZ1, kZ1) : nullptr;
    tensors.statistics_a = static_cast<float*>(address(training, kKeptStatistics1, kStatisticsA));
    tensors.left = training ? kept(layer, kKeptLeft) : nullptr;
    tensors.a = address(training && call_.keep_activation, kKeptA, kA);
    tensors.branch_b = scratch(kBranchB);
    tensors.statistics_b = static_cast<float*>(address(training, kKeptStatistics, kStatisticsB));
    tensors.workspace = scratch(kForwardWorkspace);
    tensors.y = last ? call_.y : next(kBetweenY, kY);
    if (pre)
      tensors.z = last ? call_.z : next(kBetweenZ, kZ);
    else
      tensors.z = training ? kept(layer, kKeptZ) : nullptr;
    return tensors;
  }

  void attention_block(int64_t layer, const ForwardTensors& tensors) {
    const int64_t width = call_.width;
    Gemm qkv = product_of(call_, tensors.x, parameter(layer, kQkvWeight), true, tensors.qkv, 3 * width, width,
                          tensors.workspace);
    qkv.bias = parameter(layer, kQkvBias);
    Device::project_qkv(&steps_, qkv);
    attend(layer, tensors);
    steps_(Device::gemm, product_of(call_, tensors.out, parameter(layer, kOutWeight), true, tensors.branch_a, width,
                                    width, tensors.workspace));
    steps_(Device::add_norm_forward, norm_a(layer, tensors));
  }

  void attend(int64_t layer, const ForwardTensors& tensors) {
    auto attention = attention_of<AttentionForward>(call_, layer, tensors.qkv, tensors.workspace);
    attention.out = tensors.out;
    attention.lse = tensors.lse;
    attention.tile_counter = tile_counters() + layer;
    attention.dependent = steps_.dependent();
    steps_(Device::attention_forward, attention);
  }

  void feed_forward_block(int64_t layer, const ForwardTensors& tensors) {
    Device::activation_forward(&steps_, call_, parameter(layer, kUpWeight), parameter(layer, kUpBias), tensors);
    steps_(Device::gemm, product_of(call_, tensors.a, parameter(layer, kDownWeight), true, tensors.branch_b,
                                    call_.width, call_.intermediate, tensors.workspace));
    steps_(Device::add_norm_forward, norm_b(layer, tensors));
  }

  DropoutAddLayerNormForward norm_a(int64_t layer, const ForwardTensors& tensors) const {
    auto norm = add_norm(layer, 1, tensors.branch_a, tensors.residual, tensors.y1, tensors.z1, tensors.statistics_a);
    norm.weight = parameter(layer, kNormAWeight);
    norm.bias = parameter(layer, kNormABias);
    norm.linear_bias = parameter(layer, kOutBias);
    norm.eps = call_.eps_a;
    return norm;
  }

  DropoutAddLayerNormForward norm_b(int64_t layer, const ForwardTensors& tensors) const {
    const void* residual = call_.pre_norm ? tensors.z1 : tensors.y1;
    auto norm = add_norm(layer, 2, tensors.branch_b, residual, tensors.y, tensors.z, tensors.statistics_b);
    norm.weight = parameter(layer, kNormBWeight);
    norm.bias = parameter(layer, kNormBBias);
    norm.linear_bias = parameter(layer, kDownBias);
    norm.eps = call_.eps_b;
    return norm;
  }

  DropoutAddLayerNormForward add_norm(int64_t layer, int seed_index, const void* branch, const void* residual, void* y,
                                      void* z, float* statistics) const {
    auto norm = add_norm_of<DropoutAddLayerNormForward>(call_, layer, seed_index);
    norm.x = branch;
    norm.residual = residual;
    norm.y = y;
    norm.z = z;
    norm.mean = statistics;
    norm.rstd = statistics + call_.tokens;
    norm.x_stride = norm.residual_stride = call_.width;
    norm.parameter_dtype = call_.parameter_dtype;
    norm.dependent = steps_.dependent();
    return norm;
  }

  const TransformerForward& call_;
  const KeptPlan kept_;
  const ScratchPlan<kForwardRegions> scratch_;
  Steps steps_;
};

}  // namespace transformer
}  // namespace FASTTFM_ISA
}  // namespace fasttfm
