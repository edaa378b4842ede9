// Attention of one new token of each sequence to a KV cache, to which the token is appended; the formula is in
// reference.py. B sequences, H heads of queries, Hk of keys and values, which divide H, D columns.
//
// Bytes per sequence (e = bytes of an element): reads the 2*Hk*D*e of each token that is attended to.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/status.h"

namespace fasttfm {

// A cache [B, Hk, room, D] with adjacent columns. Strides are in elements.
struct KvCache {
  void* data;
  int64_t sequence_stride, head_stride, token_stride;
};

struct DecodeAttention {
  const void* q;  // [B, H, D], dtype; rows q_stride and heads D elements apart
  const void* k;  // [B, Hk, D]
  const void* v;  // [B, Hk, D]
  KvCache keys;
  KvCache values;
  const int32_t* lengths;  // [B]: tokens in the cache, clamped to [0, room): the row of the new one
  void* out;               // [B, H, D], contiguous
  int64_t q_stride, k_stride, v_stride;
  int64_t sequences;  // B
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;     // up to 256
  int64_t room;         // tokens for which a sequence's cache is
  int64_t window_left;  // tokens before the new one that it attends to; -1: all
  float scale;
  DType dtype;
  int threads;
};

namespace cpu {
Status decode_attention(const DecodeAttention&);
}  // namespace cpu

}  // namespace fasttfm
