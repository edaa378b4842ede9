// Executes a list of steps (op.h), on every device. The fields of each kind of step are read in the order in which its
// function reads them, which is that of its class in python/fasttfm/ops/layers/steps.py.
//
// DEVICE, a struct of static functions and constants, has the launchers: see cpu.cpp and cuda_steps.cu.
#pragma once

#include <cstdint>
#include <cstring>

#include "attention/op.h"
#include "bias_gelu/op.h"
#include "column_sum/op.h"
#include "common/count.h"
#include "dropout_add_layer_norm/op.h"
#include "gated_activation/op.h"
#include "gemm/op.h"
#include "head_norm/op.h"
#include "kv_cache/op.h"
#include "layer_norm/op.h"
#include "layers/op.h"
#include "rms_norm/op.h"
#include "rotary/op.h"
#include "selected_gemm/op.h"

namespace fasttfm {
namespace FASTTFM_ISA {
namespace layers {

// Reads a step's fields.
class Fields {
 public:
  Fields(const LayersCall& call, bool resolves)
      : call_(call), resolves_(resolves), rows_((call.tokens + kLayerRows - 1) / kLayerRows * kLayerRows) {}

  // Starts with the next step. Returns false at the end of the list.
  bool next() {
    if (!is_whole_ || end_ >= call_.word_count) return false;
    at_ = end_;
    const int64_t size = at_ + 1 < call_.word_count ? call_.words[at_ + 1] : 0;
    is_whole_ = size >= 2 && size <= call_.word_count - at_;
    if (!is_whole_) return false;
    end_ = at_ + size;
    kind_ = static_cast<LayerStep>(call_.words[at_]);
    at_ += 2;
    return true;
  }
  LayerStep kind() const { return kind_; }
  // Whether the fields of the step have all been read, and no others.
  bool is_read() const { return at_ == end_; }
  bool is_whole() const { return is_whole_; }

  // Whether the next field, an address, is not null in the list.
  bool is_given() const { return at_ < call_.word_count && call_.words[at_] >= 0; }

  int64_t integer() { return at_ < call_.word_count ? call_.words[at_++] : 0; }
  float number() {
    const int64_t bits = integer();
    double value;
    std::memcpy(&value, &bits, sizeof(value));
    return static_cast<float>(value);
  }
  template <class T = void>
  T* address() {
    const int64_t word = integer();
    if (word < 0 || !resolves_) return nullptr;
    const int64_t table = word >> 56, index = word >> 40 & 0xffff, units = word & ((int64_t{1} << 40) - 1);
    if (table >= kLayerTables) return nullptr;
    const int64_t entry = call_.tables[table][index];
    return entry == 0 ? nullptr : reinterpret_cast<T*>(entry + units * rows_);
  }

 private:
  const LayersCall& call_;
  const bool resolves_;
  const int64_t rows_;
  int64_t at_ = 0, end_ = 0;
  LayerStep kind_ = LayerStep::zero;
  bool is_whole_ = true;
};

template <class Device>
class Run {
 public:
  // `launches`: false only to compute the size of the workspace.
  Run(const LayersCall& call, bool launches) : call_(call), fields_(call, launches), launches_(launches) {}

  Status run() {
    while (status_.code == StatusCode::ok && fields_.next()) {
      step();
      if (status_.code == StatusCode::ok && !fields_.is_read())
        status_ = {StatusCode::bad_value, "layers: a step with an unknown kind or number of fields"};
    }
    if (status_.code == StatusCode::ok && !fields_.is_whole())
      status_ = {StatusCode::bad_value, "layers: the last step is not whole"};
    return status_;
  }
  int64_t workspace_bytes() const { return workspace_bytes_; }

