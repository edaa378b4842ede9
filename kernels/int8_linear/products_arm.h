// Products of 32 rows and 32 columns in int8 on Arm (cpu.cpp).
#pragma once

#if defined(__aarch64__)

#include "common/cpu/linear_blocks.h"
#include "common/cpu/simd.h"
#include "int8_linear/op.h"

namespace fasttfm {
namespace FASTTFM_ISA {

// An SDOT adds four products to each of four sums: of a register with four columns of b, and of four elements of a row
// of a, which are one lane of a register. 8 x 8 sums take 16 registers, the rows of a 8 and the columns of b 2.
constexpr int kDotRows = 8, kDotColumns = 2;
struct DotTile {
  int32x4_t sum[kDotRows][kDotColumns];
};

template <int LANE>
__attribute__((target("arch=armv8.2-a+dotprod"))) inline void add_dots(DotTile& tile, const int8x16_t (&left)[kDotRows],
                                                                       const int8_t* b) {
  for (int column = 0; column < kDotColumns; ++column) {
    const int8x16_t right = vld1q_s8(b + 16 * column);
    for (int row = 0; row < kDotRows; ++row)
      tile.sum[row][column] = vdotq_laneq_s32(tile.sum[row][column], right, left[row], LANE);
  }
}

__attribute__((target("arch=armv8.2-a+dotprod"))) inline void arm_dot_products(const Int8Linear& p, const int8_t* a,
                                                                               const int8_t* b, int64_t, int rows,
                                                                               int32_t* c) {
  for (int column = 0; column < kInt8Block; column += 4 * kDotColumns)
    for (int row = 0; row < rows; row += kDotRows) {
      const int8_t* right = b + column / kInt8Panel * kInt8Panel * p.inner + column % kInt8Panel * 4;
      DotTile tile{};
      for (int64_t k = 0; k < p.inner; k += 16, right += 16 * kInt8Panel) {
        int8x16_t left[kDotRows];
        for (int i = 0; i < kDotRows; ++i) left[i] = vld1q_s8(a + (row + i) * p.inner + k);
        add_dots<0>(tile, left, right);
        add_dots<1>(tile, left, right + 4 * kInt8Panel);
        add_dots<2>(tile, left, right + 8 * kInt8Panel);
        add_dots<3>(tile, left, right + 12 * kInt8Panel);
      }
      for (int i = 0; i < kDotRows; ++i)
        for (int j = 0; j < kDotColumns; ++j) vst1q_s32(c + (row + i) * kInt8Block + column + 4 * j, tile.sum[i][j]);
    }
}

inline void matrix_products(const Int8Linear& p, const int8_t* a, const int8_t* b, int64_t, int rows, int32_t* c) {
  arm_matrix_products<int32x4_t>(a, b, p.inner, rows, c);
}

}  // namespace FASTTFM_ISA
}  // namespace fasttfm

#endif
