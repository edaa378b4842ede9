// Lists of steps on Hopper, in 16 bits. GEMMs use cuBLASLt, except for those with an activation (gelu_product) and the
// projection with rotary positions (qkv_projection). Kernels with a field `dependent` start while the previous one
// still runs.
#include <algorithm>

#include "common/cuda/hopper.cuh"
#include "common/cuda/launch.cuh"
#include "few_rows/op.h"
#include "few_rows/plan.h"
#include "fp8/op.h"
#include "gelu_product/op.h"
#include "layers/run.h"
#include "qkv_projection/op.h"

namespace fasttfm {
namespace cuda {
namespace {

using baseline::Count;
using baseline::layers::Run;

struct Hopper {
  static constexpr auto gemm = cuda::gemm;
  static constexpr auto rotary = cuda::rotary;
  static constexpr auto attention_forward = cuda::attention_forward;
  static constexpr auto attention_backward = cuda::attention_backward;
  static constexpr auto add_norm_backward = cuda::dropout_add_layer_norm_backward;
  static constexpr auto rms_norm_forward = cuda::rms_norm_forward;
  static constexpr auto rms_norm_backward = cuda::rms_norm_backward;
  static constexpr auto gated_activation_forward = cuda::gated_activation_forward;
  static constexpr auto gated_activation_backward = cuda::gated_activation_backward;
  static constexpr auto activation_forward = cuda::bias_gelu_forward;
  static constexpr auto activation_backward = cuda::bias_gelu_backward;
  static constexpr auto column_sum = cuda::column_sum;
  static constexpr auto head_norm_forward = cuda::head_norm_forward;
  static constexpr auto head_norm_backward = cuda::head_norm_backward;
  static constexpr auto add_norm_fp8 = cuda::dropout_add_layer_norm_fp8;
  static constexpr int64_t kGemmWorkspaceBytes = kGemmWorkspace;

  static Status add_norm_forward(const DropoutAddLayerNormForward& call) {
    return call.seed == nullptr ? add_layer_norm_forward(call) : dropout_add_layer_norm_forward(call);
  }

  static Status zero(const LayersCall& call, void* target, int64_t bytes) {
    return status_of(cudaMemsetAsync(target, 0, static_cast<size_t>(bytes), static_cast<cudaStream_t>(call.stream)));
  }

  // qkv [T, columns] = x [T, inner] weight^T + bias, with rotated heads of 64 columns in its first two thirds.
  static void rotary_projection(Run<Hopper>* run) {
    auto& fields = run->fields_;
    QkvProjection projection{};
    projection.x = fields.address();
    projection.weight = fields.address();
    projection.bias = fields.address();
    projection.qkv = fields.address();
    projection.columns = fields.integer();
    projection.inputs = projection.x_stride = fields.integer();
    projection.cos = fields.address<float>();
    projection.sin = fields.address<float>();
    projection.positions = fields.address<int64_t>();
    projection.table_rows = run->table_rows();
    fields.integer();  // heads, and the columns of one: 64
    fields.integer();
    projection.rows = projection.sequence = run->call_.tokens;
    projection.dtype = projection.bias_dtype = run->call_.dtype;
    projection.dependent = run->started_;
    run->launch(qkv_projection, &projection, 0);
  }

  // y [T, columns] = activation(x [T, inner] weight^T + bias), or, if it is gated, that of the gate times up.
  static void gemm_activation(Run<Hopper>* run) {
    auto& fields = run->fields_;
    ActivatedProduct product{};
    product.x = fields.address();
    product.weight = fields.address();
    product.bias = fields.address();
    product.columns = fields.integer();
    product.activation = static_cast<Activation>(fields.integer());
    product.inputs = product.x_stride = fields.integer();
    const bool gated = fields.integer() != 0;
    product.a = fields.address();
    product.rows = run->call_.tokens;
    product.dtype = run->call_.dtype;
    product.bias_dtype = run->call_.parameter_dtype;
    product.dependent = run->started_;
    if (gated) return run->launch(gated_product, &product, 0);
    GeluProductForward forward{product};
    run->launch(gelu_product_forward, &forward, 0);
  }

  // Attention without dropout over sequences that are short.
  static void short_attention(Run<Hopper>* run, const AttentionForward& call) {
    FewRowsAttention attention{};
    attention.qkv = call.q;
    attention.out = call.out;
    attention.cu_seqlens = call.cu_seqlens;
    attention.tokens = call.queries;
    attention.sequences = call.sequences;
    attention.heads = call.heads;
    attention.head_dim = call.head_dim;
    attention.max_seqlen = call.max_seqlen;
    attention.window_left = call.window_left;
    attention.window_right = call.window_right;
    attention.scale = call.scale;
    attention.split_keys = few_rows::splits_keys(call.sequences, call.heads, call.max_seqlen, run->call_.processors);
    attention.dtype = call.dtype;
    attention.dependent = call.dependent;
    run->launch(few_rows_attention, &attention, 0);
  }

  // y [T, columns] = x in e4m3.
  static void fp8_cast(Run<Hopper>* run) {
    auto& fields = run->fields_;
    Fp8Cast cast{};
    cast.x = fields.address();
    cast.scale = fields.address<const float>();
    cast.amax = fields.address<float>();
    cast.as_rows = fields.address();
    cast.columns = cast.x_stride = fields.integer();
    cast.rows = run->call_.tokens;
    cast.padded = (cast.rows + 15) / 16 * 16;
    cast.dtype = run->call_.dtype;
    run->launch(cuda::fp8_cast, &cast, 0);
  }

