// The Hopper GEMM (gemm/hopper/gemm.cuh) over two pairs of operands: the first steps of K are those of x and
// b, the last ones those of t and c, whose columns after the rank are 0.
#include <algorithm>
#include <cstdint>

#include "adapted_gemm/op.h"
#include "common/cuda/hopper.cuh"
#include "gemm/hopper/gemm.cuh"
#include "gemm/hopper/gemm_in_place.cuh"

namespace fasttfm {
namespace cuda {
namespace {

using Shape = GemmShape<192, 4, 2, 7>;

struct AdaptedParams : GemmSizes {
  const void* bias;  // or null
  DType bias_dtype;
  const char* add;  // or null
  int first_steps;  // of x and b
  CUtensorMap map;  // of y
};

struct AdaptedMaps {
  CUtensorMap x, b, t, c;
};

template <class S, Major B>
struct AdaptedCopies {
  GemmMemory<S>& memory;
  GemmCopies<S, B> first, last;
  int first_steps;

  __device__ __forceinline__ void load_a(uint32_t slot, int step, int row) const {
    step < first_steps ? first.load_a(slot, step, row) : last.load_a(slot, step - first_steps, row);
  }
  __device__ __forceinline__ void load_b(uint32_t slot, int step, int column, int parts) const {
    step < first_steps ? first.load_b(slot, step, column, parts) : last.load_b(slot, step - first_steps, column, parts);
  }
};

template <class T, class S, bool ADDS>
__device__ __forceinline__ void finish(const AdaptedParams& p, GemmMemory<S>& memory, int warp) {
  finish_in_place(p, &p.map, memory, warp, [&](int row, int column, uint4 sums, const float (&bias)[kVector]) {
    float value[kVector];
    widen_vector<T>(sums, value);
#pragma unroll
    for (int i = 0; i < kVector; ++i) value[i] += bias[i];
    if constexpr (ADDS) {
      const bool there = row < p.rows && column < p.columns;
      float added[kVector];
      widen_vector<T>(load_stream_if(there, p.add + 2 * (static_cast<int64_t>(row) * p.columns + column)), added);
#pragma unroll
      for (int i = 0; i < kVector; ++i) value[i] += added[i];
    }
    return narrow_vector<T>(value);
  });
}

// gemm_kernel() with two pairs of operands.
template <class T, class S, Major B, bool ADDS>
__global__ void __cluster_dims__(S::kCluster, 1, 1) __launch_bounds__(S::kThreads, 1)
    adapted_gemm_kernel(const __grid_constant__ AdaptedMaps maps, const __grid_constant__ AdaptedParams p) {
  extern __shared__ char dynamic_memory[];
  auto& memory =
      *reinterpret_cast<GemmMemory<S>*>(dynamic_memory + (1024 - shared_address(dynamic_memory) % 1024) % 1024);
  const int warp = warp_uniform(static_cast<int>(threadIdx.x) / 32);
  griddepcontrol_launch_dependents();
  if (threadIdx.x == 0) memory.init();
  __syncthreads();
  if constexpr (S::kCluster > 1) cluster_sync();
  if (warp < S::kConsumerWarps) {
    consume<T, S, B>(p, memory, warp / 4);
  } else {
    if (warp > S::kConsumerWarps) {
      if constexpr (ADDS) griddepcontrol_wait();  // before y's addend is read
      finish<T, S, ADDS>(p, memory, warp - S::kConsumerWarps - 1);
    } else if (elect_one()) {
      prefetch_tensormap(&maps.x);
      prefetch_tensormap(&maps.b);
      produce<S>(
          p, AdaptedCopies<S, B>{memory, {memory, &maps.x, &maps.b, 0}, {memory, &maps.t, &maps.c, 0}, p.first_steps});
    }
    __syncwarp();
  }
  if constexpr (S::kCluster > 1) cluster_sync();
}

// The maps of a pair of operands with `inner` elements of K.
template <class S, Major B>
Status make_operand_maps(CUtensorMap* a_map, CUtensorMap* b_map, const AdaptedGemm& call, const void* a, const void* b,
                         int64_t inner) {
  constexpr bool kMn = B == Major::mn;
  const int64_t columns = call.columns;
  const Status status =
      make_tensor_map(a_map, {a, call.dtype, {inner, call.rows, 1, 1}, {inner, 0, 0}, {kTileColumns, S::kRows, 1, 1}});
  if (status.code != StatusCode::ok) return status;
  return make_tensor_map(b_map, {b,
                                 call.dtype,
                                 {kMn ? columns : inner, kMn ? inner : columns, 1, 1},
                                 {kMn ? columns : inner, 0, 0},
                                 {kTileColumns, kTileColumns / S::kCluster, 1, 1}});
}

template <class T, class S, Major B, bool ADDS>
Status launch_adapted(const AdaptedGemm& call, AdaptedParams p) {
  constexpr size_t kMemory = sizeof(GemmMemory<S>) + GemmMemory<S>::kSlack;
  static_assert(kMemory <= 227 * 1024, "more shared memory than an SM has");
  int multiprocessors = 0;
  AdaptedMaps maps;
  Status status = count_multiprocessors(call.device, &multiprocessors);
  if (status.code == StatusCode::ok)
    status = make_operand_maps<S, B>(&maps.x, &maps.b, call, call.x, call.b, call.inner);
  if (status.code == StatusCode::ok)
    status = make_operand_maps<S, B>(&maps.t, &maps.c, call, call.t, call.c, call.rank);
  if (status.code != StatusCode::ok) return status;
  const auto steps = [](int64_t inner) { return (inner + kTileColumns - 1) / kTileColumns; };
  p.first_steps = static_cast<int>(steps(call.inner));
  const int clusters = multiprocessors / S::kCluster;
  plan_cluster_tiles<S>(&p, (p.first_steps + steps(call.rank)) * kTileColumns, clusters);
  return launch_after(call.dependent != 0, adapted_gemm_kernel<T, S, B, ADDS>,
                      dim3(std::min(clusters, p.cluster_tiles) * S::kCluster), dim3(S::kThreads), kMemory, call.stream,
                      maps, p);
}

template <class T, Major B>
Status run_adapted(const AdaptedGemm& call, const AdaptedParams& p) {
  return call.add == nullptr ? launch_adapted<T, Shape, B, false>(call, p) : launch_adapted<T, Shape, B, true>(call, p);
}

template <class T>
Status run_type(const AdaptedGemm& call, const AdaptedParams& p) {
  return call.transposed != 0 ? run_adapted<T, Major::k>(call, p) : run_adapted<T, Major::mn>(call, p);
}

}  // namespace

Status adapted_gemm(const AdaptedGemm& call) {
  const GemmOperands operands = {call.x, call.b, call.inner, call.inner, call.dtype, call.device, call.stream};
  const Status status =
      check_gemm(operands, call.rows, call.columns, {call.x, call.b, call.t, call.c, call.bias, call.add, call.y});
  if (status.code != StatusCode::ok || call.rows == 0) return status;
  if (call.rank < kVector || call.rank % kVector != 0 || call.rank > call.inner)
    return bad_size("adapted_gemm: the rank must be a multiple of 8, and at most the inputs");
  const DeviceGuard guard(call.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  AdaptedParams p = {};
  p.bias = call.bias;
  p.bias_dtype = call.bias_dtype;
  p.add = static_cast<const char*>(call.add);
  p.rows = static_cast<int>(call.rows);
  p.columns = static_cast<int>(call.columns);
  const Status mapped = make_result_map<Shape>(&p.map, call.y, call.dtype, call.rows, call.columns);
  if (mapped.code != StatusCode::ok) return mapped;
  return call.dtype == DType::bf16 ? run_type<bf16_t>(call, p) : run_type<f16_t>(call, p);
}

}  // namespace cuda
}  // namespace fasttfm
