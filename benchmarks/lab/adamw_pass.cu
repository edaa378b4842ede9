// A library of AdamW's step for adamw_pass.py, which edits the kernel's constants for its variants.
#include "adamw/cuda.cu"

extern "C" const char* adamw_step(const fasttfm::AdamW* p) {
  const fasttfm::Status status = fasttfm::cuda::adamw_step(*p);
  return status.code == fasttfm::StatusCode::ok ? nullptr : status.detail;
}

extern "C" const char* adamw_norm(const fasttfm::AdamW* p) {
  const fasttfm::Status status = fasttfm::cuda::adamw_norm(*p);
  return status.code == fasttfm::StatusCode::ok ? nullptr : status.detail;
}

extern "C" int64_t adamw_workspace(int64_t tensors, int64_t groups) {
  return fasttfm::cuda::adamw_workspace(tensors, groups);
}
