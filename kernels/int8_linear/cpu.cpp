#include <cstring>
#include <utility>

#include "common/cpu/activation.h"
#include "common/cpu/extensions.h"
#include "common/cpu/parallel.h"
#include "common/cpu/simd.h"
#include "int8_linear/op.h"

namespace fasttfm {
namespace FASTTFM_ISA {
namespace {

constexpr int64_t kBlock = kInt8Block, kPanel = kInt8Panel;
constexpr float kLeastStep = 1e-37f;  // of a row's range: 1 / step is finite

// ---- rows of x ------------------------------------------------------------------------------------------------------

// Rounds to nearest, ties to even: for |x| up to 2^22 the low bits of the sum are the rounded integer in two's
// complement. The bytes are XORed with `flipped`; 0x80 adds 128 to them.
FASTTFM_KERNEL void store_rounded(int8_t* to, const Lanes& x, uint8_t flipped) {
  const Lanes shifted = x + broadcast(12582912.0f);  // 1.5 * 2^23
#if defined(__ARM_NEON)
  uint16x8_t half[2];
  for (int i = 0; i < 2; ++i)
    half[i] =
        vuzp1q_u16(reinterpret_cast<uint16x8_t>(shifted.r[2 * i]), reinterpret_cast<uint16x8_t>(shifted.r[2 * i + 1]));
  const uint8x16_t all = vuzp1q_u8(vreinterpretq_u8_u16(half[0]), vreinterpretq_u8_u16(half[1]));
  vst1q_u8(reinterpret_cast<uint8_t*>(to), all ^ flipped);
#else
  typedef uint8_t RegB __attribute__((vector_size(kRegisterLanes)));
  for (int i = 0; i < kRegisters; ++i) {
    const RegB bytes = __builtin_convertvector(bits(shifted.r[i]), RegB) ^ flipped;
    std::memcpy(to + i * kRegisterLanes, &bytes, sizeof(bytes));
  }
#endif
}

// Rounds a row. If any element is not finite, the row's range is NaN, and so is its row of y.
FASTTFM_KERNEL void round_row(const Int8Linear& p, int64_t row) {
  int8_t* to = p.rounded + row * p.inner;
  float* range = p.row_ranges + 2 * row;
  if (row >= p.rows) {
    std::memset(to, 0, static_cast<size_t>(p.inner));
    range[0] = range[1] = 0.0f;
    return;
  }
  const float* x = p.x + row * p.x_columns;
  Lanes high = broadcast(0.0f), low = broadcast(0.0f), odd = broadcast(0.0f);  // low: the largest negated element
  for_columns(p.x_columns, [&](int64_t c, auto n) {
    const Lanes v = load(x + c, n);
    high = larger(high, v);
    low = larger(low, broadcast(0.0f) - v);
    odd = odd + (v - v);
  });
  const float smallest = -largest(low), step = (largest(high) - smallest) * (1.0f / 255.0f);
  const float factor = step >= kLeastStep ? 1.0f / step : 0.0f;
  range[0] = step + sum(odd);
  range[1] = smallest + 128.0f * step;
  const uint8_t flipped = p.products == Int8Products::vnni ? 0x80 : 0;
  const int64_t whole = p.x_columns / kLanes * kLanes;
  const auto rounded = [&](const Lanes& v) {
    return (v - broadcast(smallest)) * broadcast(factor) - broadcast(128.0f);
  };
  for (int64_t c = 0; c < whole; c += kLanes) store_rounded(to + c, rounded(load(x + c)), flipped);
  if (whole < p.inner) {
    std::memset(to + whole, 0, static_cast<size_t>(p.inner - whole));
    float rest[kLanes] = {};
    std::memcpy(rest, x + whole, sizeof(float) * static_cast<size_t>(p.x_columns - whole));
    if (whole < p.x_columns) store_rounded(to + whole, rounded(load(rest)), flipped);
  }
}

// ---- products of 32 rows and 32 columns: c [32, 32] -----------------------------------------------------------------

// `b` has two panels of inner * 16 bytes each.
void generic_products(const Int8Linear& p, const int8_t* a, const int8_t* b, int64_t, int rows, int32_t* c) {
  for (int row = 0; row < rows; ++row)
    for (int panel = 0; panel < 2; ++panel) {
      const int8_t *left = a + row * p.inner, *right = b + panel * p.inner * kPanel;
      int32_t total[kPanel] = {};
      for (int64_t k = 0; k < p.inner; k += 4)
        for (int column = 0; column < kPanel; ++column)
          for (int i = 0; i < 4; ++i) total[column] += left[k + i] * right[k * kPanel + 4 * column + i];
      std::memcpy(c + row * kBlock + panel * kPanel, total, sizeof(total));
    }
}

#if defined(__AVX512F__)

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

// Eight rows and two panels take 16 registers. Rows are constants, so that GCC keeps their sums in them.
template <size_t... ROW>
FASTTFM_VNNI void vnni_rows(const Int8Linear& p, const int8_t* a, const int8_t* b, int64_t first, int32_t* c,
                            std::index_sequence<ROW...>) {
  const __m512i start0 = first_sums(p, first), start1 = first_sums(p, first + kPanel);
  __m512i total0[sizeof...(ROW)], total1[sizeof...(ROW)];
  ((total0[ROW] = start0, total1[ROW] = start1), ...);
  for (int64_t k = 0; k < p.inner; k += 4) {
    const __m512i b0 = _mm512_loadu_si512(b + k * kPanel), b1 = _mm512_loadu_si512(b + (p.inner + k) * kPanel);
    (add_row(a + ROW * p.inner + k, b0, b1, total0[ROW], total1[ROW]), ...);
  }
  (_mm512_storeu_si512(c + ROW * kBlock, total0[ROW]), ...);
  (_mm512_storeu_si512(c + ROW * kBlock + kPanel, total1[ROW]), ...);
}

FASTTFM_VNNI void vnni_products(const Int8Linear& p, const int8_t* a, const int8_t* b, int64_t first, int rows,
                                int32_t* c) {
  for (int row = 0; row < rows; row += 8)
    vnni_rows(p, a + row * p.inner, b, first, c + row * kBlock, std::make_index_sequence<8>());
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// It is in static memory, because GCC's _tile_loadconfig declares only its first bytes as read.
const TileConfig kTiles;

// Tiles 0 to 3 hold c, tiles 4 and 5 sixteen rows of a each, and tiles 6 and 7 sixteen columns of b each.
__attribute__((target("amx-tile,amx-int8"))) void amx_products(const Int8Linear& p, const int8_t* a, const int8_t* b,
                                                               int64_t, int, int32_t* c) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < p.inner; k += kInt8Step) {
    _tile_loadd(4, a + k, p.inner);
    _tile_loadd(5, a + 16 * p.inner + k, p.inner);
    _tile_loadd(6, b + k * kPanel, 64);
    _tile_loadd(7, b + (p.inner + k) * kPanel, 64);
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
  _tile_stored(0, c, 4 * kBlock);
  _tile_stored(1, c + kPanel, 4 * kBlock);
  _tile_stored(2, c + 16 * kBlock, 4 * kBlock);
  _tile_stored(3, c + 16 * kBlock + kPanel, 4 * kBlock);
}

__attribute__((target("amx-tile,amx-int8"))) void configure_tiles() { _tile_loadconfig(&kTiles); }
__attribute__((target("amx-tile,amx-int8"))) void release_tiles() { _tile_release(); }

#elif defined(__aarch64__)

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

__attribute__((target("arch=armv8.2-a+dotprod"))) void arm_dot_products(const Int8Linear& p, const int8_t* a,
                                                                        const int8_t* b, int64_t, int rows,
                                                                        int32_t* c) {
  for (int column = 0; column < kBlock; column += 4 * kDotColumns)
    for (int row = 0; row < rows; row += kDotRows) {
      const int8_t* right = b + column / kPanel * kPanel * p.inner + column % kPanel * 4;
      DotTile tile{};
      for (int64_t k = 0; k < p.inner; k += 16, right += 16 * kPanel) {
        int8x16_t left[kDotRows];
        for (int i = 0; i < kDotRows; ++i) left[i] = vld1q_s8(a + (row + i) * p.inner + k);
        add_dots<0>(tile, left, right);
        add_dots<1>(tile, left, right + 4 * kPanel);
        add_dots<2>(tile, left, right + 8 * kPanel);
        add_dots<3>(tile, left, right + 12 * kPanel);
      }
      for (int i = 0; i < kDotRows; ++i)
        for (int j = 0; j < kDotColumns; ++j) vst1q_s32(c + (row + i) * kBlock + column + 4 * j, tile.sum[i][j]);
    }
}

#endif

// ---- y --------------------------------------------------------------------------------------------------------------

inline Lanes to_floats(const int32_t* from) {
  Lanes out;
  for (int i = 0; i < kRegisters; ++i) {
    RegI number;
    std::memcpy(&number, from + i * kRegisterLanes, sizeof(number));
    out.r[i] = __builtin_convertvector(number, RegF);
  }
  return out;
}

template <class Activate>
FASTTFM_KERNEL void write(const Int8Linear& p, const int32_t* c, int64_t row, int64_t column, int rows,
                          Activate activate) {
  for (int64_t first = column; first < column + kBlock && first < p.y_columns; first += kPanel) {
    const Lanes scale = load(p.scales + first);
    const Lanes bias = p.bias == nullptr ? broadcast(0.0f) : load(p.bias + first);
    const Lanes ones = to_floats(p.sums + first) * scale;  // the product with a row of ones
    const int64_t left = p.y_columns - first;
    for (int i = 0; i < rows; ++i) {
      const float* range = p.row_ranges + 2 * (row + i);
      const Lanes product = to_floats(c + i * kBlock + first - column) * (scale * broadcast(range[0]));
      Lanes value = activate(product + ones * broadcast(range[1]) + bias);
      const int64_t at = (row + i) * p.y_columns + first;
      float* y = p.y + at;
      if (left >= kPanel) {
        if (p.residual != nullptr) value = value + load(p.residual + at);
        store(y, value);
      } else {
        float all[kLanes];
        store(all, value);
        if (p.residual != nullptr)
          for (int64_t column = 0; column < left; ++column) all[column] += p.residual[at + column];
        std::memcpy(y, all, sizeof(float) * static_cast<size_t>(left));
      }
    }
  }
}

using Products = void (*)(const Int8Linear&, const int8_t*, const int8_t*, int64_t, int, int32_t*);

template <class Activate>
Status run(const Int8Linear& p, Products products, Activate activate) {
  const int64_t blocks = (p.rows + kBlock - 1) / kBlock, pairs = p.columns / kBlock;
  parallel_items(blocks, p.threads, [&](int64_t block) {
    for (int64_t row = block * kBlock; row < (block + 1) * kBlock; ++row) round_row(p, row);
  });
  // If there are few blocks of rows, the columns are divided too, so that every thread has work.
  int64_t parts = (2 * p.threads + blocks - 1) / blocks;
  parts = parts < pairs ? parts : pairs;
  parallel_items(blocks * parts, p.threads, [&](int64_t item) {
    const int64_t block = item / parts, part = item % parts, row = block * kBlock;
    const int rows = static_cast<int>(p.rows - row < kBlock ? p.rows - row : kBlock);
    alignas(64) int32_t c[kBlock * kBlock];
#if defined(__AVX512F__)
    if (p.products == Int8Products::amx) configure_tiles();
#endif
    for (int64_t pair = part * pairs / parts; pair < (part + 1) * pairs / parts; ++pair) {
      const int64_t column = pair * kBlock;
      products(p, p.rounded + row * p.inner, p.w + column * p.inner, column, rows, c);
      write(p, c, row, column, rows, activate);
    }
#if defined(__AVX512F__)
    if (p.products == Int8Products::amx) release_tiles();
#endif
  });
  return {};
}

}  // namespace

Status int8_linear(const Int8Linear& p) {
  if (p.rows < 1 || p.inner < 1 || p.inner % kInt8Step || p.x_columns < 1 || p.x_columns > p.inner)
    return bad_size("int8_linear: expected rows of x, and K in multiples of 64");
  if (p.columns < 1 || p.columns % kBlock || p.y_columns < 1 || p.y_columns > p.columns)
    return bad_size("int8_linear: expected columns of y, and N in multiples of 32");
  if (p.inner > 1 << 17) return bad_size("int8_linear: expected K up to 131072, so that sums fit into 32 bits");
  Products products = generic_products;
#if defined(__AVX512F__)
  if (p.products == Int8Products::vnni) products = vnni_products;
  if (p.products == Int8Products::amx) products = amx_products;
#elif defined(__aarch64__)
  if (p.products == Int8Products::arm_dot) products = arm_dot_products;
#endif
  if (p.activation < 0) return run(p, products, [](const Lanes& x) { return x; });
  return with_activation(static_cast<Activation>(p.activation), [&](auto activation) {
    return run(p, products, [](const Lanes& x) { return activated<decltype(activation)::value, true>(x).value; });
  });
}

}  // namespace FASTTFM_ISA

#ifdef FASTTFM_ISA_BASELINE
int64_t cpu::int8_products() {
  int64_t set = 0;
  const auto add = [&set](Int8Products products) { set |= int64_t{1} << static_cast<int>(products); };
  add(Int8Products::generic);
  if (active_isa() == Isa::avx512 && has_avx512_vnni()) add(Int8Products::vnni);
  if (active_isa() == Isa::avx512 && may_use_amx_int8()) add(Int8Products::amx);
  if (has_arm_dot_products()) add(Int8Products::arm_dot);
  return set;
}
#endif

}  // namespace fasttfm

FASTTFM_CPU_LAUNCHER(int8_linear, Int8Linear)
