// RMSNorm on the CPU. A row stays in L1 between the passes over it, so it is read from memory once.
#include "rms_norm/op.h"

#include <cmath>

#include "common/cpu/parallel.h"
#include "common/cpu/row_chunks.h"
#include "common/cpu/simd.h"

namespace fasttfm {
namespace FASTTFM_ISA {
namespace {

template <class T>
FASTTFM_KERNEL void forward_row(const RmsNormForward& p, int64_t row) {
  const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
  const T* next = row + 1 < p.rows ? x + p.x_stride : x;
  T* y = static_cast<T*>(p.y) + row * p.columns;
  const auto* weight = static_cast<const float*>(p.weight);

  Lanes squares = broadcast(0.0f);
  for_columns(p.columns, [&](int64_t c, auto n) {
    const Lanes value = load(x + c, n);
    squares = squares + value * value;
  });
  const float rstd = 1.0f / std::sqrt(sum(squares) / static_cast<float>(p.columns) + p.eps);
  for_columns(p.columns, [&](int64_t c, auto n) {
    prefetch(next + c);
    Lanes out = load(x + c, n) * broadcast(rstd);
    if (weight != nullptr) out = out * load(weight + c, n);
    store(y + c, out, n);
  });
  p.rstd[row] = rstd;
}

// A row of the backward pass and the row statistics that dx needs: with g = dy * weight,
//   dx = rstd * (g - xhat * mean(g * xhat)) = rstd * g - slope * x
template <class T>
struct BackwardRow {
  const T* x;
  const T* dy;
  const T* dz;  // or null
  T* dx;
  float rstd, slope;
};

template <class T>
FASTTFM_KERNEL BackwardRow<T> backward_row(const RmsNormBackward& p, int64_t row) {
  const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
  const T* dy = static_cast<const T*>(p.dy) + row * p.columns;
  const auto* weight = static_cast<const float*>(p.weight);
  const float rstd = p.rstd[row];
  Lanes sum_g_x = broadcast(0.0f);
  for_columns(p.columns, [&](int64_t c, auto n) {
    Lanes g = load(dy + c, n);
    if (weight != nullptr) g = g * load(weight + c, n);
    sum_g_x = sum_g_x + g * load(x + c, n);
  });
  const float mean_g_x = sum(sum_g_x) / static_cast<float>(p.columns);
  const T* dz = p.dz == nullptr ? nullptr : static_cast<const T*>(p.dz) + row * p.columns;
  return {x, dy, dz, static_cast<T*>(p.dx) + row * p.columns, rstd, rstd * (rstd * (rstd * mean_g_x))};
}

constexpr int kRows = 4;

// Writes dx of up to kRows rows and adds their contribution to dweight (fp32 [C], null if not needed). A block of the
// sum is read and written once for all of the rows.
template <class T>
FASTTFM_KERNEL void backward_rows(const RmsNormBackward& p, int64_t first, int count, float* dweight) {
  const auto* weight = static_cast<const float*>(p.weight);
  BackwardRow<T> rows[kRows];
  for (int r = 0; r < count; ++r) rows[r] = backward_row<T>(p, first + r);

  const int64_t ahead = first + 2 * count <= p.rows ? count : 0;  // prefetch distance: the next group
  for_columns(p.columns, [&](int64_t c, auto n) {
    const Lanes w = weight != nullptr ? load(weight + c, n) : broadcast(1.0f);
    Lanes dw = dweight != nullptr ? load(dweight + c, n) : broadcast(0.0f);
    // If unrolled, the rows' constants would occupy the registers of the sum.
#pragma GCC unroll 1
    for (int r = 0; r < count; ++r) {
      const BackwardRow<T>& row = rows[r];
      prefetch(row.x + ahead * p.x_stride + c);
      prefetch(row.dy + ahead * p.columns + c);
      const Lanes dy = load(row.dy + c, n), x = load(row.x + c, n), scaled = dy * broadcast(row.rstd);
      Lanes dx = scaled * w - broadcast(row.slope) * x;
      if (row.dz != nullptr) dx = dx + load(row.dz + c, n);
      store(row.dx + c, dx, n);
      dw = dw + scaled * x;
    }
    if (dweight != nullptr) store(dweight + c, dw, n);
  });
}

}  // namespace

Status rms_norm_forward(const RmsNormForward& p) {
  if (p.columns < 1) return bad_size("rms_norm: columns must be at least 1");
  return with_dtype(p.dtype, unknown_dtype(), [&](auto element) {
    parallel_rows(p.rows, p.threads, [&](int64_t row) { forward_row<decltype(element)>(p, row); });
    return Status{};
  });
}

Status rms_norm_backward(const RmsNormBackward& p) {
  if (p.columns < 1) return bad_size("rms_norm: columns must be at least 1");
  return with_dtype(p.dtype, unknown_dtype(), [&](auto element) {
    const auto chunk = [&](int64_t, int64_t begin, int64_t end, float* const* parts) {
      for_row_blocks<kRows>(begin, end,
                            [&](int64_t row, int count) { backward_rows<decltype(element)>(p, row, count, parts[0]); });
    };
    sum_over_chunks(p.rows, p.columns, p.threads, p.workspace, {p.dweight}, chunk);
    return Status{};
  });
}

}  // namespace FASTTFM_ISA

#ifdef FASTTFM_ISA_BASELINE
int64_t cpu::rms_norm_workspace(int64_t rows, int64_t columns) { return row_chunk_count(rows) * columns; }
#endif

}  // namespace fasttfm

FASTTFM_CPU_LAUNCHER(rms_norm_forward, RmsNormForward)
FASTTFM_CPU_LAUNCHER(rms_norm_backward, RmsNormBackward)
