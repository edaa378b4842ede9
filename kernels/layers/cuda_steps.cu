// Lists of steps on Hopper, in 16 bits. GEMMs use cuBLASLt, except for those with an activation (gelu_gemm) and the
// projection to queries, keys and values (qkv_projection). Kernels with a field `dependent` start while the previous
// one still runs.
#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define FASTTFM_WITH_NVTX
#endif

#include <algorithm>
#include <cstdio>

#include "adapted_gemm/op.h"
#include "common/cuda/hopper.cuh"
#include "common/cuda/launch.cuh"
#include "fp8/op.h"
#include "gelu_gemm/op.h"
#include "layers/few_rows_steps.h"
#include "layers/run.h"
#include "qkv_projection/op.h"

namespace fasttfm {
namespace cuda {
namespace {

using baseline::Count;
using baseline::layers::Run;

struct Hopper {
  static constexpr auto gemm = cuda::gemm;
  static constexpr auto selected_gemm = cuda::selected_gemm;
  static constexpr auto rotary = cuda::rotary;
  static constexpr auto attention_forward = cuda::attention_forward;
  static constexpr auto attention_backward = cuda::attention_backward;
  static constexpr auto add_norm_backward = cuda::dropout_add_layer_norm_backward;
  static constexpr auto layer_norm_forward = cuda::layer_norm_forward;
  static constexpr auto rms_norm_forward = cuda::rms_norm_forward;
  static constexpr auto rms_norm_backward = cuda::rms_norm_backward;
  static constexpr auto gated_activation_forward = cuda::gated_activation_forward;
  static constexpr auto gated_activation_backward = cuda::gated_activation_backward;
  static constexpr auto activation_forward = cuda::bias_gelu_forward;
  static constexpr auto activation_backward = cuda::bias_gelu_backward;
  static constexpr auto column_sum = cuda::column_sum;
  static constexpr auto head_norm_forward = cuda::head_norm_forward;
  static constexpr auto kv_cache_store = cuda::kv_cache_store;
  static constexpr auto head_norm_backward = cuda::head_norm_backward;
  static constexpr auto add_norm_fp8 = cuda::dropout_add_layer_norm_fp8;
  static constexpr int64_t kGemmWorkspaceBytes = kGemmWorkspace;

  static Status add_norm_forward(const DropoutAddLayerNormForward& call) {
    return call.seed == nullptr ? add_layer_norm_forward(call) : dropout_add_layer_norm_forward(call);
  }

  static Status zero(const LayersCall& call, void* target, int64_t bytes) {
    return status_of(cudaMemsetAsync(target, 0, static_cast<size_t>(bytes), static_cast<cudaStream_t>(call.stream)));
  }

  // What steps of a call share: NVTX ranges that name a layer's kernels in a profile (without a profiler they only test
  // a pointer), and the tiles of GEMMs for few rows.
  class State {
   public:
    State() = default;
    State(const State&) = delete;
    State& operator=(const State&) = delete;
    FewRowsPlans few_rows;
#ifdef FASTTFM_WITH_NVTX
    ~State() { end(); }
    void begin(int64_t layer, bool backward) {
      end();
      char name[48];
      std::snprintf(name, sizeof(name), "fasttfm layer %d %s", static_cast<int>(layer),
                    backward ? "backward" : "forward");
      nvtxRangePushA(name);
      begun_ = true;
    }

   private:
    void end() {
      if (begun_) nvtxRangePop();
    }
    bool begun_ = false;
#else
    void begin(int64_t, bool) {}
#endif
  };

  // qkv [T, columns] = x [T, inner] weight^T + bias; with tables of cosines, heads of 64 columns in its first two
  // thirds are rotated.
  static void projection(Run<Hopper>* run) {
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
    const int64_t rows = run->table_rows();
    projection.table_rows = projection.cos == nullptr ? 0 : rows;
    fields.integer();  // heads, and the columns of one: 64
    fields.integer();
    projection.rows = projection.sequence = run->call_.tokens;
    projection.dtype = projection.bias_dtype = run->call_.dtype;
    projection.dependent = run->started_;
    run->launch(qkv_projection, &projection, 0);
  }

