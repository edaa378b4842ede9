// The steps of a layer on the CPU, in fp32. GEMMs use the BLAS that the process has loaded.
#pragma once

#include <algorithm>

#include "bias_gelu/op.h"
#include "common/count.h"
#include "common/cpu/isa.h"
#include "transformer_block/layer_backward.h"
#include "transformer_block/layer_forward.h"

namespace fasttfm {
namespace FASTTFM_ISA {
namespace transformer {

struct Cpu {
  static constexpr bool kFusedActivation = false;
  static constexpr auto gemm = cpu::gemm;
  static constexpr auto attention_forward = cpu::attention_forward;
  static constexpr auto attention_backward = cpu::attention_backward;
  static constexpr auto layer_norm_forward = cpu::layer_norm_forward;
  static constexpr auto column_sum = cpu::column_sum;

  struct Range {
    Range(const char*, int64_t) {}
  };

  static void project_qkv(Steps* steps, const Gemm& product) { (*steps)(gemm, product); }
  static Status reset_tile_counters(const TransformerCall&, int32_t*) { return {}; }

  static Status add_norm_forward(const DropoutAddLayerNormForward& original) {
    DropoutAddLayerNormForward call = original;
    if (call.z == nullptr) call.z = call.y;  // a sum that is not needed is normalized in place
    return cpu::dropout_add_layer_norm_forward(call);
  }
  static Status add_norm_backward(const DropoutAddLayerNormBackward& call) {
    return cpu::dropout_add_layer_norm_backward(call);
  }

  // h = y1 weight^T, a = activation(h + bias); in place without a backward.
  static void activation_forward(Steps* steps, const TransformerCall& call, const void* weight, const void* bias,
                                 const ForwardTensors& tensors) {
    void* h = tensors.left == nullptr ? tensors.a : tensors.left;
    (*steps)(gemm, product_of(call, tensors.y1, weight, true, h, call.intermediate, call.width, tensors.workspace));
    BiasGeluForward activation{};
    activation.x = h;
    activation.bias = bias;
    activation.y = tensors.a;
    activation.rows = call.tokens;
    activation.columns = activation.x_stride = call.intermediate;
    activation.activation = call.activation;
    activation.dtype = call.dtype;
    activation.threads = static_cast<int>(call.processors);
    (*steps)(cpu::bias_gelu_forward, activation);
  }

  static void activation_backward(Steps* steps, const TransformerCall& call, const ActivationTensors& tensors) {
    (*steps)(gemm, product_of(call, tensors.dy, tensors.weight, false, tensors.da, call.intermediate, call.width,
                              tensors.workspace));
    BiasGeluBackward activation{};
    activation.dy = tensors.da;
    activation.x = tensors.left;
    activation.bias = tensors.bias;
    activation.dx = tensors.dh;
    activation.y = tensors.a;
    activation.dbias = tensors.dbias;
    activation.workspace = static_cast<float*>(tensors.workspace);
    activation.rows = call.tokens;
    activation.columns = activation.x_stride = call.intermediate;
    activation.activation = call.activation;
    activation.dtype = call.dtype;
    activation.threads = static_cast<int>(call.processors);
    (*steps)(cpu::bias_gelu_backward, activation);
  }

  static bool sums_columns(const TransformerShape&) { return false; }
  static void set_column_sums(const TransformerCall&, void*, AttentionBackward*) {}
  static int column_sum_parts(const TransformerShape&) { return 0; }

  // The sizes of workspaces are in bytes.
  static int64_t forward_workspace(const TransformerShape& shape) {
    return (Count(cpu::attention_forward_workspace(head_dim_of(shape), shape.processors)) * 4).value;
  }
  static int64_t backward_workspace(const TransformerShape& shape) {
    const int64_t floats = std::max(
        {cpu::attention_backward_workspace(shape.max_seqlen, shape.max_seqlen, head_dim_of(shape), shape.processors),
         cpu::dropout_add_layer_norm_workspace(shape.tokens, shape.width),
         cpu::bias_gelu_workspace(shape.tokens, shape.intermediate),
         cpu::column_sum_workspace(shape.tokens, 3 * shape.width)});
    return (Count(floats) * 4).value;
  }
};

}  // namespace transformer
}  // namespace FASTTFM_ISA
}  // namespace fasttfm
