#include "int8_linear/op.h"

#include "binding.h"

namespace fasttfm {

#define FIELD(MEMBER) FASTTFM_FIELD(Int8Linear, MEMBER)

FASTTFM_BINDING(int8_linear) {
  bind_number(module, "int8_products_cpu", &cpu::int8_products);
  bind_launcher(module, "int8_linear_cpu", &cpu::int8_linear, FIELD(x), FIELD(w), FIELD(sums), FIELD(scales),
                FIELD(bias), FIELD(y), FIELD(rounded), FIELD(row_scales), FIELD(rows), FIELD(x_columns),
                FIELD(y_columns), FIELD(inner), FIELD(columns), FIELD(activation), FIELD(products), FIELD(threads));
}

}  // namespace fasttfm
