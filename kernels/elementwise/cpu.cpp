#include "common/cpu/parallel.h"
#include "common/cpu/simd.h"
#include "common/cpu/simd_math.h"
#include "elementwise/op.h"

namespace fasttfm {
namespace FASTTFM_ISA {
namespace {

constexpr int64_t kItem = 1 << 14;  // elements per item of work

template <class From, class To, class Function>
FASTTFM_KERNEL void apply_item(const Elementwise& p, int64_t item, Function function) {
  const int64_t first = item * kItem, left = p.count - first;
  const From* x = static_cast<const From*>(p.x) + first;
  To* y = static_cast<To*>(p.y) + first;
  for_columns(left < kItem ? left : kItem, [&](int64_t i, auto n) { store(y + i, function(load(x + i, n)), n); });
}

template <class From, class To, class Function>
Status apply(const Elementwise& p, Function function) {
  parallel_items((p.count + kItem - 1) / kItem, p.threads,
                 [&](int64_t item) { apply_item<From, To>(p, item, function); });
  return {};
}

Status convert(const Elementwise& p) {
  return with_dtype(p.x_dtype, unknown_dtype(), [&](auto from) {
    return with_dtype(p.y_dtype, unknown_dtype(), [&](auto to) {
      return apply<decltype(from), decltype(to)>(p, [](const Lanes& x) { return x; });
    });
  });
}

}  // namespace

Status elementwise(const Elementwise& p) {
  if (p.function == ElementFunction::identity) return convert(p);
  if (p.x_dtype != DType::f32 || p.y_dtype != DType::f32)
    return {StatusCode::unknown_dtype, "elementwise: dtype codes of a function other than identity must be 0 (fp32)"};
  switch (p.function) {
    case ElementFunction::exp: return apply<float, float>(p, [](const Lanes& x) { return exp(x); });
    case ElementFunction::erf: return apply<float, float>(p, [](const Lanes& x) { return erf(x); });
    case ElementFunction::tanh: return apply<float, float>(p, [](const Lanes& x) { return tanh(x); });
    case ElementFunction::exp2_in_range: return apply<float, float>(p, [](const Lanes& x) { return exp2_in_range(x); });
    default: return {StatusCode::bad_value, "elementwise: function is not 0 to 4 (see kernels/elementwise/op.h)"};
  }
}

}  // namespace FASTTFM_ISA
}  // namespace fasttfm

FASTTFM_CPU_LAUNCHER(elementwise, Elementwise)
