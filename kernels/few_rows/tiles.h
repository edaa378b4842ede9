// Which element of a tile each thread of the kernels for few rows loads or holds. The index arithmetic also compiles
// for the host, where tests cover it.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace fasttfm {
namespace few_rows {

constexpr int kInner = 64;      // elements of K in one stage: rows of 128 bytes
constexpr int kChunk = 8;       // elements in 16 bytes
constexpr int kTileChunks = 8;  // chunks in a row of a stage

// The number of steps of `step` that cover `count`.
constexpr int64_t steps(int64_t count, int64_t step) { return (count + step - 1) / step; }

// The byte offset of a 16-byte chunk in a tile whose rows have `chunks` chunks (4, 8 or 16). Chunks are swizzled within
// 128 bytes, so that the same chunk of eight consecutive rows is in different banks.
FASTTFM_HOST_DEVICE constexpr int chunk_offset(int row, int chunk, int chunks) {
  return (row * chunks + (chunk ^ (chunks >= 8 ? row & 7 : (row >> 1) & 3))) * 16;
}

// The row and the chunk whose address a lane passes to ldmatrix.x4.
struct MatrixRow {
  int row, chunk;
};
// 16 rows x 16 columns: an operand A of mma.m16n8k16, or, transposed, operands B of two tiles of 8 columns.
FASTTFM_HOST_DEVICE constexpr MatrixRow matrix_row_a(int lane) { return {lane & 15, lane >> 4}; }
// 16 rows of a matrix whose transpose is the operand B: two tiles of 8 columns. Lanes 0 to 15 address the first one.
FASTTFM_HOST_DEVICE constexpr MatrixRow matrix_row_b(int lane) {
  return {(lane >> 4) * 8 + (lane & 7), (lane >> 3) & 1};
}

// The position of the first of two neighbouring elements that a lane holds of a 16 x 8 accumulator; the other two are 8
// rows below.
FASTTFM_HOST_DEVICE constexpr int accumulator_row(int lane) { return lane >> 2; }
FASTTFM_HOST_DEVICE constexpr int accumulator_column(int lane) { return 2 * (lane & 3); }

// The first stage of a part of K.
FASTTFM_HOST_DEVICE constexpr int first_stage(int stages, int part, int parts) { return stages * part / parts; }

}  // namespace few_rows
}  // namespace fasttfm
