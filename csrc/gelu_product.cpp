#include "gelu_product/op.h"

#include "binding.h"

namespace fasttfm {

#define FORWARD(MEMBER) FASTTFM_FIELD(GeluProductForward, MEMBER)
#define BACKWARD(MEMBER) FASTTFM_FIELD(GeluProductBackward, MEMBER)

FASTTFM_BINDING(gelu_product) {
#ifdef FASTTFM_WITH_HOPPER
  bind_workspace(module, "gelu_product_workspace_cuda", &cuda::gelu_product_workspace);
  bind_launcher(module, "gelu_product_forward_cuda", &cuda::gelu_product_forward, FORWARD(x), FORWARD(weight),
                FORWARD(bias), FORWARD(h), FORWARD(derivative), FORWARD(a), FORWARD(rows), FORWARD(inputs),
                FORWARD(columns), FORWARD(x_stride), FORWARD(activation), FORWARD(dtype), FORWARD(bias_dtype),
                FORWARD(device), FORWARD(stream));
  bind_launcher(module, "gelu_product_backward_cuda", &cuda::gelu_product_backward, BACKWARD(dy), BACKWARD(weight),
                BACKWARD(bias), BACKWARD(h), BACKWARD(derivative), BACKWARD(dh), BACKWARD(a), BACKWARD(dbias),
                BACKWARD(workspace), BACKWARD(rows), BACKWARD(outputs), BACKWARD(columns), BACKWARD(dy_stride),
                BACKWARD(activation), BACKWARD(dtype), BACKWARD(bias_dtype), BACKWARD(device), BACKWARD(stream));
#endif
}

}  // namespace fasttfm
