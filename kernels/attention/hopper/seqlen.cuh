// The rows of a sequence in packed and padded tensors.
#pragma once

#include <cstdint>

namespace fasttfm {
namespace cuda {

// A sequence's rows in a packed tensor. cu_seqlens is not validated on the GPU but clamped, so that no memory outside
// of the tensor is accessed.
struct Span {
  int first, length;
};
__device__ __forceinline__ Span packed_span(const int32_t* bounds, int sequence, int size, int longest) {
  const int first = min(max(bounds[sequence], 0), size);
  return {first, min(max(min(bounds[sequence + 1], size) - first, 0), longest)};
}
__device__ __forceinline__ int dense_length(const int32_t* lengths, int sequence, int size) {
  return lengths == nullptr ? size : min(max(lengths[sequence], 0), size);
}

}  // namespace cuda
}  // namespace fasttfm
