// A stack of transformer layers on the CPU, in fp32. The steps are in cpu_device.h.
#include "transformer_block/cpu_device.h"

namespace fasttfm {
namespace FASTTFM_ISA {
namespace {

using namespace transformer;

Status check_types(const TransformerShape& shape) {
  return shape.dtype == DType::f32 ? check_shape(shape) : unknown_dtype();
}

}  // namespace

Status transformer_block_sizes(const TransformerSizes& call) { return write_sizes<Cpu>(call); }

Status transformer_block_forward(const TransformerForward& call) {
  const Status status = check_types(call);
  if (status.code == StatusCode::ok && (call.few_rows || call.short_attention))
    return {StatusCode::bad_value, "transformer_block: few_rows and short_attention are CUDA's"};
  return status.code == StatusCode::ok ? Forward<Cpu>(call).run() : status;
}

Status transformer_block_backward(const TransformerBackward& call) {
  const Status status = check_part(call, check_types(call));
  return status.code == StatusCode::ok ? Backward<Cpu>(call).run() : status;
}

}  // namespace FASTTFM_ISA
}  // namespace fasttfm

FASTTFM_CPU_LAUNCHER(transformer_block_sizes, TransformerSizes)
FASTTFM_CPU_LAUNCHER(transformer_block_forward, TransformerForward)
FASTTFM_CPU_LAUNCHER(transformer_block_backward, TransformerBackward)
