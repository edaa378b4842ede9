#include "adamw/op.h"

#include "binding.h"

namespace fasttfm {

FASTTFM_CONSTANT(adamw_chunk, cuda::kAdamWChunk)
FASTTFM_CONSTANT(adamw_tensor_bytes, sizeof(AdamWTensor))
FASTTFM_CONSTANT(adamw_group_bytes, sizeof(AdamWGroup))

#ifdef FASTTFM_WITH_CUDA
FASTTFM_FUNCTION(int64_t, adamw_workspace_cuda, int64_t tensors, int64_t groups) {
  return cuda::adamw_workspace(tensors, groups);
}

// `norm_only`: writes the norm of the gradients and nothing else.
FASTTFM_FUNCTION(Status, adamw_cuda, const void* table, int64_t tensors, int64_t groups, int64_t chunks,
                 const Tensor& workspace, const OptionalTensor& partial_norms, const OptionalTensor& norm,
                 float max_norm, const OptionalTensor& grad_scale, const OptionalTensor& found_inf, int norm_only) {
  const AdamW params{
      .table = table,
      .workspace = workspace.data,
      .partial_norms = partial_norms.as<float>(),
      .norm = norm.as<float>(),
      .max_norm = max_norm,
      .grad_scale = grad_scale.as<float>(),
      .found_inf = found_inf.as<float>(),
      .tensors = tensors,
      .groups = groups,
      .chunks = chunks,
      .device = context.device,
      .stream = context.stream,
  };
  return norm_only != 0 ? cuda::adamw_norm(params) : cuda::adamw_step(params);
}
#endif

}  // namespace fasttfm
