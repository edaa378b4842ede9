#include "layer_norm/op.h"

#include "binding.h"

namespace fasttfm {

#define FORWARD(MEMBER) FASTTFM_FIELD(LayerNormForward, MEMBER)
#define BACKWARD(MEMBER) FASTTFM_FIELD(LayerNormBackward, MEMBER)

FASTTFM_BINDING(layer_norm) {
  bind_workspace(module, "layer_norm_workspace", &cpu::layer_norm_workspace);
  bind_launcher(module, "layer_norm_forward_cpu", &cpu::layer_norm_forward, FORWARD(x), FORWARD(weight), FORWARD(bias),
                FORWARD(y), FORWARD(mean), FORWARD(rstd), FORWARD(rows), FORWARD(columns), FORWARD(x_stride),
                FORWARD(eps), FORWARD(dtype), FORWARD(threads));
  bind_launcher(module, "layer_norm_backward_cpu", &cpu::layer_norm_backward, BACKWARD(dy), BACKWARD(x),
                BACKWARD(weight), BACKWARD(mean), BACKWARD(rstd), BACKWARD(dx), BACKWARD(dweight), BACKWARD(dbias),
                BACKWARD(workspace), BACKWARD(rows), BACKWARD(columns), BACKWARD(x_stride), BACKWARD(dtype),
                BACKWARD(threads));
#ifdef FASTTFM_WITH_CUDA
  bind_workspace(module, "layer_norm_backward_memory_cuda", &cuda::layer_norm_backward_memory,
                 {"columns", "dtype", "limit"});
  bind_launcher(module, "layer_norm_forward_cuda", &cuda::layer_norm_forward, FORWARD(x), FORWARD(weight),
                FORWARD(bias), FORWARD(y), FORWARD(mean), FORWARD(rstd), FORWARD(rows), FORWARD(columns),
                FORWARD(x_stride), FORWARD(eps), FORWARD(dtype), FORWARD(parameter_dtype), FORWARD(device),
                FORWARD(stream));
  bind_launcher(module, "layer_norm_backward_cuda", &cuda::layer_norm_backward, BACKWARD(dy), BACKWARD(x),
                BACKWARD(weight), BACKWARD(mean), BACKWARD(rstd), BACKWARD(dx), BACKWARD(dweight), BACKWARD(dbias),
                BACKWARD(workspace), BACKWARD(rows), BACKWARD(columns), BACKWARD(x_stride), BACKWARD(dtype),
                BACKWARD(weight_dtype), BACKWARD(bias_dtype), BACKWARD(blocks), BACKWARD(device), BACKWARD(stream),
                FASTTFM_FIELD(WithBlockMemory<LayerNormBackward>, block_memory));
#endif
}

}  // namespace fasttfm
