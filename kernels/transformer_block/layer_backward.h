// A stack of transformer layers, backward: a sequence of other ops' kernels. The memory layout is in regions.h.
#pragma once

#include "attention/op.h"
#include "column_sum/op.h"
#include "dropout_add_layer_norm/op.h"
#include "layer_norm/op.h"
#include "transformer_block/layer.h"

namespace fasttfm {
namespace FASTTFM_ISA {
namespace transformer {

// The inputs and outputs of the backward of one of a layer's two LayerNorms.
struct NormTensors {
  const void *dy, *dz, *z;
  const float* statistics;
  void *dstream, *dbranch;  // dbranch is null if it equals dstream
};

// The indices of a LayerNorm's parameters, and of the bias that is added before it.
struct NormParameters {
  TransformerParameter weight, bias, linear_bias;
  int seed_index;
};
constexpr NormParameters kParametersA = {kNormAWeight, kNormABias, kOutBias, 1};
constexpr NormParameters kParametersB = {kNormBWeight, kNormBBias, kDownBias, 2};

// The inputs and outputs of the backward from the feed-forward block's output to the activation's input.
struct ActivationTensors {
  const void *dy, *weight, *bias, *left;
  void *da, *dh, *a, *dbias, *workspace;  // a and dbias are null if not needed
};

template <class Device>
class Backward {
 public:
  explicit Backward(const TransformerBackward& call)
      : call_(call),
        kept_(kept_plan(call)),
        scratch_(backward_plan(call, Device::backward_workspace(call), Device::kFusedActivation)) {}

  Status run() {
    const void *dy = call_.dy, *dz = call_.dz;
    const bool pre = call_.pre_norm != 0;
    for (int64_t layer = call_.layers - 1; layer >= 0 && !steps_.failed(); --layer) {
      const typename Device::Range range("backward", layer);
      // In a post-LN model x is the residual stream, and its gradient is one sum.
      void* stream = layer > 0 ? scratch(kStreamA) : pre ? call_.dresidual : call_.dx;
      void* dx = !pre ? stream : layer > 0 ? scratch(kDx) : call_.dx;
      feed_forward_block(layer, dy, dz);
      projection(layer, stream);
      attention(layer);
      input(layer, stream, dx);
      dy = dx;
      dz = pre ? stream : nullptr;
    }
    return steps_.status();
  }

 protected:
  void* scratch(BackwardRegion region) const { return at(call_.scratch, scratch_.regions[region].offset); }
  void* workspace() const { return scratch(kBackwardWorkspace); }
  void* kept(int64_t layer, KeptRegion region) const { return in_layer(call_, kept_, layer, region); }
  const float* statistics(int64_t layer, KeptRegion region) const {
    return static_cast<const float*>(kept(layer, region));
  }
  const void* parameter(int64_t layer, TransformerParameter which) const {
    return address_in(call_.parameters, layer, which);
  }
  void* gradient(int64_t layer, TransformerParameter which) const { return address_in(call_.gradients, layer, which); }

  const void* input_of(int64_t layer) const {
    return layer == 0 ? call_.x : between_layers(call_, kept_, layer - 1, kBetweenY);
  }
  // The input of LayerNorm b.
  const void* sum_of(int64_t layer) const {
    if (!call_.pre_norm) return kept(layer, kKeptZ);
    return layer + 1 == call_.layers ? call_.z : between_layers(call_, kept_, layer, kBetweenZ);
  }

  void feed_forward_block(int64_t layer, const void* dy, const void* dz) {
    const bool separate = separate_branch(call_, call_.threshold_b);
    void *stream = scratch(kStreamB), *dbranch = separate ? scratch(kDBranchB) : stream;
    add_norm(layer, kParametersB,
             {dy, dz, sum_of(layer), statistics(layer, kKeptStatistics), stream, separate ? dbranch : nullptr});
    const bool again = !call_.keep_activation && gradient(layer, kDownWeight) != nullptr;
    Device::activation_backward(
        &steps_, call_,
        {dbranch, parameter(layer, kDownWeight), parameter(layer, kUpBias), kept(layer, kKeptLeft), scratch(kDa),
         scratch(kDh), again ? scratch(kAAgain) : nullptr, gradient(layer, kUpBias), workspace()});
    const void* a = call_.keep_activation ? kept(layer, kKeptA) : scratch(kAAgain);
    weight_gradient(layer, kDownWeight, dbranch, a, call_.width, call_.intermediate);
    if (gradient(layer, kUpWeight) != nullptr)
      weight_gradient(layer, kUpWeight, scratch(kDh), y1_of(layer), call_.intermediate, call_.width);
    meet(scratch(kDh), parameter(layer, kUpWeight), call_.intermediate, stream, scratch(kDy1));
  }

  void projection(int64_t layer, void* stream) {
    const bool separate = separate_branch(call_, call_.threshold_a), pre = call_.pre_norm != 0;
    void* dbranch = separate ? scratch(kDBranchA) : stream;
    add_norm(layer, kParametersA,
             {pre ? scratch(kDy1) : scratch(kStreamB), pre ? scratch(kStreamB) : nullptr, kept(layer, kKeptZ1),
              statistics(layer, kKeptStatistics1), stream, separate ? dbranch : nullptr});
    weight_gradient(layer, kOutWeight, dbranch, kept(layer, kKeptOut), call_.width, call_.width);
    steps_(Device::gemm, product_of(call_, dbranch, parameter(layer, kOutWeight), false, scratch(kDout), call_.width,
                                    call_.width, workspace()));
  }

