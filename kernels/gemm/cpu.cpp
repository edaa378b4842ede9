#include <cstring>
#include <initializer_list>

#include "common/cpu/blas.h"
#include "common/cpu/isa.h"
#include "gemm/op.h"

namespace fasttfm {
namespace FASTTFM_ISA {

// BLAS matrices are column-major, so it computes d^T [N, M] = b^T a^T, and its first operand is b. d is initialized
// with the bias or c.
Status gemm(const Gemm& call) {
  if (call.dtype != DType::f32 || call.out_dtype != DType::f32) return unknown_dtype();
  for (int64_t size : {call.rows, call.columns, call.inner})
    if (size < 1 || size > 0x7fffffff) return bad_size("gemm: sizes are 1 to 2^31 - 1");
  const auto rows = static_cast<int>(call.rows), columns = static_cast<int>(call.columns),
             inner = static_cast<int>(call.inner);
  auto* d = static_cast<float*>(call.d);
  const size_t row = sizeof(float) * static_cast<size_t>(columns);
  if (call.bias != nullptr)
    for (int64_t i = 0; i < call.rows; ++i) std::memcpy(d + i * call.columns, call.bias, row);
  else if (call.c != nullptr && call.c != call.d)
    std::memcpy(d, call.c, row * static_cast<size_t>(rows));
  const float beta = call.bias == nullptr && call.c == nullptr ? 0.0f : 1.0f;
  const bool done = sgemm(call.transposed_b ? 'T' : 'N', call.transposed_a ? 'T' : 'N', columns, rows, inner,
                          static_cast<const float*>(call.b), call.transposed_b ? inner : columns,
                          static_cast<const float*>(call.a), call.transposed_a ? rows : inner, beta, d, columns);
  return done ? Status{} : Status{StatusCode::bad_value, "gemm: there is no BLAS in this process"};
}

}  // namespace FASTTFM_ISA
}  // namespace fasttfm

FASTTFM_CPU_LAUNCHER(gemm, Gemm)
