#include "common/cuda/graph.h"

#include <algorithm>
#include <chrono>

#include "common/cuda/launch.cuh"

namespace fasttfm {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxBlocks = 64;
constexpr int64_t kUnit = sizeof(uint4);  // bytes that a thread copies at a time

int blocks_for(int64_t bytes) {
  const int64_t blocks = (bytes + kUnit * kThreads - 1) / (kUnit * kThreads);
  return static_cast<int>(std::clamp<int64_t>(blocks, 1, kMaxBlocks));
}

// Reads the inputs over PCIe. A DMA copy takes longer to start, and so does a kernel after it.
__global__ void __launch_bounds__(kThreads) inputs_kernel(GraphLaunch p) {
  const auto* source = static_cast<const uint4*>(p.host_inputs);
  auto* target = static_cast<uint4*>(p.inputs);
  for (int64_t i = blockIdx.x * kThreads + threadIdx.x; i < p.input_bytes / kUnit; i += gridDim.x * kThreads)
    target[i] = __ldcv(source + i);
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.slot = {p.host_results, p.host_flag, p.result_bytes, 0};
}

__global__ void __launch_bounds__(kThreads) results_kernel(const void* results, GraphSlot* slot) {
  const int64_t units = slot->bytes / kUnit, words = slot->bytes / 4, first = blockIdx.x * kThreads + threadIdx.x;
  auto* target = static_cast<uint4*>(slot->results);
  for (int64_t i = first; i < units; i += gridDim.x * kThreads) target[i] = static_cast<const uint4*>(results)[i];
  if (units * 4 + first < words)
    static_cast<uint32_t*>(slot->results)[units * 4 + first] = static_cast<const uint32_t*>(results)[units * 4 + first];
  // The host reads the results once it sees the flag: every block's writes are before it.
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (gridDim.x > 1) {
    if (atomicAdd(&slot->finished, 1) + 1 < gridDim.x) return;
    slot->finished = 0;
    __threadfence_system();
  }
  *static_cast<volatile int32_t*>(slot->flag) = 1;
}

inline void spin_pause() {
#if defined(__x86_64__)
  asm volatile("pause");
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Status graph_instantiate(const GraphInstantiate& p) {
  const DeviceGuard guard(p.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  cudaGraphExec_t exec = nullptr;
  const cudaError_t error = cudaGraphInstantiateWithFlags(&exec, static_cast<cudaGraph_t>(p.graph), 0);
  *p.exec = exec;
  return status_of(error);
}

Status graph_destroy(const GraphDestroy& p) {
  const DeviceGuard guard(p.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  // In relaxed mode the graph can be destroyed while this thread captures another one.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaError_t error = cudaThreadExchangeStreamCaptureMode(&mode);
  if (error != cudaSuccess) return status_of(error);
  error = cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(p.exec));
  const cudaError_t restored = cudaThreadExchangeStreamCaptureMode(&mode);
  return status_of(error != cudaSuccess ? error : restored);
}

Status graph_launch(const GraphLaunch& p) {
  const DeviceGuard guard(p.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  const auto stream = static_cast<cudaStream_t>(p.stream);
  if (p.slot != nullptr) {
    *static_cast<volatile int32_t*>(p.host_flag) = 0;
    const Status status = launch(inputs_kernel, blocks_for(p.input_bytes), kThreads, 0, p.stream, p);
    if (status.code != StatusCode::ok) return status;
    cudaError_t error = cudaGraphLaunch(static_cast<cudaGraphExec_t>(p.exec), stream);
    if (error == cudaSuccess) error = cudaEventRecord(static_cast<cudaEvent_t>(p.event), stream);
    return status_of(error);
  }
  cudaError_t error =
      cudaMemcpyAsync(p.inputs, p.host_inputs, static_cast<size_t>(p.input_bytes), cudaMemcpyHostToDevice, stream);
  if (error == cudaSuccess) error = cudaGraphLaunch(static_cast<cudaGraphExec_t>(p.exec), stream);
  if (error == cudaSuccess)
    error =
        cudaMemcpyAsync(p.host_results, p.results, static_cast<size_t>(p.result_bytes), cudaMemcpyDeviceToHost, stream);
  if (error == cudaSuccess) error = cudaEventRecord(static_cast<cudaEvent_t>(p.event), stream);
  return status_of(error);
}

Status graph_results(const GraphResults& p) {
  const DeviceGuard guard(p.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  return launch(results_kernel, blocks_for(p.bytes), kThreads, 0, p.stream, p.results, p.slot);
}

// Polling sees the flag earlier than CUDA sees the event, which follows the last kernel. A launch that fails sets no
// flag: its error is that of the event.
Status graph_wait(const GraphWait& p) {
  using Clock = std::chrono::steady_clock;
  constexpr auto limit = std::chrono::milliseconds(2);
  if (p.flag != nullptr) {
    for (const auto begun = Clock::now(); Clock::now() - begun < limit;) {
      for (int i = 0; i < 64; ++i) {
        if (__atomic_load_n(p.flag, __ATOMIC_ACQUIRE) != 0) return {};
        spin_pause();
      }
    }
  }
  return status_of(cudaEventSynchronize(static_cast<cudaEvent_t>(p.event)));
}

}  // namespace cuda
}  // namespace fasttfm
