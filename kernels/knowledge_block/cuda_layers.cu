// A layer of a token stream and an entity stream on Hopper, in 16 bits.
#include "common/cuda/hopper.cuh"
#include "common/cuda/launch.cuh"
#include "knowledge_block/layer_backward.h"
#include "knowledge_block/layer_forward.h"
#include "transformer_block/hopper_device.h"

namespace fasttfm {
namespace cuda {
namespace {

using namespace baseline::knowledge;

struct HopperWithEntities : Hopper {
  static constexpr auto copy_blocks = cuda::copy_blocks;
  static constexpr auto align_rows = cuda::align_rows;
  static constexpr auto entity_norm_forward = cuda::entity_norm_forward;
  static constexpr auto entity_norm_backward = cuda::entity_norm_backward;
};

Status check_call(const TransformerShape& tokens, const EntityShape& shape) {
  if (tokens.dtype != DType::bf16 && tokens.dtype != DType::f16) return unknown_dtype();
  if (tokens.width % 8 != 0 || tokens.intermediate % 8 != 0 || shape.entity_stride % 8 != 0)
    return bad_size("knowledge_block: width, intermediate and entity_stride are multiples of 8");
  if (shape.entity_width > kMaxEntityWidth) return bad_size("knowledge_block: entities have up to 512 columns");
  return check_shape(tokens, shape);
}

}  // namespace

Status knowledge_block_sizes(const KnowledgeSizes& call) {
  const Status status = check_call(call, call);
  return status.code == StatusCode::ok ? write_sizes<HopperWithEntities>(call) : status;
}

Status knowledge_block_forward(const KnowledgeForward& call) {
  const Status status = check_call(call, call);
  if (status.code != StatusCode::ok) return status;
  const DeviceGuard guard(call.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  return baseline::knowledge::Forward<HopperWithEntities>(call).run();
}

Status knowledge_block_backward(const KnowledgeBackward& call) {
  const Status status = check_call(call, call);
  if (status.code != StatusCode::ok) return status;
  const DeviceGuard guard(call.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  return baseline::knowledge::Backward<HopperWithEntities>(call).run();
}

}  // namespace cuda
}  // namespace fasttfm
