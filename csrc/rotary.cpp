#include "rotary/op.h"

#include "binding.h"

namespace fasttfm {

// x is [T, H, D] with adjacent columns, positions int64 [T] or None; every `sequence` tokens are a sequence.
FASTTFM_FUNCTION(Status, rotary_cpu, const Tensor& x, const Tensor& cos, const Tensor& sin,
                 const OptionalTensor& positions, const Tensor& y, int64_t sequence, int64_t rotary_heads, float sign) {
  return cpu::rotary({
      .x = x.data,
      .cos = cos.as<float>(),
      .sin = sin.as<float>(),
      .positions = positions.as<int64_t>(),
      .y = y.data,
      .tokens = x.shape[0],
      .sequence = sequence,
      .heads = x.shape[1],
      .rotary_heads = rotary_heads,
      .columns = x.shape[2],
      .pairs = cos.columns(),
      .table_rows = cos.shape[0],
      .token_stride = x.strides[0],
      .head_stride = x.strides[1],
      .sign = sign,
      .dtype = x.dtype(),
      .threads = context.threads,
  });
}

}  // namespace fasttfm
