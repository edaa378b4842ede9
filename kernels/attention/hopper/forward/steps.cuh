// Parts of the Hopper attention forward: TMA loads, the wgmma of a step, the epilogue, and the kernel's parameters.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/hopper/forward/memory.cuh"
#include "attention/hopper/forward/weights.cuh"
#include "attention/hopper/shared/mask.cuh"
#include "attention/hopper/shared/named_barriers.h"
#include "common/cuda/approximations.cuh"
#include "common/cuda/hopper.cuh"

namespace fasttfm {
namespace cuda {

// ---- tiles in shared memory -----------------------------------------------------------------------------------------

// Issues the TMA loads of a tile: one for every 64 columns, which are `part` bytes apart in shared memory. Called by
// one thread.
template <class S>
__device__ __forceinline__ void tma_load_tile(const CUtensorMap* map, Mbarrier& full, const char* to, uint32_t part,
                                              int head, int row, int sequence) {
#pragma unroll
  for (int i = 0; i < S::kParts; ++i)
    tma_load(map, full, shared_address(to) + i * part, i * kTileColumns, head, row, sequence);
}

// Zeros the rows of a tile of v from `first` on, because a weight of 0 times NaN would be NaN. Called by a whole
// warpgroup.
template <class S>
__device__ __forceinline__ void clear_rows(char* v, int first, int group) {
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
#pragma unroll
  for (int part = 0; part < S::kParts; ++part)
    for (int i = 8 * first + thread; i < 8 * S::kKeys; i += kWarpgroup)
      reinterpret_cast<uint4*>(v + part * S::kKeyPart)[i] = make_uint4(0, 0, 0, 0);
  fence_proxy_async();
  named_barrier_sync(kForwardZeroed + group, kWarpgroup);
}

// ---- wgmma ----------------------------------------------------------------------------------------------------------

// A descriptor whose low word, which contains the tile's address, is given. The high word is the same for all tiles.
__device__ __forceinline__ uint64_t tile_descriptor(uint32_t low) { return k_major(0) >> 32 << 32 | low; }

// Issues s = q k^T for the warpgroup's 64 queries; q and k are low words of descriptors.
template <class T, class S>
__device__ __forceinline__ void issue_scores(float (&s)[S::kKeys / 2], uint32_t q, uint32_t k) {
#pragma unroll
  for (int step = 0; step < S::kHeadDim / 16; ++step) {
    const uint32_t offset = step % 4 * kKMajorStep;
    wgmma<T>(s, tile_descriptor(q + ((step / 4 * S::kQueryPart + offset) >> 4)),
             tile_descriptor(k + ((step / 4 * S::kKeyPart + offset) >> 4)), step > 0);
  }
  wgmma_commit();
}

// Issues o += weights v; v is the low word of a descriptor.
template <class T, class S>
__device__ __forceinline__ void issue_values(float (&o)[S::kHeadDim / 2], uint32_t (&weights)[S::kKeys / 4],
                                             uint32_t v) {
#pragma unroll
  for (int step = 0; step < S::kKeys / 16; ++step)
    wgmma<T, Major::mn>(o, weights + 4 * step, tile_descriptor(v + (step * kMnMajorStep >> 4)));
  wgmma_commit();
}

// ---- results --------------------------------------------------------------------------------------------------------

// The address of the output row of a query of the tile. Row indices fit into 32 bits, because memory cannot hold 2^31
// rows.
template <class T, class S>
__device__ __forceinline__ T* out_of(const ForwardParams& p, const QueryTile& tile, int query) {
  return static_cast<T*>(p.out) + static_cast<int64_t>(tile.out_row + query * p.heads) * S::kHeadDim;
}

// A warpgroup's output rows, o * factor. Each thread has the factors of its two rows.
template <class T>
struct ResultRows {
  T* out;           // the first row
  int present;      // number of valid rows, from the first on
  float factor[2];  // with a factor of 0 the row is 0, even if o is NaN
};

// Called after the last step: writes lse of the warpgroup's rows from `first` on and returns their output rows. Rows
// that attend to no keys get a factor of 0.
template <class T, class S>
__device__ __forceinline__ ResultRows<T> finalize_rows(const ForwardParams& p, const QueryTile& tile, int first,
                                                       RunningSoftmax& softmax) {
  softmax.finish();
  ResultRows<T> rows;
  rows.out = out_of<T, S>(p, tile, first);
  rows.present = tile.rows(p) - first;
  const int row = row_in_group();
  float* const lse = p.lse + (tile.lse_row + first + row);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // The comparison is not > 0, so that a NaN in the sum propagates.
    const bool attends = first + row + 8 * half < tile.q_length && softmax.sum[half] != 0.0f;
    const float factor = p.dropout_scale * rcp_approx(softmax.sum[half]);
    // Once per row: lg2.approx would be less accurate than the scores.
    const float sum = (softmax.reference[half] + log2f(softmax.sum[half])) * 0.693147180559945f;
    rows.factor[half] = attends ? factor : 0.0f;
    if (threadIdx.x % 4 == 0 && row + 8 * half < rows.present && p.lse != nullptr)
      lse[8 * half] = attends ? sum : kMinusInfinity;
  }
  return rows;
}

// Writes the output rows. Of every 8 columns, each of the four threads of a row holds one 32-bit word. Neighbouring
// threads exchange words, so that each thread stores 8 bytes at a time.
template <class T, class S>
__device__ __forceinline__ void store_results(const ForwardParams& p, const ResultRows<T>& rows,
                                              const float (&o)[S::kHeadDim / 2]) {
  const int row = row_in_group(), thread = threadIdx.x % 4;
  const bool odd = thread % 2 != 0;
  T* const out = rows.out + static_cast<int64_t>(row * p.heads) * S::kHeadDim + thread / 2 * 4 + thread % 2 * 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float factor = rows.factor[half];
#pragma unroll
    for (int chunk = 0; chunk < S::kHeadDim / 16; ++chunk) {
      uint32_t word[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float* pair = o + 4 * (2 * chunk + i) + 2 * half;
        word[i] = factor != 0.0f ? narrow_word(pair[0] * factor, pair[1] * factor, T{}) : 0;
      }
      const uint32_t received = __shfl_xor_sync(0xffffffffu, odd ? word[0] : word[1], 1);
      if (row + 8 * half < rows.present)
        *reinterpret_cast<uint2*>(out + 8 * half * p.heads * S::kHeadDim + 16 * chunk) =
            make_uint2(odd ? received : word[0], odd ? word[1] : received);
    }
  }
}

