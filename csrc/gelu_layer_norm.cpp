#include "gelu_layer_norm/op.h"

#include "binding.h"

namespace fasttfm {

#define FORWARD(MEMBER) FASTTFM_FIELD(GeluLayerNormForward, MEMBER)
#define BACKWARD(MEMBER) FASTTFM_FIELD(GeluLayerNormBackward, MEMBER)

FASTTFM_BINDING(gelu_layer_norm) {
  bind_workspace(module, "gelu_layer_norm_forward_workspace", &cpu::gelu_layer_norm_forward_workspace);
  bind_workspace(module, "gelu_layer_norm_backward_workspace", &cpu::gelu_layer_norm_backward_workspace);
  bind_launcher(module, "gelu_layer_norm_forward_cpu", &cpu::gelu_layer_norm_forward, FORWARD(x), FORWARD(linear_bias),
                FORWARD(weight), FORWARD(bias), FORWARD(y), FORWARD(mean), FORWARD(rstd), FORWARD(workspace),
                FORWARD(rows), FORWARD(columns), FORWARD(x_stride), FORWARD(eps), FORWARD(activation), FORWARD(dtype),
                FORWARD(threads));
  bind_launcher(module, "gelu_layer_norm_backward_cpu", &cpu::gelu_layer_norm_backward, BACKWARD(dy), BACKWARD(x),
                BACKWARD(linear_bias), BACKWARD(weight), BACKWARD(mean), BACKWARD(rstd), BACKWARD(dx),
                BACKWARD(dlinear_bias), BACKWARD(dweight), BACKWARD(dbias), BACKWARD(workspace), BACKWARD(rows),
                BACKWARD(columns), BACKWARD(x_stride), BACKWARD(activation), BACKWARD(dtype), BACKWARD(threads));
#ifdef FASTTFM_WITH_CUDA
  bind_workspace(module, "gelu_layer_norm_backward_memory_cuda", &cuda::gelu_layer_norm_backward_memory,
                 {"columns", "dtype", "limit"});
  bind_launcher(module, "gelu_layer_norm_forward_cuda", &cuda::gelu_layer_norm_forward, FORWARD(x),
                FORWARD(linear_bias), FORWARD(weight), FORWARD(bias), FORWARD(y), FORWARD(mean), FORWARD(rstd),
                FORWARD(rows), FORWARD(columns), FORWARD(x_stride), FORWARD(eps), FORWARD(activation), FORWARD(dtype),
                FORWARD(parameter_dtype), FORWARD(device), FORWARD(stream));
  bind_launcher(module, "gelu_layer_norm_backward_cuda", &cuda::gelu_layer_norm_backward, BACKWARD(dy), BACKWARD(x),
                BACKWARD(linear_bias), BACKWARD(weight), BACKWARD(mean), BACKWARD(rstd), BACKWARD(dx),
                BACKWARD(dlinear_bias), BACKWARD(dweight), BACKWARD(dbias), BACKWARD(workspace), BACKWARD(rows),
                BACKWARD(columns), BACKWARD(x_stride), BACKWARD(activation), BACKWARD(dtype),
                BACKWARD(linear_bias_dtype), BACKWARD(weight_dtype), BACKWARD(bias_dtype), BACKWARD(blocks),
                BACKWARD(device), BACKWARD(stream),
                FASTTFM_FIELD(WithBlockMemory<GeluLayerNormBackward>, block_memory));
#endif
}

}  // namespace fasttfm
