#include "common/cuda/device.h"

#ifndef FASTTFM_WITH_CUDA
namespace fasttfm {
namespace cuda {

int compiled_version() { return 0; }
int driver_version() { return 0; }
int64_t compute_capability(int64_t) { return 0; }
int64_t block_memory(int64_t) { return 0; }
int64_t multiprocessors(int64_t) { return 0; }

}  // namespace cuda
}  // namespace fasttfm
#endif
