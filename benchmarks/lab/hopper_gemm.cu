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

template <class T, bool BACKWARD>
Status run(const ProductOperands& operands, const ProductParams& p, Activation activation, int multiprocessors) {
  if (activation == Activation::gelu)
    return launch_product<T, Shape, Activation::gelu, BACKWARD>(operands, p, multiprocessors);
#ifdef LAB_ALL
  if (activation == Activation::gelu_tanh)
    return launch_product<T, Shape, Activation::gelu_tanh, BACKWARD>(operands, p, multiprocessors);
  if (activation == Activation::relu)
    return launch_product<T, Shape, Activation::relu, BACKWARD>(operands, p, multiprocessors);
#endif
  return unknown_activation();
}

extern "C" const char* hopper_gemm(const ProductOperands* operands, const ProductParams* p, int activation,
                                   int backward, int multiprocessors) {
  const auto kind = static_cast<Activation>(activation);
  Status status;
  if (operands->dtype == DType::bf16)
    status = backward ? run<bf16_t, true>(*operands, *p, kind, multiprocessors)
                      : run<bf16_t, false>(*operands, *p, kind, multiprocessors);
  else
#ifdef LAB_ALL
    status = backward ? run<f16_t, true>(*operands, *p, kind, multiprocessors)
                      : run<f16_t, false>(*operands, *p, kind, multiprocessors);
#else
    return "bf16 only";
#endif
  return status.code == StatusCode::ok ? nullptr : status.detail;
}

#ifdef LAB_CLOCKS
extern "C" void hopper_gemm_clocks(long long* to) { cudaMemcpyFromSymbol(to, lab_clocks, sizeof(lab_clocks)); }
#endif
#endif
