// Attention to a KV cache on the CPU. An item is a sequence and a head of keys: its query heads read blocks of keys and
// values that stay in the L1 cache, and the softmax is rescaled from block to block. All arithmetic is fp32.
#include "decode_attention/op.h"

#include <cstring>
#include <limits>

#include "common/cpu/parallel.h"
#include "common/cpu/simd.h"
#include "common/cpu/simd_math.h"

namespace fasttfm {
namespace FASTTFM_ISA {
namespace {

constexpr int64_t kKeys = 64;  // of a block
constexpr int64_t kMostColumns = 256;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The state of a query head: `out` is the sum of the weighted values, before the division by `sum`.
struct Head {
  float q[kMostColumns];  // times the scale
  float out[kMostColumns];
  float largest, sum;
};

template <class T>
FASTTFM_KERNEL void start_head(const DecodeAttention& p, const T* q, Head& head) {
  for_columns(p.head_dim, [&](int64_t c, auto n) {
    store(head.q + c, load(q + c, n) * broadcast(p.scale));  // columns after the last one are 0
    store(head.out + c, broadcast(0.0f));
  });
  head.largest = -kInfinity;
  head.sum = 0.0f;
}

// Adds `count` keys and values, up to kKeys.
template <class T>
FASTTFM_KERNEL void add_block(const DecodeAttention& p, const T* keys, const T* values, int64_t count, Head& head) {
  float weights[kKeys];
  float largest_score = -kInfinity;
  bool is_nan = false;
  for (int64_t key = 0; key < count; ++key) {
    Lanes products = broadcast(0.0f);
    for_columns(p.head_dim, [&](int64_t c, auto n) {
      products = products + load(keys + key * p.keys.token_stride + c, n) * load(head.q + c);
    });
    weights[key] = sum(products);
    is_nan = is_nan || weights[key] != weights[key];
    if (weights[key] > largest_score) largest_score = weights[key];
  }
  if (is_nan) largest_score = std::numeric_limits<float>::quiet_NaN();
  for (int64_t key = count; key < kKeys; ++key) weights[key] = -kInfinity;
  const float before = head.largest, now = is_nan || largest_score > before ? largest_score : before;
  if (now == -kInfinity) return;  // no weight is above 0
  float factors[kLanes];
  store(factors, exp(broadcast(before - now)));
  Lanes sums = broadcast(0.0f);
  for (int64_t key = 0; key < kKeys; key += kLanes) {
    const Lanes weight = exp(load(weights + key) - broadcast(now));
    store(weights + key, weight);
    sums = sums + weight;
  }
  const Lanes factor = broadcast(factors[0]);
  head.largest = now;
  head.sum = head.sum * factors[0] + sum(sums);
  for_columns(p.head_dim, [&](int64_t c, auto n) {
    Lanes out = load(head.out + c) * factor;
    for (int64_t key = 0; key < count; ++key)
      out = out + broadcast(weights[key]) * load(values + key * p.values.token_stride + c, n);
    store(head.out + c, out);
  });
}

template <class T>
FASTTFM_KERNEL void finish_head(const DecodeAttention& p, const Head& head, T* out) {
  const bool empty = head.largest == -kInfinity;
  const Lanes factor = broadcast(empty ? 0.0f : 1.0f / head.sum);
  for_columns(p.head_dim, [&](int64_t c, auto n) { store(out + c, load(head.out + c) * factor, n); });
}

template <class T>
void attend(const DecodeAttention& p, int64_t sequence, int64_t kv_head) {
  const int64_t length = p.lengths[sequence], d = p.head_dim, group = p.heads / p.kv_heads;
  const int64_t last = length < 0 ? 0 : length < p.room ? length : p.room - 1;
  const int64_t first = p.window_left >= 0 && last > p.window_left ? last - p.window_left : 0;
  T* keys = static_cast<T*>(p.keys.data) + sequence * p.keys.sequence_stride + kv_head * p.keys.head_stride;
  T* values = static_cast<T*>(p.values.data) + sequence * p.values.sequence_stride + kv_head * p.values.head_stride;
  const size_t bytes = static_cast<size_t>(d) * sizeof(T);
  std::memcpy(keys + last * p.keys.token_stride, static_cast<const T*>(p.k) + sequence * p.k_stride + kv_head * d,
              bytes);
  std::memcpy(values + last * p.values.token_stride, static_cast<const T*>(p.v) + sequence * p.v_stride + kv_head * d,
              bytes);
  Head head;
  for (int64_t each = kv_head * group; each < (kv_head + 1) * group; ++each) {
    start_head(p, static_cast<const T*>(p.q) + sequence * p.q_stride + each * d, head);
    for (int64_t key = first; key <= last; key += kKeys) {
      const int64_t count = last + 1 - key < kKeys ? last + 1 - key : kKeys;
      add_block(p, keys + key * p.keys.token_stride, values + key * p.values.token_stride, count, head);
    }
    finish_head(p, head, static_cast<T*>(p.out) + (sequence * p.heads + each) * d);
  }
}

}  // namespace

Status decode_attention(const DecodeAttention& p) {
  if (p.head_dim < 1 || p.head_dim > kMostColumns) return bad_size("decode_attention: heads have 1 to 256 columns");
  if (p.kv_heads < 1 || p.heads % p.kv_heads != 0 || p.room < 1)
    return bad_size("decode_attention: the heads of keys divide those of queries, and a cache has room for a token");
  return with_dtype(p.dtype, unknown_dtype(), [&](auto element) {
    parallel_items(p.sequences * p.kv_heads, p.threads,
                   [&](int64_t item) { attend<decltype(element)>(p, item / p.kv_heads, item % p.kv_heads); });
    return Status{};
  });
}

}  // namespace FASTTFM_ISA
}  // namespace fasttfm

FASTTFM_CPU_LAUNCHER(decode_attention, DecodeAttention)
