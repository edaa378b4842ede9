// Parts that the two kinds of GEMMs for few rows have in common: cuda_product.cu and cuda_pipelined.cu.
#pragma once

#include <cstdint>

#include "common/cuda/hopper.cuh"
#include "common/status.h"
#include "few_rows/op.h"

namespace fasttfm {
namespace cuda {

// Makes the tensor map of a matrix [rows, K] with boxes of `box` rows and 64 elements of K.
inline Status map_rows(CUtensorMap* map, const FewRowsProduct& call, const void* matrix, int64_t rows, int box) {
  return make_tensor_map(map,
                         {matrix, call.dtype, {call.inner, rows, 1, 1}, {call.inner, 0, 0}, {kTileColumns, box, 1, 1}});
}

// The launcher for few_rows::kPipelinedTiles[tile], for a call that few_rows_product() has checked.
Status few_rows_pipelined_product(const FewRowsProduct&, int tile);

}  // namespace cuda
}  // namespace fasttfm
