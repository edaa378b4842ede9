#include "adamw/op.h"

#include "binding.h"

namespace fasttfm {

#define STEP(MEMBER) FASTTFM_FIELD(AdamW, MEMBER)
#define CALL                                                                                                        \
  STEP(table), STEP(workspace), STEP(partial_norms), STEP(norm), STEP(max_norm), STEP(grad_scale), STEP(found_inf), \
      STEP(tensors), STEP(groups), STEP(chunks), STEP(device), STEP(stream)

FASTTFM_BINDING(adamw) {
  bind_constant(module, "adamw_chunk", cuda::kAdamWChunk);
  bind_constant(module, "adamw_tensor_bytes", sizeof(AdamWTensor));
  bind_constant(module, "adamw_group_bytes", sizeof(AdamWGroup));
#ifdef FASTTFM_WITH_CUDA
  bind_workspace(module, "adamw_workspace_cuda", &cuda::adamw_workspace, {"tensors", "groups"});
  bind_launcher(module, "adamw_step_cuda", &cuda::adamw_step, CALL);
  bind_launcher(module, "adamw_norm_cuda", &cuda::adamw_norm, CALL);
#endif
}

}  // namespace fasttfm
