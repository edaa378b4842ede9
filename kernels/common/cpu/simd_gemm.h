// GEMM of small fp32 matrices that fit into L1 and L2.
// The result is computed in tiles of kTileRows rows and one or kTilePanels panels of 16 sums, which stay in registers
// over the whole inner dimension (`depth`). Each sum is one chain of multiply-adds in the order of the inner dimension,
// so results depend neither on the tile's position nor on other tiles.
#pragma once

#include <cstdint>

#include "common/cpu/simd.h"

namespace fasttfm {
namespace FASTTFM_ISA {

// Rows of a tile, a power of two: enough for at least eight accumulator registers, which hides the latency of
// multiply-adds, and few enough to leave registers for the operands.
#if defined(__AVX512F__)
constexpr int kTileRows = 8, kTilePanels = 2;  // a broadcast element of the left operand is used twice
#elif defined(__AVX__) || defined(__ARM_NEON)
constexpr int kTileRows = 4, kTilePanels = 1;
#else
constexpr int kTileRows = 2, kTilePanels = 1;
#endif
// Matrices are padded with rows of zeros to a multiple of this.
constexpr int64_t kRowStep = 8;

constexpr int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// The left operand [rows, depth]: row-major (`Along`), with element (r, d) at data[r * stride + d], or column-major
// (`Across`), with element (r, d) at data[d * stride + r].
struct Along {
  const float* data;
  int64_t stride;
  Along operator+(int64_t row) const { return {data + row * stride, stride}; }
};
struct Across {
  const float* data;
  int64_t stride;
  Across operator+(int64_t row) const { return {data + row, stride}; }
};

// The right operand [depth, 16 * panels], with element (d, 16 * p + c) at data[p * panel_stride + d * row_stride + c].
struct Panels {
  const float* data;
  int64_t row_stride;
  int64_t panel_stride;
};

#if defined(__ARM_NEON)

// 4 x 16 sums. Every register is a separate variable, because the compiler would keep parts of an array in memory.
struct TileRow {
  float32x4_t c0, c1, c2, c3;
};
template <int PANELS>
struct Tile {
  static_assert(PANELS == 1, "there are registers for one panel");
  TileRow r0, r1, r2, r3;
};

inline TileRow load_row(const float* from) {
  return {vld1q_f32(from), vld1q_f32(from + 4), vld1q_f32(from + 8), vld1q_f32(from + 12)};
}
template <bool ADD>
inline void store_row(float* to, const TileRow& row) {
  const TileRow old = ADD ? load_row(to) : TileRow{};
  vst1q_f32(to, ADD ? old.c0 + row.c0 : row.c0);
  vst1q_f32(to + 4, ADD ? old.c1 + row.c1 : row.c1);
  vst1q_f32(to + 8, ADD ? old.c2 + row.c2 : row.c2);
  vst1q_f32(to + 12, ADD ? old.c3 + row.c3 : row.c3);
}
template <int LANE>
inline void add_product(TileRow& sum, const TileRow& b, float32x4_t a) {
  sum.c0 = vfmaq_laneq_f32(sum.c0, b.c0, a, LANE);
  sum.c1 = vfmaq_laneq_f32(sum.c1, b.c1, a, LANE);
  sum.c2 = vfmaq_laneq_f32(sum.c2, b.c2, a, LANE);
  sum.c3 = vfmaq_laneq_f32(sum.c3, b.c3, a, LANE);
}
// Keeps the compiler from moving multiply-adds across the end of a step. Otherwise it schedules those of one sum close
// together, where each waits for the previous one.
inline void end_step(Tile<1>& sum) {
  asm volatile(""
               : "+w"(sum.r0.c0), "+w"(sum.r0.c1), "+w"(sum.r0.c2), "+w"(sum.r0.c3), "+w"(sum.r1.c0), "+w"(sum.r1.c1),
                 "+w"(sum.r1.c2), "+w"(sum.r1.c3));
  asm volatile(""
               : "+w"(sum.r2.c0), "+w"(sum.r2.c1), "+w"(sum.r2.c2), "+w"(sum.r2.c3), "+w"(sum.r3.c0), "+w"(sum.r3.c1),
                 "+w"(sum.r3.c2), "+w"(sum.r3.c3));
}
// A multiply-add can take its left operand from any lane of a register, so the left operand is loaded four elements at
// a time.
template <int LANE>
inline void add_along(Tile<1>& sum, const TileRow& left, const TileRow& right) {
  add_product<LANE>(sum.r0, right, left.c0);
  add_product<LANE>(sum.r1, right, left.c1);
  add_product<LANE>(sum.r2, right, left.c2);
  add_product<LANE>(sum.r3, right, left.c3);
  end_step(sum);
}
inline void add_four_steps(Tile<1>& sum, Along a, Panels b) {
  const TileRow left = {vld1q_f32(a.data), vld1q_f32(a.data + a.stride), vld1q_f32(a.data + 2 * a.stride),
                        vld1q_f32(a.data + 3 * a.stride)};
  add_along<0>(sum, left, load_row(b.data));
  add_along<1>(sum, left, load_row(b.data + b.row_stride));
  add_along<2>(sum, left, load_row(b.data + 2 * b.row_stride));
  add_along<3>(sum, left, load_row(b.data + 3 * b.row_stride));
}
inline void add_across(Tile<1>& sum, float32x4_t left, const TileRow& right) {
  add_product<0>(sum.r0, right, left);
  add_product<1>(sum.r1, right, left);
  add_product<2>(sum.r2, right, left);
  add_product<3>(sum.r3, right, left);
  end_step(sum);
}
inline void add_four_steps(Tile<1>& sum, Across a, Panels b) {
  add_across(sum, vld1q_f32(a.data), load_row(b.data));
  add_across(sum, vld1q_f32(a.data + a.stride), load_row(b.data + b.row_stride));
  add_across(sum, vld1q_f32(a.data + 2 * a.stride), load_row(b.data + 2 * b.row_stride));
  add_across(sum, vld1q_f32(a.data + 3 * a.stride), load_row(b.data + 3 * b.row_stride));
}
template <bool ADD>
inline void store_tile(float* c, int64_t stride, const Tile<1>& sum) {
  store_row<ADD>(c, sum.r0);
  store_row<ADD>(c + stride, sum.r1);
  store_row<ADD>(c + 2 * stride, sum.r2);
  store_row<ADD>(c + 3 * stride, sum.r3);
}

#else

template <int PANELS>
struct Tile {
  Lanes row[kTileRows][PANELS];
};

inline float element(Along a, int row, int64_t d) { return a.data[row * a.stride + d]; }
inline float element(Across a, int row, int64_t d) { return a.data[d * a.stride + row]; }
template <int PANELS, class Left>
inline void add_four_steps(Tile<PANELS>& sum, Left a, Panels b) {
  for (int d = 0; d < 4; ++d) {
    Lanes right[PANELS];
    for (int p = 0; p < PANELS; ++p) right[p] = load(b.data + d * b.row_stride + p * b.panel_stride);
    for (int r = 0; r < kTileRows; ++r) {
      const Lanes left = broadcast(element(a, r, d));
      for (int p = 0; p < PANELS; ++p) sum.row[r][p] = sum.row[r][p] + right[p] * left;
    }
  }
}
template <bool ADD, int PANELS>
inline void store_tile(float* c, int64_t stride, const Tile<PANELS>& sum) {
  for (int r = 0; r < kTileRows; ++r) {
    for (int p = 0; p < PANELS; ++p) {
      float* to = c + r * stride + p * kLanes;
      store(to, ADD ? load(to) + sum.row[r][p] : sum.row[r][p]);
    }
  }
}

#endif

inline Along after(Along a, int64_t steps) { return {a.data + steps, a.stride}; }
inline Across after(Across a, int64_t steps) { return {a.data + steps * a.stride, a.stride}; }

// One column of tiles: PANELS panels of c.
template <bool ADD, int PANELS, class Left>
FASTTFM_KERNEL inline void multiply_panels(int64_t rows, int64_t depth, Left a, Panels b, float* c, int64_t c_stride) {
  for (int64_t row = 0; row < rows; row += kTileRows) {
    Tile<PANELS> sum{};
    Left left = a + row;
    Panels right = b;
    for (int64_t d = 0; d < depth; d += 4) {
      add_four_steps(sum, left, right);
      left = after(left, 4);
      right.data += 4 * b.row_stride;
    }
    store_tile<ADD>(c + row * c_stride, c_stride, sum);
  }
}

// c[rows, 16 * panels] = a * b, or with ADD c += a * b. Rows are computed in full tiles and the depth in steps of four,
// so a and c have round_up(rows, kRowStep) rows, and elements of a and b past the depth are zeros up to the next
// multiple of four.
template <bool ADD, class Left>
__attribute__((noinline)) FASTTFM_KERNEL void multiply(int64_t rows, int64_t panels, int64_t depth, Left a, Panels b,
                                                       float* c, int64_t c_stride) {
  int64_t panel = 0;
  const auto right = [&] { return Panels{b.data + panel * b.panel_stride, b.row_stride, b.panel_stride}; };
  for (; panel + kTilePanels <= panels; panel += kTilePanels)
    multiply_panels<ADD, kTilePanels>(rows, depth, a, right(), c + panel * kLanes, c_stride);
  for (; panel < panels; ++panel) multiply_panels<ADD, 1>(rows, depth, a, right(), c + panel * kLanes, c_stride);
}

}  // namespace FASTTFM_ISA
}  // namespace fasttfm
