// Building blocks of row-wise kernels (layer_norm and its fused variants). N rows of C columns, C a multiple of 8.
//
// A group of threads processes a row; each thread holds kVectors vectors of 8 elements. Every element is loaded or
// stored once, 16 bytes at a time. Kernels without sums over rows process one row per group, and many small blocks
// saturate the memory bandwidth. Kernels with sums over rows are persistent: their groups iterate over the rows, the
// sums stay in registers until the end, and cp.async copies the next row to shared memory while the current one is
// processed. Each thread reads only the elements that it copied itself, so the copies need no barrier. A second, small
// kernel adds the blocks' partial sums in a fixed order.
#pragma once

#include <cstdint>

#include "common/cuda/convert.cuh"
#include "common/cuda/reduce.cuh"
#include "common/status.h"

namespace fasttfm {
namespace cuda {

// GROUP threads with VECTORS vectors each process a row; a block has BLOCK threads, i.e. BLOCK / GROUP groups.
template <int GROUP, int VECTORS, int BLOCK>
struct RowShape {
  static constexpr int kGroup = GROUP;
  static constexpr int kVectors = VECTORS;
  static constexpr int kBlock = BLOCK;
  static constexpr int kGroups = BLOCK / GROUP;
  static constexpr int kColumns = GROUP * VECTORS * kVector;
};

constexpr int64_t kMaxRowColumns = 8192;

// Whether the rows of a tensor can be read 16 bytes at a time.
inline bool rows_aligned(const void* tensor, int64_t stride) {
  return reinterpret_cast<uintptr_t>(tensor) % 16 == 0 && stride % kVector == 0;
}
inline Status misaligned_rows() { return {StatusCode::bad_alignment, "rows must start at multiples of 16 bytes"}; }

// Calls launch(RowShape{}) for the smallest shape that holds a row. A block has BLOCK threads; if BLOCK is 0, it has
// one group, or four for rows of up to 1024 columns.
template <int BLOCK, class Launch>
Status for_row_shape(int64_t columns, Launch launch) {
  constexpr int kWarpRows = BLOCK > 0 ? BLOCK : 128;
  if (columns < kVector || columns % kVector != 0 || columns > kMaxRowColumns)
    return bad_size("the CUDA kernels take columns that are a multiple of 8, from 8 to 8192");
  if (columns <= 256) return launch(RowShape<32, 1, kWarpRows>{});
  if (columns <= 512) return launch(RowShape<32, 2, kWarpRows>{});
  if (columns <= 768) return launch(RowShape<32, 3, kWarpRows>{});
  if (columns <= 1024) return launch(RowShape<32, 4, kWarpRows>{});
  if (columns <= 2048) return launch(RowShape<64, 4, BLOCK == 0 ? 64 : BLOCK>{});
  if (columns <= 4096) return launch(RowShape<128, 4, BLOCK == 0 ? 128 : BLOCK>{});
  return launch(RowShape<256, 4, 256>{});
}

// The shared memory per block on the GPUs that have the least: compute capability 8.6, 8.9 and 12.0.
constexpr int64_t kLeastBlockMemory = 99 * 1024;

// Calls use(RowShape{}) for the smallest shape that holds a row and whose shared memory fits into `limit` bytes. `Plan`
// has kBlock, the threads per block if its shared memory fits; kSmallBlock, a smaller number for GPUs on which it does
// not; and memory(S), the bytes of shared memory per block of a shape. If neither fits, the smaller block is used.
template <class Plan, class Use>
Status for_row_shape_within(int64_t columns, int64_t limit, Use use) {
  return for_row_shape<Plan::kBlock>(columns, [&](auto shape) {
    using S = decltype(shape);
    if constexpr (Plan::memory(S{}) > kLeastBlockMemory && S::kGroup <= Plan::kSmallBlock) {
      if (Plan::memory(S{}) > limit) return use(RowShape<S::kGroup, S::kVectors, Plan::kSmallBlock>{});
    }
    return use(shape);
  });
}

// The bytes of shared memory of the shape that for_row_shape_within() selects; 0 if no shape holds the columns.
template <class Plan>
int64_t row_memory(int64_t columns, int64_t limit) {
  int64_t memory = 0;
  for_row_shape_within<Plan>(columns, limit, [&](auto shape) {
    memory = Plan::memory(shape);
    return Status{};
  });
  return memory;
}

// The column of a thread's v-th vector: neighbouring threads read neighbouring vectors. The v-th vector is at the
// compile-time offset vector_offset<S>(v) from the thread's first one.
template <class S>
__device__ __forceinline__ constexpr int vector_offset(int v) {
  return v * S::kGroup * kVector;
}
template <class S>
__device__ __forceinline__ int column_of(int v) {
  return vector_offset<S>(v) + threadIdx.x % S::kGroup * kVector;
}
// Whether the thread's v-th vector is inside of a row of `columns` columns. The right side does not depend on v.
template <class S>
__device__ __forceinline__ bool in_row(int v, int columns) {
  return vector_offset<S>(v) < columns - column_of<S>(0);
}

// The index of the thread's group in its block. The shuffle tells the compiler that the value is warp-uniform.
// Otherwise it assumes that loops over a group's rows diverge, which makes reductions inside of them slower.
template <class S>
__device__ __forceinline__ int group_of_thread() {
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x), 0) / S::kGroup;
}

