// attention backward for Hopper: the statistics kernel and the kernel parameters that are common to all head dims.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/hopper/shared/backward_products.cuh"
#include "attention/hopper/shared/backward_tiles.cuh"
#include "attention/hopper/shared/column_sums.cuh"
#include "attention/op.h"
#include "common/count.h"
#include "common/cuda/hopper.cuh"
#include "common/cuda/reduce.cuh"
#include "common/packed.h"

namespace fasttfm {
namespace cuda {
namespace hopper_backward {

constexpr int kStatisticsThreads = 256;
constexpr int kMaxOrdered = 4096;  // sequences; ranking compares each with all others

// Computes a sequence's rank: sequences with more tiles come first, then those with the lower index. Called by a whole
// block.
__device__ __forceinline__ void rank_sequence(const Parameters& p, int sequence) {
  const auto work = [&](int which) {
    const StoredSpan q = span_of(p.cu_seqlens, p.lengths, which, p.queries, p.max_seqlen);
    const StoredSpan k = span_of(p.cu_seqlens_k, p.lengths_k, which, p.keys, p.max_seqlen_k);
    return divide_up(k.length, kKeys) * (divide_up(q.length, kQueries) + 1);
  };
  const int tiles = work(sequence);
  int rank = 0;
  for (int first = 0; first < p.sequences; first += kStatisticsThreads) {
    const int other = first + threadIdx.x, other_tiles = other < p.sequences ? work(other) : -1;
    rank += __syncthreads_count(other_tiles > tiles || (other_tiles == tiles && other < sequence));
  }
  if (threadIdx.x == 0) p.order[rank] = sequence;
}

// Writes zeros to the gradients of a (sequence, head) pair that has no queries or no keys. Called by a whole block.
template <class G, int HEAD_DIM, bool GROUPED>
__device__ __forceinline__ void store_empty_rows(const Parameters& p, int sequence, int head, const StoredSpan& q) {
  const StoredSpan k = span_of(p.cu_seqlens_k, p.lengths_k, sequence, p.keys, p.max_seqlen_k);
  if (q.length > 0 && k.length > 0) return;
  const auto zeros = [&](const Output& output, const StoredSpan& span) {
    store_zeros<kStatisticsThreads, HEAD_DIM>(row_of<G>(output, p, sequence, head, span.first), output.token,
                                              span.stored);
  };
  zeros(p.dq, q);
  if (GROUPED && head >= p.grouping.gradient_heads) return;
  zeros(p.dk, k);
  zeros(p.dv, k);
}

// Writes zeros to the gradients of packed rows after the last sequence. The rows are divided among the blocks of the
// last sequence.
template <class G, int HEAD_DIM, bool GROUPED>
__device__ __forceinline__ void store_rows_after_last(const Parameters& p, int head) {
  const auto zeros = [&](const Output& output, const int32_t* cu_seqlens, int size) {
    int row = packed_first(cu_seqlens, p.sequences, size) + static_cast<int>(blockIdx.x) * kQueries;
    for (; row < size; row += static_cast<int>(gridDim.x) * kQueries)
      for (int column = 0; column < HEAD_DIM; column += kTileColumns)
        store_zeros<kStatisticsThreads, (HEAD_DIM < kTileColumns ? HEAD_DIM : kTileColumns)>(
            row_of<G>(output, p, 0, head, row) + column, output.token, min(size - row, kQueries), p.head_dim - column);
  };
  zeros(p.dq, p.cu_seqlens, p.queries);
  if (GROUPED && head >= p.grouping.gradient_heads) return;
  zeros(p.dk, p.cu_seqlens_k, p.keys);
  zeros(p.dv, p.cu_seqlens_k, p.keys);
}

// Computes lse in units of log2 (+infinity for rows that attend to no keys or are past the end) and delta = sum(out *
// dout) / dropout_scale, with one block per query tile of each head and 8 elements per thread. It also zeros
// p.progress, dq_semaphores[tile] and the head's partial column sums where they are used, ranks the sequences in
// p.order, and zeros the gradients, of type G, of rows that belong to no sequence. p.head_dim may be smaller than
// HEAD_DIM.
template <class T, class G, int HEAD_DIM, bool GROUPED>
__global__ void __launch_bounds__(kStatisticsThreads)
    statistics_kernel(Parameters p, const T* dout, const T* out, const float* lse, float* statistics,
                      int* dq_semaphores, float delta_scale) {
  constexpr int kRow = HEAD_DIM / kVector;  // threads per row
  const int head = blockIdx.y, sequence = blockIdx.z;
  const StoredSpan q = span_of(p.cu_seqlens, p.lengths, sequence, p.queries, p.max_seqlen);
  const int first = blockIdx.x * kQueries;
  if (p.progress != nullptr && blockIdx.x + head + sequence == 0)
    for (int i = threadIdx.x; i < kMaxBlocks; i += kStatisticsThreads) p.progress[i] = 0;
  if (first == 0) {
    if (p.column_parts != nullptr) clear_column_parts(p, sequence, head);
    if (p.order != nullptr && head == 0) rank_sequence(p, sequence);
    if constexpr (HEAD_DIM <= kHeadDim)
      store_empty_rows<G, HEAD_DIM, GROUPED>(p, sequence, head,
                                             q);  // kernels for more than 64 columns write them themselves
  }
  if (p.cu_seqlens != nullptr && sequence == p.sequences - 1) store_rows_after_last<G, HEAD_DIM, GROUPED>(p, head);
  if (first >= q.length) return;
  const int64_t token = (p.cu_seqlens == nullptr ? static_cast<int64_t>(sequence) * p.queries : q.first);
  const float* own_lse = lse + (p.cu_seqlens == nullptr ? (static_cast<int64_t>(sequence) * p.heads + head) * p.queries
                                                        : static_cast<int64_t>(head) * p.queries + q.first);
  const int64_t tile = head * p.tiles + first_tile(p.cu_seqlens, sequence, q.first, p.queries) + blockIdx.x;
  float* to = statistics + tile * 2 * kQueries;
  if (dq_semaphores != nullptr && threadIdx.x == 0) dq_semaphores[tile] = 0;
#pragma unroll
  for (int part = 0; part < kQueries * kRow / kStatisticsThreads; ++part) {
    const int i = part * kStatisticsThreads + threadIdx.x, row = i / kRow;
    const int column = i % kRow * kVector;
    const bool there = first + row < q.length, loads = there && column < p.head_dim;
    const int64_t at = ((token + first + row) * p.heads + head) * p.head_dim + column;
    float a[kVector], b[kVector], sum = 0.0f;
    widen(load_packed_if(loads, out + at, 0u), a);
    widen(load_packed_if(loads, dout + at, 0u), b);
#pragma unroll
    for (int j = 0; j < kVector; ++j) sum += a[j] * b[j];
#pragma unroll
    for (int distance = 1; distance < kRow; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (i % kRow == 0) {
      const float value = there ? own_lse[first + row] : -__int_as_float(0x7f800000);
      to[row] = value == -__int_as_float(0x7f800000) ? __int_as_float(0x7f800000) : value * 1.4426950408889634f;
      to[kQueries + row] = sum * delta_scale;
    }
  }
}

using baseline::Count;

// The number of query tiles of all sequences; see first_tile().
inline int64_t tiles_of(int64_t sequences, int64_t queries, bool packed) {
  return packed ? queries / kQueries + sequences : sequences * ((queries + kQueries - 1) / kQueries);
}

// Whether sequence lengths may differ. They are known only on the device.
inline bool has_lengths(const AttentionCall& call) {
  return call.cu_seqlens != nullptr || call.cu_seqlens_k != nullptr || call.lengths != nullptr ||
         call.lengths_k != nullptr;
}

// In the workspace, Parameters::order is at an offset of `before` floats. It is padded, so that the statistics, which
// follow it, are aligned.
inline int64_t order_floats(int64_t sequences) { return (sequences + 31) / 32 * 32; }
inline int* order_in(const AttentionCall& call, int64_t before) {
  return has_lengths(call) && call.sequences <= kMaxOrdered ? reinterpret_cast<int*>(call.workspace + before) : nullptr;
}
inline float* statistics_in(const AttentionCall& call, int64_t before) {
  return call.workspace + before + order_floats(call.sequences);
}

template <class T, class G, int HEAD_DIM, bool GROUPED = false>
Status launch_statistics(const AttentionBackward& call, const Parameters& p, float* statistics, int* dq_semaphores) {
  const int64_t tiles = (std::min(call.max_seqlen, call.queries) + kQueries - 1) / kQueries;
  const dim3 grid(static_cast<unsigned>(std::max<int64_t>(tiles, 1)), static_cast<unsigned>(call.heads),
                  static_cast<unsigned>(call.sequences));
  const float delta_scale = call.dropout_scale > 0 ? 1 / call.dropout_scale : 0.0f;
  return launch(statistics_kernel<T, G, HEAD_DIM, GROUPED>, grid, dim3(kStatisticsThreads), 0, call.stream, p,
                static_cast<const T*>(call.dout), static_cast<const T*>(call.out), call.lse, statistics, dq_semaphores,
                delta_scale);
}

inline bool is_grouped(const AttentionCall& call) { return call.kv_heads != call.heads; }
inline int64_t gradient_heads_of(const AttentionBackward& call) {
  return call.gradient_heads == 0 ? call.kv_heads : call.gradient_heads;
}

// Checks heads, kv_heads and gradient_heads.
inline Status check_heads(const AttentionBackward& call) {
  if (call.heads == 0) return {};
  const int64_t gradient_heads = gradient_heads_of(call);
  if (call.kv_heads <= 0 || gradient_heads <= 0 || gradient_heads % call.kv_heads != 0 ||
      call.heads % gradient_heads != 0)
    return bad_size("attention: heads of k and v divide those of their gradients, which divide those of q");
  if (!is_grouped(call)) return {};
  if (call.column_sums != nullptr || call.fp8.scale != nullptr)
    return bad_size("attention: column sums and FP8 gradients require as many heads of k and v as of q");
  if (call.seed != nullptr || call.head_dim < kHeadDim)
    return bad_size("attention: dropout and head dim 32 require as many heads of k and v as of q");
  const int64_t heads_per_unit = call.heads / gradient_heads;
  if (!can_number(units_of(call, heads_per_unit)) || call.heads * heads_per_unit > 1 << 30)
    return bad_size("attention: too many query tiles of heads that share k and v");
  return {};
}

inline Status map_of(CUtensorMap* map, const AttentionCall& call, const void* data, const int64_t (&strides)[3],
                     int64_t heads, int64_t tokens, int rows) {
  if (tokens == 0) return {};
  const bool packed = call.cu_seqlens != nullptr;
  return make_tensor_map(map, {data,
                               call.dtype,
                               {call.head_dim, heads, tokens, packed ? 1 : call.sequences},
                               {strides[2], strides[1], strides[0]},
                               {kTileColumns, 1, rows, 1}});
}

// Sets all parameters except the pointers into the workspace. key_rows: of a tile of k and v.
inline Status set_parameters(const AttentionBackward& call, Parameters* p, int key_rows = kKeys) {
  const int64_t dout_strides[3] = {call.queries * call.heads * call.head_dim, call.heads * call.head_dim,
                                   call.head_dim};
  const int64_t q_strides[3] = {call.q_sequence_stride, call.q_token_stride, call.q_head_stride};
  const int64_t k_strides[3] = {call.k_sequence_stride, call.k_token_stride, call.k_head_stride};
  const int64_t v_strides[3] = {call.v_sequence_stride, call.v_token_stride, call.v_head_stride};
  const auto map = [&](CUtensorMap* to, const void* data, const int64_t (&strides)[3]) {
    return map_of(to, call, data, strides, call.heads, call.queries, kQueries);
  };
  const auto map_keys = [&](CUtensorMap* to, const void* data, const int64_t (&strides)[3]) {
    return map_of(to, call, data, strides, call.kv_heads, call.keys, key_rows);
  };
  Status status = map(&p->q, call.q, q_strides);
  if (status.code == StatusCode::ok) status = map(&p->dout, call.dout, dout_strides);
  if (status.code == StatusCode::ok) status = map_keys(&p->k, call.k, k_strides);
  if (status.code == StatusCode::ok) status = map_keys(&p->v, call.v, v_strides);
  p->dq = {call.dq, call.dq_sequence_stride, call.dq_token_stride, call.dq_head_stride};
  p->dk = {call.dk, call.dk_sequence_stride, call.dk_token_stride, call.dk_head_stride};
  p->dv = {call.dv, call.dv_sequence_stride, call.dv_token_stride, call.dv_head_stride};
  p->cu_seqlens = call.cu_seqlens;
  p->cu_seqlens_k = call.cu_seqlens_k;
  p->lengths = call.lengths;
  p->lengths_k = call.lengths_k;
  p->seed = call.seed;
  p->sequences = static_cast<int>(call.sequences);
  p->heads = static_cast<int>(call.heads);
  const int gradient_heads = static_cast<int>(gradient_heads_of(call)), heads_per_unit = p->heads / gradient_heads;
  p->grouping = {static_cast<int>(call.heads / call.kv_heads), gradient_heads, heads_per_unit,
                 half_reciprocal(heads_per_unit)};
  p->head_dim = static_cast<int>(call.head_dim);
  p->queries = static_cast<int>(call.queries);
  p->keys = static_cast<int>(call.keys);
  p->max_seqlen = static_cast<int>(std::min(call.max_seqlen, call.queries));
  p->max_seqlen_k = static_cast<int>(std::min(call.max_seqlen_k, call.keys));
  p->tiles = static_cast<int>(tiles_of(call.sequences, call.queries, call.cu_seqlens != nullptr));
  p->threshold = call.threshold;
  p->score_scale = call.scale * 1.4426950408889634f;
  p->dq_scale = call.scale * call.dropout_scale;
  p->dv_scale = call.dropout_scale;
  p->fp8 = {call.fp8.scale, call.fp8.amax, static_cast<uint8_t*>(call.fp8.columns), call.fp8.padded, call.fp8.e5m2};
  p->window = Window::of(call.window_left, call.window_right, call.queries, call.keys);
  return status;
}

// Head dims 64 and 32: sets all parameters except those of one kernel. The workspace begins with kMaxBlocks integers.
inline Status set_parameters_d64(const AttentionBackward& call, Parameters* p) {
  const Status status = set_parameters(call, p);
  float* statistics = statistics_in(call, kMaxBlocks);
  p->column_parts = call.column_sums == nullptr ? nullptr : call.column_parts;
  p->order = order_in(call, kMaxBlocks);
  p->statistics = statistics;
  p->sums = statistics + call.heads * static_cast<int64_t>(p->tiles) * 2 * kQueries;
  return status;
}

// Adds up the partial column sums, if they are requested.
inline Status sum_columns(const AttentionBackward& call, const Parameters& p) {
  if (call.column_sums == nullptr) return {};
  return sum_parts(call.column_parts, {call.column_sums, call.column_sums_dtype}, {},
                   static_cast<int>(call.sequences * p.blocks * kColumnParts), 3 * call.heads * kHeadDim, call.stream);
}

}  // namespace hopper_backward
}  // namespace cuda
}  // namespace fasttfm
