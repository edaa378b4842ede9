// Lists of steps on the CPU, in fp32. GEMMs in fp32 whose weights are not packed use the BLAS that the process has
// loaded.
#include "common/cpu/isa.h"
#include "common/cpu/parallel.h"
#include "common/packed.h"
#include "decode_attention/op.h"
#include "int8_linear/op.h"
#include "layers/run.h"
#include "packed_linear/op.h"

namespace fasttfm {
namespace FASTTFM_ISA {
namespace {

using namespace layers;

struct Cpu {
  struct State {
    void begin(int64_t, bool) {}
  };

  static constexpr auto gemm = cpu::gemm;
  static constexpr auto selected_gemm = cpu::selected_gemm;
  static constexpr auto rotary = cpu::rotary;
  static constexpr auto attention_forward = cpu::attention_forward;
  static constexpr auto attention_backward = cpu::attention_backward;
  static constexpr auto layer_norm_forward = cpu::layer_norm_forward;
  static constexpr auto rms_norm_forward = cpu::rms_norm_forward;
  static constexpr auto gated_activation_forward = cpu::gated_activation_forward;
  static constexpr auto gated_activation_backward = cpu::gated_activation_backward;
  static constexpr auto activation_forward = cpu::bias_gelu_forward;
  static constexpr auto activation_backward = cpu::bias_gelu_backward;
  static constexpr auto column_sum = cpu::column_sum;
  static constexpr auto head_norm_forward = cpu::head_norm_forward;
  static constexpr auto kv_cache_store = cpu::kv_cache_store;
  static constexpr auto head_norm_backward = cpu::head_norm_backward;
  static constexpr int64_t kGemmWorkspaceBytes = 0;

  static Status add_norm_forward(const DropoutAddLayerNormForward& call) {
    DropoutAddLayerNormForward norm = call;
    if (norm.z == nullptr) norm.z = norm.y;  // a sum that is not needed is normalized in place
    return cpu::dropout_add_layer_norm_forward(norm);
  }
  static Status add_norm_backward(const DropoutAddLayerNormBackward& call) {
    return cpu::dropout_add_layer_norm_backward(call);
  }
  static Status rms_norm_backward(const RmsNormBackward& call) { return cpu::rms_norm_backward(call); }

  static Status zero(const LayersCall&, void* target, int64_t bytes) {
    std::memset(target, 0, bytes);
    return {};
  }

  // y [T, columns] = activation(x [T, inner] weight^T + bias) + residual, of a weight in int8_linear's layout. The
  // workspace has the rounded rows of x, and their scales.
  static void int8_gemm(Run<Cpu>* run) {
    auto& fields = run->fields_;
    Int8Linear linear{};
    linear.x = fields.address<const float>();
    linear.w = fields.address<const int8_t>();
    linear.sums = fields.address<const int32_t>();
    linear.scales = fields.address<const float>();
    linear.bias = fields.address<const float>();
    linear.outliers = fields.address<const int32_t>();
    linear.outlier_weights = fields.address<const float>();
    linear.residual = fields.address<const float>();
    linear.y = fields.address<float>();
    linear.y_columns = fields.integer();
    linear.x_columns = fields.integer();
    linear.activation = static_cast<int32_t>(fields.integer());
    linear.products = static_cast<Int8Products>(fields.integer());
    linear.rows = run->call_.tokens;
    linear.inner = up_to(linear.x_columns, kInt8Step);
    linear.columns = up_to(linear.y_columns, kInt8Block);
    const int64_t rows = up_to(linear.rows, kInt8Block);
    const Count bytes = Count(rows) * linear.inner;
    linear.rounded = static_cast<int8_t*>(run->call_.workspace);
    if (run->launches_) linear.row_ranges = reinterpret_cast<float*>(linear.rounded + bytes.value);
    const Count range_bytes = Count(rows) * (kInt8RowFloats * static_cast<int64_t>(sizeof(float)));
    run->launch(cpu::int8_linear, &linear, (bytes + range_bytes.value).value);
  }
  // Attention of one new token of each sequence to the KV cache of a layer, to which the token is appended.
  static void cached_attention(Run<Cpu>* run) {
    auto& fields = run->fields_;
    const LayersCall& call = run->call_;
    DecodeAttention attention{};
    const auto* qkv = fields.address<const char>();
    auto* keys = fields.address<char>();
    auto* values = fields.address<char>();
    attention.lengths = fields.address<const int32_t>();
    const int64_t sizes = fields.integer(), layer = fields.integer();
    attention.heads = fields.integer();
    attention.kv_heads = fields.integer();
    attention.head_dim = fields.integer();
    attention.window_left = fields.integer();
    attention.scale = fields.number();
    attention.out = fields.address();
    const int64_t bytes = attention.head_dim * run->size_of(call.dtype);
    attention.q = qkv;
    attention.k = run->part(qkv, attention.heads * bytes);
    attention.v = run->part(qkv, (attention.heads + attention.kv_heads) * bytes);
    attention.q_stride = (attention.heads + 2 * attention.kv_heads) * attention.head_dim;
    attention.k_stride = attention.v_stride = attention.q_stride;
    attention.sequences = call.tokens;
    attention.dtype = call.dtype;
    if (run->launches_) {
      attention.room = run->entry(sizes);
      const int64_t columns = attention.room * attention.head_dim,
                    offset = run->layer_offset(layer, sizes, attention.head_dim);
      attention.keys = {keys + offset, attention.kv_heads * columns, columns, attention.head_dim};
      attention.values = {values + offset, attention.kv_heads * columns, columns, attention.head_dim};
    }
    run->launch(cpu::decode_attention, &attention, 0);
  }

