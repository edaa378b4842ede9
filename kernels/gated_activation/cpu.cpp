// Gated activations on the CPU: each element is read once and written once.
#include "gated_activation/op.h"

#include "common/cpu/activation.h"
#include "common/cpu/parallel.h"
#include "common/cpu/row_chunks.h"
#include "common/cpu/simd.h"

namespace fasttfm {
namespace FASTTFM_ISA {
namespace {

// The two halves of a row of 2 C columns, or of the bias; both null if that is null.
template <class T>
struct Halves {
  T* gate;
  T* up;

  Halves(T* row, int64_t columns, int gate_first)
      : gate(row == nullptr || gate_first ? row : row + columns),
        up(row == nullptr || !gate_first ? row : row + columns) {}
};

// A block of columns plus a bias, if there is one.
template <class T, class N>
inline Lanes load_biased(const T* row, const float* bias, int64_t c, N n) {
  return bias == nullptr ? load(row + c, n) : load(row + c, n) + load(bias + c, n);
}

template <class T, Activation A>
FASTTFM_KERNEL void forward_row(const GatedActivationForward& p, int64_t row) {
  const Halves x(static_cast<const T*>(p.x) + row * p.x_stride, p.columns, p.gate_first);
  const Halves bias(static_cast<const float*>(p.bias), p.columns, p.gate_first);
  T* y = static_cast<T*>(p.y) + row * p.columns;
  for_columns(p.columns, [&](int64_t c, auto n) {
    const Lanes gate = load_biased(x.gate, bias.gate, c, n);
    const Lanes up = load_biased(x.up, bias.up, c, n);
    store(y + c, activated<A, sizeof(T) == 4>(gate, n).value * up, n);
  });
}

// `dbias` is the chunk's partial sum, fp32 [2 C], or null.
template <class T, Activation A>
FASTTFM_KERNEL void backward_row(const GatedActivationBackward& p, int64_t row, float* dbias) {
  const Halves x(static_cast<const T*>(p.x) + row * p.x_stride, p.columns, p.gate_first);
  const Halves bias(static_cast<const float*>(p.bias), p.columns, p.gate_first);
  const T* dy = static_cast<const T*>(p.dy) + row * p.columns;
  const Halves dx(static_cast<T*>(p.dx) + row * 2 * p.columns, p.columns, p.gate_first);
  const Halves sum(dbias, p.columns, p.gate_first);
  for_columns(p.columns, [&](int64_t c, auto n) {
    const auto at_gate = activated<A, sizeof(T) == 4>(load_biased(x.gate, bias.gate, c, n), n);
    const Lanes up = load_biased(x.up, bias.up, c, n), gradient = load(dy + c, n);
    const Lanes dgate = gradient * up * at_gate.derivative, dup = gradient * at_gate.value;
    store(dx.gate + c, dgate, n);
    store(dx.up + c, dup, n);
    if (dbias != nullptr) {
      store(sum.gate + c, load(sum.gate + c, n) + dgate, n);
      store(sum.up + c, load(sum.up + c, n) + dup, n);
    }
  });
}

}  // namespace

Status gated_activation_forward(const GatedActivationForward& p) {
  if (p.columns < 1) return bad_size("gated_activation: columns must be at least 1");
  return with_dtype(p.dtype, unknown_dtype(), [&](auto element) {
    return with_activation(p.activation, [&](auto activation) {
      parallel_rows(p.rows, p.threads,
                    [&](int64_t row) { forward_row<decltype(element), decltype(activation)::value>(p, row); });
      return Status{};
    });
  });
}

Status gated_activation_backward(const GatedActivationBackward& p) {
  if (p.columns < 1) return bad_size("gated_activation: columns must be at least 1");
  return with_dtype(p.dtype, unknown_dtype(), [&](auto element) {
    return with_activation(p.activation, [&](auto activation) {
      const auto chunk = [&](int64_t, int64_t begin, int64_t end, float* const* parts) {
        for (int64_t row = begin; row < end; ++row)
          backward_row<decltype(element), decltype(activation)::value>(p, row, parts[0]);
      };
      sum_over_chunks(p.rows, 2 * p.columns, p.threads, p.workspace, {p.dbias}, chunk);
      return Status{};
    });
  });
}

}  // namespace FASTTFM_ISA

#ifdef FASTTFM_ISA_BASELINE
int64_t cpu::gated_activation_workspace(int64_t rows, int64_t columns) { return 2 * row_chunk_count(rows) * columns; }
#endif

}  // namespace fasttfm

FASTTFM_CPU_LAUNCHER(gated_activation_forward, GatedActivationForward)
FASTTFM_CPU_LAUNCHER(gated_activation_backward, GatedActivationBackward)
