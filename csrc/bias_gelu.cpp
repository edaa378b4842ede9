#include "bias_gelu/op.h"

#include "binding.h"

namespace fasttfm {

#define FORWARD(MEMBER) FASTTFM_FIELD(BiasGeluForward, MEMBER)
#define BACKWARD(MEMBER) FASTTFM_FIELD(BiasGeluBackward, MEMBER)

FASTTFM_BINDING(bias_gelu) {
  bind_workspace(module, "bias_gelu_workspace", &cpu::bias_gelu_workspace);
  bind_launcher(module, "bias_gelu_forward_cpu", &cpu::bias_gelu_forward, FORWARD(x), FORWARD(bias), FORWARD(y),
                FORWARD(rows), FORWARD(columns), FORWARD(x_stride), FORWARD(activation), FORWARD(dtype),
                FORWARD(threads));
  bind_launcher(module, "bias_gelu_backward_cpu", &cpu::bias_gelu_backward, BACKWARD(dy), BACKWARD(x), BACKWARD(bias),
                BACKWARD(dx), BACKWARD(y), BACKWARD(dbias), BACKWARD(workspace), BACKWARD(rows), BACKWARD(columns),
                BACKWARD(x_stride), BACKWARD(activation), BACKWARD(dtype), BACKWARD(threads));
#ifdef FASTTFM_WITH_CUDA
  bind_launcher(module, "bias_gelu_forward_cuda", &cuda::bias_gelu_forward, FORWARD(x), FORWARD(bias), FORWARD(y),
                FORWARD(rows), FORWARD(columns), FORWARD(x_stride), FORWARD(activation), FORWARD(dtype),
                FORWARD(bias_dtype), FORWARD(device), FORWARD(stream));
  bind_launcher(module, "bias_gelu_backward_cuda", &cuda::bias_gelu_backward, BACKWARD(dy), BACKWARD(x), BACKWARD(bias),
                BACKWARD(dx), BACKWARD(y), BACKWARD(dbias), BACKWARD(workspace), BACKWARD(rows), BACKWARD(columns),
                BACKWARD(x_stride), BACKWARD(activation), BACKWARD(dtype), BACKWARD(bias_dtype), BACKWARD(parts),
                BACKWARD(device), BACKWARD(stream));
#endif
}

}  // namespace fasttfm
