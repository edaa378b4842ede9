// The Hopper GEMM of FP8 operands (gemm/hopper/gemm_ring.cuh) whose epilogue computes the activation in FP8.
//
// For a tile of 128 x 128 with K = 1024 the tensor cores need 4,096 cycles. The epilogue has about 22 instructions and
// two special functions per element, which take 2,800 issue slots of each warp scheduler. Memory traffic in addition to
// the operands: 1 byte per element of the result, and 2 for h.
#include <cstdint>

#include "common/cuda/activation.cuh"
#include "common/cuda/fp8.cuh"
#include "common/cuda/hopper.cuh"
#include "common/cuda/launch.cuh"
#include "fp8/op.h"
#include "gemm/hopper/gemm.cuh"
#include "gemm/hopper/gemm_ring.cuh"

namespace fasttfm {
namespace cuda {
namespace {

using Shape = GemmShape<128, 4, 1, 11, 4, 5>;

struct Fp8GeluParams : GemmSizes {
  const void* bias;  // or null
  const float *x_inverse, *weight_inverse, *scale;
  float* amax;  // or null
  char* h;      // or null
  char* a;
  DType bias_dtype;
};

template <Activation A, bool KEEPS_H>
struct Fp8GeluEpilogue {
  using Params = Fp8GeluParams;
  static constexpr Major kB = Major::k;

  template <class T, class S>
  static __device__ __forceinline__ void finish(const Params& p, GemmMemory<S>& memory, int warp) {
    const float inverse = *p.x_inverse * *p.weight_inverse, scale = *p.scale;
    float most = 0.0f;
    finish_vectors(p, memory, warp, [&](const PartWalk<S>& at, uint4 sums, const float (&bias)[kVector]) {
      float value[kVector];
      widen_vector<T>(sums, value);
      if constexpr (KEEPS_H) {
        float product[kVector];
#pragma unroll
        for (int i = 0; i < kVector; ++i) product[i] = value[i] * inverse;
        store_vector_if(at.there(), p.h + at.offset, narrow_vector<T>(product));
      }
      // The scales are powers of two, so the multiplication is exact.
#pragma unroll
      for (int i = 0; i < kVector; ++i) value[i] = activated<A, false>(fmaf(value[i], inverse, bias[i])).value;
      if (at.there()) {
        most = largest(value, most);
        *reinterpret_cast<uint2*>(p.a + at.offset / 2) = round_vector<false>(value, scale);
      }
    });
    record_warp(p.amax, most);
  }
};

}  // namespace

Status fp8_gelu_gemm(const Fp8GeluGemm& call) {
  if (call.inputs % 16 != 0 || call.columns % 16 != 0) return bad_size("fp8: sizes must be multiples of 16");
  const GemmOperands operands = {call.x,      call.weight, call.inputs / 2, call.inputs / 2,
                                 DType::bf16, call.device, call.stream};
  const Status status = check_gemm(operands, call.rows, call.columns, {call.x, call.weight, call.bias, call.h, call.a});
  if (status.code != StatusCode::ok || call.rows == 0) return status;
  const DeviceGuard guard(call.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  Fp8GeluParams p = {};
  p.bias = call.bias;
  p.x_inverse = call.x_inverse;
  p.weight_inverse = call.weight_inverse;
  p.scale = call.scale;
  p.amax = call.amax;
  p.h = static_cast<char*>(call.h);
  p.a = static_cast<char*>(call.a);
  p.rows = static_cast<int>(call.rows);
  p.columns = static_cast<int>(call.columns);
  p.bias_dtype = call.bias_dtype;
  return with_activation(call.activation, [&](auto activation) {
    constexpr Activation kActivation = decltype(activation)::value;
    return call.h == nullptr ? run_fp8_gemm<e4m3_t, Shape, Fp8GeluEpilogue<kActivation, false>>(operands, p)
                             : run_fp8_gemm<e4m3_t, Shape, Fp8GeluEpilogue<kActivation, true>>(operands, p);
  });
}

}  // namespace cuda
}  // namespace fasttfm