// The rows of one group: `first`, `first + stride`, ...; `rounds` of them.
template <class S>
struct GroupRows {
  int64_t first, stride;
  int rounds;

  __device__ __forceinline__ explicit GroupRows(int64_t rows)
      : first(static_cast<int64_t>(blockIdx.x) * S::kGroups + group_of_thread<S>()),
        stride(static_cast<int64_t>(gridDim.x) * S::kGroups),
        rounds(first < rows ? static_cast<int>((rows - first + stride - 1) / stride) : 0) {}
};

// Called after a loop over a group's rows that calls group_sum SUMS times per row. Groups of one block may differ by a
// row, and so by SUMS barriers. If the warps of a block have executed different numbers of barriers, racecheck reports
// races between accesses that a later __syncthreads() orders. So in a build for compute-sanitizer this function makes
// all groups execute the same number.
template <int SUMS, class S>
__device__ __forceinline__ void pass_missed_barriers(int64_t all_rows, const GroupRows<S>& rows) {
#ifdef FASTTFM_SANITIZE_GPU
  const int64_t next_of_first_group = static_cast<int64_t>(blockIdx.x) * S::kGroups + rows.rounds * rows.stride;
  if (S::kGroup > 32 && next_of_first_group < all_rows)
    for (int sum = 0; sum < SUMS; ++sum) sync_group<S::kGroup, S::kBlock>();
#endif
}

// A pointer to a thread's first vector in the current row of a tensor. It is incremented from row to row, so that the
// loop needs no 64-bit multiplication.
template <class T>
struct RowWalk {
  T* vector;
  int64_t step;

  template <class S>
  __device__ __forceinline__ RowWalk(T* tensor, const GroupRows<S>& rows, int64_t row_stride)
      : vector(tensor + rows.first * row_stride + column_of<S>(0)), step(rows.stride * row_stride) {}
  __device__ __forceinline__ void next() { vector += step; }
};

constexpr int kRowStages = 2;  // one row in use, one in flight; a third stage is not faster on an H200

// A ring buffer in shared memory for rows of TENSORS tensors, filled by cp.async.
template <class T, class S, int TENSORS>
struct RowRing {
  Packed<T> vector[kRowStages][TENSORS][S::kVectors][S::kBlock];

  // Vectors past the row's end are zeroed once, so that most arithmetic needs no guards.
  __device__ __forceinline__ void clear_past_end(int columns) {
#pragma unroll
    for (int v = 0; v < S::kVectors; ++v) {
      if (in_row<S>(v, columns)) continue;
#pragma unroll
      for (int stage = 0; stage < kRowStages; ++stage)
#pragma unroll
        for (int tensor = 0; tensor < TENSORS; ++tensor) vector[stage][tensor][v][threadIdx.x] = Packed<T>{};
    }
  }

  // Starts copying the walks' next rows into `slot` and advances the walks. Past the last row (`copies` is false) it
  // commits an empty cp.async group, so that there is one group per row.
  template <class... Walks>
  __device__ __forceinline__ void start(bool copies, int columns, int slot, Walks&... walks) {
    static_assert(sizeof...(Walks) == TENSORS, "one walk per tensor");
    if (copies) {
      const uint32_t first = shared_address(&vector[slot][0][0][threadIdx.x]);
#pragma unroll
      for (int v = 0; v < S::kVectors; ++v) {
        if (!in_row<S>(v, columns)) continue;
        int tensor = 0;
        (cp_async(first + static_cast<uint32_t>(sizeof(Packed<T>)) * S::kBlock * (tensor++ * S::kVectors + v),
                  walks.vector + vector_offset<S>(v)),
         ...);
      }
    }
    cp_async_commit();
    (walks.next(), ...);
  }

  __device__ __forceinline__ void wait() { cp_async_wait<kRowStages - 1>(); }

  __device__ __forceinline__ const Packed<T>& at(int slot, int tensor, int v) const {
    return vector[slot][tensor][v][threadIdx.x];
  }
};

// Loads a parameter [C] of any type into shared memory as fp32: `fallback` if it is null, and zero past the end. A
// barrier must follow.
template <class S>
__device__ __forceinline__ void stage_parameter(const void* from, DType dtype, float fallback, int columns,
                                                float (&to)[S::kColumns]) {
  for (int column = threadIdx.x * kVector; column < S::kColumns; column += S::kBlock * kVector) {
    float value[kVector] = {};
    if (column < columns) load_parameter(from, dtype, column, fallback, value);
    store_packed(to + column, narrow<float>(value));
  }
}

// Adds the partial sums over rows of the block's groups, in group order, and stores the block's partial sum ([C] fp32).
template <class S>
__device__ __forceinline__ void store_part(const float (&share)[S::kVectors][kVector],
                                           float (&shares)[S::kGroups][S::kColumns], float* part, int columns) {
  __syncthreads();  // the memory may still be in use
#pragma unroll
  for (int v = 0; v < S::kVectors; ++v)
    store_packed(&shares[threadIdx.x / S::kGroup][column_of<S>(v)], narrow<float>(share[v]));
  __syncthreads();
  for (int column = threadIdx.x; column < columns; column += S::kBlock) {
    float sum = 0.0f;
#pragma unroll
    for (int group = 0; group < S::kGroups; ++group) sum += shares[group][column];
    part[column] = sum;
  }
}

}  // namespace cuda
}  // namespace fasttfm
