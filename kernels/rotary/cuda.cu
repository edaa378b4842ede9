// Rotary position embedding on NVIDIA GPUs. The formula is in reference.py.
//
// A thread rotates 8 pairs: it reads and writes 16 bytes of each half of the pairs, so y may be x. The rows of the
// tables, which the heads of a token share, come from L1.
#include <cstdint>

#include "common/cuda/convert.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/rows.cuh"
#include "rotary/op.h"

namespace fasttfm {
namespace cuda {
namespace {

constexpr int kBlock = 256;

// Thread i takes vector i % vectors of head i / vectors % heads of token i / vectors / heads. Of heads that are not
// rotated, and of columns after the pairs, it copies two vectors.
template <class T>
__global__ void __launch_bounds__(kBlock) rotary_kernel(Rotary p, int64_t items, int heads, int vectors) {
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  if (item >= items) return;
  const int vector = static_cast<int>(item % vectors);
  const int64_t row = item / vectors, token = row / heads;
  const int head = static_cast<int>(row % heads), column = vector * kVector, pairs = static_cast<int>(p.pairs);
  const T* x = static_cast<const T*>(p.x) + token * p.token_stride + head * p.head_stride;
  T* y = static_cast<T*>(p.y) + (token * p.heads + head) * p.columns;
  if (head >= p.rotary_heads || column >= pairs) {
    const int first = column < pairs ? column : pairs + column;
    if (first < p.columns) store_packed(y + first, load_packed(x + first));
    if (column < pairs) store_packed(y + pairs + column, load_packed(x + pairs + column));
    return;
  }
  const int64_t position = p.positions == nullptr ? token % p.sequence : p.positions[token];
  float c[kVector], s[kVector], a[kVector], b[kVector];
  if (position >= 0 && position < p.table_rows) {
    widen(load_packed(p.cos + position * pairs + column), c);
    widen(load_packed(p.sin + position * pairs + column), s);
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i) c[i] = s[i] = __int_as_float(0x7fc00000);
  }
  widen(load_packed(x + column), a);
  widen(load_packed(x + pairs + column), b);
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const float sine = s[i] * p.sign, first = a[i];
    a[i] = first * c[i] - b[i] * sine;
    b[i] = first * sine + b[i] * c[i];
  }
  store_packed(y + column, narrow<T>(a));
  store_packed(y + pairs + column, narrow<T>(b));
}

}  // namespace

Status rotary(const Rotary& p) {
  if (2 * p.pairs > p.columns) return bad_size("rotary: the pairs must fit into a head");
  if (p.pairs < 1 || p.pairs % kVector != 0 || p.columns % kVector != 0)
    return bad_size("rotary: the CUDA kernel takes pairs and columns that are multiples of 8");
  if (!rows_aligned(p.x, p.token_stride) || !rows_aligned(p.y, p.head_stride) || !rows_aligned(p.cos, 0) ||
      !rows_aligned(p.sin, 0))
    return misaligned_rows();
  const bool in_place = p.x == p.y;
  const int64_t heads = in_place ? p.rotary_heads : p.heads;
  const int64_t rest = (p.columns - 2 * p.pairs) / kVector, pairs = p.pairs / kVector;
  const int64_t vectors = in_place ? pairs : pairs + rest, items = p.tokens * heads * vectors;
  if (items == 0) return {};
  const int64_t blocks = (items + kBlock - 1) / kBlock;
  if (blocks > INT32_MAX) return bad_size("rotary: x is too large for one launch");
  const DeviceGuard guard(p.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  return with_dtype(p.dtype, unknown_dtype(), [&](auto element) {
    return launch(rotary_kernel<decltype(element)>, static_cast<unsigned>(blocks), kBlock, 0, p.stream, p, items,
                  static_cast<int>(heads), static_cast<int>(vectors));
  });
}

}  // namespace cuda
}  // namespace fasttfm
