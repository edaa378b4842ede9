// The common part of forward and backward of a stack of layers, on every device: a sequence of steps that ends at the
// first failure, and the addresses of a layer's tensors.
//
// DEVICE, a struct of static functions, has the launchers: see cpu.cpp and cuda_layers.cu.
#pragma once

#include <cmath>
#include <cstdint>

#include "gemm/op.h"
#include "transformer_block/op.h"
#include "transformer_block/regions.h"

namespace fasttfm {
namespace FASTTFM_ISA {
namespace transformer {

// Runs launchers in order, until the first one that fails.
class Steps {
 public:
  template <class Launcher, class Params>
  void operator()(Launcher launcher, const Params& params) {
    if (!failed()) status_ = launcher(params);
    started_ = 1;
  }
  // The status of work before the first kernel.
  void prepare(const Status& status) {
    if (!failed()) status_ = status;
  }
  // CUDA: whether the next kernel may be launched as a dependent of the previous one. The first one of a call is not,
  // so it waits for kernels that write parameters.
  int dependent() const { return started_; }
  const Status& status() const { return status_; }
  bool failed() const { return status_.code != StatusCode::ok; }

 private:
  Status status_;
  int started_ = 0;
};

inline void* at(void* memory, int64_t offset) { return static_cast<char*>(memory) + offset; }
inline const void* at(const void* memory, int64_t offset) { return static_cast<const char*>(memory) + offset; }

// The addresses of the tensors that a layer keeps, and of those that it passes to the next one.
inline void* in_layer(const TransformerCall& call, const KeptPlan& plan, int64_t layer, KeptRegion region) {
  return at(call.kept, layer * plan.layer_bytes + plan.regions[region].offset);
}
inline void* between_layers(const TransformerCall& call, const KeptPlan& plan, int64_t layer, BetweenRegion region) {
  return at(call.kept, call.layers * plan.layer_bytes + layer * plan.between_bytes + plan.between[region].offset);
}

inline void* address_in(const int64_t* table, int64_t layer, TransformerParameter parameter) {
  return reinterpret_cast<void*>(table[layer * kTransformerParameters + parameter]);
}

inline int64_t head_dim_of(const TransformerShape& shape) { return shape.width / shape.heads; }

// The scale of attention's scores.
inline float score_scale(const TransformerShape& shape) {
  return static_cast<float>(1 / std::sqrt(static_cast<double>(head_dim_of(shape))));
}

// A layer's seed for attention (seed_index 0) or for the dropout after one of the two blocks (1, 2); null without
// dropout.
inline const int64_t* seed_of(const TransformerCall& call, int64_t layer, int seed_index, int threshold) {
  return threshold > 0 ? call.seeds + 3 * layer + seed_index : nullptr;
}

// Sets the common fields of the launchers' params structs.
template <class Params>
void set_device(const TransformerCall& call, Params* params) {
  params->device = call.device;
  params->stream = call.stream;
}

// d [T, columns] = a [T, inner] weight, where the weight is [inner, columns] or, if transposed, [columns, inner].
inline Gemm product_of(const TransformerCall& call, const void* a, const void* weight, bool transposed, void* d,
                       int64_t columns, int64_t inner, void* workspace) {
  Gemm gemm{};
  gemm.a = a;
  gemm.b = weight;
  gemm.d = d;
  gemm.workspace = workspace;
  gemm.rows = call.tokens;
  gemm.columns = columns;
  gemm.inner = inner;
  gemm.transposed_b = transposed;
  gemm.dtype = gemm.out_dtype = call.dtype;
  set_device(call, &gemm);
  return gemm;
}

// Attention over qkv [T, 3, H, D].
template <class Attention>
Attention attention_of(const TransformerCall& call, int64_t layer, const void* qkv, void* workspace) {
  Attention attention{};
  const int64_t head_dim = head_dim_of(call), part = call.width * size_of(call.dtype);
  attention.q = qkv;
  attention.k = at(qkv, part);
  attention.v = at(qkv, 2 * part);
  attention.q_token_stride = attention.k_token_stride = attention.v_token_stride = 3 * call.width;
  attention.q_head_stride = attention.k_head_stride = attention.v_head_stride = head_dim;
  attention.cu_seqlens = attention.cu_seqlens_k = call.cu_seqlens;
  attention.seed = seed_of(call, layer, 0, call.attention_threshold);
  attention.sequences = call.sequences;
  attention.heads = attention.kv_heads = call.heads;
  attention.head_dim = head_dim;
  attention.queries = attention.keys = call.tokens;
  attention.max_seqlen = attention.max_seqlen_k = call.max_seqlen;
  attention.window_left = call.window_left;
  attention.window_right = call.window_right;
  attention.scale = score_scale(call);
  attention.threshold = call.attention_threshold;
  attention.dropout_scale = call.attention_scale;
  attention.dtype = call.dtype;
  attention.workspace = static_cast<float*>(workspace);
  attention.threads = static_cast<int>(call.processors);
  set_device(call, &attention);
  return attention;
}

// Sets the common fields of a forward or backward call of one of a layer's two dropout_add_layer_norm; `seed_index` is
// the index of its seed.
template <class Norm>
Norm add_norm_of(const TransformerCall& call, int64_t layer, int seed_index) {
  Norm norm{};
  const int threshold = seed_index == 1 ? call.threshold_a : call.threshold_b;
  norm.rows = norm.tokens_per_sequence = call.tokens;
  norm.columns = call.width;
  norm.seed = seed_of(call, layer, seed_index, threshold);
  norm.cu_seqlens = threshold > 0 ? call.cu_seqlens : nullptr;
  norm.sequences = threshold > 0 ? call.sequences : 0;
  norm.threshold = threshold;
  norm.scale = seed_index == 1 ? call.scale_a : call.scale_b;
  norm.dtype = call.dtype;
  norm.residual_dtype = call.residual_dtype;
  norm.threads = static_cast<int>(call.processors);
  set_device(call, &norm);
  return norm;
}

// Checks forward and backward calls, on every device.
inline Status check_shape(const TransformerShape& shape) {
  if (shape.layers < 1 || shape.tokens < 1 || shape.sequences < 1 || shape.heads < 1 || shape.processors < 1)
    return bad_size("transformer_block: layers, tokens, sequences, heads and processors are at least 1");
  if (shape.width < 1 || shape.width % shape.heads != 0 || shape.intermediate < 1)
    return bad_size("transformer_block: heads divide the width, and there are intermediate columns");
  if (shape.residual_dtype != shape.dtype && (shape.residual_dtype != DType::f32 || !shape.pre_norm))
    return {StatusCode::bad_value, "transformer_block: residual_dtype is dtype, or fp32 in a pre-LN model"};
  if (shape.recompute && shape.residual_dtype != shape.dtype)
    return {StatusCode::bad_value, "transformer_block: recompute is for a stream in dtype"};
  return {};
}

}  // namespace transformer
}  // namespace FASTTFM_ISA
}  // namespace fasttfm