 private:
  void step() {
    switch (fields_.kind()) {
      case LayerStep::zero: return zero();
      case LayerStep::gemm: return gemm();
      case LayerStep::weight_gradient: return weight_gradient();
      case LayerStep::projection: return Device::projection(this);
      case LayerStep::rotary: return rotary();
      case LayerStep::attention: return attention();
      case LayerStep::attention_backward: return attention_backward();
      case LayerStep::add_norm: return add_norm();
      case LayerStep::add_norm_backward: return add_norm_backward();
      case LayerStep::rms_norm: return rms_norm();
      case LayerStep::rms_norm_backward: return rms_norm_backward();
      case LayerStep::gated_activation: return gated_activation();
      case LayerStep::gated_activation_backward: return gated_activation_backward();
      case LayerStep::activation: return activation();
      case LayerStep::activation_backward: return activation_backward();
      case LayerStep::gemm_activation: return Device::gemm_activation(this);
      case LayerStep::column_sum: return column_sum();
      case LayerStep::head_norm: return head_norm();
      case LayerStep::head_norm_backward: return head_norm_backward();
      case LayerStep::int8_gemm: return Device::int8_gemm(this);
      case LayerStep::packed_gemm: return Device::packed_gemm(this);
      case LayerStep::fp8_cast: return Device::fp8_cast(this);
      case LayerStep::fp8_gemm: return Device::fp8_gemm(this);
      case LayerStep::fp8_gemm_activation: return Device::fp8_gemm_activation(this);
      case LayerStep::gemm_activation_backward: return Device::gemm_activation_backward(this);
      case LayerStep::layer_norm: return layer_norm();
      case LayerStep::range: return range();
      case LayerStep::few_rows_gemm: return Device::few_rows_gemm(this);
      case LayerStep::few_rows_add_norm: return Device::few_rows_add_norm(this);
      case LayerStep::few_rows_layers: return Device::few_rows_layers(this);
      case LayerStep::store_keys: return store_keys();
      case LayerStep::cached_attention: return Device::cached_attention(this);
      case LayerStep::selected_gemm: return selected_gemm();
      case LayerStep::adapted_gemm: return Device::adapted_gemm(this);
    }
  }

  // The steps up to the next one of these are those of a layer.
  void range() {
    const int64_t layer = fields_.integer();
    const bool backward = fields_.integer() != 0;
    if (launches_) state_.begin(layer, backward);
  }

  // bytes at `target`: 0.
  void zero() {
    void* target = fields_.address();
    const int64_t bytes = fields_.integer();
    if (launches_) status_ = Device::zero(call_, target, bytes);
  }

  // d [T, columns] = a [T, inner] b + bias + c, where b is [inner, columns] or, if transposed, [columns, inner].
  void gemm() {
    Gemm gemm{};
    gemm.a = fields_.address();
    gemm.b = fields_.address();
    gemm.bias = fields_.address();
    gemm.c = fields_.address();
    gemm.d = fields_.address();
    gemm.columns = fields_.integer();
    gemm.inner = fields_.integer();
    gemm.transposed_b = fields_.integer() != 0;
    gemm.threads = fields_.integer() != 0 ? static_cast<int>(call_.processors) : 0;
    gemm.rows = call_.tokens;
    gemm.dtype = gemm.out_dtype = call_.dtype;
    launch(Device::gemm, &gemm, Device::kGemmWorkspaceBytes);
  }

  // d [rows, columns] = a^T b in the parameters' type, where a is [T, rows] and b [T, columns]. Nothing if d is null.
  void weight_gradient() {
    Gemm gemm{};
    gemm.a = fields_.address();
    gemm.b = fields_.address();
    gemm.d = fields_.address();
    gemm.rows = fields_.integer();
    gemm.columns = fields_.integer();
    gemm.inner = call_.tokens;
    gemm.transposed_a = 1;
    gemm.dtype = call_.dtype;
    gemm.out_dtype = call_.parameter_dtype;
    if (launches_ && gemm.d == nullptr) return;
    launch(Device::gemm, &gemm, Device::kGemmWorkspaceBytes);
  }

  // Columns of y [T, y_stride] (+)= those of x [T, x_stride] b^T, where b is a part of the matrix of a token's adapter.
  void selected_gemm() {
    SelectedGemm gemm{};
    gemm.x = fields_.address();
    gemm.x_stride = fields_.integer();
    gemm.x_first = fields_.integer();
    gemm.b = fields_.address();
    gemm.b_rows = fields_.integer();
    gemm.b_first = fields_.integer();
    gemm.y = fields_.address();
    gemm.y_stride = fields_.integer();
    gemm.y_first = fields_.integer();
    gemm.columns = fields_.integer();
    gemm.inner = fields_.integer();
    gemm.adds = fields_.integer() != 0;
    gemm.adapters = fields_.template address<const int32_t>();
    gemm.rows = call_.tokens;
    gemm.dtype = call_.dtype;
    launch(Device::selected_gemm, &gemm, 0);
  }

