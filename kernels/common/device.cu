#include <cuda_runtime_api.h>

#include "common/device.h"

int fasttfm::cuda::compiled_version() { return CUDART_VERSION; }
