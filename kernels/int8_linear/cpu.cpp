#include <cstring>

#include "common/cpu/activation.h"
#include "common/cpu/extensions.h"
#include "common/cpu/linear_blocks.h"
#include "common/cpu/simd.h"
#include "int8_linear/op.h"
#include "int8_linear/products_arm.h"
#include "int8_linear/products_x86.h"

namespace fasttfm {
namespace FASTTFM_ISA {
namespace {

constexpr int64_t kBlock = kInt8Block, kPanel = kInt8Panel;
static_assert(kBlock == kLinearBlock && kPanel == kLinearPanel);
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

// Calls body(first column, number) for sixteen columns of x or fewer at a time, without the outliers. Whole registers
// begin at multiples of 16.
template <class Body>
FASTTFM_KERNEL inline void for_rounded_columns(const Int8Linear& p, Body body) {
  int64_t first = 0;
  for (int i = 0; p.outliers != nullptr && i < kInt8Outliers; ++i) {
    const int64_t end = p.outliers[i], begin = end / kLanes * kLanes;
    for (; first < begin; first += kLanes) body(first, Full{});
    if (first < end) body(first, Tail{static_cast<int>(end - first)});
    first = end + 1;
    const int64_t next = begin + kLanes, until = next < p.x_columns ? next : p.x_columns;
    const bool shared = i + 1 < kInt8Outliers && p.outliers[i + 1] < next;
    if (!shared && first < until) body(first, Tail{static_cast<int>(until - first)});
    if (!shared) first = until;
  }
  for (; first + kLanes <= p.x_columns; first += kLanes) body(first, Full{});
  if (first < p.x_columns) body(first, Tail{static_cast<int>(p.x_columns - first)});
}

// Rounds a row. If any element is not finite, the row's range is NaN, and so is its row of y. What is stored at the
// outliers does not matter: w is 0 there.
FASTTFM_KERNEL void round_row(const Int8Linear& p, int64_t row) {
  int8_t* to = p.rounded + row * p.inner;
  float* range = p.row_ranges + kInt8RowFloats * row;
  if (row >= p.rows) {
    std::memset(to, 0, static_cast<size_t>(p.inner));
    std::memset(range, 0, sizeof(float) * kInt8RowFloats);
    return;
  }
  const float* x = p.x + row * p.x_columns;
  Lanes high = broadcast(0.0f), low = broadcast(0.0f), odd = broadcast(0.0f);  // low: the largest negated element
  for_rounded_columns(p, [&](int64_t c, auto n) {
    const Lanes v = load(x + c, n);
    high = larger(high, v);
    low = larger(low, broadcast(0.0f) - v);
    odd = odd + (v - v);
  });
  const float smallest = -largest(low), step = (largest(high) - smallest) * (1.0f / 255.0f);
  const float factor = step >= kLeastStep ? 1.0f / step : 0.0f;
  range[0] = step + sum(odd);
  range[1] = smallest + 128.0f * step;
  for (int i = 0; i < kInt8Outliers; ++i) {
    const float v = p.outliers == nullptr ? 0.0f : x[p.outliers[i]];
    range[0] += v - v;
    range[2 + i] = v;
  }
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
    Lanes outlier_weights[kInt8Outliers];
    for (int i = 0; i < kInt8Outliers; ++i)
      outlier_weights[i] = p.outliers == nullptr ? broadcast(0.0f) : load(p.outlier_weights + i * p.columns + first);
    const int64_t left = p.y_columns - first;
    for (int i = 0; i < rows; ++i) {
      const float* range = p.row_ranges + kInt8RowFloats * (row + i);
      Lanes others = bias;
      for (int j = 0; j < kInt8Outliers; ++j) others = others + outlier_weights[j] * broadcast(range[2 + j]);
      others = others + ones * broadcast(range[1]);
      Lanes value = activate(others + to_floats(c + i * kBlock + first - column) * (scale * broadcast(range[0])));
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

Products products_of(Int8Products products) {
  switch (products) {
#if defined(__x86_64__)
    case Int8Products::words: return word_products;
#endif
#if defined(__AVX2__)
    case Int8Products::vnni: return vnni_products;
#endif
#if defined(__AVX512F__)
    case Int8Products::amx: return amx_products;
#elif defined(__aarch64__)
    case Int8Products::arm_dot: return arm_dot_products;
    case Int8Products::arm_matrix: return matrix_products;
#endif
    default: return generic_products;
  }
}

template <class Activate>
Status run(const Int8Linear& p, Products products, Activate activate) {
  for_linear_blocks(
      p.rows, p.columns, p.threads, p.products == Int8Products::amx, [&](int64_t row) { round_row(p, row); },
      [&](int64_t row, int64_t column, int rows) {
        alignas(64) int32_t c[kBlock * kBlock];
        products(p, p.rounded + row * p.inner, p.w + column * p.inner, column, rows, c);
        write(p, c, row, column, rows, activate);
      });
  return {};
}

}  // namespace

// A caller may have chosen its products before the instruction set was changed: all give the same sums.
Int8Products supported(Int8Products products) {
  const int64_t set = cpu::int8_products();
  if (set >> static_cast<int>(products) & 1) return products;
  int fastest = 0;
  while (set >> (fastest + 1) != 0) ++fastest;
  return static_cast<Int8Products>(fastest);
}

Status int8_linear(const Int8Linear& call) {
  Int8Linear p = call;
  p.products = supported(call.products);
  if (p.rows < 1 || p.inner < 1 || p.inner % kInt8Step || p.x_columns < 1 || p.x_columns > p.inner)
    return bad_size("int8_linear: expected rows of x, and K in multiples of 64");
  if (p.columns < 1 || p.columns % kBlock || p.y_columns < 1 || p.y_columns > p.columns)
    return bad_size("int8_linear: expected columns of y, and N in multiples of 32");
  const int32_t* outliers = p.outliers;
  if (outliers != nullptr && (outliers[0] < 0 || outliers[0] >= outliers[1] || outliers[1] >= p.x_columns))
    return bad_size("int8_linear: expected two outlier columns of x, in ascending order");
  if (p.inner > 1 << 17) return bad_size("int8_linear: expected K up to 131072, so that sums fit into 32 bits");
  const Products products = products_of(p.products);
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
#if defined(__x86_64__)
  add(Int8Products::words);
#endif
  if (active_isa() == Isa::avx512 ? has_avx512_vnni() : active_isa() == Isa::avx2 && has_avx_vnni())
    add(Int8Products::vnni);
  if (active_isa() == Isa::avx512 && may_use_amx_int8()) add(Int8Products::amx);
  if (has_arm_dot_products()) add(Int8Products::arm_dot);
  if (has_arm_int8_matrices()) add(Int8Products::arm_matrix);
  return set;
}
#endif

}  // namespace fasttfm

FASTTFM_CPU_LAUNCHER(int8_linear, Int8Linear)
