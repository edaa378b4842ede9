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
using Shape64 = ForwardShape<64, 3, 128, 3, DROPOUT>;
template <bool DROPOUT>
using Shape128 = ForwardShape<128, 2, 128, 2, DROPOUT>;

// How tiles are handed out (ForwardParams). A counter gives those of unequal work to whichever block is free; equal
// ones are dealt out, and so are whole heads of causal attention where there are many.
struct Deal {
  bool counted;
  int batched;
};

Deal deal_of(const AttentionForward& call, int blocks) {
  if (call.cu_seqlens != nullptr || call.lengths != nullptr || call.lengths_k != nullptr) return {true, 1};
  if (call.window_right != 0) return {false, 1};
  if (call.sequences * call.heads >= 8 * blocks) return {false, 0};
  constexpr int64_t kCached = 16 << 20;  // bytes of k and v whose heads go together
  const int64_t bytes = std::max<int64_t>(4 * call.head_dim * call.keys, 1);
  return {true, static_cast<int>(std::max<int64_t>(kCached / bytes, 1))};
}

template <class T, class S>
Status forward_of(const AttentionForward& call, int blocks, int* next, int batched) {
  return call.window_right == 0 ? launch_forward<T, S, true, false>(call, blocks, next, batched)
                                : launch_forward<T, S, false, false>(call, blocks, next, batched);
}

template <class T, template <bool> class SHAPE>
Status forward_of(const AttentionForward& call, int blocks, int* next, int batched) {
  return call.seed != nullptr ? forward_of<T, SHAPE<true>>(call, blocks, next, batched)
                              : forward_of<T, SHAPE<false>>(call, blocks, next, batched);
}

template <class T>
Status forward_of(const AttentionForward& call, int blocks, int* next, int batched) {
  return call.head_dim == 64 ? forward_of<T, Shape64>(call, blocks, next, batched)
                             : forward_of<T, Shape128>(call, blocks, next, batched);
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
  const Deal deal = deal_of(call, blocks);
  int* next = deal.counted ? reinterpret_cast<int*>(call.workspace) : nullptr;
  if (next != nullptr) error = cudaMemsetAsync(next, 0, sizeof(int), static_cast<cudaStream_t>(call.stream));
  if (error != cudaSuccess) return status_of(error);
  return call.dtype == DType::bf16 ? forward_of<bf16_t>(call, blocks, next, deal.batched)
                                   : forward_of<f16_t>(call, blocks, next, deal.batched);
}

}  // namespace cuda
}  // namespace fasttfm
