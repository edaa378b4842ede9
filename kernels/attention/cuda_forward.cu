// The launcher of Hopper's attention forward: which tile sizes serve which call (cuda_forward.cuh has the kernel).
#include "attention/cuda_forward.cuh"

#include <cstdint>

#include "attention/cuda_call.h"
#include "attention/op.h"
#include "common/hopper.cuh"

namespace fasttfm {
namespace cuda {
namespace {

using Shape64 = ForwardShape<64, 2, 128, 3>;
using WideShape64 = ForwardShape<64, 3, 128, 3>;  // has no registers for dropout
using Shape128 = ForwardShape<128, 2, 128, 2>;

// With heads of 64 three warpgroups work faster than two, by two ninths in long sequences, but their tiles of 192
// queries reach further past the ends of sequences and, where attention is causal, past the diagonal.
bool is_wide(const AttentionForward& call) {
  const int64_t longest = call.cu_seqlens == nullptr ? call.queries : call.max_seqlen;
  if (call.seed != nullptr) return false;
  if (call.window_right == 0) return longest > 1024;
  return (longest + 191) / 192 * 192 * 9 < (longest + 127) / 128 * 128 * 11;
}

template <class T, class S, bool DROPOUT>
Status forward_of(const AttentionForward& call, int blocks, int* next) {
  return call.window_right == 0 ? launch_forward<T, S, true, DROPOUT, true>(call, blocks, next)
                                : launch_forward<T, S, false, DROPOUT, true>(call, blocks, next);
}

template <class T>
Status forward_of(const AttentionForward& call, int blocks, int* next) {
  const bool dropout = call.seed != nullptr;
  if (call.head_dim == 128)
    return dropout ? forward_of<T, Shape128, true>(call, blocks, next)
                   : forward_of<T, Shape128, false>(call, blocks, next);
  if (is_wide(call)) return forward_of<T, WideShape64, false>(call, blocks, next);
  return dropout ? forward_of<T, Shape64, true>(call, blocks, next) : forward_of<T, Shape64, false>(call, blocks, next);
}

}  // namespace

Status attention_forward(const AttentionForward& call) {
  const Status status = check_hopper_call(call);
  if (status.code != StatusCode::ok || call.queries == 0 || call.sequences == 0 && call.cu_seqlens == nullptr)
    return status;
  DeviceGuard guard(call.device);
  int blocks = 0;
  cudaError_t error = cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, call.device);
  // Tiles of unequal work go to whichever block is free; equal ones are dealt out.
  int* next = nullptr;
  const bool unequal = call.cu_seqlens != nullptr || call.lengths != nullptr || call.lengths_k != nullptr;
  if (unequal || call.window_right == 0) {
    next = reinterpret_cast<int*>(call.workspace);
    if (error == cudaSuccess) error = cudaMemsetAsync(next, 0, sizeof(int), static_cast<cudaStream_t>(call.stream));
  }
  if (error != cudaSuccess) return status_of(error);
  return call.dtype == DType::bf16 ? forward_of<bf16_t>(call, blocks, next) : forward_of<f16_t>(call, blocks, next);
}

}  // namespace cuda
}  // namespace fasttfm
