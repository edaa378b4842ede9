// GEMMs for few rows on Hopper: x [M, K] times weight [N, K]^T, both K-major.
//
// A block computes one tile (tiles.h) over one part of K. TMA loads stages of 64 elements of K; a block starts to load
// its weights before the kernel that writes x has ended. Tiles use either mma.sync, whose 16 rows suit few rows best,
// or wgmma, which reads shared memory less often. Both have the same accumulator layout.
#include <cstdint>

#include "common/cuda/activation.cuh"
#include "common/cuda/hopper.cuh"
#include "few_rows/dependent.cuh"
#include "few_rows/op.h"
#include "few_rows/plan.h"
#include "few_rows/product.cuh"
#include "few_rows/tiles.h"

namespace fasttfm {
namespace cuda {
namespace {

using namespace few_rows;

template <int INDEX>
struct Shape {
  static constexpr Tile kTile = kTiles[INDEX];
  static constexpr int kRows = kTile.rows, kColumns = kTile.columns, kStages = kTile.stages;
  static constexpr int kThreads = threads_of(kTile);
  static constexpr int kGroups = kTile.inner_groups;
  static constexpr int kGroupThreads = kThreads / kGroups;
  static constexpr int kWarpRows = kRows / kTile.warp_rows, kWarpColumns = kColumns / kTile.warp_columns;
  static constexpr int kM = kWarpRows / 16, kN = kWarpColumns / 8;  // a warp's accumulators of 16 x 8
  static constexpr int kAhead = stages_ahead(kTile);
  static constexpr int kSteps = kInner / 16 / kGroups;  // steps of 16 elements of K per warp and stage
  static constexpr int kMemory = memory_of(kTile);
  static constexpr uint32_t kStageBytes = stage_bytes(kTile), kABytes = kRows * kInner * 2;
  static_assert(kWarpRows % 16 == 0 && kWarpColumns % 8 == 0 && kSteps * kGroups * 16 == kInner, "whole tiles");
  static_assert((kGroups - 1) * kRows * kColumns * 4 <= kStages * static_cast<int>(kStageBytes),
                "room for the groups' sums");
};

// Issues the TMA loads of a block's stages. Used by one thread.
template <class S>
struct StageCopies {
  const CUtensorMap *a_map, *b_map;
  Mbarrier* full;   // one per stage of the ring buffer
  uint32_t tiles;   // the ring buffer's address
  int row, column;  // the first row and column of the tile
  int start;        // index of the first stage of the part of K

