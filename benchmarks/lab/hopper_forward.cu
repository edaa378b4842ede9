// One shape of Hopper's attention forward as a library of its own: hopper_forward.py compiles it for each that it
// tries.
#include "attention/cuda_forward.cuh"

using namespace fasttfm;
using namespace fasttfm::cuda;
using Shape = ForwardShape<LAB_HEAD_DIM, LAB_GROUPS, LAB_KEYS, LAB_STAGES>;

template <class T, bool CAUSAL>
Status run(const AttentionForward& call, int blocks, int* next) {
  if constexpr (LAB_DROPOUT)
    if (call.seed != nullptr) return launch_forward<T, Shape, CAUSAL, true, LAB_TURNS>(call, blocks, next);
  return launch_forward<T, Shape, CAUSAL, false, LAB_TURNS>(call, blocks, next);
}

extern "C" const char* hopper_forward(const AttentionForward* call, int blocks, int dynamic) {
  int* next = nullptr;
  if (dynamic) {
    next = reinterpret_cast<int*>(call->workspace);
    cudaMemsetAsync(next, 0, sizeof(int), static_cast<cudaStream_t>(call->stream));
  }
  Status status;
  if (call->dtype == DType::f16)
#ifdef LAB_HALF
    status = call->window_right == 0 ? run<f16_t, true>(*call, blocks, next) : run<f16_t, false>(*call, blocks, next);
#else
    return "bf16 only";
#endif
  else
    status = call->window_right == 0 ? run<bf16_t, true>(*call, blocks, next) : run<bf16_t, false>(*call, blocks, next);
  return status.code == StatusCode::ok ? nullptr : status.detail;
}
