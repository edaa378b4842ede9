// The forward of a stack of transformer layers with int8 operands on a CPU, for inference: the kernels of the op-by-op
// path in the same order, with the same results. The memory layout is in regions.h.
#pragma once

#include <cstdint>

#include "int8_linear/op.h"
#include "transformer_block/cpu_device.h"

namespace fasttfm {
namespace FASTTFM_ISA {
namespace transformer {

class Int8Forward : Forward<Cpu> {
 public:
  explicit Int8Forward(const TransformerInt8Forward& call) : Forward(call), own_(call) {}

  Status run() {
    return run_layers([this](int64_t layer, const ForwardTensors& tensors) {
      const int64_t width = own_.width, inner = own_.intermediate;
      multiply(tensors.x, layer, kQkvLinear, tensors.qkv, 3 * width, width);
      attend(layer, tensors);
      multiply(tensors.out, layer, kOutLinear, tensors.branch_a, width, width);
      steps_(Cpu::add_norm_forward, norm_a(layer, tensors));
      multiply(tensors.y1, layer, kUpLinear, tensors.a, inner, width, static_cast<int32_t>(own_.activation));
      multiply(tensors.a, layer, kDownLinear, tensors.branch_b, width, inner);
      steps_(Cpu::add_norm_forward, norm_b(layer, tensors));
    });
  }

 private:
  template <class T>
  const T* address(int64_t layer, TransformerLinear linear, TransformerInt8 which) const {
    return reinterpret_cast<const T*>(own_.int8[(layer * kTransformerLinears + linear) * kTransformerInt8 + which]);
  }

  // y [T, columns] = activation(x [T, inner] W^T + bias)
  void multiply(const void* x, int64_t layer, TransformerLinear linear, void* y, int64_t columns, int64_t inner,
                int32_t activation = -1) {
    Int8Linear call{};
    call.x = static_cast<const float*>(x);
    call.w = address<int8_t>(layer, linear, kInt8Weight);
    call.sums = address<int32_t>(layer, linear, kInt8Sums);
    call.scales = address<float>(layer, linear, kInt8Scales);
    call.bias = address<float>(layer, linear, kInt8Bias);
    call.y = static_cast<float*>(y);
    call.rounded = own_.rounded;
    call.row_scales = own_.row_scales;
    call.rows = own_.tokens;
    call.x_columns = inner;
    call.y_columns = columns;
    call.inner = (inner + kInt8Step - 1) / kInt8Step * kInt8Step;
    call.columns = (columns + kInt8Block - 1) / kInt8Block * kInt8Block;
    call.activation = activation;
    call.products = own_.products;
    call.threads = static_cast<int>(own_.processors);
    steps_(cpu::int8_linear, call);
  }

  const TransformerInt8Forward& own_;
};

}  // namespace transformer
}  // namespace FASTTFM_ISA
}  // namespace fasttfm
