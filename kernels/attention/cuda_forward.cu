// The launcher of Hopper's attention forward: which tile sizes serve which call (cuda_forward.cuh has the kernel).
#include "attention/cuda_forward.cuh"

#include <cstdint>

#include "attention/cuda_call.h"
#include "attention/op.h"
#include "common/hopper.cuh"

namespace fasttfm {
namespace cuda {
namespace {

template <int HEAD_DIM>
struct ShapeFor;
template <>
struct ShapeFor<64> {
  using Type = ForwardShape<64, 2, 128, 3>;
};
template <>
struct ShapeFor<128> {
  using Type = ForwardShape<128, 2, 128, 2>;
};

template <class T, int HEAD_DIM>
Status forward_of(const AttentionForward& call, int blocks, int* next) {
  using S = typename ShapeFor<HEAD_DIM>::Type;
  const bool causal = call.window_right == 0, dropout = call.seed != nullptr;
  if (causal && dropout) return launch_forward<T, S, true, true, true>(call, blocks, next);
  if (causal) return launch_forward<T, S, true, false, true>(call, blocks, next);
  if (dropout) return launch_forward<T, S, false, true, true>(call, blocks, next);
  return launch_forward<T, S, false, false, true>(call, blocks, next);
}

template <class T>
Status forward_of(const AttentionForward& call, int blocks, int* next) {
  return call.head_dim == 64 ? forward_of<T, 64>(call, blocks, next) : forward_of<T, 128>(call, blocks, next);
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
  if (call.cu_seqlens != nullptr || call.window_right == 0) {
    next = reinterpret_cast<int*>(call.workspace);
    if (error == cudaSuccess) error = cudaMemsetAsync(next, 0, sizeof(int), static_cast<cudaStream_t>(call.stream));
  }
  if (error != cudaSuccess) return status_of(error);
  return call.dtype == DType::bf16 ? forward_of<bf16_t>(call, blocks, next) : forward_of<f16_t>(call, blocks, next);
}

}  // namespace cuda
}  // namespace fasttfm