  // The same of a weight in packed_linear's layout. The workspace has rounded or padded rows of x.
  static void packed_gemm(Run<Cpu>* run) {
    auto& fields = run->fields_;
    PackedLinear linear{};
    linear.x = fields.address<const float>();
    linear.w = fields.address();
    linear.bias = fields.address<const float>();
    linear.residual = fields.address<const float>();
    linear.y = fields.address<float>();
    linear.y_columns = fields.integer();
    linear.x_columns = fields.integer();
    linear.activation = static_cast<int32_t>(fields.integer());
    linear.products = static_cast<PackedProducts>(fields.integer());
    linear.rows = run->call_.tokens;
    linear.inner = up_to(linear.x_columns, kPackedStep);
    linear.columns = up_to(linear.y_columns, kPackedBlock);
    linear.rounded = run->call_.workspace;
    const int64_t element = linear.products == PackedProducts::fp32 ? 4 : 2;
    run->launch(cpu::packed_linear, &linear,
                (Count(up_to(linear.rows, kPackedBlock)) * (Count(linear.inner) * element).value).value);
  }

  static int64_t up_to(int64_t count, int64_t step) {
    const int64_t padded = (Count(count) + (step - 1)).value;
    return padded == kTooMany ? kTooMany : padded / step * step;
  }

  // Their kernels are Hopper's.
  static void projection(Run<Cpu>* run) { refuse(run); }
  static void gemm_activation(Run<Cpu>* run) { refuse(run); }
  static void gemm_activation_backward(Run<Cpu>* run) { refuse(run); }
  static void few_rows_gemm(Run<Cpu>* run) { refuse(run); }
  static void few_rows_add_norm(Run<Cpu>* run) { refuse(run); }
  static void few_rows_layers(Run<Cpu>* run) { refuse(run); }
  static void adapted_gemm(Run<Cpu>* run) { refuse(run); }
  static void fp8_cast(Run<Cpu>* run) { refuse(run); }
  static void fp8_gemm(Run<Cpu>* run) { refuse(run); }
  static void fp8_gemm_activation(Run<Cpu>* run) { refuse(run); }
  static void short_attention(Run<Cpu>* run, const AttentionForward&) { refuse(run); }
  static Status add_norm_fp8(const DropoutAddLayerNormFp8&) { return refusal(); }
  static void refuse(Run<Cpu>* run) { run->status_ = refusal(); }
  static Status refusal() { return {StatusCode::bad_value, "layers: a step that the CPU has not"}; }

  static int64_t attention_workspace(const LayersCall& call, int64_t head_dim) {
    return bytes_of(cpu::attention_forward_workspace(head_dim, call.processors));
  }
  static int64_t attention_backward_workspace(const LayersCall& call, AttentionBackward* attention, bool) {
    return bytes_of(
        cpu::attention_backward_workspace(call.max_seqlen, call.max_seqlen, attention->head_dim, call.processors));
  }
  static int64_t add_norm_workspace(const LayersCall& call, int64_t columns) {
    return bytes_of(cpu::dropout_add_layer_norm_workspace(call.tokens, columns));
  }
  static int64_t rms_norm_workspace(const LayersCall& call, int64_t columns) {
    return bytes_of(cpu::rms_norm_workspace(call.tokens, columns));
  }
  static int64_t gated_activation_parts(const LayersCall&, int64_t) { return 0; }
  static int64_t gated_activation_workspace(const LayersCall& call, int64_t columns) {
    return bytes_of(cpu::gated_activation_workspace(call.tokens, columns));
  }
  static int64_t activation_parts(const LayersCall&, int64_t) { return 0; }
  static int64_t activation_workspace(const LayersCall& call, int64_t columns) {
    return bytes_of(cpu::bias_gelu_workspace(call.tokens, columns));
  }
  static int64_t column_sum_parts(const LayersCall&, int64_t) { return 0; }
  static int64_t column_sum_workspace(const LayersCall& call, int64_t columns) {
    return bytes_of(cpu::column_sum_workspace(call.tokens, columns));
  }
  static int64_t head_norm_blocks(const LayersCall&) { return 0; }
  static int64_t head_norm_workspace(const LayersCall& call, int64_t head_dim) {
    return bytes_of(cpu::head_norm_workspace(call.tokens, head_dim));
  }
  static int64_t bytes_of(int64_t floats) { return (Count(floats) * 4).value; }

