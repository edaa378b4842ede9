#include "pack/op.h"

#include "binding.h"

namespace fasttfm {

namespace {

PackCopy copy_of(const Place& place, const Tensor& source, const Tensor& target, const Tensor& cu_seqlens,
                 int64_t max_seqlen, int64_t total, int64_t token_bytes) {
  return {
      .source = source.data,
      .target = target.data,
      .cu_seqlens = static_cast<const int32_t*>(cu_seqlens.data),
      .sequences = cu_seqlens.columns() - 1,
      .max_seqlen = max_seqlen,
      .total = total,
      .token_bytes = token_bytes,
      .threads = place.threads,
      .device = place.device,
      .stream = place.stream,
  };
}

Status pack_tokens(const Place& place, const Tensor& x, const Tensor& packed, const Tensor& cu_seqlens,
                   int64_t max_seqlen, int64_t total, int64_t token_bytes) {
  return FASTTFM_LAUNCH(place, pack, copy_of(place, x, packed, cu_seqlens, max_seqlen, total, token_bytes));
}

Status unpack_tokens(const Place& place, const Tensor& packed, const Tensor& x, const Tensor& cu_seqlens,
                     int64_t max_seqlen, int64_t total, int64_t token_bytes) {
  return FASTTFM_LAUNCH(place, unpack, copy_of(place, packed, x, cu_seqlens, max_seqlen, total, token_bytes));
}

}  // namespace

FASTTFM_BINDING(pack) {
  bind_call(module, "pack", "x, packed, cu_seqlens, max_seqlen, total, token_bytes", &pack_tokens);
  bind_call(module, "unpack", "packed, x, cu_seqlens, max_seqlen, total, token_bytes", &unpack_tokens);
}

}  // namespace fasttfm