  // y [T, columns] = x [T, inner] weight^T + bias + c, where x and the weight are e4m3.
  static void fp8_gemm(Run<Hopper>* run) {
    auto& fields = run->fields_;
    Gemm gemm{};
    gemm.a = fields.address();
    gemm.b = fields.address();
    gemm.a_scale = fields.address<const float>();
    gemm.b_scale = fields.address<const float>();
    gemm.bias = fields.address();
    gemm.c = fields.address();
    gemm.d = fields.address();
    gemm.columns = fields.integer();
    gemm.inner = fields.integer();
    gemm.rows = run->call_.tokens;
    gemm.transposed_b = 1;
    gemm.a_fp8 = gemm.b_fp8 = Fp8Format::e4m3;
    gemm.fast_accumulation = 1;
    gemm.dtype = gemm.out_dtype = run->call_.dtype;
    run->launch(cuda::gemm, &gemm, kGemmWorkspaceBytes);
  }

  // y [T, columns] = activation(x [T, inner] weight^T + bias), all three in e4m3.
  static void fp8_gemm_activation(Run<Hopper>* run) {
    auto& fields = run->fields_;
    Fp8GeluProduct product{};
    product.x = fields.address();
    product.weight = fields.address();
    product.x_inverse = fields.address<const float>();
    product.weight_inverse = fields.address<const float>();
    product.bias = fields.address();
    product.scale = fields.address<const float>();
    product.amax = fields.address<float>();
    product.a = fields.address();
    product.columns = fields.integer();
    product.activation = static_cast<Activation>(fields.integer());
    product.inputs = fields.integer();
    product.rows = run->call_.tokens;
    product.bias_dtype = run->call_.parameter_dtype;
    run->launch(fp8_gelu_product, &product, 0);
  }

  // Its kernel is a CPU's.
  static void int8_gemm(Run<Hopper>* run) {
    run->status_ = {StatusCode::bad_value, "layers: a step that Hopper has not"};
  }

  static int64_t attention_workspace(const LayersCall&, int64_t) { return 16; }  // a counter of tiles
  static int64_t attention_backward_workspace(const LayersCall& call, const AttentionBackward& attention) {
    return bytes_of(cuda::attention_backward_workspace(call.sequences, attention.heads, attention.head_dim, call.tokens,
                                                       call.max_seqlen, attention.heads != attention.kv_heads));
  }
  static int64_t add_norm_workspace(const LayersCall& call, int64_t columns) {
    return bytes_of((Count(call.processors) * columns * 3).value);
  }
  static int64_t rms_norm_workspace(const LayersCall& call, int64_t columns) {
    return bytes_of((Count(call.processors) * columns).value);
  }
  static int64_t gated_activation_parts(const LayersCall& call, int64_t columns) {
    return cuda::gated_activation_parts(columns, call.processors);
  }
  static int64_t gated_activation_workspace(const LayersCall& call, int64_t columns) {
    return bytes_of((Count(gated_activation_parts(call, columns)) * columns * 2).value);
  }
  static int64_t activation_parts(const LayersCall& call, int64_t columns) { return column_sum_parts(call, columns); }
  static int64_t activation_workspace(const LayersCall& call, int64_t columns) {
    return bytes_of((Count(activation_parts(call, columns)) * columns).value);
  }
  static int64_t column_sum_parts(const LayersCall& call, int64_t columns) {
    return cuda::column_sum_parts(call.tokens, columns, call.processors);
  }
  static int64_t column_sum_workspace(const LayersCall& call, int64_t columns) {
    return bytes_of((Count(column_sum_parts(call, columns)) * columns).value);
  }
  static int64_t head_norm_blocks(const LayersCall& call) { return 4 * call.processors; }
  static int64_t head_norm_workspace(const LayersCall& call, int64_t head_dim) {
    return bytes_of(cuda::head_norm_workspace(head_norm_blocks(call), head_dim));
  }
  static int64_t bytes_of(int64_t floats) { return (Count(floats) * 4).value; }

  template <class Params>
  static void set(const LayersCall& call, Params* params) {
    params->device = call.device;
    params->stream = call.stream;
    set_workspace(call, params);
  }
  template <class Params>
  static void set_workspace(const LayersCall&, Params*) {}
  static void set_workspace(const LayersCall& call, Gemm* gemm) { gemm->workspace = call.workspace; }
  static void set_workspace(const LayersCall& call, AttentionForward* attention) {
    attention->workspace = static_cast<float*>(call.workspace);
  }
  static void set_workspace(const LayersCall& call, AttentionBackward* attention) {
    attention->workspace = static_cast<float*>(call.workspace);
  }
};

}  // namespace

Status layers_run(const LayersCall& call) {
  if (call.dtype != DType::bf16 && call.dtype != DType::f16) return unknown_dtype();
  const DeviceGuard guard(call.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  return baseline::layers::run<Hopper>(call);
}

Status layers_workspace(const LayersCall& call) { return baseline::layers::write_workspace<Hopper>(call); }

}  // namespace cuda
}  // namespace fasttfm
