// attention backward for Hopper: what comes before its kernels, for every head dim.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/cuda_backward_products.cuh"
#include "attention/cuda_backward_statistics.cuh"
#include "attention/cuda_backward_tiles.cuh"
#include "attention/cuda_column_sums.cuh"
#include "attention/op.h"
#include "common/hopper.cuh"

namespace fasttfm {
namespace cuda {
namespace {

constexpr int kStatisticsThreads = 256;
constexpr int kMostOrdered = 4096;  // sequences; each looks at all others

// Finds a sequence's place among all: those with most tiles come first, then those with the lower number. A whole
// block.
__device__ __forceinline__ void put_in_order(const Parameters& p, int sequence) {
  const auto work = [&](int which) {
    const Span q = span_of(p.cu_seqlens, p.lengths, which, p.queries, p.max_seqlen);
    const Span k = span_of(p.cu_seqlens_k, p.lengths_k, which, p.keys, p.max_seqlen_k);
    return divide_up(k.length, kKeys) * (divide_up(q.length, kQueries) + 1);
  };
  const int own = work(sequence);
  int place = 0;
  for (int first = 0; first < p.sequences; first += kStatisticsThreads) {
    const int other = first + threadIdx.x, its = other < p.sequences ? work(other) : -1;
    place += __syncthreads_count(its > own || (its == own && other < sequence));
  }
  if (threadIdx.x == 0) p.order[place] = sequence;
}

// Zeros in the gradients of a (sequence, head) that has no queries or no keys. A whole block.
template <class T>
__device__ __forceinline__ void store_nothing(const Parameters& p, int sequence, int head, const Span& q) {
  const Span k = span_of(p.cu_seqlens_k, p.lengths_k, sequence, p.keys, p.max_seqlen_k);
  if (q.length > 0 && k.length > 0) return;
  const auto zeros = [&](const Output& output, const Span& span) {
    store_zeros<kStatisticsThreads>(row_of<T>(output, p, sequence, head, span.first), output.token, span.stored);
  };
  zeros(p.dq, q);
  zeros(p.dk, k);
  zeros(p.dv, k);
}

// What comes before a backward: a block for each tile of queries of each head computes its statistics. Sets p.passed,
// the tile's number in `turns` and, with a head's first tile, the places where its columns are summed, to 0, if they
// are there; and with a sequence's first one, its place in p.order.
template <class T, int HEAD_DIM>
__global__ void __launch_bounds__(kStatisticsThreads) statistics_kernel(Parameters p, int* turns, bool only_first) {
  const int head = blockIdx.y, sequence = blockIdx.z;
  const Span q = span_of(p.cu_seqlens, p.lengths, sequence, p.queries, p.max_seqlen);
  if (p.passed != nullptr && blockIdx.x + head + sequence == 0)
    for (int i = threadIdx.x; i < kMostBlocks; i += kStatisticsThreads) p.passed[i] = 0;
  if (blockIdx.x == 0) {
    if (p.column_parts != nullptr) clear_column_places(p, sequence, head);
    if (p.order != nullptr && head == 0) put_in_order(p, sequence);
    if constexpr (HEAD_DIM == kHeadDim) store_nothing<T>(p, sequence, head, q);  // the kernel for 128 does it by itself
  }
  if (only_first || static_cast<int>(blockIdx.x) * kQueries >= q.length) return;
  if (turns != nullptr && threadIdx.x == 0)
    turns[head * p.tiles + first_tile(p.cu_seqlens, sequence, q.first, p.queries) + blockIdx.x] = 0;
  constexpr int kAtOnce = kQueries * HEAD_DIM / kVector / kStatisticsThreads;
  compute_statistics<T, HEAD_DIM, kStatisticsThreads, kAtOnce>(p, sequence, head, q, blockIdx.x);
}

// Tiles of queries of all sequences: see first_tile().
inline int64_t tiles_of(int64_t sequences, int64_t queries, bool packed) {
  return packed ? queries / kQueries + sequences : sequences * ((queries + kQueries - 1) / kQueries);
}

// Lengths that are not all the same: known on the device alone.
inline bool has_lengths(const AttentionCall& call) {
  return call.cu_seqlens != nullptr || call.cu_seqlens_k != nullptr || call.lengths != nullptr ||
         call.lengths_k != nullptr;
}

// In a workspace the order of sequences comes `before` floats from its start, and then statistics, which keep their
// alignment.
inline int64_t order_floats(int64_t sequences) { return (sequences + 31) / 32 * 32; }
inline int* order_in(const AttentionCall& call, int64_t before) {
  return has_lengths(call) && call.sequences <= kMostOrdered ? reinterpret_cast<int*>(call.workspace + before)
                                                             : nullptr;
}
inline float* statistics_in(const AttentionCall& call, int64_t before) {
  return call.workspace + before + order_floats(call.sequences);
}

// `inside`: statistics are computed by the kernel that follows; what it needs beside them is set here.
template <class T, int HEAD_DIM>
Status launch_statistics(const AttentionBackward& call, Parameters p, float* statistics, int* turns,
                         bool inside = false) {
  if (inside && !has_lengths(call) && p.column_parts == nullptr) return {};
  p.statistics = statistics;
  const int64_t tiles = inside ? 1 : (std::min(call.max_seqlen, call.queries) + kQueries - 1) / kQueries;
  const dim3 grid(static_cast<unsigned>(std::max<int64_t>(tiles, 1)), static_cast<unsigned>(call.heads),
                  static_cast<unsigned>(call.sequences));
  return launch(statistics_kernel<T, HEAD_DIM>, grid, dim3(kStatisticsThreads), 0, call.stream, p, turns, inside);
}

inline Status map_of(CUtensorMap* map, const AttentionCall& call, const void* data, const int64_t (&strides)[3],
                     int64_t tokens, int rows) {
  if (tokens == 0) return {};
  const bool packed = call.cu_seqlens != nullptr;
  return make_tensor_map(map, {data,
                               call.dtype,
                               {call.head_dim, call.heads, tokens, packed ? 1 : call.sequences},
                               {strides[2], strides[1], strides[0]},
                               {kTileColumns, 1, rows, 1}});
}

// All but what points into the workspace.
inline Status set_parameters(const AttentionBackward& call, Parameters* p) {
  const int64_t dout_strides[3] = {call.queries * call.heads * call.head_dim, call.heads * call.head_dim,
                                   call.head_dim};
  const int64_t q_strides[3] = {call.q_sequence_stride, call.q_token_stride, call.q_head_stride};
  const int64_t k_strides[3] = {call.k_sequence_stride, call.k_token_stride, call.k_head_stride};
  const int64_t v_strides[3] = {call.v_sequence_stride, call.v_token_stride, call.v_head_stride};
  Status status = map_of(&p->q, call, call.q, q_strides, call.queries, kQueries);
  if (status.code == StatusCode::ok) status = map_of(&p->dout, call, call.dout, dout_strides, call.queries, kQueries);
  if (status.code == StatusCode::ok) status = map_of(&p->k, call, call.k, k_strides, call.keys, kKeys);
  if (status.code == StatusCode::ok) status = map_of(&p->v, call, call.v, v_strides, call.keys, kKeys);
  p->dq = {call.dq, call.dq_sequence_stride, call.dq_token_stride, call.dq_head_stride};
  p->dk = {call.dk, call.dk_sequence_stride, call.dk_token_stride, call.dk_head_stride};
  p->dv = {call.dv, call.dv_sequence_stride, call.dv_token_stride, call.dv_head_stride};
  p->cu_seqlens = call.cu_seqlens;
  p->cu_seqlens_k = call.cu_seqlens_k;
  p->lengths = call.lengths;
  p->lengths_k = call.lengths_k;
  p->seed = call.seed;
  p->out = call.out;
  p->gradient = call.dout;
  p->lse = call.lse;
  p->delta_scale = call.dropout_scale > 0 ? 1 / call.dropout_scale : 0.0f;
  p->sequences = static_cast<int>(call.sequences);
  p->heads = static_cast<int>(call.heads);
  p->queries = static_cast<int>(call.queries);
  p->keys = static_cast<int>(call.keys);
  p->max_seqlen = static_cast<int>(call.max_seqlen);
  p->max_seqlen_k = static_cast<int>(call.max_seqlen_k);
  p->tiles = static_cast<int>(tiles_of(call.sequences, call.queries, call.cu_seqlens != nullptr));
  p->threshold = call.threshold;
  p->score_scale = call.scale * 1.4426950408889634f;
  p->dq_scale = call.scale * call.dropout_scale;
  p->dv_scale = call.dropout_scale;
  return status;
}

}  // namespace
}  // namespace cuda
}  // namespace fasttfm
