// Argument checks of the Hopper attention kernels, forward and backward.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "attention/hopper/shared/window.h"
#include "attention/op.h"
#include "common/cuda/launch.cuh"

namespace fasttfm {
namespace cuda {

// Whether the window is neither full nor causal.
inline bool has_window(const AttentionCall& call) { return call.window_left != -1 || call.window_right > 0; }
inline Mask mask_of(const AttentionCall& call) {
  return has_window(call) ? Mask::window : call.window_right == 0 ? Mask::causal : Mask::full;
}

inline Status check_hopper_call(const AttentionCall& call) {
  if (call.dtype != DType::bf16 && call.dtype != DType::f16) return unknown_dtype();
  if (call.window_left < -1 || call.window_right < -1 || !(call.scale > 0.0f))
    return {StatusCode::bad_value, "attention: the Hopper kernels require windows of -1 or more, and scale > 0"};
  if (has_window(call) && call.seed != nullptr)
    return {StatusCode::bad_value, "attention: the Hopper kernels for windows have no dropout"};
  if (call.sequences > 0x7fffffff / 2 || call.queries > 0x7fffffff / 2 || call.keys > 0x7fffffff / 2)
    return bad_size("attention: too many tokens for 32-bit indices");
  for (const void* tensor : {call.q, call.k, call.v})
    if (reinterpret_cast<uintptr_t>(tensor) % 16 != 0)
      return {StatusCode::bad_alignment, "attention: tensors must be aligned to 16 bytes"};
  for (int64_t stride :
       {call.q_sequence_stride, call.q_token_stride, call.q_head_stride, call.k_sequence_stride, call.k_token_stride,
        call.k_head_stride, call.v_sequence_stride, call.v_token_stride, call.v_head_stride})
    if (stride % 8 != 0) return {StatusCode::bad_alignment, "attention: strides must be multiples of 8 elements"};
  int major = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, call.device);
  if (error != cudaSuccess) return status_of(error);
  if (major != 9) return {StatusCode::bad_value, "attention: these kernels require compute capability 9.0"};
  return {};
}

}  // namespace cuda
}  // namespace fasttfm
