// RMSNorm of heads on the CPU.
#include "head_norm/op.h"

#include <cmath>
#include <cstring>

#include "common/cpu/parallel.h"
#include "common/cpu/row_chunks.h"
#include "common/cpu/simd.h"

namespace fasttfm {
namespace FASTTFM_ISA {
namespace {

template <class T>
FASTTFM_KERNEL void forward_token(const HeadNorm& p, int64_t token) {
  const int64_t normed = p.heads + p.kv_heads, row = (normed + p.kv_heads) * p.head_dim;
  const T* x = static_cast<const T*>(p.x) + token * row;
  T* y = static_cast<T*>(p.y) + token * row;
  for (int64_t head = 0; head < normed; ++head, x += p.head_dim, y += p.head_dim) {
    const auto* weight = static_cast<const float*>(head < p.heads ? p.q_weight : p.k_weight);
    Lanes squares = broadcast(0.0f);
    for_columns(p.head_dim, [&](int64_t c, auto n) {
      const Lanes value = load(x + c, n);
      squares = squares + value * value;
    });
    const float rstd = 1.0f / std::sqrt(sum(squares) / static_cast<float>(p.head_dim) + p.eps);
    for_columns(p.head_dim, [&](int64_t c, auto n) {
      const Lanes scaled = load(x + c, n) * broadcast(rstd);
      store(y + c, weight == nullptr ? scaled : scaled * load(weight + c, n), n);
    });
    p.rstd[token * normed + head] = rstd;
  }
  std::memcpy(y, x, static_cast<size_t>(p.kv_heads * p.head_dim) * sizeof(T));
}

// dx = rstd * (g - xhat * mean(g * xhat)) with g = dy * weight; adds dy * xhat to the weights' sums.
template <class T>
FASTTFM_KERNEL void backward_token(const HeadNormBackward& p, int64_t token, float* q_sum, float* k_sum) {
  const int64_t normed = p.heads + p.kv_heads, row = (normed + p.kv_heads) * p.head_dim;
  const T* x = static_cast<const T*>(p.x) + token * row;
  T* dy = static_cast<T*>(p.dy) + token * row;
  for (int64_t head = 0; head < normed; ++head, x += p.head_dim, dy += p.head_dim) {
    const auto* weight = static_cast<const float*>(head < p.heads ? p.q_weight : p.k_weight);
    float* total = head < p.heads ? q_sum : k_sum;
    const float rstd = p.rstd[token * normed + head];
    Lanes products = broadcast(0.0f);
    for_columns(p.head_dim, [&](int64_t c, auto n) {
      Lanes g = load(dy + c, n);
      if (weight != nullptr) g = g * load(weight + c, n);
      products = products + g * load(x + c, n);
    });
    const float mean = sum(products) / static_cast<float>(p.head_dim), slope = rstd * (rstd * (rstd * mean));
    for_columns(p.head_dim, [&](int64_t c, auto n) {
      const Lanes gradient = load(dy + c, n), value = load(x + c, n), scaled = gradient * broadcast(rstd);
      if (total != nullptr) store(total + c, load(total + c, n) + scaled * value, n);
      const Lanes g = weight == nullptr ? scaled : scaled * load(weight + c, n);
      store(dy + c, g - broadcast(slope) * value, n);
    });
  }
}

}  // namespace

Status head_norm_forward(const HeadNorm& p) {
  return with_dtype(p.dtype, unknown_dtype(), [&](auto element) {
    parallel_rows(p.tokens, p.threads, [&](int64_t token) { forward_token<decltype(element)>(p, token); });
    return Status{};
  });
}

Status head_norm_backward(const HeadNormBackward& p) {
  return with_dtype(p.dtype, unknown_dtype(), [&](auto element) {
    const auto chunk = [&](int64_t, int64_t begin, int64_t end, float* const* parts) {
      for (int64_t token = begin; token < end; ++token) backward_token<decltype(element)>(p, token, parts[0], parts[1]);
    };
    sum_over_chunks(p.tokens, p.head_dim, p.threads, p.workspace, {p.dq_weight, p.dk_weight}, chunk);
    return Status{};
  });
}

}  // namespace FASTTFM_ISA

#ifdef FASTTFM_ISA_BASELINE
int64_t cpu::head_norm_workspace(int64_t tokens, int64_t head_dim) { return 2 * row_chunk_count(tokens) * head_dim; }
#endif

}  // namespace fasttfm

FASTTFM_CPU_LAUNCHER(head_norm_forward, HeadNorm)
FASTTFM_CPU_LAUNCHER(head_norm_backward, HeadNormBackward)
