// The projection as an instance of the Hopper GEMM (common/cuda/hopper_product.cuh), with an epilogue that adds the
// bias.
#include <cstdint>

#include "common/cuda/hopper.cuh"
#include "common/cuda/hopper_product.cuh"
#include "qkv_projection/op.h"

namespace fasttfm {
namespace cuda {
namespace {

using Shape = ProductShape<192, 4, 2, 7>;

struct QkvEpilogue {
  struct Params {
    const void* bias;  // or null
    char* qkv;
    int rows, columns;
    int steps;
    int column_tiles, turns;
    int whole, split;
    DType bias_dtype;
  };
  static constexpr Major kB = Major::k;

  template <class T, class S>
  static __device__ __forceinline__ void finish(const Params& p, ProductMemory<S>& memory, int warp) {
    finish_vectors(p, memory, warp, [&](const PartWalk<S>& at, uint4 sums, const float (&bias)[kVector]) {
      float value[kVector];
      widen_vector<T>(sums, value);
#pragma unroll
      for (int i = 0; i < kVector; ++i) value[i] += bias[i];
      store_vector_if(at.there(), p.qkv + at.offset, narrow_vector<T>(value));
    });
  }
};

}  // namespace

Status qkv_projection(const QkvProjection& call) {
  const ProductOperands operands = {call.x,     call.weight, call.x_stride, call.inputs,
                                    call.dtype, call.device, call.stream};
  const Status status = check_product(operands, call.rows, call.columns, {call.x, call.weight, call.bias, call.qkv});
  if (status.code != StatusCode::ok || call.rows == 0) return status;
  const DeviceGuard guard(call.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  QkvEpilogue::Params p = {};
  p.bias = call.bias;
  p.qkv = static_cast<char*>(call.qkv);
  p.rows = static_cast<int>(call.rows);
  p.columns = static_cast<int>(call.columns);
  p.bias_dtype = call.bias_dtype;
  return run_product<Shape, QkvEpilogue>(operands, p);
}

}  // namespace cuda
}  // namespace fasttfm
