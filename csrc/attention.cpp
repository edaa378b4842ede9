#include "attention/op.h"

#include <algorithm>

#include "attention/hopper/sharing.h"
#include "binding.h"

namespace fasttfm {

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
  const int dimensions = packed ? 3 : 4, last = q.dimensions - 1;
  if (k.given != v.given || q.dimensions != dimensions + !k.given || q.strides[last] != 1) return false;
  if (!k.given) return q.shape[last - 2] == 3;
  return k.dimensions == dimensions && v.dimensions == dimensions && k.strides[last] == 1 && v.strides[last] == 1;
}

// AttentionProblem of problem.py: where the sequences are, and the numbers in its order.
struct Problem {
  const Tensor &cu_seqlens, &cu_seqlens_k, &lengths, &lengths_k, &seed;
  int64_t max_seqlen, max_seqlen_k, window_left, window_right;
  double scale;
  int64_t threshold;
  double dropout_scale;
};

AttentionCall call_of(const Place& place, const Operands& given, const Problem& problem, DType dtype,
                      const Tensor& workspace) {
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
      .cu_seqlens = static_cast<const int32_t*>(problem.cu_seqlens.data),
      .cu_seqlens_k = static_cast<const int32_t*>(problem.cu_seqlens_k.data),
      .lengths = static_cast<const int32_t*>(problem.lengths.data),
      .lengths_k = static_cast<const int32_t*>(problem.lengths_k.data),
      .seed = static_cast<const int64_t*>(problem.seed.data),
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
      .scale = static_cast<float>(problem.scale),
      .threshold = static_cast<int>(problem.threshold),
      .dropout_scale = static_cast<float>(problem.dropout_scale),
      .dtype = dtype,
      .workspace = static_cast<float*>(workspace.data),
      .threads = place.threads,
      .device = place.device,
      .stream = place.stream,
  };
}

constexpr Status kBadLayout{StatusCode::bad_size, "attention: q, k and v must be [B, S, H, D] or [T, H, D]"};

#ifdef FASTTFM_WITH_HOPPER
#define LAUNCH_ATTENTION FASTTFM_LAUNCH
#else
#define LAUNCH_ATTENTION(PLACE, LAUNCHER, PARAMS) \
  ((PLACE).is_cuda() ? bad_size("the core was built without Hopper's kernels") : cpu::LAUNCHER(PARAMS))
#endif

// In floats.
int64_t forward_workspace(const Place& place, const Tensor& q) {
  return place.is_cuda() ? 1 : cpu::attention_forward_workspace(q.columns(), place.threads);
}

Status forward(const Place& place, const Tensor& q, const OptionalTensor& k, const OptionalTensor& v,
               const OptionalTensor& cu_seqlens, const OptionalTensor& cu_seqlens_k, const OptionalTensor& lengths,
               const OptionalTensor& lengths_k, const OptionalTensor& seed, int64_t max_seqlen, int64_t max_seqlen_k,
               int64_t window_left, int64_t window_right, double scale, int64_t threshold, double dropout_scale,
               const Tensor& out, const Tensor& lse, const Tensor& workspace) {
  if (!has_layout(q, k, v, cu_seqlens.given)) return kBadLayout;
  const Problem problem{cu_seqlens,   cu_seqlens_k, lengths,      lengths_k, seed,      max_seqlen,
                        max_seqlen_k, window_left,  window_right, scale,     threshold, dropout_scale};
  const AttentionForward params{call_of(place, Operands(q, k, v), problem, q.dtype(), workspace), out.data,
                                static_cast<float*>(lse.data)};
  return LAUNCH_ATTENTION(place, attention_forward, params);
}

// Floats for the backward, and for the sums of the gradients over all tokens.
int64_t backward_workspace(const Place& place, const Tensor& q, const OptionalTensor& k, int64_t sequences,
                           int64_t max_seqlen, int64_t max_seqlen_k) {
  static_cast<void>(sequences);  // of use on a GPU
  const Heads heads(q, k.given ? -1 : 0);
#ifdef FASTTFM_WITH_HOPPER
  if (place.is_cuda())
    return cuda::attention_backward_workspace(sequences, heads.heads, heads.head_dim, heads.sequences * heads.tokens,
                                              std::max(max_seqlen, max_seqlen_k));
#endif
  return cpu::attention_backward_workspace(max_seqlen, max_seqlen_k, heads.head_dim, place.threads);
}

