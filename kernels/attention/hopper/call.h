// What Hopper's attention kernels take, checked once for both directions.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "attention/op.h"
#include "common/cuda/launch.cuh"

namespace fasttfm {
namespace cuda {

inline Status check_hopper_call(const AttentionCall& call) {
  if (call.dtype != DType::bf16 && call.dtype != DType::f16) return unknown_dtype();
  if (call.head_dim != 64 && call.head_dim != 128) return bad_size("attention: Hopper's head dims are 64 and 128");
  if (call.window_left != -1 || call.window_right > 0 || !(call.scale > 0.0f))
    return {StatusCode::bad_value, "attention: Hopper's kernels attend to all keys or causally, scale is above 0"};
  if (call.sequences > 0x7fffffff / 2 || call.queries > 0x7fffffff / 2 || call.keys > 0x7fffffff / 2)
    return bad_size("attention: more tokens than 32 bits count");
  for (const void* tensor : {call.q, call.k, call.v})
    if (reinterpret_cast<uintptr_t>(tensor) % 16 != 0)
      return {StatusCode::bad_alignment, "attention: tensors start at multiples of 16 bytes"};
  for (int64_t stride :
       {call.q_sequence_stride, call.q_token_stride, call.q_head_stride, call.k_sequence_stride, call.k_token_stride,
        call.k_head_stride, call.v_sequence_stride, call.v_token_stride, call.v_head_stride})
    if (stride % 8 != 0) return {StatusCode::bad_alignment, "attention: strides are multiples of 8 elements"};
  int major = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, call.device);
  if (error != cudaSuccess) return status_of(error);
  if (major != 9) return {StatusCode::bad_value, "attention: these kernels are for compute capability 9.0 alone"};
  return {};
}

}  // namespace cuda
}  // namespace fasttfm
