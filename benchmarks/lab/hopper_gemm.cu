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

template <class T, bool BACKWARD, Kept KEPT>
Status run(const ProductOperands& operands, const ProductParams& p, Activation activation, int multiprocessors) {
  if (activation == Activation::gelu)
    return launch_product<T, Shape, Activation::gelu, BACKWARD, KEPT>(operands, p, multiprocessors);
#ifdef LAB_ALL
  if (activation == Activation::gelu_tanh)
    return launch_product<T, Shape, Activation::gelu_tanh, BACKWARD, KEPT>(operands, p, multiprocessors);
  if (activation == Activation::relu)
    return launch_product<T, Shape, Activation::relu, BACKWARD, KEPT>(operands, p, multiprocessors);
#endif
  return unknown_activation();
}

template <class T>
Status run_form(const ProductOperands& operands, const ProductParams& p, Activation activation, int form,
                int multiprocessors) {
  switch (form) {
    case 0: return run<T, false, Kept::product>(operands, p, activation, multiprocessors);
    case 1: return run<T, false, Kept::derivative>(operands, p, activation, multiprocessors);
    case 2: return run<T, true, Kept::product>(operands, p, activation, multiprocessors);
    default: return launch_product<T, Shape, Activation::gelu, true, Kept::derivative>(operands, p, multiprocessors);
  }
}

// Forms: forward that keeps h, forward that keeps the derivative, backward of h, backward of the derivative.
extern "C" const char* hopper_gemm(const ProductOperands* operands, const ProductParams* p, int activation, int form,
                                   int multiprocessors) {
  const auto kind = static_cast<Activation>(activation);
  Status status;
  if (operands->dtype == DType::bf16)
    status = run_form<bf16_t>(*operands, *p, kind, form, multiprocessors);
  else
#ifdef LAB_ALL
    status = run_form<f16_t>(*operands, *p, kind, form, multiprocessors);
#else
    return "bf16 only";
#endif
  return status.code == StatusCode::ok ? nullptr : status.detail;
}
#endif
