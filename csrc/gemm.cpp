#include "gemm/op.h"

#include "binding.h"

namespace fasttfm {

#define GEMM(MEMBER) FASTTFM_FIELD(Gemm, MEMBER)

FASTTFM_BINDING(gemm) {
#ifdef FASTTFM_WITH_CUDA
  bind_number(module, "gemm_workspace_bytes_cuda", [] { return cuda::kGemmWorkspace; });
  bind_number(module, "gemm_library_version_cuda", &cuda::gemm_library_version);
  bind_launcher(module, "gemm_cuda", &cuda::gemm, GEMM(a), GEMM(b), GEMM(bias), GEMM(c), GEMM(d), GEMM(workspace),
                GEMM(rows), GEMM(columns), GEMM(inner), GEMM(transposed_a), GEMM(transposed_b), GEMM(dtype),
                GEMM(out_dtype), GEMM(device), GEMM(stream));
  bind_launcher(module, "fp8_gemm_cuda", &cuda::gemm, GEMM(a), GEMM(b), GEMM(bias), GEMM(c), GEMM(d), GEMM(workspace),
                GEMM(rows), GEMM(columns), GEMM(inner), GEMM(transposed_a), GEMM(transposed_b), GEMM(dtype),
                GEMM(out_dtype), GEMM(device), GEMM(stream), GEMM(a_fp8), GEMM(b_fp8), GEMM(a_scale), GEMM(b_scale),
                GEMM(fast_accumulation));
#endif
}

}  // namespace fasttfm
