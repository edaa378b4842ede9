// A stack of transformer layers on Hopper. The steps are in hopper_device.h.
#include "common/cuda/hopper.cuh"
#include "common/cuda/launch.cuh"
#include "transformer_block/few_rows_forward.h"
#include "transformer_block/hopper_device.h"

namespace fasttfm {
namespace cuda {
namespace {

using namespace baseline::transformer;

Status check_call(const TransformerShape& shape) {
  if (shape.dtype != DType::bf16 && shape.dtype != DType::f16) return unknown_dtype();
  if (shape.width % 8 != 0 || shape.intermediate % 8 != 0)
    return bad_size("transformer_block: width and intermediate are multiples of 8");
  return check_shape(shape);
}

Status check_few_rows(const TransformerForward& call) {
  if (call.training || call.attention_threshold > 0 || call.threshold_a > 0 || call.threshold_b > 0)
    return {StatusCode::bad_value, "transformer_block: few_rows and short_attention are for inference without dropout"};
  if (call.few_rows != 0 && call.tokens > kGemmWorkspace / (4 * call.width))
    return bad_size("transformer_block: few_rows takes as many tokens as one part in fp32 fits into the workspace");
  return {};
}

}  // namespace

int64_t transformer_block_names_layers() {
#ifdef FASTTFM_WITH_NVTX
  return 1;
#else
  return 0;
#endif
}

Status transformer_block_sizes(const TransformerSizes& call) {
  const Status status = check_call(call);
  return status.code == StatusCode::ok ? write_sizes<Hopper>(call) : status;
}

Status transformer_block_forward(const TransformerForward& call) {
  Status status = check_call(call);
  if (status.code == StatusCode::ok && (call.few_rows != 0 || call.short_attention != 0)) status = check_few_rows(call);
  if (status.code != StatusCode::ok) return status;
  const DeviceGuard guard(call.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  if (call.few_rows != 0) return FewRowsForward(call).run<Hopper::Range>();
  return Forward<Hopper>(call).run();
}

Status transformer_block_folded_forward(const TransformerFoldedForward& call) {
  Status status = check_call(call);
  if (status.code == StatusCode::ok) status = FewRowsForward::check(call);
  if (status.code == StatusCode::ok) status = check_few_rows(call);
  if (status.code != StatusCode::ok) return status;
  const DeviceGuard guard(call.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  return FewRowsForward(call).run<Hopper::Range>();
}

Status transformer_block_backward(const TransformerBackward& call) {
  const Status status = check_part(call, check_call(call));
  if (status.code != StatusCode::ok) return status;
  const DeviceGuard guard(call.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  return Backward<Hopper>(call).run();
}

}  // namespace cuda
}  // namespace fasttfm
