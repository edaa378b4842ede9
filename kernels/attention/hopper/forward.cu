// The launcher of Hopper's attention forward: which tile sizes serve which call (forward_kernel.cuh has the kernel).
#include "attention/hopper/forward_kernel.cuh"

#include <algorithm>
#include <cstdint>

#include "attention/hopper/call.h"
#include "attention/op.h"
#include "common/cuda/hopper.cuh"

namespace fasttfm {
namespace cuda {
namespace {

// Heads of 64: four warpgroups of small steps hide each other's waits best. Without dropout, tiles of 128 queries are
// for calls that one round of them serves; steps of 128 keys, in tiles of 192 queries, pay where there are many.
template <bool DROPOUT>
using Shape64 = ForwardShape<64, 4, 64, 8, DROPOUT>;
using SmallShape64 = ForwardShape<64, 2, 128, 3, false>;
using LongShape64 = ForwardShape<64, 3, 128, 3, false>;
template <bool DROPOUT>
using Shape128 = ForwardShape<128, 2, 128, 2, DROPOUT>;

int64_t round_up(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

int64_t longest_of(const AttentionForward& call) { return call.cu_seqlens == nullptr ? call.queries : call.max_seqlen; }

// Whether the blocks have equal numbers of keys and queries to go over.
bool is_even(const AttentionForward& call) {
  return call.cu_seqlens == nullptr && call.lengths == nullptr && call.lengths_k == nullptr;
}

bool is_small(const AttentionForward& call, int blocks) {
  return call.seed == nullptr && call.sequences * call.heads * (round_up(longest_of(call), 128) / 128) <= blocks;
}

// From 2048 queries on, or where tiles of 192 reach less far past the ends of sequences: a twentieth is their gain.
bool is_long(const AttentionForward& call) {
  const int64_t longest = longest_of(call);
  if (call.seed != nullptr) return false;
  if (longest >= 2048) return true;
  return is_even(call) && call.window_right != 0 && longest > 256 &&
         19 * round_up(longest, 192) < 20 * round_up(longest, 256);
}

// Whether a counter gives tiles of unequal work to whichever block is free; else they are dealt out.
struct Order {
  bool counted;
  int batched;  // see ForwardParams
};

Order order_of(const AttentionForward& call, int blocks) {
  const int64_t heads = call.sequences * call.heads, rounds = (heads + blocks - 1) / blocks;
  // Where a tile is a whole sequence and a block has many, they come out even by themselves. Setting the counter takes
  // a launch of its own.
  if (!is_even(call)) return {call.head_dim != 64 || longest_of(call) > Shape64<false>::kQueries || rounds < 8, 1};
  // Few heads go together, but more than one: blocks that all read the same keys at the same time wait for each other.
  if (call.window_right != 0) return {false, 4};
  constexpr int64_t kCached = 16 << 20;  // bytes of k and v whose heads go together
  const int64_t bytes = std::max<int64_t>(4 * call.head_dim * call.keys, 1);
  const int batched = static_cast<int>(std::max<int64_t>(kCached / bytes, 1));
  // Causal tiles are unequal, but heads are not.
  return {rounds <= 3 || 20 * heads < 19 * rounds * blocks, batched};
}

template <class T, class S>
Status forward_of(const AttentionForward& call, int blocks, const Deal& deal) {
  // Four warpgroups are better off without turns; causal, three have too unequal work for it.
  return call.window_right == 0 ? launch_forward<T, S, true, S::kGroups == 2>(call, blocks, deal)
                                : launch_forward<T, S, false, (S::kGroups < 4)>(call, blocks, deal);
}

template <class T, template <bool> class SHAPE>
Status forward_of(const AttentionForward& call, int blocks, const Deal& deal) {
  return call.seed != nullptr ? forward_of<T, SHAPE<true>>(call, blocks, deal)
                              : forward_of<T, SHAPE<false>>(call, blocks, deal);
}

template <class T>
Status forward_of(const AttentionForward& call, int blocks, const Deal& deal) {
  if (call.head_dim == 128) return forward_of<T, Shape128>(call, blocks, deal);
  if (is_small(call, blocks)) return forward_of<T, SmallShape64>(call, blocks, deal);
  return is_long(call) ? forward_of<T, LongShape64>(call, blocks, deal) : forward_of<T, Shape64>(call, blocks, deal);
}

}  // namespace

Status attention_forward(const AttentionForward& call) {
  Status status = check_hopper_call(call);
  if (status.code != StatusCode::ok || call.queries == 0 || call.sequences == 0 && call.cu_seqlens == nullptr)
    return status;
  const DeviceGuard guard(call.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  int blocks = 0;
  status = count_multiprocessors(call.device, &blocks);
  if (status.code != StatusCode::ok) return status;
  const Order order = order_of(call, blocks);
  const Deal deal = {order.counted ? reinterpret_cast<int*>(call.workspace) : nullptr, order.batched};
  if (order.counted)
    status = status_of(cudaMemsetAsync(deal.next, 0, sizeof(int), static_cast<cudaStream_t>(call.stream)));
  if (status.code != StatusCode::ok) return status;
  return call.dtype == DType::bf16 ? forward_of<bf16_t>(call, blocks, deal) : forward_of<f16_t>(call, blocks, deal);
}

}  // namespace cuda
}  // namespace fasttfm
