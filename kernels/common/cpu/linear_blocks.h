// The loops of a linear layer with packed weights, for inference: blocks of 32 rows and 32 columns of y.
//
// A weight [N, K] is stored in panels of 16 columns of y; in each, groups of elements of K that together have four
// bytes follow each other: [N / 16, K / group, 16, group]. Rows of x are rounded to the weight's type first.
#pragma once

#include <cstdint>

#if defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "common/cpu/isa.h"
#include "common/cpu/parallel.h"

namespace fasttfm {
namespace FASTTFM_ISA {

constexpr int64_t kLinearBlock = 32, kLinearPanel = 16;
constexpr int64_t kLinearRows = 8;  // products read rows in multiples of it; tiles those of a whole block

#if defined(__AVX512F__)

struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// It is in static memory, because GCC's _tile_loadconfig declares only its first bytes as read.
inline const TileConfig kTiles{};

__attribute__((target("amx-tile"))) inline void configure_tiles() { _tile_loadconfig(&kTiles); }
__attribute__((target("amx-tile"))) inline void release_tiles() { _tile_release(); }

// c [32, 32] of 32 rows of a, of `bytes` each, and two panels of b. Tiles 0 to 3 hold c, tiles 4 and 5 sixteen rows of
// a each, and tiles 6 and 7 sixteen columns of b each. The elements are int8, or bf16 with BF16.
template <bool BF16>
__attribute__((target("amx-tile,amx-int8,amx-bf16"))) void tile_products(const void* a, const void* b, int64_t bytes,
                                                                         void* c) {
  const char *left = static_cast<const char*>(a), *right = static_cast<const char*>(b);
  char* to = static_cast<char*>(c);
  constexpr int64_t kHalf = 64, kRow = 128;  // bytes of 16 and of 32 elements of c
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < bytes; k += 64) {
    _tile_loadd(4, left + k, bytes);
    _tile_loadd(5, left + 16 * bytes + k, bytes);
    _tile_loadd(6, right + k * kLinearPanel, 64);
    _tile_loadd(7, right + (bytes + k) * kLinearPanel, 64);
    if constexpr (BF16) {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    } else {
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 4, 7);
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    }
  }
  _tile_stored(0, to, kRow);
  _tile_stored(1, to + kHalf, kRow);
  _tile_stored(2, to + 16 * kRow, kRow);
  _tile_stored(3, to + 16 * kRow + kHalf, kRow);
}

#elif defined(__aarch64__)

#define FASTTFM_ARM_MATRIX __attribute__((target("arch=armv8.2-a+bf16+i8mm"))) inline

// BFMMLA and SMMLA add the products of two rows of a and two columns of b, with eight or sixteen bytes of each, to 2 x
// 2 sums. Eight rows and eight columns take 16 registers of sums.
constexpr int kMatrixPairs = 4;  // of rows, and of columns

FASTTFM_ARM_MATRIX float32x4_t with_products(float32x4_t sums, uint64x2_t a, uint32x4_t b) {
  return vbfmmlaq_f32(sums, reinterpret_cast<bfloat16x8_t>(a), reinterpret_cast<bfloat16x8_t>(b));
}
FASTTFM_ARM_MATRIX int32x4_t with_products(int32x4_t sums, uint64x2_t a, uint32x4_t b) {
  return vmmlaq_s32(sums, reinterpret_cast<int8x16_t>(a), reinterpret_cast<int8x16_t>(b));
}
inline void store_halves(float* to, float* next, float32x4_t sums) {
  vst1_f32(to, vget_low_f32(sums));
  vst1_f32(next, vget_high_f32(sums));
}
inline void store_halves(int32_t* to, int32_t* next, int32x4_t sums) {
  vst1_s32(to, vget_low_s32(sums));
  vst1_s32(next, vget_high_s32(sums));
}

// `left` has eight bytes of each row; b is at the same bytes of the first of eight columns.
template <class Sums>
FASTTFM_ARM_MATRIX void add_matrices(Sums (&sums)[kMatrixPairs][kMatrixPairs], const uint64x2_t (&left)[kMatrixPairs],
                                     const uint32_t* b) {
  for (int pair = 0; pair < kMatrixPairs; pair += 2) {
    const uint32x4_t first = vld1q_u32(b + 2 * pair), second = vld1q_u32(b + 2 * pair + kLinearPanel);
    const uint32x4_t columns[2] = {vzip1q_u32(first, second), vzip2q_u32(first, second)};
    for (int row = 0; row < kMatrixPairs; ++row)
      for (int i = 0; i < 2; ++i) sums[row][pair + i] = with_products(sums[row][pair + i], left[row], columns[i]);
  }
}