  // Rotates the first rotary_heads of x's heads [T, heads, columns] in place. Positions are null if a token's position
  // is its index among all tokens.
  void rotary() {
    Rotary rotary{};
    rotary.x = rotary.y = fields_.address();
    rotary.cos = fields_.address<float>();
    rotary.sin = fields_.address<float>();
    rotary.positions = fields_.address<int64_t>();
    rotary.table_rows = table_rows();
    rotary.heads = fields_.integer();
    rotary.rotary_heads = fields_.integer();
    rotary.columns = fields_.integer();
    rotary.pairs = fields_.integer();
    rotary.sign = fields_.number();
    rotary.tokens = rotary.sequence = call_.tokens;
    rotary.head_stride = rotary.columns;
    rotary.token_stride = rotary.heads * rotary.columns;
    rotary.dtype = call_.dtype;
    launch(Device::rotary, &rotary, 0);
  }

  // The number of rows of a table of cosines, which is an entry of the buffers.
  int64_t table_rows() {
    const int64_t index = fields_.integer();
    return launches_ ? entry(index) : 0;
  }

  // Bytes in front of a layer's part of a KV cache, whose capacity and rows are the entries from `sizes` on.
  int64_t layer_offset(int64_t layer, int64_t sizes, int64_t head_dim) const {
    return layer * entry(sizes + 1) * head_dim * size_of(call_.dtype);
  }

  // An entry of the buffers that is a number.
  int64_t entry(int64_t index) const { return call_.tables[static_cast<int>(LayerTable::buffers)][index]; }

  // The fields that attention has in both directions. qkv is [T, heads + 2 kv_heads, head_dim].
  template <class Attention>
  Attention attention_fields() {
    Attention attention{};
    const char* qkv = fields_.template address<char>();
    attention.seed = fields_.template address<int64_t>();
    const int64_t seed_index = fields_.integer();
    if (attention.seed != nullptr) attention.seed += seed_index;
    attention.heads = fields_.integer();
    attention.kv_heads = fields_.integer();
    attention.head_dim = fields_.integer();
    attention.window_left = fields_.integer();
    attention.window_right = fields_.integer();
    attention.scale = fields_.number();
    attention.threshold = static_cast<int>(fields_.integer());
    attention.dropout_scale = fields_.number();
    const int64_t bytes = attention.head_dim * size_of(call_.dtype);
    attention.q = qkv;
    attention.k = part(qkv, attention.heads * bytes);
    attention.v = part(qkv, (attention.heads + attention.kv_heads) * bytes);
    const int64_t stride = (attention.heads + 2 * attention.kv_heads) * attention.head_dim;
    attention.q_token_stride = attention.k_token_stride = attention.v_token_stride = stride;
    attention.q_head_stride = attention.k_head_stride = attention.v_head_stride = attention.head_dim;
    attention.cu_seqlens = attention.cu_seqlens_k = call_.cu_seqlens;
    attention.sequences = call_.sequences;
    attention.queries = attention.keys = call_.tokens;
    attention.max_seqlen = attention.max_seqlen_k = call_.max_seqlen;
    if (attention.window_left > call_.tokens) attention.window_left = call_.tokens;
    if (attention.window_right > call_.tokens) attention.window_right = call_.tokens;
    attention.dtype = call_.dtype;
    return attention;
  }
  template <class Element>
  static Element* part(Element* tensor, int64_t offset) {
    return tensor == nullptr ? nullptr : tensor + offset;
  }

  void attention() {
    auto attention = attention_fields<AttentionForward>();
    attention.out = fields_.address();
    attention.lse = fields_.template address<float>();
    auto* counters = fields_.template address<int32_t>();  // 0 before the first step that uses them
    attention.tile_counter = counters == nullptr ? nullptr : counters + fields_.integer();
    if (counters == nullptr) fields_.integer();
    attention.dependent = started_;
    if (fields_.integer() != 0) return Device::short_attention(this, attention);
    launch(Device::attention_forward, &attention, Device::attention_workspace(call_, attention.head_dim));
  }

