// attention backward for Hopper, head dim 128: one pass with the five products. Formulas: reference.py.
//
// A block takes 128 keys of a (sequence, head) at a time; for them it goes over all queries, 64 at a time. Three
// warpgroups share the work:
//
//   0  warp 0 brings tiles in by TMA, warp 1 adds dQ up in the workspace, warps 2 and 3 draw dropout's random bits
//   1, 2  64 keys each, keys by queries:  S^T = K Q^T, dP^T = V dO^T, then P^T and dS^T in registers, and from there
//         dV += P^T dO and dK += dS^T Q. dS^T meets in shared memory, and each of them computes 64 columns of dQ = dS K
//
// The order of products keeps the matrix units busy while numbers are computed: dP, dV, S of the next tile of queries
// (dS is computed beside it), dK, dQ (the next weights are computed beside it), dP of the next tile (beside it, dQ
// leaves). P is kept in 16 bits: there are no registers for more.
//
// Blocks share a (sequence, head) where there are few, or where the second level cache profits; counters order their
// additions to dQ. Every sum has one fixed order.
#include <algorithm>

#include "attention/cuda_backward_wide_products.cuh"
#include "attention/cuda_backward_wide_tiles.cuh"
#include "attention/cuda_call.h"
#include "attention/op.h"
#include "common/hopper.cuh"