template <class Sums, class Element>
FASTTFM_ARM_MATRIX void matrix_tile(const char* a, int64_t bytes, const uint32_t* b, Element* c) {
  Sums sums[kMatrixPairs][kMatrixPairs] = {};
  for (int64_t k = 0; k < bytes; k += 16) {
    uint64x2_t first[kMatrixPairs], second[kMatrixPairs];
    for (int row = 0; row < kMatrixPairs; ++row) {
      const char* from = a + 2 * row * bytes + k;
      const uint64x2_t even = vld1q_u64(reinterpret_cast<const uint64_t*>(from));
      const uint64x2_t odd = vld1q_u64(reinterpret_cast<const uint64_t*>(from + bytes));
      first[row] = vzip1q_u64(even, odd);
      second[row] = vzip2q_u64(even, odd);
    }
    add_matrices(sums, first, b + k / 4 * kLinearPanel);
    add_matrices(sums, second, b + (k / 4 + 2) * kLinearPanel);
  }
  for (int row = 0; row < kMatrixPairs; ++row)
    for (int pair = 0; pair < kMatrixPairs; ++pair) {
      Element* to = c + 2 * row * kLinearBlock + 2 * pair;
      store_halves(to, to + kLinearBlock, sums[row][pair]);
    }
}

// c [rows, 32] of rows of a, of `bytes` each, and two panels of b. The elements are int8, or bf16 if Sums are fp32.
template <class Sums, class Element>
__attribute__((target("arch=armv8.2-a+bf16+i8mm"))) void arm_matrix_products(const void* a, const void* b,
                                                                             int64_t bytes, int rows, Element* c) {
  for (int64_t column = 0; column < kLinearBlock; column += 2 * kMatrixPairs) {
    const auto* right = static_cast<const uint32_t*>(b) + column / kLinearPanel * kLinearPanel * (bytes / 4);
    for (int row = 0; row < rows; row += 2 * kMatrixPairs)
      matrix_tile<Sums>(static_cast<const char*>(a) + row * bytes, bytes, right + column % kLinearPanel,
                        c + row * kLinearBlock + column);
  }
}

#endif

// Calls block(row, column, rows) for each block of up to ROWS rows and 32 columns. With `with_tiles`, AMX's tiles are
// configured around the blocks of an item.
template <int64_t ROWS, class Block>
void for_blocks(int64_t rows, int64_t columns, int threads, [[maybe_unused]] bool with_tiles, Block block) {
  const int64_t blocks = (rows + ROWS - 1) / ROWS, pairs = columns / kLinearBlock;
  // If there are few blocks of rows, the columns are divided too, so that every thread has work.
  int64_t parts = (2 * threads + blocks - 1) / blocks;
  parts = parts < pairs ? parts : pairs;
  parallel_items(blocks * parts, threads, [&](int64_t item) {
    const int64_t row = item / parts * ROWS, part = item % parts;
    const int count = static_cast<int>(rows - row < ROWS ? rows - row : ROWS);
#if defined(__AVX512F__)
    if (with_tiles) configure_tiles();
#endif
    for (int64_t pair = part * pairs / parts; pair < (part + 1) * pairs / parts; ++pair)
      block(row, pair * kLinearBlock, count);
#if defined(__AVX512F__)
    if (with_tiles) release_tiles();
#endif
  });
}

// Calls round(row) for each row up to a multiple of what products read, and then block(row, column, rows) for each
// block of `rows` rows and 32 columns.
template <class Round, class Block>
void for_linear_blocks(int64_t rows, int64_t columns, int threads, bool with_tiles, Round round, Block block) {
  const int64_t step = with_tiles ? kLinearBlock : kLinearRows, read = (rows + step - 1) / step * step;
  parallel_items((rows + kLinearBlock - 1) / kLinearBlock, threads, [&](int64_t item) {
    const int64_t end = (item + 1) * kLinearBlock;
    for (int64_t row = item * kLinearBlock; row < (end < read ? end : read); ++row) round(row);
  });
  for_blocks<kLinearBlock>(rows, columns, threads, with_tiles, block);
}

}  // namespace FASTTFM_ISA
}  // namespace fasttfm
