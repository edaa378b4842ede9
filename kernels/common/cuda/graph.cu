#include "common/cuda/graph.h"

#include "common/cuda/launch.cuh"

namespace fasttfm {
namespace cuda {

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
  return status_of(cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(p.exec)));
}

Status graph_launch(const GraphLaunch& p) {
  const DeviceGuard guard(p.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  const auto stream = static_cast<cudaStream_t>(p.stream);
  cudaError_t error =
      cudaMemcpyAsync(p.inputs, p.host_inputs, static_cast<size_t>(p.input_bytes), cudaMemcpyHostToDevice, stream);
  if (error == cudaSuccess) error = cudaGraphLaunch(static_cast<cudaGraphExec_t>(p.exec), stream);
  if (error == cudaSuccess)
    error =
        cudaMemcpyAsync(p.host_results, p.results, static_cast<size_t>(p.result_bytes), cudaMemcpyDeviceToHost, stream);
  if (error == cudaSuccess) error = cudaEventRecord(static_cast<cudaEvent_t>(p.event), stream);
  return status_of(error);
}

}  // namespace cuda
}  // namespace fasttfm