// How evenly Hopper's backward for head dim 64 spreads its work over the multiprocessors, in thousandths.
int64_t backward_efficiency(int64_t sequences, int64_t heads, int64_t max_seqlen, int64_t max_seqlen_k,
                            int64_t processors) {
  if (sequences * heads == 0 || max_seqlen_k == 0 || processors == 0) return 1000;  // there is no work to share
  AttentionCall call{};
  call.sequences = sequences;
  call.heads = heads;
  call.queries = call.max_seqlen = max_seqlen;
  call.keys = call.max_seqlen_k = max_seqlen_k;
  const int most = static_cast<int>(std::min<int64_t>(processors, cuda::hopper_backward::kMaxBlocks));
  return static_cast<int64_t>(1000 * cuda::hopper_backward::sharing_of(call, false, most).efficiency);
}

#ifdef FASTTFM_WITH_HOPPER
int64_t column_parts(const Place&, const Tensor& q, const OptionalTensor& k, int64_t sequences, int64_t max_seqlen) {
  const Heads heads(q, k.given ? -1 : 0);
  return cuda::attention_column_parts(sequences, heads.heads, heads.head_dim, max_seqlen);
}
#endif

Status backward(const Place& place, const Tensor& dout, const Tensor& q, const OptionalTensor& k,
                const OptionalTensor& v, const OptionalTensor& cu_seqlens, const OptionalTensor& cu_seqlens_k,
                const OptionalTensor& lengths, const OptionalTensor& lengths_k, const OptionalTensor& seed,
                int64_t max_seqlen, int64_t max_seqlen_k, int64_t window_left, int64_t window_right, double scale,
                int64_t threshold, double dropout_scale, const Tensor& out, const Tensor& lse, const Tensor& dq,
                const OptionalTensor& dk, const OptionalTensor& dv, const Tensor& workspace,
                const OptionalTensor& column_sums, const OptionalTensor& parts) {
  if (!has_layout(q, k, v, cu_seqlens.given) || !has_layout(dq, dk, dv, cu_seqlens.given)) return kBadLayout;
  const Problem problem{cu_seqlens,   cu_seqlens_k, lengths,      lengths_k, seed,      max_seqlen,
                        max_seqlen_k, window_left,  window_right, scale,     threshold, dropout_scale};
  const Operands gradients(dq, dk, dv);
  const AttentionBackward params{
      call_of(place, Operands(q, k, v), problem, q.dtype(), workspace),
      dout.data,
      out.data,
      static_cast<const float*>(lse.data),
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
      column_sums.data,
      column_sums.given ? column_sums.dtype() : q.dtype(),
      static_cast<float*>(parts.data),
  };
  return LAUNCH_ATTENTION(place, attention_backward, params);
}

#define PROBLEM                                                                                                      \
  "cu_seqlens, cu_seqlens_k, lengths, lengths_k, seed, max_seqlen, max_seqlen_k, window_left, window_right, scale, " \
  "threshold, dropout_scale"

}  // namespace

FASTTFM_BINDING(attention) {
  bind_call(module, "attention_forward_workspace", "q", &forward_workspace);
  bind_call(module, "attention_forward", "q, k, v, " PROBLEM ", out, lse, workspace", &forward);
  bind_call(module, "attention_backward_workspace", "q, k, sequences, max_seqlen, max_seqlen_k", &backward_workspace);
  bind_workspace(module, "attention_backward_efficiency", &backward_efficiency,
                 {"sequences", "heads", "max_seqlen", "max_seqlen_k", "processors"});
#ifdef FASTTFM_WITH_HOPPER
  bind_call(module, "attention_column_parts_cuda", "q, k, sequences, max_seqlen", &column_parts);
#endif
  bind_call(module, "attention_backward",
            "dout, q, k, v, " PROBLEM ", out, lse, dq, dk, dv, workspace, column_sums, column_parts", &backward);
}

}  // namespace fasttfm
