#include "dropout_add_layer_norm/op.h"

#include "binding.h"

namespace fasttfm {

#define FORWARD(MEMBER) FASTTFM_FIELD(DropoutAddLayerNormForward, MEMBER)
#define BACKWARD(MEMBER) FASTTFM_FIELD(DropoutAddLayerNormBackward, MEMBER)
// What both devices take.
#define FORWARD_FIELDS                                                                                            \
  FORWARD(x), FORWARD(residual), FORWARD(weight), FORWARD(bias), FORWARD(linear_bias), FORWARD(y), FORWARD(z),    \
      FORWARD(mean), FORWARD(rstd), FORWARD(rows), FORWARD(columns), FORWARD(x_stride), FORWARD(residual_stride), \
      FORWARD(eps), FORWARD(seed), FORWARD(cu_seqlens), FORWARD(sequences), FORWARD(tokens_per_sequence),         \
      FORWARD(threshold), FORWARD(scale), FORWARD(dtype), FORWARD(residual_dtype)
#define BACKWARD_FIELDS                                                                                              \
  BACKWARD(dy), BACKWARD(dz), BACKWARD(z), BACKWARD(weight), BACKWARD(mean), BACKWARD(rstd), BACKWARD(dresidual),    \
      BACKWARD(dx), BACKWARD(dweight), BACKWARD(dbias), BACKWARD(dlinear_bias), BACKWARD(workspace), BACKWARD(rows), \
      BACKWARD(columns), BACKWARD(seed), BACKWARD(cu_seqlens), BACKWARD(sequences), BACKWARD(tokens_per_sequence),   \
      BACKWARD(threshold), BACKWARD(scale), BACKWARD(dtype), BACKWARD(residual_dtype)

FASTTFM_BINDING(dropout_add_layer_norm) {
  bind_workspace(module, "dropout_add_layer_norm_workspace", &cpu::dropout_add_layer_norm_workspace);
  bind_launcher(module, "dropout_add_layer_norm_forward_cpu", &cpu::dropout_add_layer_norm_forward, FORWARD_FIELDS,
                FORWARD(threads));
  bind_launcher(module, "dropout_add_layer_norm_backward_cpu", &cpu::dropout_add_layer_norm_backward, BACKWARD_FIELDS,
                BACKWARD(threads));
#ifdef FASTTFM_WITH_CUDA
  bind_workspace(module, "dropout_add_layer_norm_backward_memory_cuda", &cuda::dropout_add_layer_norm_backward_memory,
                 {"columns", "dtype", "residual_dtype", "linear_bias", "limit"});
  bind_launcher(module, "dropout_add_layer_norm_forward_cuda", &cuda::dropout_add_layer_norm_forward, FORWARD_FIELDS,
                FORWARD(parameter_dtype), FORWARD(device), FORWARD(stream));
  bind_launcher(module, "dropout_add_layer_norm_backward_cuda", &cuda::dropout_add_layer_norm_backward, BACKWARD_FIELDS,
                BACKWARD(weight_dtype), BACKWARD(bias_dtype), BACKWARD(linear_bias_dtype), BACKWARD(blocks),
                BACKWARD(device), BACKWARD(stream),
                FASTTFM_FIELD(WithBlockMemory<DropoutAddLayerNormBackward>, block_memory));
#endif
}

}  // namespace fasttfm
