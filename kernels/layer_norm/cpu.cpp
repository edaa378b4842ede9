// LayerNorm on the CPU. A row stays in the first-level cache between its passes, so each row is read from memory once.
#include "layer_norm/op.h"

#include <cmath>

#include "common/parallel.h"
#include "common/row_chunks.h"
#include "common/simd.h"

namespace fasttfm {
namespace FASTTFM_ISA {
namespace {

// N rows, C columns. Two passes over the row: the variance is the mean of squared deviations, not a difference of large sums. The mean of the
// deviations, zero but for the rounding of the mean, corrects both.
template <class T>
void forward_row(const LayerNormForward& p, int64_t row) {
  const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
  T* y = static_cast<T*>(p.y) + row * p.columns;
  const auto* weight = static_cast<const float*>(p.weight);
  const auto* bias = static_cast<const float*>(p.bias);
  const float inverse_c = 1.0f / static_cast<float>(p.columns);

  Lanes total = broadcast(0.0f);
  for_columns(p.columns, [&](int64_t c, auto n) { total = total + load(x + c, n); });
  const float mean = sum(total) * inverse_c;

  Lanes deviations = broadcast(0.0f), squares = broadcast(0.0f);
  for_columns(p.columns, [&](int64_t c, auto n) {
    const Lanes deviation = keep(load(x + c, n) - broadcast(mean), n);
    deviations = deviations + deviation;
    squares = squares + deviation * deviation;
  });
  const float correction = sum(deviations) * inverse_c;
  const float variance = sum(squares) * inverse_c - correction * correction;
  const float rstd = 1.0f / std::sqrt((variance > 0.0f ? variance : 0.0f) + p.eps);

  for_columns(p.columns, [&](int64_t c, auto n) {
    Lanes out = (load(x + c, n) - broadcast(mean) - broadcast(correction)) * broadcast(rstd);
    if (weight != nullptr) out = out * load(weight + c, n);
    if (bias != nullptr) out = out + load(bias + c, n);
    store(y + c, out, n);
  });
  p.mean[row] = mean;
  p.rstd[row] = rstd;
}

// Writes dx of one row and adds the row's share to dweight and dbias (fp32 [C] each, null when not wanted).
template <class T>
void backward_row(const LayerNormBackward& p, int64_t row, float* dweight, float* dbias) {
  const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
  const T* dy = static_cast<const T*>(p.dy) + row * p.columns;
  T* dx = static_cast<T*>(p.dx) + row * p.columns;
  const auto* weight = static_cast<const float*>(p.weight);
  const float inverse_c = 1.0f / static_cast<float>(p.columns);
  const Lanes mean = broadcast(p.mean[row]);
  const Lanes rstd = broadcast(p.rstd[row]);
  const auto scaled_gradient = [&](int64_t c, auto n) {
    const Lanes g = load(dy + c, n);
    return weight != nullptr ? g * load(weight + c, n) : g;
  };

  // dy is zero past the end of the row, so only the sum without it needs keep().
  Lanes sum_xhat = broadcast(0.0f), sum_g = broadcast(0.0f), sum_g_xhat = broadcast(0.0f);
  for_columns(p.columns, [&](int64_t c, auto n) {
    const Lanes g = scaled_gradient(c, n);
    const Lanes xhat = keep((load(x + c, n) - mean) * rstd, n);
    sum_xhat = sum_xhat + xhat;
    sum_g = sum_g + g;
    sum_g_xhat = sum_g_xhat + g * xhat;
  });
  const Lanes correction = broadcast(sum(sum_xhat) * inverse_c);  // zero but for the rounding of the mean
  const Lanes mean_g = broadcast(sum(sum_g) * inverse_c);
  const Lanes mean_g_xhat = broadcast(sum(sum_g_xhat) * inverse_c) - correction * mean_g;

  for_columns(p.columns, [&](int64_t c, auto n) {
    const Lanes xhat = (load(x + c, n) - mean) * rstd - correction;
    store(dx + c, rstd * (scaled_gradient(c, n) - mean_g - xhat * mean_g_xhat), n);
    const Lanes g = load(dy + c, n);
    if (dweight != nullptr) store(dweight + c, load(dweight + c, n) + g * xhat, n);
    if (dbias != nullptr) store(dbias + c, load(dbias + c, n) + g, n);
  });
}

}  // namespace

Status layer_norm_forward(const LayerNormForward& p) {
  if (p.columns < 1) return bad_size("layer_norm: columns must be at least 1");
  return with_dtype(p.dtype, unknown_dtype(), [&](auto element) {
    const RowChunks chunks(p.rows);
    parallel_items(chunks.count, p.threads, [&](int64_t chunk) {
      for (int64_t row = chunks.begin(chunk); row < chunks.end(chunk); ++row) forward_row<decltype(element)>(p, row);
    });
    return Status{};
  });
}

Status layer_norm_backward(const LayerNormBackward& p) {
  if (p.columns < 1) return bad_size("layer_norm: columns must be at least 1");
  return with_dtype(p.dtype, unknown_dtype(), [&](auto element) {
    const RowChunks chunks(p.rows);
    const ColumnSums dweight{p.dweight, p.workspace, p.columns};
    const ColumnSums dbias{p.dbias, p.workspace + chunks.count * p.columns, p.columns};
    parallel_items(chunks.count, p.threads, [&](int64_t chunk) {
      float* dweight_part = dweight.start(chunk);
      float* dbias_part = dbias.start(chunk);
      for (int64_t row = chunks.begin(chunk); row < chunks.end(chunk); ++row)
        backward_row<decltype(element)>(p, row, dweight_part, dbias_part);
    });
    dweight.finish(chunks.count, p.threads);
    dbias.finish(chunks.count, p.threads);
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
