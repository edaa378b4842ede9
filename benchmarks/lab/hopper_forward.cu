// One shape of Hopper's attention forward as a library of its own: hopper_forward.py compiles it for each that it
// tries.
#include "attention/hopper/forward_kernel.cuh"

using namespace fasttfm;
using namespace fasttfm::cuda;

template <class T, bool CAUSAL, bool DROPOUT>
Status run(const AttentionForward& call, int blocks, const TileSchedule& schedule) {
  using Shape = ForwardShape<LAB_HEAD_DIM, LAB_GROUPS, LAB_KEYS, LAB_STAGES, DROPOUT>;
  return launch_forward<T, Shape, CAUSAL, LAB_TURNS>(call, blocks, schedule);
}

template <class T, bool CAUSAL>
Status run(const AttentionForward& call, int blocks, const TileSchedule& schedule) {
  if constexpr (LAB_DROPOUT)
    if (call.seed != nullptr) return run<T, CAUSAL, true>(call, blocks, schedule);
  return run<T, CAUSAL, false>(call, blocks, schedule);
}

// batched: see ForwardParams; dynamic: a counter hands out the tiles.
extern "C" const char* hopper_forward(const AttentionForward* call, int blocks, int dynamic, int batched) {
  const TileSchedule schedule = {dynamic ? reinterpret_cast<int*>(call->workspace) : nullptr, batched};
  if (dynamic) cudaMemsetAsync(schedule.next, 0, sizeof(int), static_cast<cudaStream_t>(call->stream));
  Status status;
  const bool causal = call->window_right == 0;
  if (call->dtype == DType::f16)
#ifdef LAB_HALF
    status = causal ? run<f16_t, true>(*call, blocks, schedule) : run<f16_t, false>(*call, blocks, schedule);
#else
    return "bf16 only";
#endif
  else
    status = causal ? run<bf16_t, true>(*call, blocks, schedule) : run<bf16_t, false>(*call, blocks, schedule);
  return status.code == StatusCode::ok ? nullptr : status.detail;
}