  void input(int64_t layer, void* stream, void* dx) {
    if (gradient(layer, kQkvBias) != nullptr && !sums_come_along()) column_sums(layer);
    weight_gradient(layer, kQkvWeight, scratch(kDqkv), input_of(layer), 3 * call_.width, call_.width);
    meet(scratch(kDqkv), parameter(layer, kQkvWeight), 3 * call_.width, stream, dx);
  }

  // Computes dy weight, the gradient of a block's input. In a post-LN model it is added to the gradient of the stream,
  // otherwise it is dx.
  void meet(const void* dy, const void* weight, int64_t inner, void* stream, void* dx) {
    Gemm product = product_of(call_, dy, weight, false, call_.pre_norm ? dx : stream, call_.width, inner, workspace());
    product.c = call_.pre_norm ? nullptr : stream;
    steps_(Device::gemm, product);
  }

  // dy^T x [rows, columns] in the parameter's type.
  void weight_gradient(int64_t layer, TransformerParameter which, const void* dy, const void* x, int64_t rows,
                       int64_t columns) {
    if (gradient(layer, which) == nullptr) return;
    Gemm product{};
    product.a = dy;
    product.b = x;
    product.d = gradient(layer, which);
    product.workspace = workspace();
    product.rows = rows;
    product.columns = columns;
    product.inner = call_.tokens;
    product.transposed_a = 1;
    product.dtype = call_.dtype;
    product.out_dtype = call_.parameter_dtype;
    set_device(call_, &product);
    steps_(Device::gemm, product);
  }

  void add_norm(int64_t layer, const NormParameters& parameters, const NormTensors& tensors) {
    auto norm = add_norm_of<WithBlockMemory<DropoutAddLayerNormBackward>>(call_, layer, parameters.seed_index);
    norm.dy = tensors.dy;
    norm.dz = tensors.dz;
    norm.z = tensors.z;
    norm.weight = parameter(layer, parameters.weight);
    norm.mean = tensors.statistics;
    norm.rstd = tensors.statistics + call_.tokens;
    norm.dresidual = tensors.dstream;
    norm.dx = tensors.dbranch;
    norm.dweight = gradient(layer, parameters.weight);
    norm.dbias = gradient(layer, parameters.bias);
    norm.dlinear_bias = gradient(layer, parameters.linear_bias);
    norm.workspace = static_cast<float*>(workspace());
    norm.weight_dtype = norm.bias_dtype = norm.linear_bias_dtype = call_.parameter_dtype;
    norm.blocks = static_cast<int>(call_.processors);
    norm.block_memory = call_.block_memory;
    steps_(Device::add_norm_backward, norm);
  }

  const void* y1_of(int64_t layer) {
    if (!call_.recompute) return kept(layer, kKeptY1);
    void* y1 = scratch(kY1Again);
    LayerNormForward norm{};
    norm.x = kept(layer, kKeptZ1);
    norm.weight = parameter(layer, kNormAWeight);
    norm.bias = parameter(layer, kNormABias);
    norm.y = y1;
    norm.mean = static_cast<float*>(scratch(kStatisticsAgain));
    norm.rstd = norm.mean + call_.tokens;
    norm.rows = call_.tokens;
    norm.columns = norm.x_stride = call_.width;
    norm.eps = call_.eps_a;
    norm.dtype = call_.dtype;
    norm.parameter_dtype = call_.parameter_dtype;
    norm.threads = static_cast<int>(call_.processors);
    set_device(call_, &norm);
    steps_(Device::layer_norm_forward, norm);
    return y1;
  }

  // Whether attention also computes the column sums of dqkv, which are the gradient of the qkv bias.
  bool sums_come_along() const { return Device::sums_columns(call_); }

  void attention(int64_t layer) {
    void* to = scratch(kDqkv);
    auto call = attention_of<AttentionBackward>(call_, layer, kept(layer, kKeptQkv), workspace());
    const int64_t part = call_.width * size_of(call_.dtype);
    call.dout = scratch(kDout);
    call.out = kept(layer, kKeptOut);
    call.lse = statistics(layer, kKeptLse);
    call.dq = to;
    call.dk = at(to, part);
    call.dv = at(to, 2 * part);
    call.dq_token_stride = call.dk_token_stride = call.dv_token_stride = 3 * call_.width;
    call.dq_head_stride = call.dk_head_stride = call.dv_head_stride = call.head_dim;
    void* sums = gradient(layer, kQkvBias);
    if (sums != nullptr && sums_come_along()) Device::set_column_sums(call_, sums, &call);
    steps_(Device::attention_backward, call);
  }

  void column_sums(int64_t layer) {
    ColumnSum columns{};
    columns.x = scratch(kDqkv);
    columns.sum = gradient(layer, kQkvBias);
    columns.workspace = static_cast<float*>(workspace());
    columns.rows = call_.tokens;
    columns.columns = columns.x_stride = 3 * call_.width;
    columns.dtype = call_.dtype;
    columns.sum_dtype = call_.parameter_dtype;
    columns.threads = static_cast<int>(call_.processors);
    columns.parts = Device::column_sum_parts(call_);
    set_device(call_, &columns);
    steps_(Device::column_sum, columns);
  }

  const TransformerBackward& call_;
  const KeptPlan kept_;
  const ScratchPlan<kBackwardRegions> scratch_;
  Steps steps_;
};

}  // namespace transformer
}  // namespace FASTTFM_ISA
}  // namespace fasttfm
