// The launcher of Hopper's attention forward (cuda_forward.cuh has the kernel, cuda_forward_{64,128}.cu its tile sizes).
#include <cstdint>

#include "attention/cuda_call.h"
#include "attention/cuda_forward_heads.h"
#include "attention/op.h"
#include "common/launch.cuh"

namespace fasttfm {
namespace cuda {

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
  return call.head_dim == 64 ? forward_heads_64(call, blocks, next) : forward_heads_128(call, blocks, next);
}

}  // namespace cuda
}  // namespace fasttfm
