#include <cstring>

#include "common/cpu/activation.h"
#include "common/cpu/extensions.h"
#include "common/cpu/linear_blocks.h"
#include "common/cpu/simd.h"
#include "packed_linear/bf16_products.h"
#include "packed_linear/fp32_products.h"
#include "packed_linear/op.h"

namespace fasttfm {
namespace FASTTFM_ISA {
namespace {

static_assert(kPackedBlock == kLinearBlock);

FASTTFM_KERNEL void round_row(const PackedLinear& p, int64_t row) {
  bf16_t* to = static_cast<bf16_t*>(p.rounded) + row * p.inner;
  const int64_t columns = row < p.rows ? p.x_columns : 0;
  const float* x = p.x + row * p.x_columns;
  for_columns(columns, [&](int64_t column, auto n) { store(to + column, load(x + column, n), n); });
  std::memset(static_cast<void*>(to + columns), 0, static_cast<size_t>(p.inner - columns) * sizeof(bf16_t));
}

template <class Activate>
FASTTFM_KERNEL void write(const PackedLinear& p, const float* c, int64_t row, int64_t column, int rows,
                          Activate activate) {
  for (int64_t first = column; first < column + kPackedBlock && first < p.y_columns; first += kLinearPanel) {
    const Lanes bias = p.bias == nullptr ? broadcast(0.0f) : load(p.bias + first);
    for (int i = 0; i < rows; ++i) {
      const int64_t at = (row + i) * p.y_columns + first;
      const Lanes value = activate(load(c + i * kPackedBlock + first - column) + bias);
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

using Products = void (*)(const PackedLinear&, const bf16_t*, const bf16_t*, int, float*);

Products products_of(PackedProducts products) {
  switch (products) {
#if defined(__AVX512F__)
    case PackedProducts::avx512: return avx512_products;
    case PackedProducts::amx: return amx_products;
#elif defined(__aarch64__)
    case PackedProducts::arm_matrix: return matrix_products;
#endif
    default: return generic_products;
  }
}

template <class Activate>
Status run(const PackedLinear& p, Activate activate) {
  if (p.products == PackedProducts::fp32) {
    const int64_t first = rows_in_place(p), groups = (p.rows - first + kRowStep - 1) / kRowStep;
    parallel_items(groups, p.threads, [&](int64_t group) { pad_rows(p, first + group * kRowStep); });
    for_blocks<kFp32Rows>(p.rows, p.columns, p.threads, false, [&](int64_t row, int64_t column, int rows) {
      alignas(64) float c[kFp32Rows * kPackedBlock];
      fp32_products(p, row, column, rows, c);
      write(p, c, row, column, rows, activate);
    });
    return {};
  }
  const Products products = products_of(p.products);
  const auto *rounded = static_cast<const bf16_t*>(p.rounded), *w = static_cast<const bf16_t*>(p.w);
  for_linear_blocks(
      p.rows, p.columns, p.threads, p.products == PackedProducts::amx, [&](int64_t row) { round_row(p, row); },
      [&](int64_t row, int64_t column, int rows) {
        alignas(64) float c[kPackedBlock * kPackedBlock];
        products(p, rounded + row * p.inner, w + column * p.inner, rows, c);
        write(p, c, row, column, rows, activate);
      });
  return {};
}

}  // namespace

Status packed_linear(const PackedLinear& p) {
  if (p.rows < 1 || p.inner < 1 || p.inner % kPackedStep || p.x_columns < 1 || p.x_columns > p.inner)
    return bad_size("packed_linear: expected rows of x, and K in multiples of 32");
  if (p.columns < 1 || p.columns % kPackedBlock || p.y_columns < 1 || p.y_columns > p.columns)
    return bad_size("packed_linear: expected columns of y, and N in multiples of 32");
  if (p.activation < 0) return run(p, [](const Lanes& x) { return x; });
  return with_activation(static_cast<Activation>(p.activation), [&](auto activation) {
    return run(p, [](const Lanes& x) { return activated<decltype(activation)::value, true>(x).value; });
  });
}

}  // namespace FASTTFM_ISA

#ifdef FASTTFM_ISA_BASELINE
int64_t cpu::packed_products() {
  int64_t set = 0;
  const auto add = [&set](PackedProducts products) { set |= int64_t{1} << static_cast<int>(products); };
  add(PackedProducts::generic);
  if (active_isa() == Isa::avx512 && has_avx512_bf16()) add(PackedProducts::avx512);
  if (active_isa() == Isa::avx512 && may_use_amx_bf16()) add(PackedProducts::amx);
  if (has_arm_bf16()) add(PackedProducts::arm_matrix);
  return set;
}
#endif

}  // namespace fasttfm

FASTTFM_CPU_LAUNCHER(packed_linear, PackedLinear)
