#include "int8_linear/op.h"

#include "binding.h"

namespace fasttfm {

FASTTFM_FUNCTION(int64_t, int8_products_cpu) { return cpu::int8_products(); }

FASTTFM_FUNCTION(Status, int8_linear_cpu, const Tensor& x, const Tensor& w, const Tensor& sums, const Tensor& scales,
                 const OptionalTensor& bias, const OptionalTensor& outliers, const OptionalTensor& outlier_weights,
                 const Tensor& y, const Tensor& rounded, const Tensor& row_ranges, int activation,
                 Int8Products products) {
  return cpu::int8_linear({
      .x = x.as<float>(),
      .w = w.as<int8_t>(),
      .sums = sums.as<int32_t>(),
      .scales = scales.as<float>(),
      .bias = bias.as<float>(),
      .outliers = outliers.as<int32_t>(),
      .outlier_weights = outlier_weights.as<float>(),
      .y = y.as<float>(),
      .rounded = rounded.as<int8_t>(),
      .row_ranges = row_ranges.as<float>(),
      .rows = x.rows(),
      .x_columns = x.columns(),
      .y_columns = y.columns(),
      .inner = rounded.columns(),
      .columns = sums.columns(),
      .activation = activation,
      .products = products,
      .threads = context.threads,
  });
}

}  // namespace fasttfm
