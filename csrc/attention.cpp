#include "attention/op.h"

#include "binding.h"

namespace fasttfm {

#define FORWARD(MEMBER) FASTTFM_FIELD(AttentionForward, MEMBER)
#define BACKWARD(MEMBER) FASTTFM_FIELD(AttentionBackward, MEMBER)
#define STRIDES(FIELD, TENSOR) \
  FIELD(TENSOR##_sequence_stride), FIELD(TENSOR##_token_stride), FIELD(TENSOR##_head_stride)
#define CALL(FIELD)                                                                                                \
  FIELD(q), FIELD(k), FIELD(v), STRIDES(FIELD, q), STRIDES(FIELD, k), STRIDES(FIELD, v), FIELD(cu_seqlens),        \
      FIELD(cu_seqlens_k), FIELD(lengths), FIELD(lengths_k), FIELD(seed), FIELD(sequences), FIELD(heads),          \
      FIELD(kv_heads), FIELD(head_dim), FIELD(queries), FIELD(keys), FIELD(max_seqlen), FIELD(max_seqlen_k),       \
      FIELD(window_left), FIELD(window_right), FIELD(scale), FIELD(threshold), FIELD(dropout_scale), FIELD(dtype), \
      FIELD(workspace)

FASTTFM_BINDING(attention) {
  bind_workspace(module, "attention_forward_workspace", &cpu::attention_forward_workspace, {"head_dim", "threads"});
  bind_workspace(module, "attention_backward_workspace", &cpu::attention_backward_workspace,
                 {"max_seqlen", "max_seqlen_k", "head_dim", "threads"});
  bind_launcher(module, "attention_forward_cpu", &cpu::attention_forward, CALL(FORWARD), FORWARD(threads), FORWARD(out),
                FORWARD(lse));
  bind_launcher(module, "attention_backward_cpu", &cpu::attention_backward, CALL(BACKWARD), BACKWARD(threads),
                BACKWARD(dout), BACKWARD(out), BACKWARD(lse), BACKWARD(dq), BACKWARD(dk), BACKWARD(dv),
                STRIDES(BACKWARD, dq), STRIDES(BACKWARD, dk), STRIDES(BACKWARD, dv));
#ifdef FASTTFM_WITH_HOPPER
  bind_launcher(module, "attention_forward_cuda", &cuda::attention_forward, CALL(FORWARD), FORWARD(device),
                FORWARD(stream), FORWARD(out), FORWARD(lse));
  bind_workspace(module, "attention_backward_workspace_cuda", &cuda::attention_backward_workspace,
                 {"sequences", "heads", "head_dim", "tokens", "longest"});
  bind_workspace(module, "attention_column_parts_cuda", &cuda::attention_column_parts,
                 {"sequences", "heads", "head_dim", "max_seqlen"});
  bind_launcher(module, "attention_backward_cuda", &cuda::attention_backward, CALL(BACKWARD), BACKWARD(device),
                BACKWARD(stream), BACKWARD(dout), BACKWARD(out), BACKWARD(lse), BACKWARD(dq), BACKWARD(dk),
                BACKWARD(dv), STRIDES(BACKWARD, dq), STRIDES(BACKWARD, dk), STRIDES(BACKWARD, dv),
                BACKWARD(column_sums), BACKWARD(column_sums_dtype), BACKWARD(column_parts));
#endif
}

}  // namespace fasttfm