  // y [T, columns] = x [T, inner] b + t [T, rank] c + bias + add; b and c are transposed if `transposed`.
  static void adapted_gemm(Run<Hopper>* run) {
    auto& fields = run->fields_;
    AdaptedGemm product{};
    product.x = fields.address();
    product.b = fields.address();
    product.t = fields.address();
    product.c = fields.address();
    product.bias = fields.address();
    product.add = fields.address();
    product.y = fields.address();
    product.columns = fields.integer();
    product.inner = fields.integer();
    product.rank = fields.integer();
    product.transposed = fields.integer() != 0;
    product.rows = run->call_.tokens;
    product.dtype = product.bias_dtype = run->call_.dtype;
    product.dependent = run->started_;
    run->launch(cuda::adapted_gemm, &product, 0);
  }

  // y [T, columns] = activation(x [T, inner] weight^T + bias), or, if it is gated, that of the gate times up.
  static void gemm_activation(Run<Hopper>* run) {
    auto& fields = run->fields_;
    GeluGemmForward product{};
    product.x = fields.address();
    product.weight = fields.address();
    product.bias = fields.address();
    product.columns = fields.integer();
    product.activation = static_cast<Activation>(fields.integer());
    product.inputs = product.x_stride = fields.integer();
    const bool gated = fields.integer() != 0, scaled = fields.integer() != 0;
    (scaled ? product.derivative : product.h) = fields.address();
    product.a = fields.address();
    product.rows = run->call_.tokens;
    product.dtype = run->call_.dtype;
    product.bias_dtype = run->call_.parameter_dtype;
    product.dependent = run->started_;
    if (gated) return run->launch(gated_gemm, static_cast<ActivatedGemm*>(&product), 0);
    run->launch(gelu_gemm_forward, &product, 0);
  }

