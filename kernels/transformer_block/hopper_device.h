// The steps of a layer on Hopper, in 16 bits. GEMMs use cuBLASLt, except for those with an activation (gelu_gemm)
// and the projection to qkv of many tokens (qkv_projection). Kernels with a field `dependent` start while the previous
// one still runs.
#pragma once

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define FASTTFM_WITH_NVTX
#endif

#include <algorithm>
#include <cstdio>

#include "common/count.h"
#include "common/cuda/launch.cuh"
#include "gelu_gemm/op.h"
#include "qkv_projection/op.h"
#include "transformer_block/layer_backward.h"
#include "transformer_block/layer_forward.h"

namespace fasttfm {
namespace cuda {

struct Hopper {
  using Count = baseline::Count;
  using Steps = baseline::transformer::Steps;
  using ForwardTensors = baseline::transformer::ForwardTensors;
  using ActivationTensors = baseline::transformer::ActivationTensors;

  static constexpr bool kFusedActivation = true;
  static constexpr auto gemm = cuda::gemm;
  static constexpr auto attention_forward = cuda::attention_forward;
  static constexpr auto attention_backward = cuda::attention_backward;
  static Status add_norm_forward(const DropoutAddLayerNormForward& call) {
    return call.seed == nullptr ? add_layer_norm_forward(call) : dropout_add_layer_norm_forward(call);
  }
  static constexpr auto add_norm_backward = cuda::dropout_add_layer_norm_backward;
  static constexpr auto layer_norm_forward = cuda::layer_norm_forward;
  static constexpr auto column_sum = cuda::column_sum;

  static constexpr int64_t kLeastProjected = 2048;  // rows for which qkv_projection is faster than cuBLASLt

  static void project_qkv(Steps* steps, const Gemm& product) {
    if (product.rows < kLeastProjected) return (*steps)(gemm, product);
    QkvProjection projection{};
    projection.x = product.a;
    projection.weight = product.b;
    projection.bias = product.bias;
    projection.qkv = product.d;
    projection.rows = product.rows;
    projection.inputs = projection.x_stride = product.inner;
    projection.columns = product.columns;
    projection.dtype = projection.bias_dtype = product.dtype;
    projection.device = product.device;
    projection.stream = product.stream;
    projection.dependent = steps->dependent();
    (*steps)(qkv_projection, projection);
  }

  // Sets the counters of all layers' attention to 0.
  static Status reset_tile_counters(const TransformerCall& call, int32_t* counters) {
    const auto bytes = static_cast<size_t>(call.layers) * sizeof(int32_t);
    return status_of(cudaMemsetAsync(counters, 0, bytes, static_cast<cudaStream_t>(call.stream)));
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
    GeluGemmForward up{};
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
    up.dependent = steps->dependent();
    baseline::transformer::set_device(call, &up);
    (*steps)(gelu_gemm_forward, up);
  }

  static void activation_backward(Steps* steps, const TransformerCall& call, const ActivationTensors& tensors) {
    GeluGemmBackward product{};
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
    baseline::transformer::set_device(call, &product);
    (*steps)(gelu_gemm_backward, product);
  }

  // Whether attention also computes the column sums of dqkv: if sequences are long enough, as in
  // attention_native.sums_columns.
  static bool sums_columns(const TransformerShape& shape) {
    return baseline::transformer::head_dim_of(shape) == 64 && shape.tokens >= 64 * shape.sequences;
  }
  static void set_column_sums(const TransformerCall& call, void* sums, AttentionBackward* attention) {
    attention->column_sums = sums;
    attention->column_sums_dtype = call.parameter_dtype;
    attention->column_parts = attention->workspace + attention_floats(call);
  }

  static int column_sum_parts(const TransformerShape& shape) {
    return static_cast<int>(cuda::column_sum_parts(shape.tokens, 3 * shape.width, shape.processors));
  }

  static int64_t attention_floats(const TransformerShape& shape) {
    return attention_backward_workspace(shape.sequences, shape.heads, baseline::transformer::head_dim_of(shape),
                                        shape.tokens, shape.max_seqlen);
  }

  // The sizes of workspaces are in bytes; the launchers use the same workspace one after the other.
  static int64_t forward_workspace(const TransformerShape&) { return kGemmWorkspace; }
  static int64_t backward_workspace(const TransformerShape& shape) {
    Count attention = attention_floats(shape);
    if (sums_columns(shape))
      attention = attention + attention_column_parts(shape.sequences, shape.heads,
                                                     baseline::transformer::head_dim_of(shape), shape.max_seqlen);
    const Count columns = Count(column_sum_parts(shape)) * shape.width * 3;
    const Count norm = Count(shape.processors) * shape.width * 3;
    const int64_t activation = gelu_gemm_workspace(shape.tokens, shape.intermediate);
    const int64_t floats = std::max({attention.value, columns.value, norm.value, activation});
    return std::max((Count(floats) * 4).value, kGemmWorkspace);
  }
};

}  // namespace cuda
}  // namespace fasttfm
