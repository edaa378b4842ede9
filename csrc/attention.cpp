#include "attention/op.h"

#include <algorithm>
#include <memory>

#include "attention/hopper/shared/work_partition.h"
#include "binding.h"
#include "fp8_cast.h"

namespace fasttfm {

// attention_native.py passes a tuple of these.
// clang-format off: it lays out macros without commas differently each time.
#define PROBLEM(F) \
  F(const OptionalTensor&, cu_seqlens) F(const OptionalTensor&, cu_seqlens_k) F(const OptionalTensor&, lengths) \
  F(const OptionalTensor&, lengths_k) F(const OptionalTensor&, seed) F(int64_t, max_seqlen) \
  F(int64_t, max_seqlen_k) F(int64_t, window_left) \
  F(int64_t, window_right) F(float, scale) F(int, threshold) F(float, dropout_scale)
// clang-format on
FASTTFM_STRUCT(AttentionProblem, PROBLEM)

namespace {

// One of q, k and v, or of their gradients: [B, S, H, D] or [T, H, D], or a part of [..., 3, H, D].
struct Heads {
  void* data;
  int64_t sequence_stride, token_stride, head_stride;  // packed: no sequence stride
  int64_t sequences, tokens, heads, head_dim;

  explicit Heads(const Tensor& tensor, int part = -1) {
    const int last = tensor.dimensions - 1, token = part < 0 ? last - 2 : last - 3;
    const int64_t bytes = tensor.type == ElementType::f32 ? 4 : 2;
    data = part < 0 ? tensor.data : static_cast<char*>(tensor.data) + part * bytes * tensor.strides[last - 2];
    sequence_stride = token > 0 ? tensor.strides[token - 1] : 0;
    sequences = token > 0 ? tensor.shape[token - 1] : 1;
    token_stride = tensor.strides[token];
    tokens = tensor.shape[token];
    head_stride = tensor.strides[last - 1];
    heads = tensor.shape[last - 1];
    head_dim = tensor.shape[last];
  }
};

// q, k and v: three tensors, or one where k and v are not given.
struct Operands {
  Heads q, k, v;
  Operands(const Tensor& q, const Tensor& k, const Tensor& v)
      : q(q, k.given ? -1 : 0), k(k.given ? Heads(k) : Heads(q, 1)), v(k.given ? Heads(v) : Heads(q, 2)) {}
};

bool has_layout(const Tensor& q, const Tensor& k, const Tensor& v, bool packed) {
  const int dimensions = packed ? 3 : 4;
  if (k.given != v.given || q.dimensions != dimensions + !k.given || !q.has_adjacent_columns()) return false;
  if (!k.given) return q.shape[dimensions - 2] == 3;
  return k.dimensions == dimensions && v.dimensions == dimensions && k.has_adjacent_columns() &&
         v.has_adjacent_columns();
}

AttentionCall call_of(const CallContext& context, const Operands& given, const Tensor& workspace, DType dtype,
                      const AttentionProblem& problem) {
  const Heads &q = given.q, &k = given.k, &v = given.v;
  return {
      .q = q.data,
      .k = k.data,
      .v = v.data,
      .q_sequence_stride = q.sequence_stride,
      .q_token_stride = q.token_stride,
      .q_head_stride = q.head_stride,
      .k_sequence_stride = k.sequence_stride,
      .k_token_stride = k.token_stride,
      .k_head_stride = k.head_stride,
      .v_sequence_stride = v.sequence_stride,
      .v_token_stride = v.token_stride,
      .v_head_stride = v.head_stride,
      .cu_seqlens = problem.cu_seqlens.as<int32_t>(),
      .cu_seqlens_k = problem.cu_seqlens_k.as<int32_t>(),
      .lengths = problem.lengths.as<int32_t>(),
      .lengths_k = problem.lengths_k.as<int32_t>(),
      .seed = problem.seed.as<int64_t>(),
      .sequences = problem.cu_seqlens.given ? problem.cu_seqlens.shape[0] - 1 : q.sequences,
      .heads = q.heads,
      .kv_heads = k.heads,
      .head_dim = q.head_dim,
      .queries = q.tokens,
      .keys = k.tokens,
      .max_seqlen = problem.max_seqlen,
      .max_seqlen_k = problem.max_seqlen_k,
      .window_left = problem.window_left,
      .window_right = problem.window_right,
      .scale = problem.scale,
      .threshold = problem.threshold,
      .dropout_scale = problem.dropout_scale,
      .dtype = dtype,
      .workspace = workspace.as<float>(),
      .threads = context.threads,
      .device = context.device,
      .stream = context.stream,
  };
}

constexpr int64_t kVectorFloats = 16;
struct alignas(64) Vector {
  float elements[kVectorFloats];  // not initialized
};

constexpr Status kBadLayout{StatusCode::bad_size, "attention: q, k and v must be [B, S, H, D] or [T, H, D]"};

}  // namespace

// `workspace`: a float on a GPU; the CPU's is allocated here if it is None, which saves a call of torch.
FASTTFM_FUNCTION(Status, attention_forward, const Tensor& q, const OptionalTensor& k, const OptionalTensor& v,
                 const AttentionProblem& problem, const Tensor& out, const OptionalTensor& lse,
                 const OptionalTensor& workspace) {
  if (!has_layout(q, k, v, problem.cu_seqlens.given)) return kBadLayout;
  AttentionForward params{call_of(context, Operands(q, k, v), workspace, q.dtype(), problem), out.data,
                          lse.as<float>()};
  std::unique_ptr<Vector[]> own;
  if (!context.is_cuda() && !workspace.given) {
    const int64_t floats = cpu::attention_forward_workspace(q.columns(), context.threads);
    own.reset(new Vector[floats / kVectorFloats + 1]);
    params.workspace = own[0].elements;
  }
  return FASTTFM_LAUNCH_HOPPER(attention_forward, params);
}

// In floats.
FASTTFM_FUNCTION(int64_t, attention_backward_workspace, const Tensor& q, const OptionalTensor& k, int64_t sequences,
                 int64_t max_seqlen, int64_t max_seqlen_k) {
  static_cast<void>(sequences);  // used on a GPU
  const Heads heads(q, k.given ? -1 : 0);
#ifdef FASTTFM_WITH_HOPPER
  if (context.is_cuda())
    return cuda::attention_backward_workspace(sequences, heads.heads, heads.head_dim, heads.sequences * heads.tokens,
                                              std::max(max_seqlen, max_seqlen_k),
                                              k.given && Heads(k).heads != heads.heads);
#endif
  return cpu::attention_backward_workspace(max_seqlen, max_seqlen_k, heads.head_dim, context.threads);
}

// How evenly Hopper's backward for head dim 64 distributes its work over the SMs, in thousandths.
FASTTFM_FUNCTION(int64_t, attention_backward_efficiency, int64_t sequences, int64_t heads, int64_t max_seqlen,
                 int64_t max_seqlen_k, int64_t processors) {
  if (sequences * heads == 0 || max_seqlen_k == 0 || processors == 0) return 1000;  // no work
  const int most = static_cast<int>(std::min<int64_t>(processors, cuda::hopper_backward::kMaxBlocks));
  const cuda::hopper_backward::Units units{sequences * heads, 1, max_seqlen, max_seqlen_k};
  return static_cast<int64_t>(1000 * cuda::hopper_backward::partition_of(units, false, false, most).efficiency);
}

// How many heads dk and dv should have in Hopper's backward if heads of q share those of k and v: see
// AttentionBackward::gradient_heads. packed: not 0 for cu_seqlens. left, right: of the window; as many as there are
// tokens, or more, for no limit.
FASTTFM_FUNCTION(int64_t, attention_backward_gradient_heads, const Tensor& q, const Tensor& k,
                 const OptionalTensor& seed, int64_t packed, int64_t sequences, int64_t max_seqlen,
                 int64_t max_seqlen_k, int64_t left, int64_t right, int64_t processors) {
  const Heads queries(q), keys(k);
  const int32_t bounds = 0;  // only whether there are any is used
  AttentionCall call{};
  call.cu_seqlens = call.cu_seqlens_k = packed != 0 ? &bounds : nullptr;
  call.seed = seed.as<int64_t>();
  call.sequences = sequences;
  call.heads = queries.heads;
  call.kv_heads = keys.heads;
  call.head_dim = queries.head_dim;
  call.queries = queries.tokens;
  call.keys = keys.tokens;
  call.max_seqlen = max_seqlen;
  call.max_seqlen_k = max_seqlen_k;
  call.window_left = left >= keys.tokens ? -1 : left;
  call.window_right = right >= queries.tokens ? -1 : right;
  return call.heads / cuda::hopper_backward::heads_together(call, static_cast<int>(processors));
}

#ifdef FASTTFM_WITH_HOPPER
FASTTFM_FUNCTION(int64_t, attention_column_parts_cuda, const Tensor& q, const OptionalTensor& k, int64_t sequences,
                 int64_t max_seqlen) {
  const Heads heads(q, k.given ? -1 : 0);
  return cuda::attention_column_parts(sequences, heads.heads, heads.head_dim, max_seqlen);
}
#endif

FASTTFM_FUNCTION(Status, attention_backward, const Tensor& dout, const Tensor& q, const OptionalTensor& k,
                 const OptionalTensor& v, const AttentionProblem& problem, const Tensor& out, const Tensor& lse,
                 const Tensor& dq, const OptionalTensor& dk, const OptionalTensor& dv, const Tensor& workspace,
                 const OptionalTensor& column_sums, const OptionalTensor& column_parts) {
  if (!has_layout(q, k, v, problem.cu_seqlens.given) || !has_layout(dq, dk, dv, problem.cu_seqlens.given))
    return kBadLayout;
  const Operands gradients(dq, dk, dv);
  const AttentionBackward params{
      call_of(context, Operands(q, k, v), workspace, q.dtype(), problem),
      dout.data,
      out.data,
      lse.as<float>(),
      gradients.q.data,
      gradients.k.data,
      gradients.v.data,
      gradients.q.sequence_stride,
      gradients.q.token_stride,
      gradients.q.head_stride,
      gradients.k.sequence_stride,
      gradients.k.token_stride,
      gradients.k.head_stride,
      gradients.v.sequence_stride,
      gradients.v.token_stride,
      gradients.v.head_stride,
      gradients.k.heads,
      column_sums.data,
      column_sums.given ? column_sums.dtype() : q.dtype(),
      column_parts.as<float>(),
  };
  return FASTTFM_LAUNCH_HOPPER(attention_backward, params);
}

#ifdef FASTTFM_WITH_HOPPER
// The gradient of qkv [T, 3, H, D] in FP8: rows [T, 3 H D], and what attention/op.h says of the columns [3 H D, P].
FASTTFM_FUNCTION(Status, attention_backward_fp8_cuda, const Tensor& dout, const Tensor& qkv,
                 const AttentionProblem& problem, const Tensor& out, const Tensor& lse, const Fp8Cast& cast,
                 const Tensor& workspace, const OptionalTensor& column_sums, const OptionalTensor& column_parts) {
  const Tensor none;
  if (!has_layout(qkv, none, none, problem.cu_seqlens.given)) return kBadLayout;
  const Operands operands(qkv, none, none);
  const int64_t width = operands.q.heads * operands.q.head_dim;
  auto* rows = cast.as_rows.as<char>();
  const AttentionBackward params{
      call_of(context, operands, workspace, qkv.dtype(), problem),
      dout.data,
      out.data,
      lse.as<float>(),
      rows,
      rows + width,
      rows + 2 * width,
      0,
      3 * width,
      operands.q.head_dim,
      0,
      3 * width,
      operands.q.head_dim,
      0,
      3 * width,
      operands.q.head_dim,
      operands.q.heads,
      column_sums.data,
      column_sums.given ? column_sums.dtype() : qkv.dtype(),
      column_parts.as<float>(),
      {cast.scale.as<float>(), cast.amax.as<float>(), cast.as_columns.data, cast.as_columns.shape[1], cast.e5m2},
  };
  return cuda::attention_backward(params);
}
#endif

}  // namespace fasttfm
