// An additional launcher argument for GPUs with little shared memory.
#pragma once

#include <cstdint>

namespace fasttfm {

// Kernels get the Params; block_memory is used by the launcher only.
template <class Params>
struct WithBlockMemory : Params {
  int64_t block_memory;  // bytes of shared memory that a block may use on the GPU
};

}  // namespace fasttfm