namespace fasttfm {
namespace cuda {
namespace {

// ---- the kernels ----------------------------------------------------------------------------------------------------

constexpr int kWideProducerRegisters = 24, kWideConsumerRegisters = 240;

template <class T, bool DROPOUT, bool CAUSAL>
__global__ void __launch_bounds__(kWideThreads, 1) wide_backward_kernel(const __grid_constant__ WideParameters p) {
  extern __shared__ __align__(1024) char bytes[];
  auto& memory = *reinterpret_cast<WideMemory<CAUSAL>*>(bytes);
  const int warpgroup = uniform(threadIdx.x / kWarpgroup);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kQueryStages; ++i) {
      memory.q_full[i].initialize(1);
      memory.q_empty[i].initialize(8 * kWarpArrivals);
    }
    for (int i = 0; i < kGradientStages; ++i) {
      memory.dout_full[i].initialize(1);
      memory.dout_empty[i].initialize(8 * kWarpArrivals);
    }
    for (int i = 0; i < kKeyStages; ++i) {
      memory.k_full[i].initialize(1);
      memory.k_empty[i].initialize(8 * kWarpArrivals);
    }
    for (int i = 0; i < 2; ++i) {
      memory.kept_full[i].initialize(kWarpArrivals);
      memory.kept_empty[i].initialize(4 * kWarpArrivals);
    }
    memory.v_full.initialize(1);
    memory.v_empty.initialize(8 * kWarpArrivals);
    memory.raw.initialize(1);
    memory.dscores_full.initialize(8 * kWarpArrivals);
    memory.dscores_empty.initialize(8 * kWarpArrivals);
    memory.staging_free.initialize(1);
    memory.staging_done.initialize(8 * kWarpArrivals);
    fence_barriers();
    prefetch_map(&p.q);
    prefetch_map(&p.k);
    prefetch_map(&p.v);
    prefetch_map(&p.dout);
  }
  __syncthreads();
  if (warpgroup == 0) {
    lower_registers<kWideProducerRegisters>();
    const int warp = uniform(threadIdx.x / 32);
    if (warp == 0) {
      bring_wide_tiles<CAUSAL>(p, memory);
    } else if (warp == 1) {
      if (threadIdx.x % 32 == 0) sum_wide_dq<CAUSAL>(p, memory);
    } else if constexpr (DROPOUT) {
      draw_wide_kept<CAUSAL>(p, memory, warp - 2);
    }
  } else {
    raise_registers<kWideConsumerRegisters>();
    WideKeyWarpgroup<T, DROPOUT, CAUSAL> keys(p, memory, warpgroup - 1);
    for (int index = blockIdx.x / p.parts; index < p.sequences * p.heads; index += gridDim.x / p.parts)
      keys.over_unit(index);
  }
}

constexpr int kWideStatisticsThreads = 256;

// lse in units of log2, +infinity for rows that attend to nothing or are not there, and sum(out * dout) over dropout's
// scale: a block for each tile of queries of each head, 16 threads for a row.
template <class T>
__global__ void __launch_bounds__(kWideStatisticsThreads)
    wide_statistics_kernel(WideParameters p, const T* dout, const T* out, const float* lse, float* statistics,
                           float delta_scale) {
  const int head = blockIdx.y, sequence = blockIdx.z;
  const Span q = span_of(p.cu_seqlens, p.lengths, sequence, p.queries, p.max_seqlen);
  const int first = blockIdx.x * kQueries;
  if (first >= q.length) return;
  const int64_t token = (p.cu_seqlens == nullptr ? static_cast<int64_t>(sequence) * p.queries : q.first);
  const float* own_lse = lse + (p.cu_seqlens == nullptr ? (static_cast<int64_t>(sequence) * p.heads + head) * p.queries
                                                        : static_cast<int64_t>(head) * p.queries + q.first);
  const int64_t tile = head * p.tiles + first_tile(p.cu_seqlens, sequence, q.first, p.queries) + blockIdx.x;
  float* to = statistics + tile * 2 * kQueries;
  if (threadIdx.x == 0) p.turns[tile] = 0;
#pragma unroll
  for (int part = 0; part < kQueries * 16 / kWideStatisticsThreads; ++part) {
    const int i = part * kWideStatisticsThreads + threadIdx.x, row = i / 16;
    const bool there = first + row < q.length;
    const int64_t at = ((token + first + row) * p.heads + head) * kWideDim + i % 16 * 8;
    float a[kVector], b[kVector], sum = 0.0f;
    widen(load_packed_if(there, out + at, 0u), a);
    widen(load_packed_if(there, dout + at, 0u), b);
#pragma unroll
    for (int j = 0; j < kVector; ++j) sum += a[j] * b[j];
#pragma unroll
    for (int distance = 1; distance < 16; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (i % 16 == 0) {
      const float value = there ? own_lse[first + row] : -__int_as_float(0x7f800000);
      to[row] = value == -__int_as_float(0x7f800000) ? __int_as_float(0x7f800000) : value * 1.4426950408889634f;
      to[kQueries + row] = sum * delta_scale;
    }
  }
}

// ---- launchers ------------------------------------------------------------------------------------------------------

Status wide_map_of(CUtensorMap* map, const AttentionCall& call, const void* data, const int64_t (&strides)[3],
                   int64_t tokens, int rows) {
  const bool packed = call.cu_seqlens != nullptr;
  return make_tensor_map(map, {data,
                               call.dtype,
                               {kWideDim, call.heads, tokens, packed ? 1 : call.sequences},
                               {strides[2], strides[1], strides[0]},
                               {kTileColumns, 1, rows, 1}});
}

int64_t wide_tiles_of(int64_t sequences, int64_t queries, bool packed) {
  return packed ? queries / kQueries + sequences : sequences * ((queries + kQueries - 1) / kQueries);
}

// How many blocks share a (sequence, head): what takes the shortest time of the block that has most to do. Blocks that
// share follow one another some 3 steps apart. What they read and add to, queries, gradients and sums, takes 1 KB a
// token: if that does not fit into the second level cache for all that is under way, a step takes longer.
int parts_of(int64_t units, int64_t queries, int64_t keys, int processors) {
  const int64_t key_tiles = std::max<int64_t>((keys + kKeys - 1) / kKeys, 1);
  const int64_t query_tiles = (queries + kQueries - 1) / kQueries;
  int best = 1;
  double least = 0;
  for (int parts = 1; parts <= std::min<int64_t>(key_tiles, processors); ++parts) {
    const int64_t groups = processors / parts;
    const int64_t rounds = (units + groups - 1) / groups * ((key_tiles + parts - 1) / parts);
    const bool fits = std::min(units, groups) * queries <= 36 * 1024;
    const double time = (rounds * query_tiles + 3.0 * parts) * (fits ? 1.0 : 1.08);
    if (parts == 1 || time < least) {
      best = parts;
      least = time;
    }
  }
  return best;
}

template <class T>
Status launch_wide(const AttentionBackward& call, WideParameters& p, float* statistics) {
  int processors = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, call.device);
  if (error != cudaSuccess) return status_of(error);
  const dim3 tiles(static_cast<unsigned>((std::min(call.max_seqlen, call.queries) + kQueries - 1) / kQueries),
                   static_cast<unsigned>(call.heads), static_cast<unsigned>(call.sequences));
  if (tiles.x > 0) {
    const float delta_scale = call.dropout_scale > 0 ? 1 / call.dropout_scale : 0.0f;
    const Status status =
        launch(wide_statistics_kernel<T>, tiles, dim3(kWideStatisticsThreads), 0, call.stream, p,
               static_cast<const T*>(call.dout), static_cast<const T*>(call.out), call.lse, statistics, delta_scale);
    if (status.code != StatusCode::ok) return status;
  }
  const int64_t units = call.sequences * call.heads;
  p.parts =
      parts_of(units, std::min(call.max_seqlen, call.queries), std::min(call.max_seqlen_k, call.keys), processors);
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(units, processors / p.parts) * p.parts));
  const bool causal = call.window_right == 0;
  const auto start = [&](auto* kernel) {
    return launch(kernel, grid, dim3(kWideThreads), sizeof(WideMemory<false>), call.stream, p);
  };
  if (call.seed != nullptr)
    return causal ? start(wide_backward_kernel<T, true, true>) : start(wide_backward_kernel<T, true, false>);
  return causal ? start(wide_backward_kernel<T, false, true>) : start(wide_backward_kernel<T, false, false>);
}

}  // namespace

