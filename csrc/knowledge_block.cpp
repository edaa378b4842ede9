#include "knowledge_block/op.h"

#include "binding.h"
#include "common/cuda/device.h"
#include "transformer_call.h"

namespace fasttfm {

// The fields of Python's EntityShape, in its order: those of EntityShape in op.h.
#define ENTITY_SHAPE(F)                                                                                \
  F(int64_t, entities), F(int64_t, entity_width), F(int64_t, entity_stride), F(int64_t, entity_heads), \
      F(int64_t, entity_head_dim), F(int64_t, entity_max_seqlen), F(int, entity_attention), F(int, last)
#define ENTITY_INPUTS(F)                                                                        \
  F(const Tensor&, entity_x), F(const Tensor&, entity_cu_seqlens), F(const Tensor&, positions), \
      F(float, entity_eps_a), F(float, entity_eps_b)
#define PARAMETERS                                                                                               \
  TRANSFORMER_SHAPE(FASTTFM_PARAMETER), ENTITY_SHAPE(FASTTFM_PARAMETER), TRANSFORMER_OPTIONS(FASTTFM_PARAMETER), \
      TRANSFORMER_INPUTS(FASTTFM_PARAMETER), ENTITY_INPUTS(FASTTFM_PARAMETER)
#define ENTITY_CALL entity_call_of({ENTITY_SHAPE(FASTTFM_NAME)}, ENTITY_INPUTS(FASTTFM_NAME))

namespace {

EntityCall entity_call_of(const EntityShape& shape, ENTITY_INPUTS(FASTTFM_PARAMETER)) {
  return {shape, entity_x.data, entity_cu_seqlens.as<int32_t>(), positions.as<int64_t>(), entity_eps_a, entity_eps_b};
}

}  // namespace

// Writes three numbers of bytes to `sizes`.
FASTTFM_FUNCTION(Status, knowledge_block_sizes_cpu, TRANSFORMER_SHAPE(FASTTFM_PARAMETER),
                 ENTITY_SHAPE(FASTTFM_PARAMETER), int64_t* sizes) {
  return cpu::knowledge_block_sizes({shape_of(TRANSFORMER_SHAPE(FASTTFM_NAME)), {ENTITY_SHAPE(FASTTFM_NAME)}, sizes});
}

#ifdef FASTTFM_WITH_HOPPER
FASTTFM_FUNCTION(Status, knowledge_block_sizes_cuda, TRANSFORMER_SHAPE(FASTTFM_PARAMETER),
                 ENTITY_SHAPE(FASTTFM_PARAMETER), int64_t* sizes) {
  return cuda::knowledge_block_sizes({shape_of(TRANSFORMER_SHAPE(FASTTFM_NAME)), {ENTITY_SHAPE(FASTTFM_NAME)}, sizes});
}
#endif

FASTTFM_FUNCTION(Status, knowledge_block_forward, PARAMETERS, const Tensor& y, const OptionalTensor& entity_y) {
  const TransformerForward layer{TRANSFORMER_CALL, nullptr, y.data, nullptr};
  const KnowledgeForward params{layer, ENTITY_CALL, entity_y.data};
  return FASTTFM_LAUNCH_HOPPER(knowledge_block_forward, params);
}

// `gradients` is a table of addresses.
FASTTFM_FUNCTION(Status, knowledge_block_backward, PARAMETERS, const Tensor& dy, const Tensor& dx,
                 const int64_t* gradients, const OptionalTensor& entity_dy, const Tensor& entity_dx,
                 const OptionalTensor& ddown) {
  const TransformerBackward layer{TRANSFORMER_CALL, nullptr, dy.data,   nullptr,
                                  dx.data,          nullptr, gradients, cuda::block_memory(context.device)};
  const KnowledgeBackward params{layer, ENTITY_CALL, entity_dy.data, entity_dx.data, ddown.data};
  return FASTTFM_LAUNCH_HOPPER(knowledge_block_backward, params);
}

}  // namespace fasttfm
