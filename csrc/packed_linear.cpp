#include "packed_linear/op.h"

#include "binding.h"

namespace fasttfm {

FASTTFM_FUNCTION(int64_t, packed_products_cpu) { return cpu::packed_products(); }

FASTTFM_FUNCTION(Status, packed_linear_cpu, const Tensor& x, const Tensor& w, const OptionalTensor& bias,
                 const Tensor& y, const Tensor& rounded, int64_t columns, int activation, PackedProducts products) {
  return cpu::packed_linear({
      .x = x.as<float>(),
      .w = w.as<void>(),
      .bias = bias.as<float>(),
      .y = y.as<float>(),
      .rounded = rounded.as<void>(),
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
