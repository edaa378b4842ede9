// LayerNorm of GELU(x + linear_bias) on the CPU. A row's GELU (and in the backward its derivative) is computed once and
// stored in fp32 buffers, which stay in L1 between the passes over the row.
#include "gelu_layer_norm/op.h"

#include <cmath>

#include "common/cpu/activation.h"
#include "common/cpu/moments.h"
#include "common/cpu/parallel.h"
#include "common/cpu/row_chunks.h"
#include "common/cpu/simd.h"

namespace fasttfm {
namespace FASTTFM_ISA {
namespace {

// `h` is the chunk's buffer, fp32 [C].
template <class T, Activation A>
FASTTFM_KERNEL void forward_row(const GeluLayerNormForward& p, int64_t row, float* h) {
  const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
  T* y = static_cast<T*>(p.y) + row * p.columns;
  const auto* linear_bias = static_cast<const float*>(p.linear_bias);
  const auto* weight = static_cast<const float*>(p.weight);
  const auto* bias = static_cast<const float*>(p.bias);

  for_columns(p.columns, [&](int64_t c, auto n) {
    Lanes u = load(x + c, n);
    if (linear_bias != nullptr) u = u + load(linear_bias + c, n);
    store(h + c, activated<A, true>(u, n).value, n);
  });
  const Moments statistics = moments(p.columns, [&](int64_t c, auto n) { return load(h + c, n); });
  const float rstd = 1.0f / std::sqrt(statistics.variance + p.eps);
  const Lanes mean = broadcast(statistics.mean), scale = broadcast(rstd),
              shift = broadcast(-statistics.correction * rstd);
  for_columns(p.columns, [&](int64_t c, auto n) {
    Lanes out = (load(h + c, n) - mean) * scale + shift;
    if (weight != nullptr) out = out * load(weight + c, n);
    if (bias != nullptr) out = out + load(bias + c, n);
    store(y + c, out, n);
  });
  p.mean[row] = statistics.mean;
  p.rstd[row] = rstd;
}

// A chunk's memory, fp32 [C] each: two buffers for the current row, and three sums over the chunk's rows (null if not
// needed).
struct ChunkMemory {
  float* deviation;
  float* derivative;
  float* dlinear_bias;
  float* dweight;
  float* dbias;
};

template <class N>
inline void add_to(float* sum, const Lanes& term, N n) {
  store(sum, load(sum, n) + term, n);
}

// With d = h - mean - correction (correction: the rounding error of the mean) and g = dy * weight,
//   dx = gelu' * rstd * (g - mean(g) - hhat * mean(g * hhat)) = gelu' * (rstd * (g - mean_g) - slope * d)
template <class T, Activation A>
FASTTFM_KERNEL void backward_row(const GeluLayerNormBackward& p, int64_t row, const ChunkMemory& memory) {
  const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
  const T* dy = static_cast<const T*>(p.dy) + row * p.columns;
  T* dx = static_cast<T*>(p.dx) + row * p.columns;
  const auto* linear_bias = static_cast<const float*>(p.linear_bias);
  const auto* weight = static_cast<const float*>(p.weight);
  const float inverse_c = 1.0f / static_cast<float>(p.columns);
  const float mean = p.mean[row], rstd = p.rstd[row];

  // dy is zero past the end of the row, so only the sum without a factor dy needs keep().
  Lanes deviations = broadcast(0.0f), sum_g = broadcast(0.0f), sum_g_deviation = broadcast(0.0f);
  for_columns(p.columns, [&](int64_t c, auto n) {
    Lanes u = load(x + c, n);
    if (linear_bias != nullptr) u = u + load(linear_bias + c, n);
    const Activated h = activated<A, true>(u, n);
    const Lanes deviation = keep(h.value - broadcast(mean), n);
    store(memory.deviation + c, deviation, n);
    store(memory.derivative + c, h.derivative, n);
    Lanes g = load(dy + c, n);
    if (weight != nullptr) g = g * load(weight + c, n);
    deviations = deviations + deviation;
    sum_g = sum_g + g;
    sum_g_deviation = sum_g_deviation + g * deviation;
  });
  const float correction = sum(deviations) * inverse_c;
  const float mean_g = sum(sum_g) * inverse_c;
  const float mean_g_d = sum(sum_g_deviation) * inverse_c - correction * mean_g;
  const float slope = rstd * (rstd * (rstd * mean_g_d));

  for_columns(p.columns, [&](int64_t c, auto n) {
    const Lanes gradient = load(dy + c, n), d = load(memory.deviation + c, n) - broadcast(correction);
    // Rounded as in mean_g, so that the difference is exactly zero where it should be.
    const Lanes g = weight != nullptr ? product(gradient, load(weight + c, n)) : gradient;
    const Lanes dh = broadcast(rstd) * (g - broadcast(mean_g)) - broadcast(slope) * d;
    const Lanes out = dh * load(memory.derivative + c, n);
    store(dx + c, out, n);
    if (memory.dlinear_bias != nullptr) add_to(memory.dlinear_bias + c, out, n);
    if (memory.dweight != nullptr) add_to(memory.dweight + c, gradient * broadcast(rstd) * d, n);
    if (memory.dbias != nullptr) add_to(memory.dbias + c, gradient, n);
  });
}

}  // namespace

Status gelu_layer_norm_forward(const GeluLayerNormForward& p) {
  if (p.columns < 1) return bad_size("gelu_layer_norm: columns must be at least 1");
  return with_dtype(p.dtype, unknown_dtype(), [&](auto element) {
    return with_gelu(p.activation, [&](auto gelu) {
      const RowChunks chunks(p.rows);
      parallel_items(chunks.count, p.threads, [&](int64_t chunk) {
        for (int64_t row = chunks.begin(chunk); row < chunks.end(chunk); ++row)
          forward_row<decltype(element), decltype(gelu)::value>(p, row, p.workspace + chunk * p.columns);
      });
      return Status{};
    });
  });
}

Status gelu_layer_norm_backward(const GeluLayerNormBackward& p) {
  if (p.columns < 1) return bad_size("gelu_layer_norm: columns must be at least 1");
  return with_dtype(p.dtype, unknown_dtype(), [&](auto element) {
    return with_gelu(p.activation, [&](auto gelu) {
      const auto chunk = [&](int64_t index, int64_t begin, int64_t end, float* const* parts) {
        float* rows = p.workspace + 2 * index * p.columns;
        const ChunkMemory memory{rows, rows + p.columns, parts[0], parts[1], parts[2]};
        for (int64_t row = begin; row < end; ++row)
          backward_row<decltype(element), decltype(gelu)::value>(p, row, memory);
      };
      float* sums = p.workspace + 2 * row_chunk_count(p.rows) * p.columns;  // after two rows of each chunk
      sum_over_chunks(p.rows, p.columns, p.threads, sums, {p.dlinear_bias, p.dweight, p.dbias}, chunk);
      return Status{};
    });
  });
}

}  // namespace FASTTFM_ISA

#ifdef FASTTFM_ISA_BASELINE
int64_t cpu::gelu_layer_norm_forward_workspace(int64_t rows, int64_t columns) {
  return row_chunk_count(rows) * columns;
}
int64_t cpu::gelu_layer_norm_backward_workspace(int64_t rows, int64_t columns) {
  return 5 * row_chunk_count(rows) * columns;
}
#endif

}  // namespace fasttfm

FASTTFM_CPU_LAUNCHER(gelu_layer_norm_forward, GeluLayerNormForward)
FASTTFM_CPU_LAUNCHER(gelu_layer_norm_backward, GeluLayerNormBackward)
