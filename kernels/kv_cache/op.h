// Writes the keys and values of packed tokens to a KV cache, as a step of layers (layers/run.h).
//
// Bytes per head of keys and values (e = bytes of an element): reads and writes D*e.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/status.h"

namespace fasttfm {

struct KvCacheStore {
  const void* qkv;        // [T, heads + 2 kv_heads, D], dtype, contiguous
  const int64_t* places;  // [T]: the row of the token's first head in the cache; its head h is at row + h * capacity
  void* keys;             // [rows, D], dtype, contiguous: [slots, kv_heads, capacity, D]
  void* values;           // as keys
  int64_t tokens;         // T
  int64_t rows;           // heads that would be outside of these rows are not written
  int64_t capacity;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;  // D
  DType dtype;
  int threads;   // CPU
  int device;    // CUDA
  void* stream;  // CUDA
};

namespace cpu {
Status kv_cache_store(const KvCacheStore&);
}  // namespace cpu

namespace cuda {
// D is a multiple of 8; tensors start at multiples of 16 bytes.
Status kv_cache_store(const KvCacheStore&);
}  // namespace cuda

}  // namespace fasttfm
