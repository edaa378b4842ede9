// Keys and values to a KV cache on the CPU.
#include "kv_cache/op.h"

#include <cstring>

#include "common/cpu/parallel.h"
#include "common/cpu/row_chunks.h"

namespace fasttfm {
namespace FASTTFM_ISA {
namespace {

void store_token(const KvCacheStore& p, int64_t token, size_t bytes) {
  const char* key = static_cast<const char*>(p.qkv) + ((p.heads + 2 * p.kv_heads) * token + p.heads) * bytes;
  const char* value = key + p.kv_heads * bytes;
  for (int64_t head = 0; head < p.kv_heads; ++head) {
    const int64_t row = p.places[token] + head * p.capacity;
    if (row < 0 || row >= p.rows) continue;
    std::memcpy(static_cast<char*>(p.keys) + row * bytes, key + head * bytes, bytes);
    std::memcpy(static_cast<char*>(p.values) + row * bytes, value + head * bytes, bytes);
  }
}

}  // namespace

Status kv_cache_store(const KvCacheStore& p) {
  const size_t bytes = static_cast<size_t>(p.head_dim) * (p.dtype == DType::f32 ? 4 : 2);
  parallel_rows(p.tokens, p.threads, [&](int64_t token) { store_token(p, token, bytes); });
  return {};
}

}  // namespace FASTTFM_ISA
}  // namespace fasttfm

FASTTFM_CPU_LAUNCHER(kv_cache_store, KvCacheStore)