int64_t attention_backward_wide_workspace(int64_t sequences, int64_t heads, int64_t tokens, int64_t max_seqlen_k) {
  const int64_t tiles = wide_tiles_of(sequences, tokens, true);  // not fewer than those of dense sequences
  return heads * tiles * (2 * kQueries + 1 + (max_seqlen_k > kKeys ? kWideSumFloats : 0));
}

Status attention_backward_wide(const AttentionBackward& call) {
  Status status;
  if (call.kv_heads != call.heads) return bad_size("kv_heads differs from heads");
  if (call.sequences == 0 || call.heads == 0) return {};
  if (call.sequences > 65535 || call.heads > 65535) return bad_size("more than 65535 sequences or heads");
  const DeviceGuard guard(call.device);
  const bool packed = call.cu_seqlens != nullptr;
  const int64_t tiles = wide_tiles_of(call.sequences, call.queries, packed);
  WideParameters p{};
  const int64_t dout_strides[3] = {call.queries * call.heads * kWideDim, call.heads * kWideDim, kWideDim};
  const int64_t q_strides[3] = {call.q_sequence_stride, call.q_token_stride, call.q_head_stride};
  const int64_t k_strides[3] = {call.k_sequence_stride, call.k_token_stride, call.k_head_stride};
  const int64_t v_strides[3] = {call.v_sequence_stride, call.v_token_stride, call.v_head_stride};
  if (call.queries > 0) {
    status = wide_map_of(&p.q, call, call.q, q_strides, call.queries, kQueries);
    if (status.code == StatusCode::ok)
      status = wide_map_of(&p.dout, call, call.dout, dout_strides, call.queries, kQueries);
  }
  if (call.keys > 0) {
    if (status.code == StatusCode::ok) status = wide_map_of(&p.k, call, call.k, k_strides, call.keys, kKeys);
    if (status.code == StatusCode::ok) status = wide_map_of(&p.v, call, call.v, v_strides, call.keys, kKeys);
  }
  if (status.code != StatusCode::ok) return status;
  p.dq = {call.dq, call.dq_sequence_stride, call.dq_token_stride, call.dq_head_stride};
  p.dk = {call.dk, call.dk_sequence_stride, call.dk_token_stride, call.dk_head_stride};
  p.dv = {call.dv, call.dv_sequence_stride, call.dv_token_stride, call.dv_head_stride};
  p.cu_seqlens = call.cu_seqlens;
  p.cu_seqlens_k = call.cu_seqlens_k;
  p.lengths = call.lengths;
  p.lengths_k = call.lengths_k;
  p.seed = call.seed;
  p.statistics = call.workspace;
  p.sums = call.workspace + call.heads * tiles * 2 * kQueries;
  p.turns = reinterpret_cast<int*>(p.sums + (call.max_seqlen_k > kKeys ? call.heads * tiles * kWideSumFloats : 0));
  p.sequences = static_cast<int>(call.sequences);
  p.heads = static_cast<int>(call.heads);
  p.queries = static_cast<int>(call.queries);
  p.keys = static_cast<int>(call.keys);
  p.max_seqlen = static_cast<int>(call.max_seqlen);
  p.max_seqlen_k = static_cast<int>(call.max_seqlen_k);
  p.tiles = static_cast<int>(tiles);
  p.threshold = call.threshold;
  p.score_scale = call.scale * 1.4426950408889634f;
  p.dq_scale = call.scale * call.dropout_scale;
  p.dv_scale = call.dropout_scale;
  return call.dtype == DType::bf16  ? launch_wide<bf16_t>(call, p, call.workspace)
         : call.dtype == DType::f16 ? launch_wide<f16_t>(call, p, call.workspace)
                                    : unknown_dtype();
}

}  // namespace cuda
}  // namespace fasttfm
