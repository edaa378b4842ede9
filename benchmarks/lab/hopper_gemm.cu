// One shape of Hopper's product with an activation as a library of its own: hopper_gemm.py compiles it for each that it
// tries.
#ifdef LAB_PASS
#include "bias_gelu/cuda.cu"

extern "C" void bias_gelu_forward_pass(const fasttfm::BiasGeluForward* call) {
  fasttfm::cuda::bias_gelu_forward(*call);
}
extern "C" void bias_gelu_backward_pass(const fasttfm::BiasGeluBackward* call) {
  fasttfm::cuda::bias_gelu_backward(*call);
}
#else
#include "gelu_product/cuda_product.cuh"

using namespace fasttfm;
using namespace fasttfm::cuda;
using Shape = ProductShape<LAB_COLUMNS, LAB_STAGES, LAB_CLUSTER, LAB_EPILOGUES>;

template <bool BACKWARD, Kept KEPT>
Status run(const ProductOperands& operands, const ProductParams& p, int multiprocessors) {
  return launch_product<bf16_t, Shape, Activation::gelu, BACKWARD, KEPT>(operands, p, multiprocessors);
}

// Forms: forward that keeps h, forward that keeps the derivative, backward of h, backward of the derivative.
extern "C" const char* hopper_gemm(const ProductOperands* operands, const ProductParams* p, int form,
                                   int multiprocessors) {
  constexpr decltype(&run<false, Kept::product>) kForms[] = {run<false, Kept::product>, run<false, Kept::derivative>,
                                                             run<true, Kept::product>, run<true, Kept::derivative>};
  const Status status = kForms[form](*operands, *p, multiprocessors);
  return status.code == StatusCode::ok ? nullptr : status.detail;
}
#endif
