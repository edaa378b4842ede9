// Products of 32 rows and 32 columns in int8 on x86 (cpu.cpp).
#pragma once

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstring>
#include <utility>

#include "common/cpu/linear_blocks.h"
#include "common/cpu/simd.h"
#include "int8_linear/op.h"

namespace fasttfm {
namespace FASTTFM_ISA {

// ---- pairs of 16-bit integers: every x86 CPU ------------------------------------------------------------------------

// PMADDWD adds the two products of a pair. Bytes are sign-extended first: PMADDUBSW multiplies bytes, but its sums of
// two saturate. A register has groups of four elements of K for kWordColumns columns, so two sums for each column.
// Assembly adds them, because GCC would copy each sum once more in each step of the loop.
#if defined(__AVX512F__)
typedef __m512i Words;
constexpr int kWordColumns = 8, kWordRegisters = 4;
inline Words widened(__m256i bytes) { return _mm512_maskz_cvtepi8_epi16(0xffffffffu, bytes); }
inline Words widened(const int8_t* from) { return widened(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))); }
inline Words widened(int32_t four) { return widened(_mm256_set1_epi32(four)); }
inline void add_pairs(Words& sums, const Words& a, const Words& b) {
  asm("vpaddd %1, %0, %0" : "+v"(sums) : "v"(_mm512_madd_epi16(a, b)));
}
#elif defined(__AVX2__)
typedef __m256i Words;
constexpr int kWordColumns = 4, kWordRegisters = 2;
inline Words widened(const int8_t* from) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline Words widened(int32_t four) { return _mm256_cvtepi8_epi16(_mm_set1_epi32(four)); }
inline void add_pairs(Words& sums, const Words& a, const Words& b) {
  asm("vpaddd %1, %0, %0" : "+x"(sums) : "x"(_mm256_madd_epi16(a, b)));
}
#else
typedef __m128i Words;
constexpr int kWordColumns = 2, kWordRegisters = 2;
inline Words widened(__m128i bytes) { return _mm_srai_epi16(_mm_unpacklo_epi8(bytes, bytes), 8); }
inline Words widened(const int8_t* from) { return widened(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))); }
inline Words widened(int32_t four) { return widened(_mm_set1_epi32(four)); }
inline void add_pairs(Words& sums, const Words& a, const Words& b) {
  asm("paddd %1, %0" : "+x"(sums) : "x"(_mm_madd_epi16(a, b)));
}
#endif

constexpr int kWordRows = 4, kWordTile = kWordColumns * kWordRegisters;  // rows and columns whose sums are registers

// `b` is the first of the tile's columns in each of its panels.
template <size_t... ROW>
FASTTFM_KERNEL inline void word_tile(const int8_t* a, int64_t inner, const int8_t* b, int32_t* c,
                                     std::index_sequence<ROW...>) {
  Words sums[sizeof...(ROW)][kWordRegisters] = {};
  for (int64_t k = 0; k < inner; k += 4) {
    Words right[kWordRegisters];
    for (int i = 0; i < kWordRegisters; ++i) {
      const int64_t column = i * kWordColumns;
      right[i] = widened(b + column / kInt8Panel * kInt8Panel * inner + k * kInt8Panel + column % kInt8Panel * 4);
    }
    const auto add = [&](size_t row) {
      int32_t four;
      std::memcpy(&four, a + static_cast<int64_t>(row) * inner + k, sizeof(four));
      const Words left = widened(four);
      for (int i = 0; i < kWordRegisters; ++i) add_pairs(sums[row][i], left, right[i]);
    };
    (add(ROW), ...);
  }
  for (size_t row = 0; row < sizeof...(ROW); ++row) {
    int32_t pairs[2 * kWordTile];
    std::memcpy(pairs, sums[row], sizeof(pairs));
    for (int i = 0; i < kWordTile; ++i) c[row * kInt8Block + i] = pairs[2 * i] + pairs[2 * i + 1];
  }
}

FASTTFM_KERNEL inline void word_products(const Int8Linear& p, const int8_t* a, const int8_t* b, int64_t, int rows,
                                         int32_t* c) {
  for (int64_t column = 0; column < kInt8Block; column += kWordTile) {
    const int8_t* right = b + column / kInt8Panel * kInt8Panel * p.inner + column % kInt8Panel * 4;
    for (int row = 0; row < rows; row += kWordRows)
      word_tile(a + row * p.inner, p.inner, right, c + row * kInt8Block + column,
                std::make_index_sequence<kWordRows>());
  }
}

#if defined(__AVX512F__)

// ---- VNNI and AMX ---------------------------------------------------------------------------------------------------

#define FASTTFM_VNNI __attribute__((target("avx512vnni"))) inline

