// The projection as an instance of the Hopper GEMM (gemm/hopper/gemm.cuh), with an epilogue that adds the
// bias and rotates queries and keys.
#include <cstdint>

#include "common/cuda/hopper.cuh"
#include "gemm/hopper/gemm.cuh"
#include "gemm/hopper/gemm_in_place.cuh"
#include "qkv_projection/op.h"

namespace fasttfm {
namespace cuda {
namespace {

using Shape = GemmShape<192, 4, 2, 7>;

constexpr int kHeadColumns = 64, kPairs = kHeadColumns / 2;
static_assert(kHeadColumns == kTileColumns, "a part of a tile is a head");

struct QkvParams : GemmSizes {
  const void* bias;  // or null
  DType bias_dtype;
  const float *cos, *sin;
  const int64_t* positions;
  int sequence, table_rows;
  CUtensorMap map;  // of qkv
};

// Rotates a thread's 8 columns of a row. The columns of their pairs are in another lane, 32 columns away. Called by all
// threads of a warp together.
__device__ __forceinline__ void rotate(const QkvParams& p, int row, int column, bool there, float (&value)[kVector]) {
  int64_t position = -1;
  if (there) position = p.positions == nullptr ? row % p.sequence : p.positions[row];
  const bool known = position >= 0 && position < p.table_rows;
  const int64_t at = known ? position * kPairs + column % kPairs : 0;
  const bool second = column % kHeadColumns >= kPairs;
  float cos[kVector], sin[kVector];
  widen(load_packed(p.cos + at), cos);
  widen(load_packed(p.sin + at), sin);
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const float other = __shfl_xor_sync(0xffffffffu, value[i], kPairs / kVector);
    const float rotated = fmaf(second ? other : -other, sin[i], value[i] * cos[i]);
    value[i] = known ? rotated : __int_as_float(0x7fffffff);
  }
}

template <bool ROTARY>
struct QkvEpilogue {
  using Params = QkvParams;
  static constexpr Major kB = Major::k;

  template <class T, class S>
  static __device__ __forceinline__ void finish(const Params& p, GemmMemory<S>& memory, int warp) {
    finish_in_place(p, &p.map, memory, warp, [&](int row, int column, uint4 sums, const float (&bias)[kVector]) {
      float value[kVector];
      widen_vector<T>(sums, value);
#pragma unroll
      for (int i = 0; i < kVector; ++i) value[i] += bias[i];
      if constexpr (ROTARY) {  // the condition is the same for all columns of a head
        if (column < p.columns / 3 * 2) rotate(p, row, column, row < p.rows, value);
      }
      return narrow_vector<T>(value);
    });
  }
};

}  // namespace

Status qkv_projection(const QkvProjection& call) {
  const GemmOperands operands = {call.x,     call.weight, call.x_stride, call.inputs,
                                 call.dtype, call.device, call.stream,   call.dependent != 0};
  const Status status = check_gemm(operands, call.rows, call.columns, {call.x, call.weight, call.bias, call.qkv});
  if (status.code != StatusCode::ok || call.rows == 0) return status;
  const DeviceGuard guard(call.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  if (call.cos != nullptr && (call.columns % (3 * kHeadColumns) != 0 || call.sequence < 1))
    return bad_size("qkv_projection: rotary embedding needs heads of 64 columns");
  if (call.rows > INT32_MAX || call.table_rows > INT32_MAX) return bad_size("qkv_projection: too many rows");
  QkvParams p = {};
  p.bias = call.bias;
  p.rows = static_cast<int>(call.rows);
  p.columns = static_cast<int>(call.columns);
  p.bias_dtype = call.bias_dtype;
  p.cos = call.cos;
  p.sin = call.sin;
  p.positions = call.positions;
  p.sequence = static_cast<int>(call.sequence);
  p.table_rows = static_cast<int>(call.table_rows);
  const Status mapped = make_result_map<Shape>(&p.map, call.qkv, call.dtype, call.rows, call.columns);
  if (mapped.code != StatusCode::ok) return mapped;
  return call.cos == nullptr ? run_gemm<Shape, QkvEpilogue<false>>(operands, p)
                             : run_gemm<Shape, QkvEpilogue<true>>(operands, p);
}

}  // namespace cuda
}  // namespace fasttfm
