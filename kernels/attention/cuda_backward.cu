// attention backward for Hopper, head dim 64: one pass with the five products. Formulas: reference.py.
//
// A block works on one (sequence, head) after another. It takes 128 keys at a time; for them it goes over all queries,
// 64 at a time. Four warpgroups share the work:
//
//   0  producer: warp 0 brings tiles in by TMA, warps 1 to 3 draw dropout's random bits
//   1, 2  64 keys each, keys by queries:  S^T = K Q^T, dP^T = V dO^T, then P^T and dS^T in registers, and from there
//         dV += P^T dO and dK += dS^T Q; dS^T is left in shared memory
//   3  dQ += dS K of all 128 keys. Its sums over keys stand in shared memory up to kOnChipQueries queries, else in the
//      workspace, each thread's own in its own place, so that nothing has to be ordered.
//
// Every sum has one fixed order.
#include <algorithm>

#include "attention/cuda_backward_products.cuh"
#include "attention/cuda_backward_tiles.cuh"
#include "attention/cuda_backward_wide.h"
#include "attention/cuda_call.h"
#include "attention/op.h"
#include "common/hopper.cuh"

namespace fasttfm {
namespace cuda {
namespace {

// ---- the kernels -----------------------------------------------------------------------------------------------------

template <class T, bool DROPOUT, bool CAUSAL, bool ON_CHIP>
__global__ void __launch_bounds__(kThreads, 1) backward_kernel(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) char bytes[];
  auto& memory = *reinterpret_cast<Memory<ON_CHIP>*>(bytes);
  const int warpgroup = uniform(threadIdx.x / kWarpgroup);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Memory<ON_CHIP>::kStages; ++i) {
      memory.q_full[i].initialize(1);
      memory.q_empty[i].initialize(8);
    }
    for (int i = 0; i < 2; ++i) {
      memory.k_full[i].initialize(1);
      memory.k_empty[i].initialize(4);
      memory.kept_full[i].initialize(2);
    }
    memory.kept_empty.initialize(8);
    memory.v_full.initialize(1);
    memory.v_empty.initialize(8);
    memory.raw.initialize(1);
    memory.dscores_full.initialize(8);
    memory.dscores_empty.initialize(4);
    fence_barriers();
    prefetch_map(&p.q);
    prefetch_map(&p.k);
    prefetch_map(&p.v);
    prefetch_map(&p.dout);
  }
  __syncthreads();
  if (warpgroup == 0) {
    lower_registers<kProducerRegisters>();
    const int warp = uniform(threadIdx.x / 32);
    if (warp == 0)
      bring_tiles<CAUSAL>(p, memory);
    else if constexpr (DROPOUT)
      draw_kept<CAUSAL>(p, memory, warp - 1);
  } else if (warpgroup == 3) {
    lower_registers<kSumRegisters>();
    sum_dq<T, CAUSAL>(p, memory);
  } else {
    raise_registers<kConsumerRegisters>();
    KeyWarpgroup<T, DROPOUT, CAUSAL, ON_CHIP> keys(p, memory, warpgroup - 1);
    for (int index = blockIdx.x; index < p.sequences * p.heads; index += gridDim.x)
      keys.over_unit(Unit<CAUSAL>(p, index));
  }
}

constexpr int kStatisticsThreads = 256;

// lse in units of log2, +infinity for rows that attend to nothing or are not there, and sum(out * dout) over dropout's
// scale: a block for each tile of queries of each head, 8 threads for a row.
template <class T>
__global__ void __launch_bounds__(kStatisticsThreads)
    statistics_kernel(Parameters p, const T* dout, const T* out, const float* lse, float* statistics,
                      float delta_scale) {
  const int head = blockIdx.y, sequence = blockIdx.z;
  const Span q = span_of(p.cu_seqlens, p.lengths, sequence, p.queries, p.max_seqlen);
  const int first = blockIdx.x * kQueries;
  if (first >= q.length) return;
  const int64_t token = (p.cu_seqlens == nullptr ? static_cast<int64_t>(sequence) * p.queries : q.first);
  const float* own_lse = lse + (p.cu_seqlens == nullptr ? (static_cast<int64_t>(sequence) * p.heads + head) * p.queries
                                                        : static_cast<int64_t>(head) * p.queries + q.first);
  float* to = statistics + static_cast<int64_t>(head * p.tiles +
                                                first_tile(p.cu_seqlens, sequence, q.first, p.queries) + blockIdx.x) *
                               2 * kQueries;
#pragma unroll
  for (int part = 0; part < kQueries * 8 / kStatisticsThreads; ++part) {
    const int i = part * kStatisticsThreads + threadIdx.x, row = i / 8;
    const bool there = first + row < q.length;
    const int64_t at = ((token + first + row) * p.heads + head) * kHeadDim + i % 8 * 8;
    float a[kVector], b[kVector], sum = 0.0f;
    widen(load_packed_if(there, out + at, 0u), a);
    widen(load_packed_if(there, dout + at, 0u), b);
#pragma unroll
    for (int j = 0; j < kVector; ++j) sum += a[j] * b[j];
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (i % 8 == 0) {
      const float value = there ? own_lse[first + row] : -__int_as_float(0x7f800000);
      to[row] = value == -__int_as_float(0x7f800000) ? __int_as_float(0x7f800000) : value * 1.4426950408889634f;
      to[kQueries + row] = sum * delta_scale;
    }
  }
}

