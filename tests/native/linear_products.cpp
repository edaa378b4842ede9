// Linear layers in int8 and bf16 with every set of instructions of this CPU, next to the portable ones: bitwise the
// same in int8, and to the rounding of fp32 sums in bf16. Prints the number of sets, or the first difference.
#include <cmath>
#include <cstdio>
#include <vector>

#include "int8_linear/op.h"
#include "packed_linear/op.h"

using namespace fasttfm;

namespace {

struct Shape {
  int64_t rows, inner, columns;
};

uint32_t state = 1;
uint32_t draw() { return state = state * 1664525u + 1013904223u, state >> 8; }
float draw_float() { return static_cast<float>(draw()) / (1 << 23) - 1.0f; }

int64_t padded(int64_t rows) { return (rows + 31) / 32 * 32; }

struct Inputs {
  explicit Inputs(Shape shape) : x(shape.rows * shape.inner), bias(shape.columns), y(shape.rows * shape.columns) {
    for (float& each : x) each = draw_float();
    for (float& each : bias) each = draw_float();
  }
  std::vector<float> x, bias, y;
};

template <class Params>
void set(Params* params, Shape shape, Inputs* inputs) {
  params->x = inputs->x.data();
  params->bias = inputs->bias.data();
  params->y = inputs->y.data();
  params->rows = shape.rows;
  params->x_columns = params->inner = shape.inner;
  params->y_columns = params->columns = shape.columns;
  params->activation = -1;
  params->threads = 1;
}

std::vector<float> int8_result(Shape shape, Int8Products products) {
  state = 1;
  Inputs inputs(shape);
  std::vector<int8_t> w(shape.columns * shape.inner), rounded(padded(shape.rows) * shape.inner);
  std::vector<int32_t> sums(shape.columns);
  std::vector<float> scales(shape.columns, 0.01f), ranges(kInt8RowFloats * padded(shape.rows));
  for (size_t i = 0; i < w.size(); ++i) {
    w[i] = static_cast<int8_t>(draw());
    const size_t panel = i / (16 * shape.inner);
    sums[panel * 16 + i / 4 % 16] += w[i];
  }
  const std::vector<int32_t> outliers = {5, 40};
  std::vector<float> outlier_weights(kInt8Outliers * shape.columns);
  for (float& each : outlier_weights) each = draw_float();
  Int8Linear params{};
  set(&params, shape, &inputs);
  params.w = w.data();
  params.sums = sums.data();
  params.scales = scales.data();
  params.outliers = outliers.data();
  params.outlier_weights = outlier_weights.data();
  params.rounded = rounded.data();
  params.row_ranges = ranges.data();
  params.products = products;
  cpu::int8_linear(params);
  return inputs.y;
}

std::vector<float> bf16_result(Shape shape, PackedProducts products) {
  state = 1;
  Inputs inputs(shape);
  std::vector<bf16_t> w(shape.columns * shape.inner), rounded(padded(shape.rows) * shape.inner);
  for (bf16_t& each : w) {  // a magnitude from 0.5 to 2
    const uint32_t bits = draw();
    each.bits = static_cast<uint16_t>(0x3f00 + (bits & 0xff) + ((bits >> 8 & 1) << 15));
  }
  PackedLinear params{};
  set(&params, shape, &inputs);
  params.w = w.data();
  params.rounded = rounded.data();
  params.products = products;
  cpu::packed_linear(params);
  return inputs.y;
}

// The number of sets that were compared; -1 after a difference of more than `bound`.
template <class Products, class Result>
int compared(const char* name, int64_t supported, Shape shape, Result result, float bound) {
  int count = 0;
  const std::vector<float> expected = result(shape, Products::generic);
  for (int code = 1; code < 64; ++code) {
    if (!(supported >> code & 1)) continue;
    const std::vector<float> found = result(shape, static_cast<Products>(code));
    for (size_t i = 0; i < found.size(); ++i)
      if (!(std::fabs(found[i] - expected[i]) <= bound)) {
        std::printf("%s %d: element %zu of %lld x %lld: expected %g, got %g\n", name, code, i,
                    static_cast<long long>(shape.rows), static_cast<long long>(shape.columns), expected[i], found[i]);
        return -1;
      }
    ++count;
  }
  return count;
}

}  // namespace

int main() {
  int count = 0;
  for (const Shape shape : {Shape{1, 64, 32}, Shape{3, 384, 96}, Shape{33, 64, 32}, Shape{70, 384, 96}}) {
    const int int8 = compared<Int8Products>("int8", cpu::int8_products(), shape, int8_result, 0.0f);
    const float bound = 2.0f * static_cast<float>(shape.inner * shape.inner) * 1.2e-7f;
    const int bf16 = compared<PackedProducts>("bf16", cpu::packed_products(), shape, bf16_result, bound);
    if (int8 < 0 || bf16 < 0) return 1;
    count = int8 + bf16;
  }
  std::printf("%d\n", count);
  return 0;
}