  void attention_backward() {
    auto attention = attention_fields<AttentionBackward>();
    attention.dout = fields_.address();
    attention.out = fields_.address();
    attention.lse = fields_.template address<float>();
    char* to = fields_.template address<char>();
    const int64_t bytes = attention.head_dim * size_of(call_.dtype);
    attention.dq = to;
    attention.dk = part(to, attention.heads * bytes);
    attention.dv = part(to, (attention.heads + attention.kv_heads) * bytes);
    attention.dq_token_stride = attention.dk_token_stride = attention.dv_token_stride = attention.q_token_stride;
    attention.dq_head_stride = attention.dk_head_stride = attention.dv_head_stride = attention.head_dim;
    const bool sums = fields_.is_given();
    attention.column_sums = fields_.address();
    attention.column_sums_dtype = call_.parameter_dtype;
    launch(Device::attention_backward, &attention, Device::attention_backward_workspace(call_, &attention, sums));
  }

  // The fields that the addition with a following LayerNorm has in both directions.
  template <class Norm>
  Norm add_norm_fields() {
    Norm norm{};
    norm.columns = fields_.integer();
    norm.seed = fields_.template address<int64_t>();
    const int64_t seed_index = fields_.integer();
    if (norm.seed != nullptr) norm.seed += seed_index;
    norm.threshold = static_cast<int>(fields_.integer());
    norm.scale = fields_.number();
    norm.cu_seqlens = norm.threshold > 0 ? call_.cu_seqlens : nullptr;
    norm.sequences = norm.threshold > 0 ? call_.sequences : 0;
    norm.rows = norm.tokens_per_sequence = call_.tokens;
    norm.dtype = call_.dtype;
    norm.residual_dtype = call_.residual_dtype;
    return norm;
  }

  // z = residual + dropout(x + linear_bias), y = LayerNorm(z); statistics are [2, T].
  void add_norm() {
    auto norm = add_norm_fields<DropoutAddLayerNormForward>();
    norm.x = fields_.address();
    norm.residual = fields_.address();
    norm.linear_bias = fields_.address();
    norm.weight = fields_.address();
    norm.bias = fields_.address();
    norm.y = fields_.address();
    norm.z = fields_.address();
    norm.mean = fields_.template address<float>();
    norm.rstd = part(norm.mean, call_.tokens);
    norm.eps = fields_.number();
    norm.x_stride = norm.residual_stride = norm.columns;
    norm.parameter_dtype = call_.parameter_dtype;
    norm.dependent = started_;
    DropoutAddLayerNormFp8 fp8{};
    static_cast<DropoutAddLayerNormForward&>(fp8) = norm;
    fp8.y_scale = fields_.template address<const float>();
    fp8.y_amax = fields_.template address<float>();
    fp8.as_rows = fields_.address();
    if (fp8.as_rows != nullptr) return launch(Device::add_norm_fp8, &fp8, 0);
    launch(Device::add_norm_forward, &norm, 0);
  }

  void add_norm_backward() {
    auto norm = add_norm_fields<WithBlockMemory<DropoutAddLayerNormBackward>>();
    norm.dy = fields_.address();
    norm.dz = fields_.address();
    norm.z = fields_.address();
    norm.weight = fields_.address();
    norm.mean = fields_.template address<float>();
    norm.rstd = part(norm.mean, call_.tokens);
    norm.dresidual = fields_.address();
    norm.dx = fields_.address();
    norm.dweight = fields_.address();
    norm.dbias = fields_.address();
    norm.dlinear_bias = fields_.address();
    norm.weight_dtype = norm.bias_dtype = norm.linear_bias_dtype = call_.parameter_dtype;
    norm.blocks = static_cast<int>(call_.processors);
    norm.block_memory = call_.block_memory;
    const int64_t workspace = Device::add_norm_workspace(call_, norm.columns);
    norm.workspace = static_cast<float*>(call_.workspace);
    launch(Device::add_norm_backward, &norm, workspace);
  }

