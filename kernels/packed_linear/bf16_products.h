// Products of 32 rows and 32 columns in bf16 (cpu.cpp): c [32, 32] in fp32, of rows of a and two panels of b.
#pragma once

#include <cstring>
#include <utility>

#include "common/cpu/linear_blocks.h"
#include "common/cpu/simd.h"
#include "packed_linear/op.h"

namespace fasttfm {
namespace FASTTFM_ISA {

// ---- fp32 instructions ----------------------------------------------------------------------------------------------

// A pair of bf16 is an integer of 32 bits: its upper half is the second element in fp32, and its lower half the first.
inline RegF first_of(RegU pair) { return floats(pair << 16); }
inline RegF second_of(RegU pair) { return floats(pair & 0xffff0000u); }
inline float number(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

constexpr int kGenericRows = 4;

FASTTFM_KERNEL inline void generic_rows(const bf16_t* a, int64_t inner, const bf16_t* panel, float* c) {
  Lanes sums[kGenericRows] = {};
  for (int64_t k = 0; k < inner; k += 2)
    for (int i = 0; i < kRegisters; ++i) {
      RegU pairs;
      std::memcpy(&pairs, panel + k * kLinearPanel + 2 * i * kRegisterLanes, sizeof(pairs));
      const RegF first = first_of(pairs), second = second_of(pairs);
      for (int row = 0; row < kGenericRows; ++row) {
        uint32_t left;
        std::memcpy(&left, a + row * inner + k, sizeof(left));
        sums[row].r[i] += number(left << 16) * first;
        sums[row].r[i] += number(left & 0xffff0000u) * second;
      }
    }
  for (int row = 0; row < kGenericRows; ++row) store(c + row * kPackedBlock, sums[row]);
}

FASTTFM_KERNEL inline void generic_products(const PackedLinear& p, const bf16_t* a, const bf16_t* b, int rows,
                                            float* c) {
  for (int64_t column = 0; column < kPackedBlock; column += kLinearPanel)
    for (int row = 0; row < rows; row += kGenericRows)
      generic_rows(a + row * p.inner, p.inner, b + column * p.inner, c + row * kPackedBlock + column);
}

#if defined(__AVX512F__)

// ---- AVX512-BF16 and AMX --------------------------------------------------------------------------------------------

// Adds the products of pairs. Assembly, because GCC would copy each sum once more in each step of the loop.
inline void add_pairs(__m512& sums, const __m512i& a, const __m512i& b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
}

// Eight rows and two panels take 16 registers. Rows are constants, so that GCC keeps their sums in them.
template <size_t... ROW>
FASTTFM_KERNEL inline void pair_rows(const bf16_t* a, int64_t inner, const bf16_t* b, float* c,
                                     std::index_sequence<ROW...>) {
  __m512 sums0[sizeof...(ROW)] = {}, sums1[sizeof...(ROW)] = {};
  for (int64_t k = 0; k < inner; k += 2) {
    const __m512i b0 = _mm512_loadu_si512(b + k * kLinearPanel);
    const __m512i b1 = _mm512_loadu_si512(b + (inner + k) * kLinearPanel);
    const auto add = [&](__m512& first, __m512& second, int64_t row) {
      int32_t pair;
      std::memcpy(&pair, a + row * inner + k, sizeof(pair));
      const __m512i left = _mm512_set1_epi32(pair);
      add_pairs(first, left, b0);
      add_pairs(second, left, b1);
    };
    (add(sums0[ROW], sums1[ROW], ROW), ...);
  }
  (_mm512_storeu_ps(c + ROW * kPackedBlock, sums0[ROW]), ...);
  (_mm512_storeu_ps(c + ROW * kPackedBlock + kLinearPanel, sums1[ROW]), ...);
}

FASTTFM_KERNEL inline void avx512_products(const PackedLinear& p, const bf16_t* a, const bf16_t* b, int rows,
                                           float* c) {
  for (int row = 0; row < rows; row += 8)
    pair_rows(a + row * p.inner, p.inner, b, c + row * kPackedBlock, std::make_index_sequence<8>());
}

inline void amx_products(const PackedLinear& p, const bf16_t* a, const bf16_t* b, int, float* c) {
  tile_products<true>(a, b, 2 * p.inner, c);
}

#elif defined(__aarch64__)

// ---- BFMMLA ---------------------------------------------------------------------------------------------------------

inline void matrix_products(const PackedLinear& p, const bf16_t* a, const bf16_t* b, int rows, float* c) {
  arm_matrix_products<float32x4_t>(a, b, 2 * p.inner, rows, c);
}

#endif

}  // namespace FASTTFM_ISA
}  // namespace fasttfm
