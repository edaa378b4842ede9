#include "pack/op.h"

#include "binding.h"

namespace fasttfm {

namespace {

PackCopy copy_of(const CallContext& context, const Tensor& source, const Tensor& target, const Tensor& cu_seqlens,
                 int64_t max_seqlen, int64_t total, int64_t token_bytes) {
  return {
      .source = source.data,
      .target = target.data,
      .cu_seqlens = cu_seqlens.as<int32_t>(),
      .sequences = cu_seqlens.columns() - 1,
      .max_seqlen = max_seqlen,
      .total = total,
      .token_bytes = token_bytes,
      .threads = context.threads,
      .device = context.device,
      .stream = context.stream,
  };
}

}  // namespace

FASTTFM_FUNCTION(Status, pack, const Tensor& x, const Tensor& packed, const Tensor& cu_seqlens, int64_t max_seqlen,
                 int64_t total, int64_t token_bytes) {
  return FASTTFM_LAUNCH(pack, copy_of(context, x, packed, cu_seqlens, max_seqlen, total, token_bytes));
}

FASTTFM_FUNCTION(Status, unpack, const Tensor& packed, const Tensor& x, const Tensor& cu_seqlens, int64_t max_seqlen,
                 int64_t total, int64_t token_bytes) {
  return FASTTFM_LAUNCH(unpack, copy_of(context, packed, x, cu_seqlens, max_seqlen, total, token_bytes));
}

#ifdef FASTTFM_WITH_CUDA
FASTTFM_FUNCTION(Status, mask_layout_cuda, const Tensor& mask, const Tensor& cu_seqlens, const void* found,
                 int64_t element_bytes) {
  return cuda::mask_layout({
      .mask = mask.data,
      .cu_seqlens = cu_seqlens.as<int32_t>(),
      .summary = static_cast<int32_t*>(const_cast<void*>(found)),
      .sequences = mask.shape[0],
      .max_seqlen = mask.shape[1],
      .element_bytes = element_bytes,
      .device = context.device,
      .stream = context.stream,
  });
}

FASTTFM_FUNCTION(Status, packed_positions_cuda, const Tensor& cu_seqlens, const Tensor& positions) {
  return cuda::packed_positions({
      .cu_seqlens = cu_seqlens.as<int32_t>(),
      .positions = positions.as<int64_t>(),
      .sequences = cu_seqlens.shape[0] - 1,
      .total = positions.shape[0],
      .device = context.device,
      .stream = context.stream,
  });
}
#endif

}  // namespace fasttfm
