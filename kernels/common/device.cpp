#include "common/device.h"

#ifndef FASTTFM_WITH_CUDA
int fasttfm::cuda::compiled_version() { return 0; }
#endif
