// What every CUDA launcher does around its kernel: be on the right device, launch, and turn CUDA's answer into a
// status.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "common/status.h"

namespace fasttfm {
namespace cuda {

inline Status status_of(cudaError_t error) {
  if (error == cudaSuccess) return {};
  return {StatusCode::cuda_error, cudaGetErrorString(error)};
}

// Makes `device` current for the lifetime of the guard.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    if (cudaGetDevice(&previous_) != cudaSuccess) previous_ = device;
    cudaSetDevice(device);  // also where it is the one: on a new thread no context is current until it has been set
    changed_ = previous_ != device;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

// Launches a kernel with `memory` bytes of dynamic shared memory.
template <class... Parameters, class... Arguments>
Status launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t memory, void* stream,
              const Arguments&... arguments) {
  if (memory > 48 * 1024) {  // above this a kernel has to ask
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(memory));
    if (error != cudaSuccess) return status_of(error);
  }
  kernel<<<grid, block, memory, static_cast<cudaStream_t>(stream)>>>(arguments...);
  return status_of(cudaGetLastError());
}

// A launch of clusters of `blocks` blocks of one kernel.
class ClusterLaunch {
 public:
  ClusterLaunch(dim3 grid, dim3 block, int blocks, size_t memory, void* stream) {
    attribute_.id = cudaLaunchAttributeClusterDimension;
    attribute_.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
    config_.gridDim = grid;
    config_.blockDim = block;
    config_.dynamicSmemBytes = memory;
    config_.stream = static_cast<cudaStream_t>(stream);
    config_.attrs = &attribute_;
    config_.numAttrs = 1;
  }
  ClusterLaunch(const ClusterLaunch&) = delete;
  ClusterLaunch& operator=(const ClusterLaunch&) = delete;

  // How many of its clusters the device runs at the same time.
  template <class... Parameters>
  cudaError_t resident(void (*kernel)(Parameters...), int* clusters) const {
    const cudaError_t error = allow_memory(kernel);
    return error == cudaSuccess ? cudaOccupancyMaxActiveClusters(clusters, kernel, &config_) : error;
  }

  template <class... Parameters, class... Arguments>
  Status operator()(void (*kernel)(Parameters...), const Arguments&... arguments) const {
    cudaError_t error = allow_memory(kernel);
    if (error == cudaSuccess) error = cudaLaunchKernelEx(&config_, kernel, arguments...);
    return status_of(error);
  }

 private:
  template <class Kernel>
  cudaError_t allow_memory(Kernel kernel) const {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                static_cast<int>(config_.dynamicSmemBytes));
  }

  cudaLaunchAttribute attribute_{};
  cudaLaunchConfig_t config_{};
};

}  // namespace cuda
}  // namespace fasttfm
