// LayerNorm on the CPU. A row stays in L1 between the passes over it, so it is read from memory once.
#include "layer_norm/op.h"

#include <cmath>

#include "common/cpu/moments.h"
#include "common/cpu/parallel.h"
#include "common/cpu/row_chunks.h"
#include "common/cpu/simd.h"

namespace fasttfm {
namespace FASTTFM_ISA {
namespace {

template <class T>
FASTTFM_KERNEL void forward_row(const LayerNormForward& p, int64_t row) {
  const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
  const T* next = row + 1 < p.rows ? x + p.x_stride : x;
  T* y = static_cast<T*>(p.y) + row * p.columns;
  const auto* weight = static_cast<const float*>(p.weight);
  const auto* bias = static_cast<const float*>(p.bias);

  const Moments statistics = moments(p.columns, [&](int64_t c, auto n) { return load(x + c, n); });
  const float rstd = 1.0f / std::sqrt(statistics.variance + p.eps);
  const Lanes mean = broadcast(statistics.mean), scale = broadcast(rstd),
              shift = broadcast(-statistics.correction * rstd);
  for_columns(p.columns, [&](int64_t c, auto n) {
    prefetch(next + c);
    Lanes out = (load(x + c, n) - mean) * scale + shift;
    if (weight != nullptr) out = out * load(weight + c, n);
    if (bias != nullptr) out = out + load(bias + c, n);
    store(y + c, out, n);
  });
  if (p.mean == nullptr) return;
  p.mean[row] = statistics.mean;
  p.rstd[row] = rstd;
}

// A row of the backward pass and the row statistics that dx needs: with g = dy * weight and d = x - mean - correction,
//   dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) = rstd * (g - mean_g) - slope * d
template <class T>
struct BackwardRow {
  const T* x;
  const T* dy;
  T* dx;
  float mean, correction, rstd, mean_g, slope;
};

template <class T>
FASTTFM_KERNEL BackwardRow<T> backward_row(const LayerNormBackward& p, int64_t row) {
  const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
  const T* dy = static_cast<const T*>(p.dy) + row * p.columns;
  T* dx = static_cast<T*>(p.dx) + row * p.columns;
  const auto* weight = static_cast<const float*>(p.weight);
  const float inverse_c = 1.0f / static_cast<float>(p.columns);
  const float mean = p.mean[row], rstd = p.rstd[row];

  // dy is zero past the end of the row, so only the sum without a factor dy needs keep().
  Lanes deviations = broadcast(0.0f), sum_g = broadcast(0.0f), sum_g_deviation = broadcast(0.0f);
  for_columns(p.columns, [&](int64_t c, auto n) {
    Lanes g = load(dy + c, n);
    if (weight != nullptr) g = g * load(weight + c, n);
    const Lanes deviation = keep(load(x + c, n) - broadcast(mean), n);
    deviations = deviations + deviation;
    sum_g = sum_g + g;
    sum_g_deviation = sum_g_deviation + g * deviation;
  });
  const float correction = sum(deviations) * inverse_c;
  const float mean_g = sum(sum_g) * inverse_c;
  const float mean_g_d = sum(sum_g_deviation) * inverse_c - correction * mean_g;
  return {x, dy, dx, mean, correction, rstd, mean_g, rstd * (rstd * (rstd * mean_g_d))};
}

constexpr int kRows = 4;

// Writes dx of up to kRows rows and adds their contributions to dweight and dbias (fp32 [C] each, null if not needed).
// A block of the two sums is read and written once for all of the rows.
template <class T>
FASTTFM_KERNEL void backward_rows(const LayerNormBackward& p, int64_t first, int count, float* dweight, float* dbias) {
  const auto* weight = static_cast<const float*>(p.weight);
  BackwardRow<T> rows[kRows];
  for (int r = 0; r < count; ++r) rows[r] = backward_row<T>(p, first + r);

  const int64_t ahead = first + 2 * count <= p.rows ? count : 0;  // prefetch distance: the next group
  for_columns(p.columns, [&](int64_t c, auto n) {
    const Lanes w = weight != nullptr ? load(weight + c, n) : broadcast(1.0f);
    Lanes dw = dweight != nullptr ? load(dweight + c, n) : broadcast(0.0f);
    Lanes db = dbias != nullptr ? load(dbias + c, n) : broadcast(0.0f);
    // If unrolled, the rows' constants would occupy the registers of the sums.
#pragma GCC unroll 1
    for (int r = 0; r < count; ++r) {
      const BackwardRow<T>& row = rows[r];
      prefetch(row.x + ahead * p.x_stride + c);
      prefetch(row.dy + ahead * p.columns + c);
      const Lanes dy = load(row.dy + c, n);
      const Lanes d = load(row.x + c, n) - broadcast(row.mean) - broadcast(row.correction);
      const Lanes g = product(dy, w);  // rounded as in mean_g, so that g - mean_g is exactly 0 where it should be
      store(row.dx + c, broadcast(row.rstd) * (g - broadcast(row.mean_g)) - broadcast(row.slope) * d, n);
      dw = dw + dy * broadcast(row.rstd) * d;
      db = db + dy;
    }
    if (dweight != nullptr) store(dweight + c, dw, n);
    if (dbias != nullptr) store(dbias + c, db, n);
  });
}

}  // namespace

Status layer_norm_forward(const LayerNormForward& p) {
  if (p.columns < 1) return bad_size("layer_norm: columns must be at least 1");
  return with_dtype(p.dtype, unknown_dtype(), [&](auto element) {
    parallel_rows(p.rows, p.threads, [&](int64_t row) { forward_row<decltype(element)>(p, row); });
    return Status{};
  });
}

Status layer_norm_backward(const LayerNormBackward& p) {
  if (p.columns < 1) return bad_size("layer_norm: columns must be at least 1");
  return with_dtype(p.dtype, unknown_dtype(), [&](auto element) {
    const auto chunk = [&](int64_t, int64_t begin, int64_t end, float* const* parts) {
      for_row_blocks<kRows>(begin, end, [&](int64_t row, int count) {
        backward_rows<decltype(element)>(p, row, count, parts[0], parts[1]);
      });
    };
    sum_over_chunks(p.rows, p.columns, p.threads, p.workspace, {p.dweight, p.dbias}, chunk);
    return Status{};
  });
}

}  // namespace FASTTFM_ISA

#ifdef FASTTFM_ISA_BASELINE
int64_t cpu::layer_norm_workspace(int64_t rows, int64_t columns) { return 2 * row_chunk_count(rows) * columns; }
#endif

}  // namespace fasttfm

FASTTFM_CPU_LAUNCHER(layer_norm_forward, LayerNormForward)
FASTTFM_CPU_LAUNCHER(layer_norm_backward, LayerNormBackward)
