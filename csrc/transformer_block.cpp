#include "transformer_block/op.h"

#include "binding.h"
#include "transformer_block/regions.h"

namespace fasttfm {

using baseline::transformer::RegionsCall;

#define REGIONS(MEMBER) FASTTFM_FIELD(RegionsCall, MEMBER)
#define SIZES(MEMBER) FASTTFM_FIELD(TransformerSizes, MEMBER)
#define FORWARD(MEMBER) FASTTFM_FIELD(TransformerForward, MEMBER)
#define BACKWARD(MEMBER) FASTTFM_FIELD(TransformerBackward, MEMBER)
#define FP8(MEMBER) FASTTFM_FIELD(TransformerFp8Forward, MEMBER)
#define SHAPE(FIELD)                                                                                                  \
  FIELD(layers), FIELD(tokens), FIELD(width), FIELD(intermediate), FIELD(heads), FIELD(sequences), FIELD(max_seqlen), \
      FIELD(processors), FIELD(pre_norm), FIELD(training), FIELD(recompute), FIELD(keep_activation), FIELD(dtype),    \
      FIELD(residual_dtype)
#define CALL(FIELD)                                                                                                   \
  SHAPE(FIELD), FIELD(parameters), FIELD(x), FIELD(cu_seqlens), FIELD(seeds), FIELD(kept), FIELD(scratch),            \
      FIELD(window_left), FIELD(window_right), FIELD(activation), FIELD(attention_threshold), FIELD(attention_scale), \
      FIELD(threshold_a), FIELD(scale_a), FIELD(threshold_b), FIELD(scale_b), FIELD(eps_a), FIELD(eps_b),             \
      FIELD(parameter_dtype), FIELD(device), FIELD(stream)

FASTTFM_BINDING(transformer_block) {
  bind_launcher(module, "transformer_block_regions", &baseline::transformer::list_regions, SHAPE(REGIONS),
                REGIONS(workspace_bytes), REGIONS(fused_activation), REGIONS(table), REGIONS(kind));
#define BIND(DEVICE)                                                                                                \
  bind_launcher(module, "transformer_block_sizes_" #DEVICE, &DEVICE::transformer_block_sizes, SHAPE(SIZES),         \
                SIZES(sizes));                                                                                      \
  bind_launcher(module, "transformer_block_forward_" #DEVICE, &DEVICE::transformer_block_forward, CALL(FORWARD),    \
                FORWARD(residual), FORWARD(y), FORWARD(z), FORWARD(few_rows), FORWARD(short_attention));            \
  bind_launcher(module, "transformer_block_backward_" #DEVICE, &DEVICE::transformer_block_backward, CALL(BACKWARD), \
                BACKWARD(z), BACKWARD(dy), BACKWARD(dz), BACKWARD(dx), BACKWARD(dresidual), BACKWARD(gradients),    \
                BACKWARD(block_memory), BACKWARD(part), BACKWARD(dout), BACKWARD(dqkv))
  BIND(cpu);
#ifdef FASTTFM_WITH_HOPPER
  BIND(cuda);
  bind_launcher(module, "transformer_block_fp8_forward_cuda", &cuda::transformer_block_fp8_forward, CALL(FP8),
                FP8(residual), FP8(y), FP8(z), FP8(few_rows), FP8(short_attention), FP8(fp8), FP8(operand));
  bind_number(module, "transformer_block_names_layers_cuda", &cuda::transformer_block_names_layers);
#endif
}

}  // namespace fasttfm
