// dropout_add_layer_norm on the CPU. A row stays in L1 between the passes over it, so it is read from memory once. The
// random numbers of dropout are drawn for a span of columns right before they are used.
#include "dropout_add_layer_norm/op.h"

#include <cmath>

#include "common/cpu/dropout.h"
#include "common/cpu/moments.h"
#include "common/cpu/parallel.h"
#include "common/cpu/row_chunks.h"
#include "common/cpu/simd.h"

namespace fasttfm {
namespace FASTTFM_ISA {
namespace {

// z = residual + dropout(x + linear_bias), rounded to the residual's type R.
template <class T, class R, class D>
FASTTFM_KERNEL void add_row(const DropoutAddLayerNormForward& p, const D& dropout, int64_t row) {
  const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
  const R* residual = static_cast<const R*>(p.residual) + row * p.residual_stride;
  R* z = static_cast<R*>(p.z) + row * p.columns;
  const auto* linear_bias = static_cast<const float*>(p.linear_bias);
  const RowPosition position = dropout.positions(row);
  const bool last = row + 1 == p.rows;
  const T* next_x = last ? x : x + p.x_stride;
  const R* next_residual = last ? residual : residual + p.residual_stride;
  for_spans(p.columns, [&](int64_t first, int64_t width) {
    typename D::Span span;
    span.draw(dropout, position, first);
    for_columns(width, [&](int64_t offset, auto n) {
      const int64_t c = first + offset;
      prefetch(next_x + c);
      prefetch(next_residual + c);
      Lanes branch = load(x + c, n);
      if (linear_bias != nullptr) branch = branch + load(linear_bias + c, n);
      store(z + c, load(residual + c, n) + span(branch, offset), n);
    });
  });
}

// y = LayerNorm(z). z may be y itself.
template <class T, class R>
FASTTFM_KERNEL void normalize_row(const DropoutAddLayerNormForward& p, int64_t row) {
  const R* z = static_cast<const R*>(p.z) + row * p.columns;
  T* y = static_cast<T*>(p.y) + row * p.columns;
  const auto* weight = static_cast<const float*>(p.weight);
  const auto* bias = static_cast<const float*>(p.bias);
  const Moments statistics = moments(p.columns, [&](int64_t c, auto n) { return load(z + c, n); });
  const float rstd = 1.0f / std::sqrt(statistics.variance + p.eps);
  const Lanes mean = broadcast(statistics.mean), scale = broadcast(rstd),
              shift = broadcast(-statistics.correction * rstd);
  for_columns(p.columns, [&](int64_t c, auto n) {
    Lanes out = (load(z + c, n) - mean) * scale + shift;
    if (weight != nullptr) out = out * load(weight + c, n);
    if (bias != nullptr) out = out + load(bias + c, n);
    store(y + c, out, n);
  });
  if (p.mean == nullptr) return;
  p.mean[row] = statistics.mean;
  p.rstd[row] = rstd;
}

// A row of the backward pass and the row statistics that its gradient needs: with g = dy * weight and d = z - mean -
// correction,
//   dresidual = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dz = rstd * (g - mean_g) - slope * d + dz
template <class T, class R>
struct BackwardRow {
  const T* dy;
  const R* dz;  // or null
  const R* z;
  R* dresidual;
  T* dx;  // or null
  RowPosition position;
  float mean, correction, rstd, mean_g, slope;
};

template <class T, class R, class D>
FASTTFM_KERNEL BackwardRow<T, R> backward_row(const DropoutAddLayerNormBackward& p, const D& dropout, int64_t row) {
  const int64_t start = row * p.columns;
  const T* dy = static_cast<const T*>(p.dy) + start;
  const R* z = static_cast<const R*>(p.z) + start;
  const auto* weight = static_cast<const float*>(p.weight);
  const float inverse_c = 1.0f / static_cast<float>(p.columns);
  const float mean = p.mean[row], rstd = p.rstd[row];

  // dy is zero past the end of the row, so only the sum without a factor dy needs keep().
  Lanes deviations = broadcast(0.0f), sum_g = broadcast(0.0f), sum_g_deviation = broadcast(0.0f);
  for_columns(p.columns, [&](int64_t c, auto n) {
    Lanes g = load(dy + c, n);
    if (weight != nullptr) g = g * load(weight + c, n);
    const Lanes deviation = keep(load(z + c, n) - broadcast(mean), n);
    deviations = deviations + deviation;
    sum_g = sum_g + g;
    sum_g_deviation = sum_g_deviation + g * deviation;
  });
  const float correction = sum(deviations) * inverse_c;
  const float mean_g = sum(sum_g) * inverse_c;
  const float mean_g_d = sum(sum_g_deviation) * inverse_c - correction * mean_g;
  BackwardRow<T, R> out{};
  out.dy = dy;
  out.dz = p.dz != nullptr ? static_cast<const R*>(p.dz) + start : nullptr;
  out.z = z;
  out.dresidual = static_cast<R*>(p.dresidual) + start;
  out.dx = p.dx != nullptr ? static_cast<T*>(p.dx) + start : nullptr;
  out.position = dropout.positions(row);
  out.mean = mean;
  out.correction = correction;
  out.rstd = rstd;
  out.mean_g = mean_g;
  out.slope = rstd * (rstd * (rstd * mean_g_d));
  return out;
}

// The chunk's partial sums over rows: fp32 [C] each, null if not needed.
struct Shares {
  float* dweight;
  float* dbias;
  float* dlinear_bias;
};

constexpr int kRows = 4;

// Writes dresidual and dx of up to kRows rows and adds to the sums. A block of the sums is read and written once for
// all of the rows.
template <class T, class R, class D>
FASTTFM_KERNEL void backward_rows(const DropoutAddLayerNormBackward& p, const D& dropout, int64_t first_row, int count,
                                  const Shares& shares) {
  const auto* weight = static_cast<const float*>(p.weight);
  BackwardRow<T, R> rows[kRows];
  for (int r = 0; r < count; ++r) rows[r] = backward_row<T, R>(p, dropout, first_row + r);

  const int64_t ahead = first_row + 2 * count <= p.rows ? count * p.columns : 0;  // prefetch distance: the next group
  for_spans(p.columns, [&](int64_t first, int64_t width) {
    typename D::Span spans[kRows];
    for (int r = 0; r < count; ++r) spans[r].draw(dropout, rows[r].position, first);
    for_columns(width, [&](int64_t offset, auto n) {
      const int64_t c = first + offset;
      const Lanes w = weight != nullptr ? load(weight + c, n) : broadcast(1.0f);
      Lanes dw = shares.dweight != nullptr ? load(shares.dweight + c, n) : broadcast(0.0f);
      Lanes db = shares.dbias != nullptr ? load(shares.dbias + c, n) : broadcast(0.0f);
      Lanes dl = shares.dlinear_bias != nullptr ? load(shares.dlinear_bias + c, n) : broadcast(0.0f);
      // If unrolled, the rows' constants would occupy the registers of the sums.
#pragma GCC unroll 1
      for (int r = 0; r < count; ++r) {
        const BackwardRow<T, R>& row = rows[r];
        prefetch(row.z + ahead + c);
        prefetch(row.dy + ahead + c);
        const Lanes dy = load(row.dy + c, n);
        const Lanes d = load(row.z + c, n) - broadcast(row.mean) - broadcast(row.correction);
        const Lanes g = product(dy, w);  // rounded as in mean_g, so that g - mean_g is exactly 0 where it should be
        Lanes dresidual = broadcast(row.rstd) * (g - broadcast(row.mean_g)) - broadcast(row.slope) * d;
        if (row.dz != nullptr) dresidual = dresidual + load(row.dz + c, n);
        store(row.dresidual + c, dresidual, n);
        dw = dw + dy * broadcast(row.rstd) * d;
        db = db + dy;
        const Lanes dx = spans[r](dresidual, offset);
        if (row.dx != nullptr) store(row.dx + c, dx, n);
        dl = dl + dx;
      }
      if (shares.dweight != nullptr) store(shares.dweight + c, dw, n);
      if (shares.dbias != nullptr) store(shares.dbias + c, db, n);
      if (shares.dlinear_bias != nullptr) store(shares.dlinear_bias + c, dl, n);
    });
  });
}

}  // namespace

Status dropout_add_layer_norm_forward(const DropoutAddLayerNormForward& p) {
  if (p.columns < 1) return bad_size("dropout_add_layer_norm: columns must be at least 1");
  return with_stream_types(p.dtype, p.residual_dtype, [&](auto element, auto stream) {
    return with_dropout(p, [&](const auto& dropout) {
      parallel_rows(p.rows, p.threads, [&](int64_t row) {
        add_row<decltype(element), decltype(stream)>(p, dropout, row);
        normalize_row<decltype(element), decltype(stream)>(p, row);
      });
      return Status{};
    });
  });
}

Status dropout_add_layer_norm_backward(const DropoutAddLayerNormBackward& p) {
  if (p.columns < 1) return bad_size("dropout_add_layer_norm: columns must be at least 1");
  return with_stream_types(p.dtype, p.residual_dtype, [&](auto element, auto stream) {
    return with_dropout(p, [&](const auto& dropout) {
      const auto chunk = [&](int64_t, int64_t begin, int64_t end, float* const* parts) {
        const Shares shares{parts[0], parts[1], parts[2]};
        for_row_blocks<kRows>(begin, end, [&](int64_t row, int count) {
          backward_rows<decltype(element), decltype(stream)>(p, dropout, row, count, shares);
        });
      };
      sum_over_chunks(p.rows, p.columns, p.threads, p.workspace, {p.dweight, p.dbias, p.dlinear_bias}, chunk);
      return Status{};
    });
  });
}

}  // namespace FASTTFM_ISA

#ifdef FASTTFM_ISA_BASELINE
int64_t cpu::dropout_add_layer_norm_workspace(int64_t rows, int64_t columns) {
  return 3 * row_chunk_count(rows) * columns;
}
#endif

}  // namespace fasttfm

FASTTFM_CPU_LAUNCHER(dropout_add_layer_norm_forward, DropoutAddLayerNormForward)
FASTTFM_CPU_LAUNCHER(dropout_add_layer_norm_backward, DropoutAddLayerNormBackward)
