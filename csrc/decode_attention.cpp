#include "decode_attention/op.h"

#include "binding.h"

namespace fasttfm {

namespace {

// A cache [B, room, Hk, D].
KvCache cache_of(const Tensor& cache) { return {cache.data, cache.strides[0], cache.strides[2], cache.strides[1]}; }

}  // namespace

// Heads of q, k and v are adjacent, and so are columns of all tensors.
FASTTFM_FUNCTION(Status, decode_attention_cpu, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& keys,
                 const Tensor& values, const Tensor& lengths, const Tensor& out, int64_t window_left, float scale) {
  return cpu::decode_attention({
      .q = q.data,
      .k = k.data,
      .v = v.data,
      .keys = cache_of(keys),
      .values = cache_of(values),
      .lengths = lengths.as<int32_t>(),
      .out = out.data,
      .q_stride = q.strides[0],
      .k_stride = k.strides[0],
      .v_stride = v.strides[0],
      .sequences = q.shape[0],
      .heads = q.shape[1],
      .kv_heads = k.shape[1],
      .head_dim = q.shape[2],
      .room = keys.shape[1],
      .window_left = window_left,
      .scale = scale,
      .dtype = q.dtype(),
      .threads = context.threads,
  });
}

}  // namespace fasttfm
