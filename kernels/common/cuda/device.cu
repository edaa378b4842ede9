#include "common/cuda/device.h"

#include "common/cuda/launch.cuh"

namespace fasttfm {
namespace cuda {
namespace {

int64_t attribute(cudaDeviceAttr name, int64_t device) {
  int value = 0;
  if (device < 0) return 0;  // the CPU
  return status_of(cudaDeviceGetAttribute(&value, name, static_cast<int>(device))).code == StatusCode::ok ? value : 0;
}

}  // namespace

int compiled_version() { return CUDART_VERSION; }

int driver_version() {
  int version = 0;
  return status_of(cudaDriverGetVersion(&version)).code == StatusCode::ok ? version : 0;
}

int64_t compute_capability(int64_t device) {
  return 10 * attribute(cudaDevAttrComputeCapabilityMajor, device) +
         attribute(cudaDevAttrComputeCapabilityMinor, device);
}

int64_t block_memory(int64_t device) { return attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device); }

int64_t multiprocessors(int64_t device) { return attribute(cudaDevAttrMultiProcessorCount, device); }

}  // namespace cuda
}  // namespace fasttfm
