// attention backward for Hopper: what it needs to know of each query beside its row, lse in units of log2 and delta,
// the sum of out * dout over dropout's scale.
#pragma once

#include "attention/cuda_backward_tiles.cuh"
#include "common/hopper.cuh"

namespace fasttfm {
namespace cuda {
namespace {

// Where the rows of a (sequence, head) start in out and dout, in elements.
__device__ __forceinline__ int64_t first_row(const Parameters& p, int sequence, int head, const Span& q, int head_dim) {
  const int64_t token = p.cu_seqlens == nullptr ? static_cast<int64_t>(sequence) * p.queries : q.first;
  return (token * p.heads + head) * head_dim;
}

__device__ __forceinline__ const float* own_lse(const Parameters& p, int sequence, int head, const Span& q) {
  return p.lse + (p.cu_seqlens == nullptr ? (static_cast<int64_t>(sequence) * p.heads + head) * p.queries
                                          : static_cast<int64_t>(head) * p.queries + q.first);
}

// Of a tile of a sequence's queries: lse is +infinity for rows that attend to nothing or are not there. So many
// THREADS, 8 elements of a row each, with loads of so many rows AT_ONCE under way.
template <class T, int HEAD_DIM, int THREADS, int AT_ONCE>
__device__ __forceinline__ void compute_statistics(const Parameters& p, int sequence, int head, const Span& q,
                                                   int query_tile) {
  constexpr int kRow = HEAD_DIM / kVector, kRows = THREADS / kRow;
  const int thread = thread_here() % THREADS, first = query_tile * kQueries;
  const int64_t tile = head * p.tiles + first_tile(p.cu_seqlens, sequence, q.first, p.queries) + query_tile;
  const int64_t start = first_row(p, sequence, head, q, HEAD_DIM) + thread % kRow * kVector;
  const float* lse_of = own_lse(p, sequence, head, q);
#pragma unroll 1
  for (int row = thread / kRow; row < kQueries; row += AT_ONCE * kRows) {
    Packed<T> out[AT_ONCE], gradient[AT_ONCE];
    float lse[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int query = first + row + i * kRows;
      const int64_t at = start + static_cast<int64_t>(query) * p.heads * HEAD_DIM;
      out[i] = load_packed_if(query < q.length, static_cast<const T*>(p.out) + at, 0u);
      gradient[i] = load_packed_if(query < q.length, static_cast<const T*>(p.gradient) + at, 0u);
      lse[i] = query < q.length ? lse_of[query] : -__int_as_float(0x7f800000);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      float a[kVector], b[kVector], sum = 0.0f;
      widen(out[i], a);
      widen(gradient[i], b);
#pragma unroll
      for (int j = 0; j < kVector; ++j) sum += a[j] * b[j];
      __syncwarp();  // or the compiler takes warps for diverged here, and gives up uniform registers everywhere
#pragma unroll
      for (int distance = 1; distance < kRow; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
      if (thread % kRow == 0) {
        float* to = p.statistics + tile * 2 * kQueries + row + i * kRows;
        to[0] = lse[i] == -__int_as_float(0x7f800000) ? __int_as_float(0x7f800000) : lse[i] * 1.4426950408889634f;
        to[kQueries] = sum * p.delta_scale;
      }
    }
  }
}

// Statistics of the (sequence, head) after the one that a block works on, of which the copying warp tells: a tile of
// queries at a time, by a warpgroup that has the time.
template <class T, bool CAUSAL>
class NextStatistics {
 public:
  explicit __device__ __forceinline__ NextStatistics(const Parameters& p, Memory<true>& memory)
      : p_(p), memory_(memory) {}

  // The block goes over to the next one.
  __device__ __forceinline__ void go_on() { --ahead_; }

  // A tile, if there is one to do; all those of the one that the block works on.
  __device__ __forceinline__ void work() {
    do {
      __syncwarp();
      if (tile_ < 0) {
        if (!__all_sync(0xffffffffu, memory_.next_told.has_ended(parity_))) continue;
        tile_ = unit().begin(0);
        prefetch();
      }
      const int tiles = unit().query_tiles;  // when all are there, another one may be told
      if (tile_ < tiles) {
        compute_statistics<T, kHeadDim, kWarpgroup, 4>(p_, unit().sequence, unit().head, unit().q, tile_);
        asm volatile("fence.acq_rel.gpu; fence.proxy.async.global;" ::: "memory");  // the copy engine reads them
        arrive_warp(memory_.statistics_there[tile_]);
        ++tile_;
      }
      if (tile_ >= tiles) {
        tile_ = -1;
        parity_ ^= 1;
        ++ahead_;
      }
    } while (ahead_ < 0);
  }

 private:
  // Brings what is read to the second level cache.
  __device__ __forceinline__ void prefetch() const {
    const int64_t start = first_row(p_, unit().sequence, unit().head, unit().q, kHeadDim);
    const float* lse = own_lse(p_, unit().sequence, unit().head, unit().q);
    for (int query = thread_here() % kWarpgroup; query < unit().q.length; query += kWarpgroup) {
      const int64_t at = start + static_cast<int64_t>(query) * p_.heads * kHeadDim;
      prefetch_line(static_cast<const T*>(p_.out) + at);
      prefetch_line(static_cast<const T*>(p_.gradient) + at);
      if (query % 32 == 0) prefetch_line(lse + query);
    }
  }
  static __device__ __forceinline__ void prefetch_line(const void* from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
  }
  __device__ __forceinline__ const Unit<CAUSAL>& unit() const { return next_unit<CAUSAL>(memory_); }

  const Parameters& p_;
  Memory<true>& memory_;
  int tile_ = -1;  // the next tile; -1: of one that is not told yet
  int ahead_ = 0;  // how many are whole beyond the one that the block works on
  uint32_t parity_ = 0;
};

}  // namespace
}  // namespace cuda
}  // namespace fasttfm
