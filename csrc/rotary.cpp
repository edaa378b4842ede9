#include "rotary/op.h"

#include "binding.h"

namespace fasttfm {

namespace {

// x is [T, H, D] with adjacent columns, positions int64 [T] or None; `sequence` tokens make a sequence.
Status forward(const Place& place, const Tensor& x, const Tensor& cos, const Tensor& sin,
               const OptionalTensor& positions, const Tensor& y, int64_t sequence, int64_t turned_heads, double sign) {
  const Rotary params{
      .x = x.data,
      .cos = static_cast<const float*>(cos.data),
      .sin = static_cast<const float*>(sin.data),
      .positions = static_cast<const int64_t*>(positions.data),
      .y = y.data,
      .tokens = x.shape[0],
      .sequence = sequence,
      .heads = x.shape[1],
      .turned_heads = turned_heads,
      .columns = x.shape[2],
      .pairs = cos.columns(),
      .token_stride = x.strides[0],
      .head_stride = x.strides[1],
      .sign = static_cast<float>(sign),
      .dtype = x.dtype(),
      .threads = place.threads,
  };
  return cpu::rotary(params);
}

}  // namespace

FASTTFM_BINDING(rotary) {
  bind_call(module, "rotary_cpu", "x, cos, sin, positions, y, sequence, turned_heads, sign", &forward);
}

}  // namespace fasttfm
