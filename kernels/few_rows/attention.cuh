// What the attention kernels for few rows have in common.
#pragma once

#include <cstdint>

#include "few_rows/op.h"
#include "few_rows/tiles.h"

namespace fasttfm {
namespace cuda {

// Sequences of up to few_rows::kShortKeys tokens: few_rows::is_short_attention().
Status launch_short_attention(const FewRowsAttention&);

// Writes zeros for the tokens from `first` on, for the head blockIdx.y.
template <class T, int D>
__device__ __forceinline__ void clear_tokens(const FewRowsAttention& p, int64_t first) {
  constexpr int kChunks = D / few_rows::kChunk;
  const int64_t stride = p.heads * D;
  T* out = static_cast<T*>(p.out) + blockIdx.y * D;
  for (int64_t i = first * kChunks + threadIdx.x; i < p.tokens * kChunks; i += blockDim.x)
    *reinterpret_cast<uint4*>(out + i / kChunks * stride + i % kChunks * few_rows::kChunk) = make_uint4(0, 0, 0, 0);
}

}  // namespace cuda
}  // namespace fasttfm
