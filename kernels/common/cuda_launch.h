// What every CUDA launcher does around its kernel: be on the right device, and turn CUDA's answer into a status.
#pragma once

#include <cuda_runtime_api.h>

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
    if (previous_ != device) cudaSetDevice(device);
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

}  // namespace cuda
}  // namespace fasttfm
