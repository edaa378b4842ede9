#include "qkv_projection/op.h"

#include "binding.h"

#ifdef FASTTFM_WITH_HOPPER
namespace fasttfm {

// `sequence`: the number of rows of a sequence; positions without a tensor count from its start.
FASTTFM_FUNCTION(Status, qkv_projection_cuda, const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                 const Tensor& qkv, const OptionalTensor& cos, const OptionalTensor& sin,
                 const OptionalTensor& positions, int64_t sequence) {
  if (!x.has_rows()) return bad_size("qkv_projection: x must have adjacent columns and one stride between rows");
  return cuda::qkv_projection({
      .x = x.data,
      .weight = weight.data,
      .bias = bias.data,
      .qkv = qkv.data,
      .rows = x.rows(),
      .inputs = x.columns(),
      .columns = weight.shape[0],
      .x_stride = x.row_stride(),
      .cos = cos.as<float>(),
      .sin = sin.as<float>(),
      .positions = positions.as<int64_t>(),
      .sequence = sequence,
      .table_rows = cos.given ? cos.shape[0] : 0,
      .dtype = x.dtype(),
      .bias_dtype = bias.dtype(),
      .device = context.device,
      .stream = context.stream,
  });
}

}  // namespace fasttfm
#endif
