// Keys and values to a KV cache on NVIDIA GPUs. A thread copies 16 bytes of keys or values.
#include <cstdint>

#include "common/cuda/convert.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/rows.cuh"
#include "kv_cache/op.h"

namespace fasttfm {
namespace cuda {
namespace {

constexpr int kBlock = 256;

// Thread i takes vector i % vectors of head i / vectors % (2 kv_heads) of token i / vectors / (2 kv_heads), of the
// heads of keys, then of values. Neighbouring threads read neighbouring vectors.
template <class T>
__global__ void __launch_bounds__(kBlock) store_kernel(KvCacheStore p, int64_t items, int vectors) {
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  if (item >= items) return;
  const auto heads = static_cast<int>(2 * p.kv_heads), kv_heads = static_cast<int>(p.kv_heads);
  const int column = static_cast<int>(item % vectors) * kVector;
  const int64_t at = item / vectors, token = at / heads;
  const int head = static_cast<int>(at % heads);
  const bool is_value = head >= kv_heads;
  const int64_t row = p.places[token] + (is_value ? head - kv_heads : head) * p.capacity;
  if (row < 0 || row >= p.rows) return;
  const T* from = static_cast<const T*>(p.qkv) + ((p.heads + heads) * token + p.heads + head) * p.head_dim + column;
  store_packed(static_cast<T*>(is_value ? p.values : p.keys) + row * p.head_dim + column, load_packed(from));
}

}  // namespace

Status kv_cache_store(const KvCacheStore& p) {
  for (const void* tensor : {p.qkv, static_cast<const void*>(p.keys), static_cast<const void*>(p.values)})
    if (!rows_aligned(tensor, p.head_dim)) return misaligned_rows();
  const int64_t vectors = p.head_dim / kVector, items = p.tokens * 2 * p.kv_heads * vectors;
  if (items == 0) return {};
  const int64_t blocks = (items + kBlock - 1) / kBlock;
  if (blocks > INT32_MAX) return bad_size("kv_cache: too many tokens for one launch");
  const DeviceGuard guard(p.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  return with_dtype(p.dtype, unknown_dtype(), [&](auto element) {
    return launch(store_kernel<decltype(element)>, static_cast<unsigned>(blocks), kBlock, 0, p.stream, p, items,
                  static_cast<int>(vectors));
  });
}

}  // namespace cuda
}  // namespace fasttfm