  // y = LayerNorm(x), of x in dtype; statistics are [2, T].
  void layer_norm() {
    LayerNormForward norm{};
    norm.x = fields_.address();
    norm.weight = fields_.address();
    norm.bias = fields_.address();
    norm.y = fields_.address();
    norm.mean = fields_.template address<float>();
    norm.rstd = part(norm.mean, call_.tokens);
    norm.columns = norm.x_stride = fields_.integer();
    norm.eps = fields_.number();
    norm.rows = call_.tokens;
    norm.dtype = call_.dtype;
    norm.parameter_dtype = call_.parameter_dtype;
    launch(Device::layer_norm_forward, &norm, 0);
  }

  // y = RMSNorm(x); rstd is [T].
  void rms_norm() {
    RmsNormForward norm{};
    norm.x = fields_.address();
    norm.weight = fields_.address();
    norm.y = fields_.address();
    norm.rstd = fields_.template address<float>();
    norm.columns = norm.x_stride = fields_.integer();
    norm.eps = fields_.number();
    norm.rows = call_.tokens;
    norm.dtype = call_.dtype;
    norm.weight_dtype = call_.parameter_dtype;
    launch(Device::rms_norm_forward, &norm, 0);
  }

  // dx = dz + the gradient through the norm; dz may be null, and may be dx.
  void rms_norm_backward() {
    WithBlockMemory<RmsNormBackward> norm{};
    norm.dy = fields_.address();
    norm.dz = fields_.address();
    norm.x = fields_.address();
    norm.weight = fields_.address();
    norm.rstd = fields_.template address<float>();
    norm.dx = fields_.address();
    norm.dweight = fields_.address();
    norm.columns = norm.x_stride = fields_.integer();
    norm.rows = call_.tokens;
    norm.dtype = call_.dtype;
    norm.weight_dtype = call_.parameter_dtype;
    norm.blocks = static_cast<int>(call_.processors);
    norm.block_memory = call_.block_memory;
    norm.workspace = static_cast<float*>(call_.workspace);
    launch(Device::rms_norm_backward, &norm, Device::rms_norm_workspace(call_, norm.columns));
  }

  // The fields that the norm of heads has in both directions.
  template <class Norm>
  Norm head_norm_fields() {
    Norm norm{};
    norm.x = fields_.address();
    norm.q_weight = fields_.address();
    norm.k_weight = fields_.address();
    norm.rstd = fields_.template address<float>();
    norm.heads = fields_.integer();
    norm.kv_heads = fields_.integer();
    norm.head_dim = fields_.integer();
    norm.tokens = call_.tokens;
    norm.dtype = call_.dtype;
    norm.weight_dtype = call_.parameter_dtype;
    return norm;
  }

  // y: x [T, heads + 2 kv_heads, head_dim] with normalized heads of q and k.
  void head_norm() {
    auto norm = head_norm_fields<HeadNorm>();
    norm.y = fields_.address();
    norm.eps = fields_.number();
    launch(Device::head_norm_forward, &norm, 0);
  }

  // Keys and values of qkv [T, heads + 2 kv_heads, head_dim] to the part of the KV cache that belongs to this layer.
  void store_keys() {
    KvCacheStore store{};
    store.qkv = fields_.address();
    auto* keys = fields_.template address<char>();
    auto* values = fields_.template address<char>();
    store.places = fields_.template address<const int64_t>();
    const int64_t sizes = fields_.integer(), layer = fields_.integer();
    store.heads = fields_.integer();
    store.kv_heads = fields_.integer();
    store.head_dim = fields_.integer();
    store.tokens = call_.tokens;
    store.dtype = call_.dtype;
    if (launches_) {
      store.capacity = entry(sizes);
      store.rows = entry(sizes + 1);
      store.keys = keys + layer_offset(layer, sizes, store.head_dim);
      store.values = values + layer_offset(layer, sizes, store.head_dim);
    }
    launch(Device::kv_cache_store, &store, 0);
  }

  // The gradient of x replaces dy.
  void head_norm_backward() {
    auto norm = head_norm_fields<HeadNormBackward>();
    norm.dy = fields_.address();
    norm.dq_weight = fields_.address();
    norm.dk_weight = fields_.address();
    norm.workspace = static_cast<float*>(call_.workspace);
    norm.blocks = static_cast<int>(Device::head_norm_blocks(call_));
    launch(Device::head_norm_backward, &norm, Device::head_norm_workspace(call_, norm.head_dim));
  }

