#include "gemm/op.h"

#include "binding.h"

namespace fasttfm {

// y [M, N] = x [M, K] weight [N, K]^T + bias, fp32.
FASTTFM_FUNCTION(Status, linear_cpu, const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                 const Tensor& y) {
  Gemm gemm{};
  gemm.a = x.data;
  gemm.b = weight.data;
  gemm.bias = bias.data;
  gemm.d = y.data;
  gemm.rows = x.shape[0];
  gemm.columns = weight.shape[0];
  gemm.inner = weight.shape[1];
  gemm.transposed_b = 1;
  gemm.dtype = gemm.out_dtype = x.dtype();
  gemm.threads = context.threads;
  return cpu::gemm(gemm);
}

#ifdef FASTTFM_WITH_CUDA

FASTTFM_FUNCTION(int64_t, gemm_workspace_bytes_cuda) { return cuda::kGemmWorkspace; }
FASTTFM_FUNCTION(int64_t, gemm_library_version_cuda) { return cuda::gemm_library_version(); }

FASTTFM_FUNCTION(Status, gemm_cuda, const Tensor& a, const Tensor& b, const OptionalTensor& bias,
                 const OptionalTensor& c, const Tensor& d, const Tensor& workspace, int transposed_a,
                 int transposed_b) {
  return cuda::gemm({
      .a = a.data,
      .b = b.data,
      .bias = bias.data,
      .c = c.data,
      .d = d.data,
      .workspace = workspace.data,
      .rows = d.shape[0],
      .columns = d.shape[1],
      .inner = a.shape[transposed_a != 0 ? 0 : 1],
      .transposed_a = transposed_a,
      .transposed_b = transposed_b,
      .dtype = a.dtype(),
      .out_dtype = d.dtype(),
      .device = context.device,
      .stream = context.stream,
      .a_fp8 = Fp8Format::none,
      .b_fp8 = Fp8Format::none,
      .a_scale = nullptr,
      .b_scale = nullptr,
      .fast_accumulation = 0,
      .threads = 0,
  });
}

// a [M, K] and b [N, K], each to be multiplied by its scale.
FASTTFM_FUNCTION(Status, fp8_gemm_cuda, const Tensor& a, const Tensor& b, const OptionalTensor& bias,
                 const OptionalTensor& c, const Tensor& d, const Tensor& workspace, Fp8Format a_fp8, Fp8Format b_fp8,
                 const Tensor& a_scale, const Tensor& b_scale, int fast_accumulation) {
  return cuda::gemm({
      .a = a.data,
      .b = b.data,
      .bias = bias.data,
      .c = c.data,
      .d = d.data,
      .workspace = workspace.data,
      .rows = a.shape[0],
      .columns = b.shape[0],
      .inner = a.shape[1],
      .transposed_a = 0,
      .transposed_b = 1,
      .dtype = d.dtype(),
      .out_dtype = d.dtype(),
      .device = context.device,
      .stream = context.stream,
      .a_fp8 = a_fp8,
      .b_fp8 = b_fp8,
      .a_scale = a_scale.as<float>(),
      .b_scale = b_scale.as<float>(),
      .fast_accumulation = fast_accumulation,
      .threads = 0,
  });
}

#endif

}  // namespace fasttfm
