// The forward of a stack of transformer layers with FP8 operands and static scales, for inference: the kernels of
// python/fasttfm/ops/fp8_inference.py in the same order. The memory layout is in regions.h.
#pragma once

#include <cstdint>

#include "dropout_add_layer_norm/op.h"
#include "fp8/op.h"
#include "transformer_block/hopper_device.h"

namespace fasttfm {
namespace cuda {

class Fp8Forward : baseline::transformer::Forward<Hopper> {
 public:
  explicit Fp8Forward(const TransformerFp8Forward& call) : Forward(call), own_(call) {}

  Status run() {
    const void *x = own_.x, *residual = own_.residual;
    reset_tile_counters();
    cast(x, 0, kQkvLinear);
    for (int64_t layer = 0; layer < own_.layers && !steps_.failed(); ++layer) {
      const Hopper::Range range("forward", layer);
      ForwardTensors tensors = tensors_of(layer);
      tensors.x = x;
      tensors.residual = own_.pre_norm ? residual : x;
      attention_block(layer, tensors);
      feed_forward_block(layer, tensors);
      x = tensors.y;
      residual = tensors.z;
    }
    return steps_.status();
  }

 private:
  using ForwardTensors = baseline::transformer::ForwardTensors;

  template <class T>
  T* address(int64_t layer, TransformerLinear linear, TransformerFp8 which) const {
    return reinterpret_cast<T*>(own_.fp8[(layer * kTransformerLinears + linear) * kTransformerFp8 + which]);
  }

  // Casts x [T, C] to `operand`, the input of a linear layer.
  void cast(const void* x, int64_t layer, TransformerLinear linear) {
    Fp8Cast cast{};
    cast.x = x;
    cast.scale = address<const float>(layer, linear, kFp8InputScale);
    cast.amax = address<float>(layer, linear, kFp8InputAmax);
    cast.as_rows = own_.operand;
    cast.rows = own_.tokens;
    cast.columns = cast.x_stride = own_.width;
    cast.padded = (own_.tokens + 15) / 16 * 16;
    cast.dtype = own_.dtype;
    baseline::transformer::set_device(own_, &cast);
    steps_(fp8_cast, cast);
  }

  // The LayerNorm, which also writes `operand`, the input of a linear layer.
  void normalize(const DropoutAddLayerNormForward& norm, int64_t layer, TransformerLinear linear) {
    DropoutAddLayerNormFp8 fp8{};
    static_cast<DropoutAddLayerNormForward&>(fp8) = norm;
    fp8.y_scale = address<const float>(layer, linear, kFp8InputScale);
    fp8.y_amax = address<float>(layer, linear, kFp8InputAmax);
    fp8.as_rows = own_.operand;
    steps_(dropout_add_layer_norm_fp8, fp8);
  }

  // d [T, columns] = x [T, inner] W^T + bias
  void multiply(const void* x, int64_t layer, TransformerLinear linear, const void* bias, void* d, int64_t columns,
                int64_t inner, void* workspace) {
    Gemm gemm = baseline::transformer::product_of(own_, x, address<const void>(layer, linear, kFp8Weight), true, d,
                                                  columns, inner, workspace);
    gemm.bias = bias;
    gemm.a_fp8 = gemm.b_fp8 = Fp8Format::e4m3;
    gemm.a_scale = address<const float>(layer, linear, kFp8InputInverse);
    gemm.b_scale = address<const float>(layer, linear, kFp8WeightInverse);
    gemm.fast_accumulation = 1;
    steps_(cuda::gemm, gemm);
  }

  void attention_block(int64_t layer, const ForwardTensors& tensors) {
    const int64_t width = own_.width;
    multiply(own_.operand, layer, kQkvLinear, parameter(layer, kQkvBias), tensors.qkv, 3 * width, width,
             tensors.workspace);
    attend(layer, tensors);
    cast(tensors.out, layer, kOutLinear);
    multiply(own_.operand, layer, kOutLinear, nullptr, tensors.branch_a, width, width, tensors.workspace);
    normalize(norm_a(layer, tensors), layer, kUpLinear);
  }

  void feed_forward_block(int64_t layer, const ForwardTensors& tensors) {
    Fp8GeluProduct up{};
    up.x = own_.operand;
    up.weight = address<const void>(layer, kUpLinear, kFp8Weight);
    up.x_inverse = address<const float>(layer, kUpLinear, kFp8InputInverse);
    up.weight_inverse = address<const float>(layer, kUpLinear, kFp8WeightInverse);
    up.bias = parameter(layer, kUpBias);
    up.scale = address<const float>(layer, kDownLinear, kFp8InputScale);
    up.amax = address<float>(layer, kDownLinear, kFp8InputAmax);
    up.a = tensors.a;
    up.rows = own_.tokens;
    up.inputs = own_.width;
    up.columns = own_.intermediate;
    up.activation = own_.activation;
    up.bias_dtype = own_.parameter_dtype;
    baseline::transformer::set_device(own_, &up);
    steps_(fp8_gelu_product, up);
    multiply(tensors.a, layer, kDownLinear, nullptr, tensors.branch_b, own_.width, own_.intermediate,
             tensors.workspace);
    if (layer + 1 < own_.layers)
      normalize(norm_b(layer, tensors), layer + 1, kQkvLinear);
    else
      steps_(Hopper::add_norm_forward, norm_b(layer, tensors));
  }

  const TransformerFp8Forward& own_;
};

}  // namespace cuda
}  // namespace fasttfm
