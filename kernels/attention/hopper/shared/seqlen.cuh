// The number of valid rows of a sequence in a padded tensor; those of a packed one are in common/packed.h.
#pragma once

#include <cstdint>

namespace fasttfm {
namespace cuda {

__device__ __forceinline__ int dense_length(const int32_t* lengths, int sequence, int size) {
  return lengths == nullptr ? size : min(max(lengths[sequence], 0), size);
}

}  // namespace cuda
}  // namespace fasttfm
