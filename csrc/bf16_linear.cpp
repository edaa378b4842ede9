#include "bf16_linear/op.h"

#include "binding.h"

namespace fasttfm {

FASTTFM_FUNCTION(int64_t, bf16_products_cpu) { return cpu::bf16_products(); }

FASTTFM_FUNCTION(Status, bf16_linear_cpu, const Tensor& x, const Tensor& w, const OptionalTensor& bias, const Tensor& y,
                 const Tensor& rounded, int64_t columns, int activation, Bf16Products products) {
  return cpu::bf16_linear({
      .x = x.as<float>(),
      .w = w.as<bf16_t>(),
      .bias = bias.as<float>(),
      .y = y.as<float>(),
      .rounded = rounded.as<bf16_t>(),
      .rows = x.rows(),
      .x_columns = x.columns(),
      .y_columns = y.columns(),
      .inner = rounded.columns(),
      .columns = columns,
      .activation = activation,
      .products = products,
      .threads = context.threads,
  });
}

}  // namespace fasttfm