  // The fields that activations have in both directions: of x [T, columns], or [T, 2 columns] if it is gated.
  template <class Params>
  Params activation_fields(int64_t parts) {
    Params params{};
    params.x = fields_.address();
    params.bias = fields_.address();
    params.columns = fields_.integer();
    params.activation = static_cast<Activation>(fields_.integer());
    params.rows = call_.tokens;
    params.x_stride = parts * params.columns;
    params.dtype = call_.dtype;
    params.bias_dtype = call_.parameter_dtype;
    return params;
  }

  void gated_activation() {
    auto gated = activation_fields<GatedActivationForward>(2);
    gated.gate_first = static_cast<int>(fields_.integer());
    gated.y = fields_.address();
    launch(Device::gated_activation_forward, &gated, 0);
  }

  void gated_activation_backward() {
    auto gated = activation_fields<GatedActivationBackward>(2);
    gated.gate_first = static_cast<int>(fields_.integer());
    gated.dy = fields_.address();
    gated.dx = fields_.address();
    gated.dbias = fields_.address();
    gated.workspace = static_cast<float*>(call_.workspace);
    gated.parts = static_cast<int>(Device::gated_activation_parts(call_, gated.columns));
    launch(Device::gated_activation_backward, &gated, Device::gated_activation_workspace(call_, gated.columns));
  }

  void activation() {
    auto activation = activation_fields<BiasGeluForward>(1);
    activation.y = fields_.address();
    launch(Device::activation_forward, &activation, 0);
  }

  // y, the activation once more, may be null.
  void activation_backward() {
    auto activation = activation_fields<BiasGeluBackward>(1);
    activation.dy = fields_.address();
    activation.dx = fields_.address();
    activation.y = fields_.address();
    activation.dbias = fields_.address();
    activation.workspace = static_cast<float*>(call_.workspace);
    activation.parts = static_cast<int>(Device::activation_parts(call_, activation.columns));
    launch(Device::activation_backward, &activation, Device::activation_workspace(call_, activation.columns));
  }

  // Nothing if the sum is null.
  void column_sum() {
    ColumnSum columns{};
    columns.x = fields_.address();
    columns.sum = fields_.address();
    columns.columns = columns.x_stride = fields_.integer();
    columns.rows = call_.tokens;
    columns.dtype = call_.dtype;
    columns.sum_dtype = call_.parameter_dtype;
    columns.parts = static_cast<int>(Device::column_sum_parts(call_, columns.columns));
    columns.workspace = static_cast<float*>(call_.workspace);
    if (launches_ && columns.sum == nullptr) return;
    launch(Device::column_sum, &columns, Device::column_sum_workspace(call_, columns.columns));
  }

  // Launches a kernel that needs this number of bytes of the workspace, which all steps share.
  template <class Launcher, class Params>
  void launch(Launcher launcher, Params* params, int64_t workspace_bytes) {
    if (workspace_bytes > workspace_bytes_) workspace_bytes_ = workspace_bytes;
    if (!launches_) return;
    Device::set(call_, params);
    status_ = launcher(*params);
    started_ = 1;
  }

  static int64_t size_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

  friend Device;

  const LayersCall& call_;
  Fields fields_;
  const bool launches_;
  Status status_;
  int64_t workspace_bytes_ = 0;
  // CUDA: whether the next kernel may be launched as a dependent of the previous one. The first one of a call is not,
  // so it waits for kernels that write parameters.
  int started_ = 0;
  typename Device::State state_;
};

template <class Device>
Status run(const LayersCall& call) {
  return Run<Device>(call, true).run();
}

template <class Device>
Status write_workspace(const LayersCall& call) {
  Run<Device> run(call, false);
  const Status status = run.run();
  *call.needed = run.workspace_bytes();
  if (status.code == StatusCode::ok && *call.needed == kTooMany)
    return bad_size("layers: expected sizes that 64 bits count, got larger ones");
  return status;
}

}  // namespace layers
}  // namespace FASTTFM_ISA
}  // namespace fasttfm
