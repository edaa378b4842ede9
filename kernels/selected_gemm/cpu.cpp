// One GEMM of the BLAS for each run of rows with the same adapter.
#include <cstring>
#include <initializer_list>

#include "common/cpu/blas.h"
#include "common/cpu/isa.h"
#include "selected_gemm/op.h"

namespace fasttfm {
namespace FASTTFM_ISA {
namespace {

// y's columns of `rows` rows; BLAS matrices are column-major, so it computes y^T = b x^T.
bool multiply(const SelectedGemm& call, const float* x, const float* b, float* y, int64_t rows) {
  const auto columns = static_cast<int>(call.columns), inner = static_cast<int>(call.inner);
  return sgemm('T', 'N', columns, static_cast<int>(rows), inner, b, inner, x, static_cast<int>(call.x_stride),
               call.adds ? 1.0f : 0.0f, y, static_cast<int>(call.y_stride));
}

}  // namespace

Status selected_gemm(const SelectedGemm& call) {
  if (call.dtype != DType::f32) return unknown_dtype();
  for (int64_t size : {call.rows, call.x_stride, call.y_stride, call.columns, call.inner})
    if (size < 1 || size > 0x7fffffff) return bad_size("selected_gemm: sizes are 1 to 2^31 - 1");
  const auto* x = static_cast<const float*>(call.x) + call.x_first;
  const auto* b = static_cast<const float*>(call.b) + call.b_first * call.inner;
  auto* y = static_cast<float*>(call.y) + call.y_first;
  for (int64_t first = 0, last = 0; first < call.rows; first = last) {
    const int32_t adapter = call.adapters[first];
    while (last < call.rows && call.adapters[last] == adapter) ++last;
    if (adapter >= 0) {
      const float* own = b + adapter * call.b_rows * call.inner;
      if (!multiply(call, x + first * call.x_stride, own, y + first * call.y_stride, last - first))
        return {StatusCode::bad_value, "selected_gemm: there is no BLAS in this process"};
    } else if (!call.adds) {
      for (int64_t row = first; row < last; ++row)
        std::memset(y + row * call.y_stride, 0, sizeof(float) * static_cast<size_t>(call.columns));
    }
  }
  return {};
}

}  // namespace FASTTFM_ISA
}  // namespace fasttfm

FASTTFM_CPU_LAUNCHER(selected_gemm, SelectedGemm)
