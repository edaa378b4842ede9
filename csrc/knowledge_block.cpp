#include "knowledge_block/op.h"

#include "binding.h"

namespace fasttfm {

#define SIZES(MEMBER) FASTTFM_FIELD(KnowledgeSizes, MEMBER)
#define FORWARD(MEMBER) FASTTFM_FIELD(KnowledgeForward, MEMBER)
#define BACKWARD(MEMBER) FASTTFM_FIELD(KnowledgeBackward, MEMBER)
#define SHAPE(FIELD)                                                                                                  \
  FIELD(layers), FIELD(tokens), FIELD(width), FIELD(intermediate), FIELD(heads), FIELD(sequences), FIELD(max_seqlen), \
      FIELD(processors), FIELD(pre_norm), FIELD(training), FIELD(recompute), FIELD(keep_activation), FIELD(dtype),    \
      FIELD(residual_dtype), FIELD(entities), FIELD(entity_width), FIELD(entity_stride), FIELD(entity_heads),         \
      FIELD(entity_head_dim), FIELD(entity_max_seqlen), FIELD(entity_attention), FIELD(last)
#define CALL(FIELD)                                                                                                   \
  SHAPE(FIELD), FIELD(parameters), FIELD(x), FIELD(cu_seqlens), FIELD(seeds), FIELD(kept), FIELD(scratch),            \
      FIELD(window_left), FIELD(window_right), FIELD(activation), FIELD(attention_threshold), FIELD(attention_scale), \
      FIELD(threshold_a), FIELD(scale_a), FIELD(threshold_b), FIELD(scale_b), FIELD(eps_a), FIELD(eps_b),             \
      FIELD(parameter_dtype), FIELD(device), FIELD(stream), FIELD(entity_x), FIELD(entity_cu_seqlens),                \
      FIELD(positions), FIELD(entity_eps_a), FIELD(entity_eps_b)

FASTTFM_BINDING(knowledge_block) {
#define BIND(DEVICE)                                                                                                   \
  bind_launcher(module, "knowledge_block_sizes_" #DEVICE, &DEVICE::knowledge_block_sizes, SHAPE(SIZES), SIZES(sizes)); \
  bind_launcher(module, "knowledge_block_forward_" #DEVICE, &DEVICE::knowledge_block_forward, CALL(FORWARD),           \
                FORWARD(y), FORWARD(entity_y));                                                                        \
  bind_launcher(module, "knowledge_block_backward_" #DEVICE, &DEVICE::knowledge_block_backward, CALL(BACKWARD),        \
                BACKWARD(dy), BACKWARD(dx), BACKWARD(gradients), BACKWARD(block_memory), BACKWARD(entity_dy),          \
                BACKWARD(entity_dx), BACKWARD(ddown))
  BIND(cpu);
#ifdef FASTTFM_WITH_HOPPER
  BIND(cuda);
#endif
}

}  // namespace fasttfm
