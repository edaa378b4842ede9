// Parts that the two kinds of GEMMs for few rows have in common: cuda_product.cu and cuda_pipelined.cu.
#pragma once

#include <cstdint>

#include "common/cuda/hopper.cuh"
#include "common/status.h"
#include "few_rows/dependent.cuh"
#include "few_rows/op.h"
#include "few_rows/tiles.h"

namespace fasttfm {
namespace cuda {

// Makes the tensor map of a matrix [rows, K] with boxes of `box` rows and 64 elements of K.
inline Status map_rows(CUtensorMap* map, const FewRowsProduct& call, const void* matrix, int64_t rows, int box) {
  return make_tensor_map(map,
                         {matrix, call.dtype, {call.inner, rows, 1, 1}, {call.inner, 0, 0}, {kTileColumns, box, 1, 1}});
}

inline dim3 grid_of(int64_t x, int64_t y, int64_t z) {
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z));
}

// Prefetches the weights of COLUMNS columns and `stages` stages of K, from `first` on, into L2. Called by THREADS
// threads; only the blocks of the first rows do this.
template <class T, int COLUMNS, int THREADS>
__device__ __forceinline__ void prefetch_weights(const FewRowsProduct& p, int first_column, int first, int stages) {
  if (blockIdx.y != 0) return;
  for (int line = static_cast<int>(threadIdx.x); line < COLUMNS * stages; line += THREADS) {
    const int column = first_column + line % COLUMNS, k = (first + line / COLUMNS) * few_rows::kInner;
    if (column < p.columns) prefetch_l2(static_cast<const T*>(p.weight) + column * p.inner + k);
  }
}

// The launcher for few_rows::kPipelinedTiles[tile], for a call that few_rows_product() has checked.
Status few_rows_pipelined_product(const FewRowsProduct&, int tile);

}  // namespace cuda
}  // namespace fasttfm
