// The parameters of attention's launchers. The formulas are in reference.py, the meaning of the dimensions in
// problem.py.
//
// Dense tensors are [B, S, heads, D], packed tensors [T, heads, D]. Element (sequence b, token t, head h, d) of q is
// q[b * q_sequence_stride + t * q_token_stride + h * q_head_stride + d]. In packed tensors t is the index among all
// tokens, and b is not used. The same applies to k, v and their gradients, so slices of one qkv tensor are read and
// written in place.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/status.h"

namespace fasttfm {

// The parameters that forward and backward have in common.
struct AttentionCall {
  const void* q;  // [B, queries, heads, D] or [queries, heads, D], dtype, strided
  const void* k;  // [B, keys, kv_heads, D] or [keys, kv_heads, D], dtype, strided
  const void* v;  // as k
  int64_t q_sequence_stride, q_token_stride, q_head_stride;
  int64_t k_sequence_stride, k_token_stride, k_head_stride;
  int64_t v_sequence_stride, v_token_stride, v_head_stride;
  const int32_t* cu_seqlens;    // [sequences + 1], or null when dense
  const int32_t* cu_seqlens_k;  // packed: always given, may be cu_seqlens
  const int32_t* lengths;       // [sequences] when dense: number of valid queries; null: all are valid
  const int32_t* lengths_k;     // [sequences] when dense: number of valid keys; null: all are valid
  const int64_t* seed;          // [1], or null for no dropout
  int64_t sequences;
  int64_t heads;         // of q
  int64_t kv_heads;      // divides heads
  int64_t head_dim;      // D: 16 to 256 in steps of 8
  int64_t queries;       // dense: tokens of q per sequence; packed: of all sequences
  int64_t keys;          // the same for k and v
  int64_t max_seqlen;    // no sequence has more queries; only used when packed
  int64_t max_seqlen_k;  // no sequence has more keys
  int64_t window_left;   // keys before a query's own position that it attends to; -1: all
  int64_t window_right;  // keys after it; -1: all, 0: causal
  float scale;           // multiplies the scores
  int threshold;         // out of 256: see common/philox.h
  float dropout_scale;   // multiplies the weights that are kept
  DType dtype;           // of every tensor except lse
  float* workspace;      // attention_forward_workspace() or attention_backward_workspace() floats
  int threads;           // CPU
  int device;            // CUDA
  void* stream;          // CUDA
};

// Every element of the results is written: rows that belong to no sequence, or attend to no keys, get 0 and lse =
// -infinity.
struct AttentionForward : AttentionCall {
  void* out;              // shape of q, contiguous
  float* lse;             // dense [B, heads, queries], packed [heads, queries]; null if it is not needed
  int32_t* tile_counter;  // CUDA: [1], set to 0 by an earlier kernel; null if the launcher has to do that, in workspace
  int dependent;          // CUDA, with tile_counter: not 0 to start before the stream's previous kernel ends, which
                          // writes q, k and v at most
};

// Gradients in FP8 with one scale, as fp8/op.h defines them.
struct AttentionFp8 {
  const float* scale;  // [1]; null if gradients are not in FP8
  float* amax;         // [1]: updated to at least the largest magnitude of the gradients
  void* columns;       // [3 * heads * D, padded]; written for each 16 tokens from a multiple of 16 on that belong to a
                       // sequence whose first token is a multiple of 16. fp8_transpose() writes the others.
  int64_t padded;      // the number of tokens rounded up to a multiple of 16
  int e5m2;            // not 0 for e5m2, 0 for e4m3
};

struct AttentionBackward : AttentionCall {
  const void* dout;  // shape of q, contiguous
  const void* out;   // shape of q, contiguous
  const float* lse;  // from the forward
  void* dq;          // shapes of q, k and v, strided
  void* dk;
  void* dv;
  int64_t dq_sequence_stride, dq_token_stride, dq_head_stride;
  int64_t dk_sequence_stride, dk_token_stride, dk_head_stride;
  int64_t dv_sequence_stride, dv_token_stride, dv_head_stride;
  // CUDA: heads of dk and dv, or 0 for kv_heads. A multiple of kv_heads, which divides `heads`: head h of dk and dv has
  // the sums over the query heads from h * heads / gradient_heads on. The caller adds up those of a head of k and v.
  int64_t gradient_heads;
  // CUDA, head dim 64, no window: the sums of dq, dk and dv over all tokens, computed before rounding, or null.
  void* column_sums;  // [3, heads, D]
  DType column_sums_dtype;
  float* column_parts;  // attention_column_parts() floats, aligned to 16 bytes
  // CUDA, head dim 64, bf16, packed self-attention without a window: dq, dk and dv are FP8.
  AttentionFp8 fp8;
};

namespace cpu {
Status attention_forward(const AttentionForward&);
Status attention_backward(const AttentionBackward&);
int64_t attention_forward_workspace(int64_t head_dim, int64_t threads);  // in floats
int64_t attention_backward_workspace(int64_t max_seqlen, int64_t max_seqlen_k, int64_t head_dim, int64_t threads);
}  // namespace cpu

namespace cuda {
// Hopper kernels (compute capability 9.0) for bf16 and fp16. Head dims are 64 and 128, with windows only without
// dropout; without a window also 32; without window and dropout also 80, 96, 192 and 256. q, k and v are aligned to 16
// bytes; their strides are multiples of 8 elements and not 0. The forward's workspace is one int32. The backward
// requires the same alignment of dout, out and the gradients and, with head dim 32, at most 512 queries. Head dim 32,
// dropout, column sums and FP8 require kv_heads == heads; windows with head dim 64 require gradient_heads == heads.
// With head dim 64 and more than 512 queries, it requires that a window's left and right add up to at most 321 keys.
// Its workspace, in floats, depends on the number of queries of all sequences (tokens) and on the longest sequence of
// queries or keys.
Status attention_forward(const AttentionForward&);
Status attention_backward(const AttentionBackward&);
// `grouped`: kv_heads differs from heads.
int64_t attention_backward_workspace(int64_t sequences, int64_t heads, int64_t head_dim, int64_t tokens,
                                     int64_t longest, bool grouped = false);
int64_t attention_column_parts(int64_t sequences, int64_t heads, int64_t head_dim, int64_t max_seqlen);
}  // namespace cuda

}  // namespace fasttfm
