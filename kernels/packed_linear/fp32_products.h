// Products of up to 128 rows and 32 columns in fp32 (cpu.cpp).
//
// K is divided into parts, so that 32 columns of a part of w, 16 KB, stay in L1 while all rows of a block read them.
// The products of the first rows of a block also prefetch the next part, which comes from memory if there are few rows.
#pragma once

#include <cstring>

#include "common/cpu/linear_blocks.h"
#include "common/cpu/simd_gemm.h"
#include "packed_linear/op.h"

namespace fasttfm {
namespace FASTTFM_ISA {

constexpr int64_t kFp32Rows = 128, kFp32Depth = 128;

// Rows of x are read in place, in groups of kRowStep. Those of an incomplete group are copied to p.rounded, with rows
// of zeros after them; if K is padded, all rows are.
inline int64_t rows_in_place(const PackedLinear& p) {
  return p.x_columns == p.inner ? p.rows / kRowStep * kRowStep : 0;
}

inline Along rows_from(const PackedLinear& p, int64_t row) {
  const int64_t copied = rows_in_place(p);
  const float* from =
      row < copied ? p.x + row * p.inner : static_cast<const float*>(p.rounded) + (row - copied) * p.inner;
  return {from, p.inner};
}

// Copies the group of rows from `row` on.
inline void pad_rows(const PackedLinear& p, int64_t row) {
  float* to = static_cast<float*>(p.rounded) + (row - rows_in_place(p)) * p.inner;
  for (const int64_t end = row + kRowStep; row < end; ++row, to += p.inner) {
    const int64_t columns = row < p.rows ? p.x_columns : 0;
    if (columns > 0) std::memcpy(to, p.x + row * columns, sizeof(float) * static_cast<size_t>(columns));
    std::memset(to + columns, 0, sizeof(float) * static_cast<size_t>(p.inner - columns));
  }
}

// kTileRows rows of c (+)= a b. `next`, if not null, has as many rows of a panel as b.
template <bool ADD>
FASTTFM_KERNEL inline void fp32_tile(Along a, Panels b, int64_t depth, const float* next, float* c) {
  Tile<kTilePanels> sum{};
  for (int64_t d = 0; d < depth; d += 4) {
    add_four_steps(sum, a, b);
    a = after(a, 4);
    b.data += 4 * b.row_stride;
    if (next != nullptr)
      for (int i = 0; i < 4; ++i) __builtin_prefetch(next + (d + i) * kLinearPanel);
  }
  store_tile<ADD>(c, kLinearBlock, sum);
}

// c [rows, 32] of the rows from `row` on and the two panels from `column` on; rows are rounded up to kRowStep.
FASTTFM_KERNEL inline void fp32_products(const PackedLinear& p, int64_t row, int64_t column, int rows, float* c) {
  const int64_t panel_size = kLinearPanel * p.inner;
  for (int64_t k = 0; k < p.inner; k += kFp32Depth) {
    const int64_t left = p.inner - k, depth = left < kFp32Depth ? left : kFp32Depth;
    for (int64_t panel = 0; panel < kLinearBlock / kLinearPanel; panel += kTilePanels) {
      const float* w = static_cast<const float*>(p.w) + column * p.inner + panel * panel_size + k * kLinearPanel;
      // The same panels in the next part of K, or the first part of the next two panels.
      const float* next = left > depth ? w + depth * kLinearPanel : w - k * kLinearPanel + 2 * panel_size;
      const bool is_last = left <= depth && column + kLinearBlock >= p.columns;
      for (int tile = 0; tile * kTileRows < rows; ++tile) {
        const Along a = rows_from(p, row + tile * kTileRows);
        const float* ahead = !is_last && tile < kTilePanels ? next + tile * panel_size : nullptr;
        float* to = c + tile * kTileRows * kLinearBlock + panel * kLinearPanel;
        const Panels b{w, kLinearPanel, panel_size};
        if (k == 0) {
          fp32_tile<false>(after(a, k), b, depth, ahead, to);
        } else {
          fp32_tile<true>(after(a, k), b, depth, ahead, to);
        }
      }
    }
  }
}

}  // namespace FASTTFM_ISA
}  // namespace fasttfm
