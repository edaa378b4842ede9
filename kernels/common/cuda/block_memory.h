// What a launcher of a GPU with little shared memory needs to know besides the params.
#pragma once

#include <cstdint>

namespace fasttfm {

// The kernels take the Params, the launcher alone the rest.
template <class Params>
struct WithBlockMemory : Params {
  int64_t block_memory;  // bytes of shared memory that a block may have on the GPU
};

}  // namespace fasttfm
