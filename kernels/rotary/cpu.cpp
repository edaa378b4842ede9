// Rotary position embedding on the CPU: each element is read once and written once.
#include "rotary/op.h"

#include <cstring>

#include "common/cpu/parallel.h"
#include "common/cpu/row_chunks.h"
#include "common/cpu/simd.h"

namespace fasttfm {
namespace FASTTFM_ISA {
namespace {

template <class T>
FASTTFM_KERNEL void rotate_token(const Rotary& p, int64_t token) {
  const int64_t position = p.positions == nullptr ? token % p.sequence : p.positions[token];
  const bool known = position >= 0 && position < p.table_rows;
  const float* cosines = p.cos + (known ? position * p.pairs : 0);
  const float* sines = p.sin + (known ? position * p.pairs : 0);
  const Lanes sign = broadcast(known ? p.sign : __builtin_nanf(""));
  for (int64_t head = 0; head < p.heads; ++head) {
    const T* x = static_cast<const T*>(p.x) + token * p.token_stride + head * p.head_stride;
    T* y = static_cast<T*>(p.y) + (token * p.heads + head) * p.columns;
    if (head >= p.rotary_heads) {
      if (y != x) std::memcpy(y, x, p.columns * sizeof(T));
      continue;
    }
    for_columns(p.pairs, [&](int64_t c, auto n) {
      const Lanes a = load(x + c, n), b = load(x + p.pairs + c, n);
      const Lanes sine = load(sines + c, n) * sign, cosine = known ? load(cosines + c, n) : sign;
      store(y + c, a * cosine - b * sine, n);
      store(y + p.pairs + c, a * sine + b * cosine, n);
    });
    const int64_t rotated = 2 * p.pairs;
    if (y != x) std::memcpy(y + rotated, x + rotated, (p.columns - rotated) * sizeof(T));
  }
}

}  // namespace

Status rotary(const Rotary& p) {
  if (2 * p.pairs > p.columns) return bad_size("rotary: the pairs must fit into a head");
  return with_dtype(p.dtype, unknown_dtype(), [&](auto element) {
    const RowChunks chunks(p.tokens);
    parallel_items(chunks.count, p.threads, [&](int64_t chunk) {
      for (int64_t token = chunks.begin(chunk); token < chunks.end(chunk); ++token)
        rotate_token<decltype(element)>(p, token);
    });
    return Status{};
  });
}

}  // namespace FASTTFM_ISA
}  // namespace fasttfm

FASTTFM_CPU_LAUNCHER(rotary, Rotary)