// total += the products of groups of four bytes, of which those of a are unsigned. With the intrinsic, GCC copies every
// sum once more in each step of the loop, which takes more time than the products.
FASTTFM_VNNI void add_products(__m512i& total, const __m512i& a, const __m512i& b) {
  asm("vpdpbusd %2, %1, %0" : "+v"(total) : "v"(a), "v"(b));
}

// The same for four elements of a row of a and two panels of b.
FASTTFM_VNNI void add_row(const int8_t* a, const __m512i& b0, const __m512i& b1, __m512i& total0, __m512i& total1) {
  int32_t four;
  std::memcpy(&four, a, sizeof(four));
  const __m512i all = _mm512_set1_epi32(four);
  add_products(total0, all, b0);
  add_products(total1, all, b1);
}

// dpbusd multiplies unsigned by signed bytes. Therefore round_row adds 128 to the bytes of a, and the sums start at
// -128 times the column sums of b.
FASTTFM_VNNI __m512i first_sums(const Int8Linear& p, int64_t column) {
  const __m512i sums = _mm512_loadu_si512(p.sums + column);
  return _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_maskz_slli_epi32(0xffff, sums, 7));
}

// Few rows take less time than their panels need from the cache of all cores, whose two streams the processor's own
// prefetcher follows too late.
constexpr int64_t kAhead = 1024;  // bytes of each panel

// Eight rows and two panels take 16 registers. Rows are constants, so that GCC keeps their sums in them.
template <size_t... ROW>
FASTTFM_VNNI void vnni_rows(const Int8Linear& p, const int8_t* a, const int8_t* b, int64_t first, int32_t* c,
                            std::index_sequence<ROW...>) {
  const __m512i start0 = first_sums(p, first), start1 = first_sums(p, first + kInt8Panel);
  __m512i total0[sizeof...(ROW)], total1[sizeof...(ROW)];
  ((total0[ROW] = start0, total1[ROW] = start1), ...);
  for (int64_t k = 0; k < p.inner; k += 4) {
    const int8_t *panel0 = b + k * kInt8Panel, *panel1 = panel0 + p.inner * kInt8Panel;
    prefetch(panel0 + kAhead);
    prefetch(panel1 + kAhead);
    const __m512i b0 = _mm512_loadu_si512(panel0), b1 = _mm512_loadu_si512(panel1);
    (add_row(a + ROW * p.inner + k, b0, b1, total0[ROW], total1[ROW]), ...);
  }
  (_mm512_storeu_si512(c + ROW * kInt8Block, total0[ROW]), ...);
  (_mm512_storeu_si512(c + ROW * kInt8Block + kInt8Panel, total1[ROW]), ...);
}

FASTTFM_VNNI void vnni_products(const Int8Linear& p, const int8_t* a, const int8_t* b, int64_t first, int rows,
                                int32_t* c) {
  for (int row = 0; row < rows; row += 8)
    vnni_rows(p, a + row * p.inner, b, first, c + row * kInt8Block, std::make_index_sequence<8>());
}

inline void amx_products(const Int8Linear& p, const int8_t* a, const int8_t* b, int64_t, int, int32_t* c) {
  tile_products<false>(a, b, p.inner, c);
}

#elif defined(__AVX2__)

// ---- VNNI in 256 bits -----------------------------------------------------------------------------------------------

// Eight rows and eight columns take 8 registers of 16.
template <size_t... ROW>
FASTTFM_KERNEL inline void vnni_rows(const Int8Linear& p, const int8_t* a, const int8_t* b, int64_t first, int32_t* c,
                                     std::index_sequence<ROW...>) {
  const __m256i columns = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p.sums + first));
  const __m256i start = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_slli_epi32(columns, 7));
  __m256i sums[sizeof...(ROW)] = {};
  ((sums[ROW] = start), ...);
  for (int64_t k = 0; k < p.inner; k += 4) {
    const __m256i right = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + k * kInt8Panel));
    const auto add = [&](__m256i& total, int64_t row) {
      int32_t four;
      std::memcpy(&four, a + row * p.inner + k, sizeof(four));
      const __m256i left = _mm256_set1_epi32(four);
      asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(total) : "x"(left), "x"(right));
    };
    (add(sums[ROW], ROW), ...);
  }
  (_mm256_storeu_si256(reinterpret_cast<__m256i*>(c + ROW * kInt8Block), sums[ROW]), ...);
}

FASTTFM_KERNEL inline void vnni_products(const Int8Linear& p, const int8_t* a, const int8_t* b, int64_t first, int rows,
                                         int32_t* c) {
  for (int64_t column = 0; column < kInt8Block; column += 8) {
    const int8_t* right = b + column / kInt8Panel * kInt8Panel * p.inner + column % kInt8Panel * 4;
    for (int row = 0; row < rows; row += 8)
      vnni_rows(p, a + row * p.inner, right, first + column, c + row * kInt8Block + column,
                std::make_index_sequence<8>());
  }
}

#endif

}  // namespace FASTTFM_ISA
}  // namespace fasttfm

#endif