  // `stage` is relative to the first stage of the part.
  __device__ __forceinline__ void start_weights(int stage, int slot) const {
    full[slot].arrive_expect_tx(S::kStageBytes);
    tma_load(b_map, full[slot], tiles + slot * S::kStageBytes + S::kABytes, (start + stage) * kInner, column, 0, 0);
  }
  __device__ __forceinline__ void start_rows(int stage, int slot) const {
    tma_load(a_map, full[slot], tiles + slot * S::kStageBytes, (start + stage) * kInner, row, 0, 0);
  }
};

// Prefetches the weights of the stages from `first` on into L2. Only the blocks of the first rows do this.
template <class T, class S>
__device__ __forceinline__ void prefetch_weights(const FewRowsProduct& p, int first_column, int start, int first,
                                                 int stages) {
  if (blockIdx.y != 0) return;
  const int lines = S::kColumns * (stages - first);
  for (int line = static_cast<int>(threadIdx.x); line < lines; line += S::kThreads) {
    const int column = first_column + line % S::kColumns, k = (start + first + line / S::kColumns) * kInner;
    if (column < p.columns) prefetch_l2(static_cast<const T*>(p.weight) + column * p.inner + k);
  }
}

// Accumulates the warp's steps of one stage by mma.sync.
template <class T, class S>
__device__ __forceinline__ void multiply_stage(uint32_t a_tile, uint32_t b_tile, int group,
                                               float (&sums)[S::kM][S::kN][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const MatrixRow of_a = matrix_row_a(lane), of_b = matrix_row_b(lane);
#pragma unroll
  for (int i = 0; i < S::kSteps; ++i) {
    const int chunk = 2 * (group * S::kSteps + i);
    uint32_t a[S::kM][4], b[S::kN + 1][2];
#pragma unroll
    for (int m = 0; m < S::kM; ++m)
      ldmatrix_x4(a[m], a_tile + chunk_offset(16 * m + of_a.row, chunk + of_a.chunk, kTileChunks));
#pragma unroll
    for (int n = 0; n + 1 < S::kN; n += 2)
      ldmatrix_x4(b[n], b_tile + chunk_offset(8 * n + of_b.row, chunk + of_b.chunk, kTileChunks));
    if constexpr (S::kN % 2 != 0)
      ldmatrix_x2(b[S::kN - 1], b_tile + chunk_offset(8 * (S::kN - 1) + lane % 8, chunk + of_b.chunk, kTileChunks));
#pragma unroll
    for (int m = 0; m < S::kM; ++m)
#pragma unroll
      for (int n = 0; n < S::kN; ++n) mma_m16n8k16(sums[m][n], a[m], b[n], T{});
  }
}

// The same by wgmma. On return the wgmma of the previous stage are complete and those of this stage are in flight.
// `a_tile` has the warpgroup's 64 rows, `b_tile` all columns.
template <class T, class S>
__device__ __forceinline__ void start_stage(uint32_t a_tile, uint32_t b_tile, int group, float (&sums)[S::kN * 4]) {
  const uint32_t first = static_cast<uint32_t>(group * S::kSteps) * kKMajorStep;
  const uint64_t a = k_major(a_tile), b = k_major(b_tile);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < S::kSteps; ++i)
    wgmma<T>(sums, advance(a, first + i * kKMajorStep), advance(b, first + i * kKMajorStep));
  wgmma_commit();
  wgmma_wait<1>();
}

// Adds the sums of all groups to those of the first group, in order. Returns true for threads of the first group.
template <class S>
__device__ __forceinline__ bool add_groups(float* exchange, int group, float (&sums)[S::kM][S::kN][4]) {
  if constexpr (S::kGroups == 1) return true;
  const int thread = static_cast<int>(threadIdx.x) % S::kGroupThreads;
  constexpr int kSums = S::kM * S::kN * 4;
  __syncthreads();  // all warps have read the stages
  if (group > 0)
#pragma unroll
    for (int i = 0; i < kSums; ++i)
      exchange[((group - 1) * kSums + i) * S::kGroupThreads + thread] = sums[i / 4 / S::kN][i / 4 % S::kN][i % 4];
  __syncthreads();
  if (group > 0) return false;
#pragma unroll
  for (int other = 0; other + 1 < S::kGroups; ++other)
#pragma unroll
    for (int i = 0; i < kSums; ++i)
      sums[i / 4 / S::kN][i / 4 % S::kN][i % 4] += exchange[(other * kSums + i) * S::kGroupThreads + thread];
  return true;
}

struct Identity {
  static __device__ __forceinline__ float of(float u) { return u; }
};
template <Activation A, class T>
struct Activate {
  static __device__ __forceinline__ float of(float u) { return activated_as<A, T>(u).value; }
};

template <class T, class S, class F>
__device__ __forceinline__ void store_tile(const FewRowsProduct& p, int row, int column, const float (&bias)[S::kN][2],
                                           const float (&sums)[S::kM][S::kN][4], F) {
#pragma unroll
  for (int m = 0; m < S::kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = row + 16 * m + 8 * half;
      if (own >= p.rows) continue;
      T* to = static_cast<T*>(p.y) + own * p.columns + column;
#pragma unroll
      for (int n = 0; n < S::kN; ++n)
        if (column + 8 * n < p.columns)
          *reinterpret_cast<uint32_t*>(to + 8 * n) =
              narrow_word(F::of(sums[m][n][2 * half] + bias[n][0]), F::of(sums[m][n][2 * half + 1] + bias[n][1]), T{});
    }
}

template <class S>
__device__ __forceinline__ void store_part(const FewRowsProduct& p, int row, int column,
                                           const float (&sums)[S::kM][S::kN][4]) {
#pragma unroll
  for (int m = 0; m < S::kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = row + 16 * m + 8 * half;
      if (own >= p.rows) continue;
      float* to = p.parts + (blockIdx.z * p.rows + own) * p.columns + column;
#pragma unroll
      for (int n = 0; n < S::kN; ++n)
        if (column + 8 * n < p.columns)
          *reinterpret_cast<float2*>(to + 8 * n) = make_float2(sums[m][n][2 * half], sums[m][n][2 * half + 1]);
    }
}

// The bias of a thread's columns.
template <class S>
__device__ __forceinline__ void load_bias(const FewRowsProduct& p, int column, float (&bias)[S::kN][2]) {
#pragma unroll
  for (int n = 0; n < S::kN; ++n) {
    bias[n][0] = bias[n][1] = 0.0f;
    const int own = column + 8 * n;
    if (p.bias == nullptr || own >= p.columns) continue;
    float2 pair;
    if (p.bias_dtype == DType::f32)
      pair = *reinterpret_cast<const float2*>(static_cast<const float*>(p.bias) + own);
    else if (p.bias_dtype == DType::bf16)
      pair = widen_word(*reinterpret_cast<const uint32_t*>(static_cast<const bf16_t*>(p.bias) + own), bf16_t{});
    else
      pair = widen_word(*reinterpret_cast<const uint32_t*>(static_cast<const f16_t*>(p.bias) + own), f16_t{});
    bias[n][0] = pair.x;
    bias[n][1] = pair.y;
  }
}

// The work of a warp: the tile's first row and column, the warp's first row and column within the tile, its group, and
// its stages.
struct Place {
  int row, column, warp_row, warp_column, group;
  int start, stages;
};

template <class T, class S>
__device__ __forceinline__ void multiply_slot(uint32_t tile, const Place& at, float (&sums)[S::kM][S::kN][4]) {
  if constexpr (S::kTile.wgmma)
    start_stage<T, S>(tile + at.warp_row / 64 * 64 * kInner * 2, tile + S::kABytes, at.group,
                      reinterpret_cast<float (&)[S::kM * S::kN * 4]>(sums));
  else
    multiply_stage<T, S>(tile + at.warp_row * kInner * 2, tile + S::kABytes + at.warp_column * kInner * 2, at.group,
                         sums);
}

template <class S>
__device__ __forceinline__ void finish_stages(float (&sums)[S::kM][S::kN][4]) {
  if constexpr (S::kTile.wgmma) {
    wgmma_wait<0>();
    fence_operand(reinterpret_cast<float (&)[S::kM * S::kN * 4]>(sums));
  }
}

template <class T, class S>
__device__ __forceinline__ void multiply_part(char* memory, const CUtensorMap* a_map, const CUtensorMap* b_map,
                                              const Place& at, float (&sums)[S::kM][S::kN][4]) {
  const uint32_t tiles = shared_address(memory);
  auto* full = reinterpret_cast<Mbarrier*>(memory + S::kStages * S::kStageBytes);
  const StageCopies<S> copies{a_map, b_map, full, tiles, at.row, at.column, at.start};
  const int ahead = min(S::kAhead, at.stages);
  const bool copies_stages = threadIdx.x == 0;
  if (copies_stages) {
    prefetch_tensormap(b_map);
    prefetch_tensormap(a_map);
    for (int slot = 0; slot < S::kStages; ++slot) full[slot].init(1);
    fence_mbarrier_init();
    for (int stage = 0; stage < ahead; ++stage) copies.start_weights(stage, stage);
  }
  __syncthreads();  // the mbarriers are initialized
  griddepcontrol_wait();
  if (copies_stages)
    for (int stage = 0; stage < ahead; ++stage) copies.start_rows(stage, stage);
  RingPosition<S::kStages> ring;
  int free_slot = S::kAhead;
  for (int stage = 0; stage < at.stages; ++stage) {
    full[ring.slot].wait(ring.parity);
    __syncthreads();  // all warps have read the stage that is loaded next
    if (copies_stages && stage + S::kAhead < at.stages) {
      copies.start_weights(stage + S::kAhead, free_slot);
      copies.start_rows(stage + S::kAhead, free_slot);
    }
    multiply_slot<T, S>(tiles + ring.slot * S::kStageBytes, at, sums);
    ring.next();
    free_slot = free_slot + 1 == S::kStages ? 0 : free_slot + 1;
  }
  finish_stages<S>(sums);
}

// Grid (columns / tile, rows / tile, parts of K).
template <class T, class S>
__global__ void __launch_bounds__(S::kThreads)
    product_kernel(const __grid_constant__ FewRowsProduct p, const __grid_constant__ CUtensorMap a_map,
                   const __grid_constant__ CUtensorMap b_map) {
  extern __shared__ __align__(1024) char memory[];
  griddepcontrol_launch_dependents();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int warp = warp_uniform(thread / 32), group = warp / (S::kGroupThreads / 32);
  const int warp_in_group = warp % (S::kGroupThreads / 32);
  const int warp_row = warp_in_group / S::kTile.warp_columns * S::kWarpRows;
  const int warp_column = warp_in_group % S::kTile.warp_columns * S::kWarpColumns;
  const int first_row = static_cast<int>(blockIdx.y) * S::kRows;
  const int first_column = static_cast<int>(blockIdx.x) * S::kColumns;
  const int all_stages = (static_cast<int>(p.inner) + kInner - 1) / kInner;
  const int start = first_stage(all_stages, blockIdx.z, gridDim.z);
  const int stages = first_stage(all_stages, blockIdx.z + 1, gridDim.z) - start;
  const int row = first_row + warp_row + accumulator_row(lane);
  const int column = first_column + warp_column + accumulator_column(lane);
  prefetch_weights<T, S>(p, first_column, start, S::kAhead, stages);
  float bias[S::kN][2], sums[S::kM][S::kN][4] = {};
  load_bias<S>(p, column, bias);
  const Place at{first_row, first_column, warp_row, warp_column, group, start, stages};
  multiply_part<T, S>(memory, &a_map, &b_map, at, sums);
  if (!add_groups<S>(reinterpret_cast<float*>(memory), group, sums)) return;
  if (p.parts != nullptr) return store_part<S>(p, row, column, sums);
  if (!p.activates) return store_tile<T, S>(p, row, column, bias, sums, Identity{});
  switch (p.activation) {
    case Activation::gelu: return store_tile<T, S>(p, row, column, bias, sums, Activate<Activation::gelu, T>{});
    case Activation::gelu_tanh:
      return store_tile<T, S>(p, row, column, bias, sums, Activate<Activation::gelu_tanh, T>{});
    case Activation::relu: return store_tile<T, S>(p, row, column, bias, sums, Activate<Activation::relu, T>{});
    case Activation::silu: return store_tile<T, S>(p, row, column, bias, sums, Activate<Activation::silu, T>{});
  }
}

template <class T, int INDEX = 0>
Status launch_tile(const FewRowsProduct& call) {
  if constexpr (INDEX == kTileCount) {
    return few_rows_pipelined_product(call, call.tile - kTileCount);
  } else {
    if (call.tile != INDEX) return launch_tile<T, INDEX + 1>(call);
    using S = Shape<INDEX>;
    const auto steps = [](int64_t count, int step) { return static_cast<unsigned>((count + step - 1) / step); };
    const dim3 grid(steps(call.columns, S::kColumns), steps(call.rows, S::kRows),
                    static_cast<unsigned>(call.part_count));
    CUtensorMap a_map, b_map;
    Status status = map_rows(&a_map, call, call.x, call.rows, S::kRows);
    if (status.code == StatusCode::ok) status = map_rows(&b_map, call, call.weight, call.columns, S::kColumns);
    if (status.code != StatusCode::ok) return status;
    return launch_after(call.dependent != 0, product_kernel<T, S>, grid, S::kThreads, S::kMemory, call.stream, call,
                        a_map, b_map);
  }
}

Status check(const FewRowsProduct& call) {
  constexpr int64_t kMost = 1 << 20;
  for (int64_t size : {call.rows, call.columns, call.inner})
    if (size < 1 || size > kMost) return bad_size("few_rows_product: sizes are 1 to 2^20");
  if (call.columns % kChunk != 0 || call.inner % kChunk != 0)
    return bad_size("few_rows_product: columns and inner are multiples of 8");
  if (call.part_count < 1 || call.part_count > (call.inner + kInner - 1) / kInner ||
      (call.parts == nullptr && call.part_count > 1))
    return {StatusCode::bad_value, "few_rows_product: part_count: expected 1, or at most one part for 64 of K"};
  for (const void* tensor :
       {call.x, call.weight, call.bias, static_cast<const void*>(call.y), static_cast<const void*>(call.parts)})
    if (reinterpret_cast<uintptr_t>(tensor) % 16 != 0)
      return {StatusCode::bad_alignment, "few_rows_product: tensors start at multiples of 16 bytes"};
  return {};
}

}  // namespace

Status few_rows_product(const FewRowsProduct& call) {
  const Status status = check(call);
  if (status.code != StatusCode::ok) return status;
  const DeviceGuard guard(call.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  if (call.dtype == DType::bf16) return launch_tile<bf16_t>(call);
  return call.dtype == DType::f16 ? launch_tile<f16_t>(call) : unknown_dtype();
}

}  // namespace cuda
}  // namespace fasttfm