// Writes the results of the warpgroup's queries from `first` on if they attend to no keys: zeros, and lse = -infinity.
template <class T, class S>
__device__ __forceinline__ void store_empty_rows(const ForwardParams& p, const QueryTile& tile, int first) {
  constexpr int vectors = S::kHeadDim / 8;  // per row
  for (int i = static_cast<int>(threadIdx.x) % kWarpgroup; i < 64 * vectors; i += kWarpgroup) {
    const int row = first + i / vectors;
    if (row >= tile.rows(p)) return;
    if (i % vectors == 0 && p.lse != nullptr) p.lse[tile.lse_row + row] = kMinusInfinity;
    *reinterpret_cast<uint4*>(out_of<T, S>(p, tile, row) + 8 * (i % vectors)) = make_uint4(0, 0, 0, 0);
  }
}

// ---- launch ---------------------------------------------------------------------------------------------------------

// The view of a tensor for a tensor map. A tensor without rows is never read, but its tensor map needs a valid address
// and at least one row.
inline TensorView head_view(const void* data, const AttentionCall& call, int64_t heads, int64_t rows,
                            const int64_t (&stride)[3], int box_rows) {
  const int64_t sequences = call.cu_seqlens == nullptr ? call.sequences : 1;
  return {rows > 0 ? data : call.q,
          call.dtype,
          {call.head_dim, heads, std::max<int64_t>(rows, 1), sequences},
          {stride[0], stride[1], stride[2]},
          {kTileColumns, 1, box_rows, 1}};
}

// The tensor maps of q, with boxes of 64 rows, and of k and v, with boxes of `keys` rows.
struct ForwardMaps {
  CUtensorMap q, k, v;
};
inline Status make_forward_maps(ForwardMaps* maps, const AttentionForward& call, int keys) {
  const TensorView views[3] = {head_view(call.q, call, call.heads, call.queries,
                                         {call.q_head_stride, call.q_token_stride, call.q_sequence_stride}, 64),
                               head_view(call.k, call, call.kv_heads, call.keys,
                                         {call.k_head_stride, call.k_token_stride, call.k_sequence_stride}, keys),
                               head_view(call.v, call, call.kv_heads, call.keys,
                                         {call.v_head_stride, call.v_token_stride, call.v_sequence_stride}, keys)};
  CUtensorMap* const targets[3] = {&maps->q, &maps->k, &maps->v};
  for (int i = 0; i < 3; ++i) {
    const Status status = make_tensor_map(targets[i], views[i]);
    if (status.code != StatusCode::ok) return status;
  }
  return {};
}

// How tiles are assigned to blocks; see ForwardParams.
struct TileSchedule {
  int* next;
  int batched;
};

template <class S>
ForwardParams make_forward_params(const AttentionForward& call, const TileSchedule& schedule) {
  ForwardParams p;
  p.out = call.out;
  p.lse = call.lse;
  p.cu_seqlens = call.cu_seqlens;
  p.cu_seqlens_k = call.cu_seqlens_k;
  p.lengths = call.lengths;
  p.lengths_k = call.lengths_k;
  p.seed = call.seed;
  p.next = schedule.next;
  p.sequences = static_cast<int>(call.sequences);
  p.heads = static_cast<int>(call.heads);
  p.group = static_cast<int>(call.heads / call.kv_heads);
  p.queries = static_cast<int>(call.queries);
  p.keys = static_cast<int>(call.keys);
  p.max_seqlen = static_cast<int>(std::min(call.max_seqlen, call.queries));
  p.max_seqlen_k = static_cast<int>(std::min(call.max_seqlen_k, call.keys));
  p.tiles = (p.queries + S::kQueries - 1) / S::kQueries;
  p.batched = schedule.batched;
  p.scale = call.scale * 1.44269504088896f;
  p.dropout_scale = S::kDropout ? call.dropout_scale : 1.0f;
  p.threshold = call.threshold;
  p.window = Window::of(call.window_left, call.window_right, call.queries, call.keys);
  return p;
}

}  // namespace cuda
}  // namespace fasttfm
