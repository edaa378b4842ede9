// Activation of x + bias on the CPU: each element is read once and written once.
#include "bias_gelu/op.h"

#include "common/cpu/activation.h"
#include "common/cpu/parallel.h"
#include "common/cpu/row_chunks.h"
#include "common/cpu/simd.h"

namespace fasttfm {
namespace FASTTFM_ISA {
namespace {

template <class T, Activation A>
FASTTFM_KERNEL void forward_row(const BiasGeluForward& p, int64_t row) {
  const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
  T* y = static_cast<T*>(p.y) + row * p.columns;
  const auto* bias = static_cast<const float*>(p.bias);
  for_column_groups<4>(p.columns, [&](int64_t first, auto n, auto count) {
    Lanes u[count];
    for (int i = 0; i < count; ++i) {
      const int64_t c = first + i * kLanes;
      u[i] = load(x + c, n);
      if (bias != nullptr) u[i] = u[i] + load(bias + c, n);
    }
    for (int i = 0; i < count; ++i) u[i] = activated<A, sizeof(T) == 4>(u[i], n).value;
    for (int i = 0; i < count; ++i) store(y + first + i * kLanes, u[i], n);
  });
}

// `dbias` is the chunk's partial sum, fp32 [C], or null.
template <class T, Activation A>
FASTTFM_KERNEL void backward_row(const BiasGeluBackward& p, int64_t row, float* dbias) {
  const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
  const T* dy = static_cast<const T*>(p.dy) + row * p.columns;
  T* dx = static_cast<T*>(p.dx) + row * p.columns;
  T* y = p.y == nullptr ? nullptr : static_cast<T*>(p.y) + row * p.columns;
  const auto* bias = static_cast<const float*>(p.bias);
  for_column_groups<2>(p.columns, [&](int64_t first, auto n, auto count) {
    Lanes u[count];
    for (int i = 0; i < count; ++i) {
      const int64_t c = first + i * kLanes;
      u[i] = load(x + c, n);
      if (bias != nullptr) u[i] = u[i] + load(bias + c, n);
    }
    Activated at_u[count];
    for (int i = 0; i < count; ++i) at_u[i] = activated<A, sizeof(T) == 4>(u[i], n);
    for (int i = 0; i < count; ++i) {
      const int64_t c = first + i * kLanes;
      const Lanes out = load(dy + c, n) * at_u[i].derivative;
      store(dx + c, out, n);
      if (y != nullptr) store(y + c, at_u[i].value, n);
      if (dbias != nullptr) store(dbias + c, load(dbias + c, n) + out, n);
    }
  });
}

}  // namespace

Status bias_gelu_forward(const BiasGeluForward& p) {
  if (p.columns < 1) return bad_size("bias_gelu: columns must be at least 1");
  return with_dtype(p.dtype, unknown_dtype(), [&](auto element) {
    return with_activation(p.activation, [&](auto activation) {
      parallel_rows(p.rows, p.threads,
                    [&](int64_t row) { forward_row<decltype(element), decltype(activation)::value>(p, row); });
      return Status{};
    });
  });
}

Status bias_gelu_backward(const BiasGeluBackward& p) {
  if (p.columns < 1) return bad_size("bias_gelu: columns must be at least 1");
  return with_dtype(p.dtype, unknown_dtype(), [&](auto element) {
    return with_activation(p.activation, [&](auto activation) {
      const auto chunk = [&](int64_t, int64_t begin, int64_t end, float* const* parts) {
        for (int64_t row = begin; row < end; ++row)
          backward_row<decltype(element), decltype(activation)::value>(p, row, parts[0]);
      };
      sum_over_chunks(p.rows, p.columns, p.threads, p.workspace, {p.dbias}, chunk);
      return Status{};
    });
  });
}

}  // namespace FASTTFM_ISA

#ifdef FASTTFM_ISA_BASELINE
int64_t cpu::bias_gelu_workspace(int64_t rows, int64_t columns) { return row_chunk_count(rows) * columns; }
#endif

}  // namespace fasttfm

FASTTFM_CPU_LAUNCHER(bias_gelu_forward, BiasGeluForward)
FASTTFM_CPU_LAUNCHER(bias_gelu_backward, BiasGeluBackward)
