#include <cstring>

#include "bf16_linear/op.h"
#include "bf16_linear/products.h"
#include "common/cpu/activation.h"
#include "common/cpu/extensions.h"
#include "common/cpu/linear_blocks.h"
#include "common/cpu/simd.h"

namespace fasttfm {
namespace FASTTFM_ISA {
namespace {

static_assert(kBf16Block == kLinearBlock);

FASTTFM_KERNEL void round_row(const Bf16Linear& p, int64_t row) {
  bf16_t* to = p.rounded + row * p.inner;
  const int64_t columns = row < p.rows ? p.x_columns : 0;
  const float* x = p.x + row * p.x_columns;
  for_columns(columns, [&](int64_t column, auto n) { store(to + column, load(x + column, n), n); });
  std::memset(static_cast<void*>(to + columns), 0, static_cast<size_t>(p.inner - columns) * sizeof(bf16_t));
}

template <class Activate>
FASTTFM_KERNEL void write(const Bf16Linear& p, const float* c, int64_t row, int64_t column, int rows,
                          Activate activate) {
  for (int64_t first = column; first < column + kBf16Block && first < p.y_columns; first += kLinearPanel) {
    const Lanes bias = p.bias == nullptr ? broadcast(0.0f) : load(p.bias + first);
    for (int i = 0; i < rows; ++i) {
      const int64_t at = (row + i) * p.y_columns + first;
      const Lanes value = activate(load(c + i * kBf16Block + first - column) + bias);
      const auto finish = [&](auto n) {
        store(p.y + at, p.residual == nullptr ? value : value + load(p.residual + at, n), n);
      };
      if (p.y_columns - first >= kLinearPanel) {
        finish(Full{});
      } else {
        finish(Tail{static_cast<int>(p.y_columns - first)});
      }
    }
  }
}

using Products = void (*)(const Bf16Linear&, const bf16_t*, const bf16_t*, int, float*);

Products products_of(Bf16Products products) {
  switch (products) {
#if defined(__AVX512F__)
    case Bf16Products::avx512: return avx512_products;
    case Bf16Products::amx: return amx_products;
#elif defined(__aarch64__)
    case Bf16Products::arm_matrix: return matrix_products;
#endif
    default: return generic_products;
  }
}

template <class Activate>
Status run(const Bf16Linear& p, Activate activate) {
  const Products products = products_of(p.products);
  for_linear_blocks(
      p.rows, p.columns, p.threads, p.products == Bf16Products::amx, [&](int64_t row) { round_row(p, row); },
      [&](int64_t row, int64_t column, int rows) {
        alignas(64) float c[kBf16Block * kBf16Block];
        products(p, p.rounded + row * p.inner, p.w + column * p.inner, rows, c);
        write(p, c, row, column, rows, activate);
      });
  return {};
}

}  // namespace

Status bf16_linear(const Bf16Linear& p) {
  if (p.rows < 1 || p.inner < 1 || p.inner % kBf16Step || p.x_columns < 1 || p.x_columns > p.inner)
    return bad_size("bf16_linear: expected rows of x, and K in multiples of 32");
  if (p.columns < 1 || p.columns % kBf16Block || p.y_columns < 1 || p.y_columns > p.columns)
    return bad_size("bf16_linear: expected columns of y, and N in multiples of 32");
  if (p.activation < 0) return run(p, [](const Lanes& x) { return x; });
  return with_activation(static_cast<Activation>(p.activation), [&](auto activation) {
    return run(p, [](const Lanes& x) { return activated<decltype(activation)::value, true>(x).value; });
  });
}

}  // namespace FASTTFM_ISA

#ifdef FASTTFM_ISA_BASELINE
int64_t cpu::bf16_products() {
  int64_t set = 0;
  const auto add = [&set](Bf16Products products) { set |= int64_t{1} << static_cast<int>(products); };
  add(Bf16Products::generic);
  if (active_isa() == Isa::avx512 && has_avx512_bf16()) add(Bf16Products::avx512);
  if (active_isa() == Isa::avx512 && may_use_amx_bf16()) add(Bf16Products::amx);
  if (has_arm_bf16()) add(Bf16Products::arm_matrix);
  return set;
}
#endif

}  // namespace fasttfm

FASTTFM_CPU_LAUNCHER(bf16_linear, Bf16Linear)
