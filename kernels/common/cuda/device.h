// CUDA versions of the build and of the driver, and properties of the GPU. The functions also exist in builds without
// CUDA.
#pragma once

#include <cstdint>

namespace fasttfm {
namespace cuda {

// The CUDA version that the core was built with, as CUDART_VERSION (13000 for 13.0); 0 when built without CUDA.
int compiled_version();

// The newest CUDA version that the GPU driver supports, in the same form; 0 without a driver. Creates no context.
int driver_version();

// A GPU's compute capability (90 for 9.0), the bytes of shared memory that a block may use, and the number of
// SMs; 0 on an error and for the CPU (-1). None of them creates a context.
int64_t compute_capability(int64_t device);
int64_t block_memory(int64_t device);
int64_t multiprocessors(int64_t device);

}  // namespace cuda
}  // namespace fasttfm