  template <class Params>
  static void set(const LayersCall& call, Params* params) {
    params->threads = static_cast<int>(call.processors);
    set_workspace(call, params);
  }
  static void set(const LayersCall&, Gemm*) {}
  static void set(const LayersCall&, SelectedGemm*) {}
  template <class Params>
  static void set_workspace(const LayersCall&, Params*) {}
  static void set_workspace(const LayersCall& call, AttentionForward* attention) {
    attention->workspace = static_cast<float*>(call.workspace);
  }
  static void set_workspace(const LayersCall& call, AttentionBackward* attention) {
    attention->workspace = static_cast<float*>(call.workspace);
  }
};

constexpr int64_t kMostBuffers = 64;

// The call of one part, on the memory of one thread.
Status run_part(const LayersParts& parts, int64_t part, char* memory) {
  const LayersCall& whole = parts.call;
  const int64_t first = parts.first_sequences[part], last = parts.first_sequences[part + 1];
  auto* relative = reinterpret_cast<int32_t*>(memory);
  const Span rows = packed_part(whole.cu_seqlens, first, last, packed_size(whole.tokens), relative);
  LayersCall call = whole;
  call.cu_seqlens = relative;
  call.sequences = last - first;
  call.tokens = rows.length;
  if (call.tokens == 0) return {};
  if (call.tokens > parts.rows) return bad_size("layers: a part has more tokens than its memory is for");
  if (call.max_seqlen > call.tokens) call.max_seqlen = call.tokens;
  call.processors = 1;
  call.workspace = memory + parts.boundary_bytes;
  int64_t buffers[kMostBuffers];
  const int64_t* given = whole.tables[static_cast<int>(LayerTable::buffers)];
  for (int64_t i = 0; i < parts.buffers; ++i)
    buffers[i] = given[i] == 0 ? 0 : given[i] + parts.token_bytes[i] * rows.first;
  buffers[0] = reinterpret_cast<int64_t>(memory + parts.boundary_bytes + parts.workspace_bytes);
  call.tables[static_cast<int>(LayerTable::buffers)] = buffers;
  return run<Cpu>(call);
}

Status check(const LayersCall& call) { return call.dtype == DType::f32 ? Status{} : unknown_dtype(); }

}  // namespace

Status layers_run(const LayersCall& call) {
  const Status status = check(call);
  return status.code == StatusCode::ok ? run<Cpu>(call) : status;
}

Status layers_workspace(const LayersCall& call) { return write_workspace<Cpu>(call); }

Status layers_run_parts(const LayersParts& parts) {
  const Status status = check(parts.call);
  if (status.code != StatusCode::ok) return status;
  if (parts.buffers < 1 || parts.buffers > kMostBuffers) return bad_size("layers: too many buffers");
  const int64_t threads = parts.call.processors < parts.parts ? parts.call.processors : parts.parts;
  const int64_t bytes = parts.boundary_bytes + parts.workspace_bytes + parts.scratch_bytes;
  int64_t next = 0;
  Status failure;
  bool has_failed = false;
  parallel_items(threads, static_cast<int>(threads), [&](int64_t thread) {
    for (;;) {
      const int64_t part = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
      if (part >= parts.parts) return;
      const Status result = run_part(parts, part, parts.memory + thread * bytes);
      if (result.code != StatusCode::ok && !__atomic_exchange_n(&has_failed, true, __ATOMIC_ACQ_REL)) failure = result;
    }
  });
  return failure;
}

}  // namespace FASTTFM_ISA
}  // namespace fasttfm

FASTTFM_CPU_LAUNCHER(layers_run, LayersCall)
FASTTFM_CPU_LAUNCHER(layers_workspace, LayersCall)
FASTTFM_CPU_LAUNCHER(layers_run_parts, LayersParts)
