#include <cstring>
#include <initializer_list>

#include "common/cpu/blas.h"
#include "common/cpu/isa.h"
#include "common/cpu/parallel.h"
#include "common/cpu/simd.h"
#include "gemm/op.h"

namespace fasttfm {
namespace FASTTFM_ISA {
namespace {

// ---- few rows: b is read from memory once, and its bytes are what takes the time -------------------------------------

// A tile's sums are in registers.
constexpr int kRows = 4, kColumns = kRegisters == 1 ? 4 : kRegisters == 2 ? 2 : 1;
constexpr int64_t kBlock = 16;  // columns of d per item: all rows of a read them
// For more rows the BLAS is faster: the tiles of wider registers read a less often.
constexpr int64_t kFewRows = kRegisters == 1 ? 16 : 8;

// The sums of R rows of a times C rows of b.
template <int R, int C>
FASTTFM_KERNEL void multiply_tile(const Gemm& p, const float* a, const float* b, float* d, int64_t column) {
  Lanes sums[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) sums[r][c] = broadcast(0.0f);
  for_columns(p.inner, [&](int64_t k, auto n) {
    Lanes own[C];
    for (int c = 0; c < C; ++c) own[c] = load(b + c * p.inner + k, n);
    for (int r = 0; r < R; ++r) {
      const Lanes row = load(a + r * p.inner + k, n);
      for (int c = 0; c < C; ++c) sums[r][c] = sums[r][c] + row * own[c];
    }
  });
  const auto* bias = static_cast<const float*>(p.bias);
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) {
      const int64_t at = r * p.columns + column + c;
      d[at] = sum(sums[r][c]) + (bias != nullptr ? bias[column + c] : 0.0f);
    }
  }
}

template <int C>
void multiply_columns(const Gemm& p, int64_t column) {
  const float *a = static_cast<const float*>(p.a), *b = static_cast<const float*>(p.b) + column * p.inner;
  auto* d = static_cast<float*>(p.d);
  int64_t row = 0;
  for (; row + kRows <= p.rows; row += kRows)
    multiply_tile<kRows, C>(p, a + row * p.inner, b, d + row * p.columns, column);
  for (; row + 2 <= p.rows; row += 2) multiply_tile<2, C>(p, a + row * p.inner, b, d + row * p.columns, column);
  if (row < p.rows) multiply_tile<1, C>(p, a + row * p.inner, b, d + row * p.columns, column);
}

Status multiply_few_rows(const Gemm& p) {
  parallel_items((p.columns + kBlock - 1) / kBlock, p.threads, [&](int64_t item) {
    const int64_t first = item * kBlock, last = first + kBlock < p.columns ? first + kBlock : p.columns;
    int64_t column = first;
    for (; column + kColumns <= last; column += kColumns) multiply_columns<kColumns>(p, column);
    for (; column < last; ++column) multiply_columns<1>(p, column);
    const auto* c = static_cast<const float*>(p.c);
    auto* d = static_cast<float*>(p.d);
    for (int64_t row = 0; c != nullptr && row < p.rows; ++row)
      for (int64_t at = row * p.columns + first; at < row * p.columns + last; ++at) d[at] += c[at];
  });
  return {};
}

}  // namespace

// BLAS matrices are column-major, so it computes d^T [N, M] = b^T a^T, and its first operand is b. d is initialized
// with the bias or c.
Status gemm(const Gemm& call) {
  if (call.dtype != DType::f32 || call.out_dtype != DType::f32) return unknown_dtype();
  for (int64_t size : {call.rows, call.columns, call.inner})
    if (size < 1 || size > 0x7fffffff) return bad_size("gemm: sizes are 1 to 2^31 - 1");
  const bool few = call.rows <= kFewRows && call.threads > 0 && call.transposed_b && !call.transposed_a;
  if (few && (call.c == nullptr || call.c != call.d)) return multiply_few_rows(call);
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
