// A stack of transformer layers on Hopper, in 16 bits: GEMMs by cuBLASLt or, with the activation, by gelu_product.
#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define FASTTFM_WITH_NVTX
#endif

#include <algorithm>
#include <cstdio>

#include "common/count.h"
#include "common/cuda/hopper.cuh"
#include "common/cuda/launch.cuh"
#include "gelu_product/op.h"
#include "transformer_block/few_rows_forward.h"
#include "transformer_block/layer_backward.h"
#include "transformer_block/layer_forward.h"

namespace fasttfm {
namespace cuda {
namespace {

using baseline::Count;
using namespace baseline::transformer;

struct Hopper {
  static constexpr bool kFusedActivation = true;
  static constexpr auto gemm = cuda::gemm;
  static constexpr auto attention_forward = cuda::attention_forward;
  static constexpr auto attention_backward = cuda::attention_backward;
  static constexpr auto add_norm_forward = cuda::dropout_add_layer_norm_forward;
  static constexpr auto add_norm_backward = cuda::dropout_add_layer_norm_backward;
  static constexpr auto layer_norm_forward = cuda::layer_norm_forward;
  static constexpr auto column_sum = cuda::column_sum;

  static void short_attention(Steps* steps, const TransformerForward& call, const ForwardTensors& tensors) {
    auto attention = few_rows_attention_of(call, tensors.qkv, tensors.out);
    attention.dtype = call.dtype;
    set_device(call, &attention);
    (*steps)(few_rows_attention, attention);
  }

  // An NVTX range that names a layer's kernels in a profile; without a profiler it only tests a pointer.
  class Range {
   public:
#ifdef FASTTFM_WITH_NVTX
    Range(const char* direction, int64_t layer) {
      char name[48];
      std::snprintf(name, sizeof(name), "fasttfm layer %d %s", static_cast<int>(layer), direction);
      nvtxRangePushA(name);
    }
    ~Range() { nvtxRangePop(); }
#else
    Range(const char*, int64_t) {}
#endif
    Range(const Range&) = delete;
    Range& operator=(const Range&) = delete;
  };

  static void activation_forward(Steps* steps, const TransformerCall& call, const void* weight, const void* bias,
                                 const ForwardTensors& tensors) {
    GeluProductForward up{};
    up.x = tensors.y1;
    up.weight = weight;
    up.bias = bias;
    (call.keep_activation ? up.derivative : up.h) = tensors.left;
    up.a = tensors.a;
    up.rows = call.tokens;
    up.inputs = up.x_stride = call.width;
    up.columns = call.intermediate;
    up.activation = call.activation;
    up.dtype = call.dtype;
    up.bias_dtype = call.parameter_dtype;
    set_device(call, &up);
    (*steps)(gelu_product_forward, up);
  }

  static void activation_backward(Steps* steps, const TransformerCall& call, const ActivationTensors& tensors) {
    GeluProductBackward product{};
    product.dy = tensors.dy;
    product.weight = tensors.weight;
    if (call.keep_activation) {
      product.derivative = tensors.left;
    } else {
      product.h = tensors.left;
      product.bias = tensors.bias;
      product.a = tensors.a;
    }
    product.dh = tensors.dh;
    product.dbias = tensors.dbias;
    product.workspace = static_cast<float*>(tensors.workspace);
    product.rows = call.tokens;
    product.outputs = product.dy_stride = call.width;
    product.columns = call.intermediate;
    product.activation = call.activation;
    product.dtype = call.dtype;
    product.bias_dtype = call.parameter_dtype;
    set_device(call, &product);
    (*steps)(gelu_product_backward, product);
  }

  // Sums of dqkv's columns come with it where sequences are long enough: as attention_native.sums_columns.
  static bool sums_columns(const TransformerShape& shape) {
    return head_dim_of(shape) == 64 && shape.tokens >= 64 * shape.sequences;
  }
  static void set_column_sums(const TransformerCall& call, void* sums, AttentionBackward* attention) {
    attention->column_sums = sums;
    attention->column_sums_dtype = call.parameter_dtype;
    attention->column_parts = attention->workspace + attention_floats(call);
  }

  static int column_sum_parts(const TransformerShape& shape) {
    const int64_t strips = (3 * shape.width + kColumnSumStrip - 1) / kColumnSumStrip;
    return static_cast<int>(std::max<int64_t>(1, std::min(4 * shape.processors / strips, shape.tokens / 64)));
  }

  static int64_t attention_floats(const TransformerShape& shape) {
    return attention_backward_workspace(shape.sequences, shape.heads, head_dim_of(shape), shape.tokens,
                                        shape.max_seqlen);
  }

  // In bytes; the launchers use it one after the other.
  static int64_t forward_workspace(const TransformerShape&) { return kGemmWorkspace; }
  static int64_t backward_workspace(const TransformerShape& shape) {
    Count attention = attention_floats(shape);
    if (sums_columns(shape))
      attention =
          attention + attention_column_parts(shape.sequences, shape.heads, head_dim_of(shape), shape.max_seqlen);
    const Count columns = Count(column_sum_parts(shape)) * shape.width * 3;
    const Count norm = Count(shape.processors) * shape.width * 3;
    const int64_t activation = gelu_product_workspace(shape.tokens, shape.intermediate);
    const int64_t floats = std::max({attention.value, columns.value, norm.value, activation});
    return std::max((Count(floats) * 4).value, kGemmWorkspace);
  }
};

Status check_call(const TransformerShape& shape) {
  if (shape.dtype != DType::bf16 && shape.dtype != DType::f16) return unknown_dtype();
  if (shape.width % 8 != 0 || shape.intermediate % 8 != 0)
    return bad_size("transformer_block: width and intermediate are multiples of 8");
  return check_shape(shape);
}

Status check_few_rows(const TransformerForward& call) {
  if (call.training || call.attention_threshold > 0 || call.threshold_a > 0 || call.threshold_b > 0)
    return {StatusCode::bad_value, "transformer_block: few_rows and short_attention are for inference without dropout"};
  if (call.few_rows != 0 && call.tokens > kGemmWorkspace / (4 * call.width))
    return bad_size("transformer_block: few_rows takes as many tokens as one part in fp32 fits into the workspace");
  return {};
}

}  // namespace

int64_t transformer_block_names_layers() {
#ifdef FASTTFM_WITH_NVTX
  return 1;
#else
  return 0;
#endif
}

Status transformer_block_sizes(const TransformerSizes& call) {
  const Status status = check_call(call);
  return status.code == StatusCode::ok ? write_sizes<Hopper>(call) : status;
}

Status transformer_block_forward(const TransformerForward& call) {
  Status status = check_call(call);
  if (status.code == StatusCode::ok && (call.few_rows != 0 || call.short_attention != 0)) status = check_few_rows(call);
  if (status.code != StatusCode::ok) return status;
  const DeviceGuard guard(call.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  if (call.few_rows != 0) return FewRowsForward(call).run<Hopper::Range>();
  return Forward<Hopper>(call).run();
}

Status transformer_block_backward(const TransformerBackward& call) {
  const Status status = check_part(call, check_call(call));
  if (status.code != StatusCode::ok) return status;
  const DeviceGuard guard(call.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  return Backward<Hopper>(call).run();
}

}  // namespace cuda
}  // namespace fasttfm