// ---- launchers -------------------------------------------------------------------------------------------------------

Status map_of(CUtensorMap* map, const AttentionCall& call, const void* data, const int64_t (&strides)[3],
              int64_t tokens, int rows) {
  const bool packed = call.cu_seqlens != nullptr;
  return make_tensor_map(map, {data,
                               call.dtype,
                               {kHeadDim, call.heads, tokens, packed ? 1 : call.sequences},
                               {strides[2], strides[1], strides[0]},
                               {kTileColumns, 1, rows, 1}});
}

int64_t tiles_of(int64_t sequences, int64_t queries, bool packed) {
  return packed ? queries / kQueries + sequences : sequences * ((queries + kQueries - 1) / kQueries);
}

template <class T, bool DROPOUT, bool CAUSAL>
Status launch_backward(const AttentionBackward& call, const Parameters& p, int processors) {
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(call.sequences * call.heads, processors)));
  if (call.max_seqlen <= kOnChipQueries)
    return launch(backward_kernel<T, DROPOUT, CAUSAL, true>, grid, dim3(kThreads), sizeof(Memory<true>), call.stream,
                  p);
  return launch(backward_kernel<T, DROPOUT, CAUSAL, false>, grid, dim3(kThreads), sizeof(Memory<false>), call.stream,
                p);
}

template <class T>
Status launch_typed(const AttentionBackward& call, const Parameters& p, float* statistics) {
  int processors = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, call.device);
  if (error != cudaSuccess) return status_of(error);
  const dim3 grid(static_cast<unsigned>((std::min(call.max_seqlen, call.queries) + kQueries - 1) / kQueries),
                  static_cast<unsigned>(call.heads), static_cast<unsigned>(call.sequences));
  if (grid.x > 0) {
    const float delta_scale = call.dropout_scale > 0 ? 1 / call.dropout_scale : 0.0f;
    const Status status =
        launch(statistics_kernel<T>, grid, dim3(kStatisticsThreads), 0, call.stream, p,
               static_cast<const T*>(call.dout), static_cast<const T*>(call.out), call.lse, statistics, delta_scale);
    if (status.code != StatusCode::ok) return status;
  }
  const bool causal = call.window_right == 0;
  if (call.seed != nullptr)
    return causal ? launch_backward<T, true, true>(call, p, processors)
                  : launch_backward<T, true, false>(call, p, processors);
  return causal ? launch_backward<T, false, true>(call, p, processors)
                : launch_backward<T, false, false>(call, p, processors);
}

}  // namespace

int64_t attention_backward_workspace(int64_t sequences, int64_t heads, int64_t head_dim, int64_t tokens,
                                     int64_t max_seqlen_k) {
  if (head_dim == kWideDim) return attention_backward_wide_workspace(sequences, heads, tokens, max_seqlen_k);
  const int64_t tiles = tiles_of(sequences, tokens, true);  // not fewer than those of dense sequences
  return heads * tiles * (2 * kQueries + (max_seqlen_k > kKeys ? kSumFloats : 0));
}

Status attention_backward(const AttentionBackward& call) {
  Status status = check_hopper_call(call);
  if (status.code != StatusCode::ok) return status;
  if (call.head_dim == kWideDim) return attention_backward_wide(call);
  if (call.kv_heads != call.heads) return bad_size("kv_heads differs from heads");
  if (call.sequences == 0 || call.heads == 0) return {};
  if (call.sequences > 65535 || call.heads > 65535) return bad_size("more than 65535 sequences or heads");
  const DeviceGuard guard(call.device);
  const bool packed = call.cu_seqlens != nullptr;
  const int64_t tiles = tiles_of(call.sequences, call.queries, packed);
  Parameters p{};
  const int64_t dout_strides[3] = {call.queries * call.heads * kHeadDim, call.heads * kHeadDim, kHeadDim};
  const int64_t q_strides[3] = {call.q_sequence_stride, call.q_token_stride, call.q_head_stride};
  const int64_t k_strides[3] = {call.k_sequence_stride, call.k_token_stride, call.k_head_stride};
  const int64_t v_strides[3] = {call.v_sequence_stride, call.v_token_stride, call.v_head_stride};
  if (call.queries > 0) {
    status = map_of(&p.q, call, call.q, q_strides, call.queries, kQueries);
    if (status.code == StatusCode::ok) status = map_of(&p.dout, call, call.dout, dout_strides, call.queries, kQueries);
  }
  if (call.keys > 0) {
    if (status.code == StatusCode::ok) status = map_of(&p.k, call, call.k, k_strides, call.keys, kKeys);
    if (status.code == StatusCode::ok) status = map_of(&p.v, call, call.v, v_strides, call.keys, kKeys);
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
  return call.dtype == DType::bf16  ? launch_typed<bf16_t>(call, p, call.workspace)
         : call.dtype == DType::f16 ? launch_typed<f16_t>(call, p, call.workspace)
                                    : unknown_dtype();
}

}  // namespace cuda
}  // namespace fasttfm
