#include "common/cuda/device.h"

#include <cstddef>

#include "common/cuda/driver.h"
#include "common/cuda/launch.cuh"

namespace fasttfm {
namespace cuda {

// driver.h declares these types for builds without cuda.h.
static_assert(sizeof(driver::Config) == sizeof(CUlaunchConfig) &&
              sizeof(driver::Attribute) == sizeof(CUlaunchAttribute));
static_assert(offsetof(driver::Config, block) == offsetof(CUlaunchConfig, blockDimX) &&
              offsetof(driver::Config, shared_bytes) == offsetof(CUlaunchConfig, sharedMemBytes) &&
              offsetof(driver::Config, stream) == offsetof(CUlaunchConfig, hStream) &&
              offsetof(driver::Config, attributes) == offsetof(CUlaunchConfig, attrs) &&
              offsetof(driver::Config, attribute_count) == offsetof(CUlaunchConfig, numAttrs) &&
              offsetof(driver::Attribute, value) == offsetof(CUlaunchAttribute, value));
static_assert(static_cast<int>(driver::kCooperative) == CU_LAUNCH_ATTRIBUTE_COOPERATIVE &&
              static_cast<int>(driver::kProgrammaticStreamSerialization) ==
                  CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
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