  // dh [T, columns] = (dy [T, inner] weight) * activation'(h + bias), where the derivative is given if it is `scaled`.
  static void gemm_activation_backward(Run<Hopper>* run) {
    auto& fields = run->fields_;
    GeluGemmBackward product{};
    product.dy = fields.address();
    product.weight = fields.address();
    product.bias = fields.address();
    const void* left = fields.address();
    product.columns = fields.integer();
    product.activation = static_cast<Activation>(fields.integer());
    product.outputs = product.dy_stride = fields.integer();
    (fields.integer() != 0 ? product.derivative : product.h) = left;
    product.dh = fields.address();
    product.a = fields.address();
    product.dbias = fields.address();
    product.workspace = static_cast<float*>(run->call_.workspace);
    product.rows = run->call_.tokens;
    product.dtype = run->call_.dtype;
    product.bias_dtype = run->call_.parameter_dtype;
    run->launch(gelu_gemm_backward, &product, bytes_of(gelu_gemm_workspace(product.rows, product.columns)));
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

  // y [T, columns] = activation(x [T, inner] weight^T + bias), or partial sums of x weight^T for the next step, where y
  // is null. `statistics` are those of rows that are not normalized yet: of the residual, or, without it, of x.
  static void few_rows_gemm(Run<Hopper>* run) {
    auto& fields = run->fields_;
    const LayersCall& call = run->call_;
    FewRowsGemm product{};
    product.x = fields.address();
    product.weight = fields.address();
    product.bias = fields.address();
    product.bias_dtype = bias_dtype(call, fields.integer());
    product.statistics = fields.address<float>();
    product.residual = fields.address();
    product.residual_weight = fields.address<float>();
    product.y = fields.address();
    product.y_statistics = fields.address<float>();
    product.norms = fields.address<float>();
    product.columns = fields.integer();
    product.inner = fields.integer();
    const int64_t activation = fields.integer();
    product.activates = activation >= 0;
    product.activation = static_cast<Activation>(std::max<int64_t>(activation, 0));
    product.eps = fields.number();
    const auto role = static_cast<LinearRole>(fields.integer());
    const FewRowsSizes sizes = few_rows_sizes(&fields);
    if (!run->launches_) return run->launch(cuda::few_rows_gemm, &product, kGemmWorkspace);
    const few_rows::Plan plan = run->state_.few_rows.plan(call, sizes, role);
    if (product.y == nullptr) product.parts = static_cast<float*>(call.workspace);
    product.rows = call.tokens;
    product.tile = plan.tile;
    product.cluster = plan.cluster;
    product.part_count = plan.parts;
    product.dtype = call.dtype;
    product.dependent = run->started_;
    run->launch(cuda::few_rows_gemm, &product, kGemmWorkspace);
  }
  // The type of a GEMM's bias: x's, the parameters', or fp32.
  static DType bias_dtype(const LayersCall& call, int64_t kind) {
    return kind == 0 ? call.dtype : kind == 1 ? call.parameter_dtype : DType::f32;
  }

  // z = residual + the partial sums of the previous step + linear_bias, y = LayerNorm(z). With `norms`, the residual is
  // normalized first. `adds`: 0 if there are no partial sums.
  static void few_rows_add_norm(Run<Hopper>* run) {
    auto& fields = run->fields_;
    const LayersCall& call = run->call_;
    FewRowsAddNorm norm{};
    norm.residual = fields.address();
    norm.linear_bias = fields.address();
    norm.weight = fields.address();
    norm.bias = fields.address();
    norm.norms = fields.address<float>();
    norm.residual_weight = fields.address();
    norm.residual_bias = fields.address();
    norm.y = fields.address();
    norm.z = fields.address();
    norm.eps = fields.number();
    const bool adds = fields.integer() != 0;
    const auto role = static_cast<LinearRole>(fields.integer());
    const FewRowsSizes sizes = few_rows_sizes(&fields);
    norm.parts = static_cast<float*>(call.workspace);
    norm.part_count = adds && run->launches_ ? run->state_.few_rows.plan(call, sizes, role).parts : 0;
    norm.rows = call.tokens;
    norm.columns = sizes.width;
    norm.dtype = call.dtype;
    norm.residual_dtype = call.residual_dtype;
    norm.parameter_dtype = call.parameter_dtype;
    norm.dependent = run->started_;
    run->launch(cuda::few_rows_add_norm, &norm, kGemmWorkspace);
  }

  // All layers in one kernel.
  static void few_rows_layers(Run<Hopper>* run) {
    auto& fields = run->fields_;
    FewRowsLayers layers{};
    layers.x = fields.address();
    layers.workspace = fields.address();
    layers.y = fields.address();
    layers.layers = fields.integer();
    layers.entries = fields.integer();
    layers.width = fields.integer();
    layers.intermediate = fields.integer();
    layers.heads = fields.integer();
    layers.activation = static_cast<Activation>(fields.integer());
    layers.eps_a = fields.number();
    layers.eps_b = fields.number();
    layers.polls = static_cast<int>(fields.integer());
    layers.parameters = run->call_.tables[static_cast<int>(LayerTable::parameters)];
    layers.cu_seqlens = run->call_.cu_seqlens;
    layers.tokens = run->call_.tokens;
    layers.sequences = run->call_.sequences;
    run->launch(cuda::few_rows_layers, &layers, 0);
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
    Fp8GeluGemm product{};
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
    run->launch(fp8_gelu_gemm, &product, 0);
  }

  // Their kernels are a CPU's.
  static void int8_gemm(Run<Hopper>* run) { refuse(run); }
  static void cached_attention(Run<Hopper>* run) { refuse(run); }
  static void packed_gemm(Run<Hopper>* run) { refuse(run); }
  static void refuse(Run<Hopper>* run) { run->status_ = {StatusCode::bad_value, "layers: a step that Hopper has not"}; }

  static int64_t attention_workspace(const LayersCall&, int64_t) { return 16; }  // a counter of tiles
  // `sums`: whether the list has sums of columns; their parts follow the workspace without them.
  static int64_t attention_backward_workspace(const LayersCall& call, AttentionBackward* attention, bool sums) {
    const int64_t floats =
        cuda::attention_backward_workspace(call.sequences, attention->heads, attention->head_dim, call.tokens,
                                           call.max_seqlen, attention->heads != attention->kv_heads);
    if (!sums) return bytes_of(floats);
    if (attention->column_sums != nullptr) attention->column_parts = static_cast<float*>(call.workspace) + floats;
    const Count parts = attention_column_parts(call.sequences, attention->heads, attention->head_dim, call.max_seqlen);
    return bytes_of((parts + floats).value);
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

int64_t layers_names_ranges() {
#ifdef FASTTFM_WITH_NVTX
  return 1;
#else
  return 0;
#endif
}

Status layers_workspace(const LayersCall& call) { return baseline::layers::write_workspace<Hopper>(call); }

}  // namespace cuda
}  // namespace fasttfm
