// The launcher of Hopper's attention forward: which tile sizes serve which call (cuda_forward.cuh has the kernel).
#include "attention/cuda_forward.cuh"

#include <algorithm>
#include <cstdint>

#include "attention/cuda_call.h"
#include "attention/op.h"
#include "common/hopper.cuh"

namespace fasttfm {
namespace cuda {
namespace {

template <bool DROPOUT>
using Shape64 = ForwardShape<64, 2, 128, 3, DROPOUT>;
using WideShape64 = ForwardShape<64, 3, 128, 3, false>;  // with dropout a third warpgroup is of no use
template <bool DROPOUT>
using Shape128 = ForwardShape<128, 2, 128, 2, DROPOUT>;

// With heads of 64 three warpgroups work faster than two, by two ninths in long sequences, but their tiles of 192
// queries reach further past the ends of sequences.
bool is_wide(const AttentionForward& call) {
  const int64_t longest = call.cu_seqlens == nullptr ? call.queries : call.max_seqlen;
  return call.seed == nullptr && (longest + 191) / 192 * 192 * 9 < (longest + 127) / 128 * 128 * 11;
}

// Whether a counter gives tiles of unequal work to whichever block is free; equal ones are dealt out.
struct Order {
  bool counted;
  int batched;  // see ForwardParams
};

Order order_of(const AttentionForward& call, int blocks) {
  if (call.cu_seqlens != nullptr || call.lengths != nullptr || call.lengths_k != nullptr) return {true, 1};
  // Few heads go together, but more than one: blocks that all read the same keys at the same time wait for each other.
  if (call.window_right != 0) return {false, 4};
  constexpr int64_t kCached = 16 << 20;  // bytes of k and v whose heads go together
  const int64_t bytes = std::max<int64_t>(4 * call.head_dim * call.keys, 1);
  const int batched = static_cast<int>(std::max<int64_t>(kCached / bytes, 1));
  // Causal tiles are unequal, but heads are not: where blocks come out even with whole ones, no counter has to be set.
  const int64_t heads = call.sequences * call.heads, rounds = (heads + blocks - 1) / blocks;
  return {rounds <= 3 || 20 * heads < 19 * rounds * blocks, batched};
}

template <class T, class S>
Status forward_of(const AttentionForward& call, int blocks, const Deal& deal) {
  constexpr bool kCausalTurns = S::kGroups == 2;  // three warpgroups have too unequal work for it
  return call.window_right == 0 ? launch_forward<T, S, true, kCausalTurns>(call, blocks, deal)
                                : launch_forward<T, S, false, true>(call, blocks, deal);
}

template <class T, template <bool> class SHAPE>
Status forward_of(const AttentionForward& call, int blocks, const Deal& deal) {
  return call.seed != nullptr ? forward_of<T, SHAPE<true>>(call, blocks, deal)
                              : forward_of<T, SHAPE<false>>(call, blocks, deal);
}

template <class T>
Status forward_of(const AttentionForward& call, int blocks, const Deal& deal) {
  if (call.head_dim == 128) return forward_of<T, Shape128>(call, blocks, deal);
  return is_wide(call) ? forward_of<T, WideShape64>(call, blocks, deal) : forward_of<T, Shape64>(call, blocks, deal);
}

}  // namespace

Status attention_forward(const AttentionForward& call) {
  const Status status = check_hopper_call(call);
  if (status.code != StatusCode::ok || call.queries == 0 || call.sequences == 0 && call.cu_seqlens == nullptr)
    return status;
  DeviceGuard guard(call.device);
  int blocks = 0;
  cudaError_t error = cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, call.device);
  if (error != cudaSuccess) return status_of(error);
  const Order order = order_of(call, blocks);
  const Deal deal = {order.counted ? reinterpret_cast<int*>(call.workspace) : nullptr, order.batched};
  if (order.counted) error = cudaMemsetAsync(deal.next, 0, sizeof(int), static_cast<cudaStream_t>(call.stream));
  if (error != cudaSuccess) return status_of(error);
  return call.dtype == DType::bf16 ? forward_of<bf16_t>(call, blocks, deal) : forward_of<f16_t>(call, blocks, deal);
}

}  // namespace cuda
}  // namespace fasttfm
