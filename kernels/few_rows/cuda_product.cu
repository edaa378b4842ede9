// GEMMs of up to 16 rows on Hopper: x [M, K] times weight [N, K]^T, both K-major; cuda_pipelined.cu is for more rows.
//
// A block computes one tile (tiles.h) over one part of K by mma.sync, whose operand has 16 rows. TMA loads stages of 64
// elements of K; a block starts to load its weights before the kernel that writes x has ended.
#include <cstdint>

#include "common/cuda/activation.cuh"
#include "common/cuda/hopper.cuh"
#include "few_rows/dependent.cuh"
#include "few_rows/op.h"
#include "few_rows/product.cuh"
#include "few_rows/tiles.h"

namespace fasttfm {
namespace cuda {
namespace {

using namespace few_rows;

constexpr int kRows = kSmallTile.rows, kColumns = kSmallTile.columns, kStages = kSmallTile.stages;
constexpr int kThreads = threads_of(kSmallTile);
constexpr int kGroups = kSmallTile.inner_groups, kGroupThreads = kThreads / kGroups;
constexpr int kWarpColumns = kColumns / kSmallTile.warp_columns;
constexpr int kN = kWarpColumns / 8;           // a warp's accumulators of 16 x 8
constexpr int kAhead = kStages - 1;            // stages that are loaded ahead of the one in use
constexpr int kSteps = kInner / 16 / kGroups;  // steps of 16 elements of K per warp and stage
constexpr int kMemory = memory_of(kSmallTile);
constexpr uint32_t kStageBytes = stage_bytes(kSmallTile), kABytes = kRows * kInner * 2;
static_assert(kRows == 16 && kN % 2 == 0 && kSteps * kGroups * 16 == kInner, "whole tiles");
static_assert((kGroups - 1) * kRows * kColumns * 4 <= kStages * static_cast<int>(kStageBytes),
              "room for the groups' sums");

using Sums = float[kN][4];

// Issues the TMA loads of a block's stages. Used by one thread.
struct StageCopies {
  const CUtensorMap *a_map, *b_map;
  Mbarrier* full;   // one per stage of the ring buffer
  uint32_t tiles;   // the ring buffer's address
  int row, column;  // the first row and column of the tile
  int start;        // index of the first stage of the part of K

  // `stage` is relative to the first stage of the part.
  __device__ __forceinline__ void start_weights(int stage, int slot) const {
    full[slot].arrive_expect_tx(kStageBytes);
    tma_load(b_map, full[slot], tiles + slot * kStageBytes + kABytes, (start + stage) * kInner, column, 0, 0);
  }
  __device__ __forceinline__ void start_rows(int stage, int slot) const {
    tma_load(a_map, full[slot], tiles + slot * kStageBytes, (start + stage) * kInner, row, 0, 0);
  }
};

// Accumulates the warp's steps of one stage.
template <class T>
__device__ __forceinline__ void multiply_stage(uint32_t a_tile, uint32_t b_tile, int group, Sums& sums) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const MatrixRow of_a = matrix_row_a(lane), of_b = matrix_row_b(lane);
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int chunk = 2 * (group * kSteps + i);
    uint32_t a[4], b[kN][2];
    ldmatrix_x4(a, a_tile + chunk_offset(of_a.row, chunk + of_a.chunk, kTileChunks));
#pragma unroll
    for (int n = 0; n < kN; n += 2)
      ldmatrix_x4(b[n], b_tile + chunk_offset(8 * n + of_b.row, chunk + of_b.chunk, kTileChunks));
#pragma unroll
    for (int n = 0; n < kN; ++n) mma_m16n8k16(sums[n], a, b[n], T{});
  }
}

// Adds the sums of all groups to those of the first group, in order. Returns true for threads of the first group.
__device__ __forceinline__ bool add_groups(float* exchange, int group, Sums& sums) {
  const int thread = static_cast<int>(threadIdx.x) % kGroupThreads;
  constexpr int kSums = kN * 4;
  __syncthreads();  // all warps have read the stages
  if (group > 0)
#pragma unroll
    for (int i = 0; i < kSums; ++i) exchange[((group - 1) * kSums + i) * kGroupThreads + thread] = sums[i / 4][i % 4];
  __syncthreads();
  if (group > 0) return false;
#pragma unroll
  for (int other = 0; other + 1 < kGroups; ++other)
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i / 4][i % 4] += exchange[(other * kSums + i) * kGroupThreads + thread];
  return true;
}

struct Identity {
  static __device__ __forceinline__ float of(float u) { return u; }
};
template <Activation A, class T>
struct Activate {
  static __device__ __forceinline__ float of(float u) { return activated_as<A, T>(u).value; }
};

template <class T, class F>
__device__ __forceinline__ void store_tile(const FewRowsProduct& p, int row, int column, const float (&bias)[kN][2],
                                           const Sums& sums, F) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int own = row + 8 * half;
    if (own >= p.rows) continue;
    T* to = static_cast<T*>(p.y) + own * p.columns + column;
#pragma unroll
    for (int n = 0; n < kN; ++n)
      if (column + 8 * n < p.columns)
        *reinterpret_cast<uint32_t*>(to + 8 * n) =
            narrow_word(F::of(sums[n][2 * half] + bias[n][0]), F::of(sums[n][2 * half + 1] + bias[n][1]), T{});
  }
}

__device__ __forceinline__ void store_part(const FewRowsProduct& p, int row, int column, const Sums& sums) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int own = row + 8 * half;
    if (own >= p.rows) continue;
    float* to = p.parts + (blockIdx.z * p.rows + own) * p.columns + column;
#pragma unroll
    for (int n = 0; n < kN; ++n)
      if (column + 8 * n < p.columns)
        *reinterpret_cast<float2*>(to + 8 * n) = make_float2(sums[n][2 * half], sums[n][2 * half + 1]);
  }
}

// The bias of a thread's columns.
__device__ __forceinline__ void load_bias(const FewRowsProduct& p, int column, float (&bias)[kN][2]) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
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

// The work of a warp: the tile's first row and column, the warp's first column within the tile, its group, and its
// stages.
struct Place {
  int row, column, warp_column, group;
  int start, stages;
};

template <class T>
__device__ __forceinline__ void multiply_part(char* memory, const CUtensorMap* a_map, const CUtensorMap* b_map,
                                              const Place& at, Sums& sums) {
  const uint32_t tiles = shared_address(memory);
  auto* full = reinterpret_cast<Mbarrier*>(memory + kStages * kStageBytes);
  const StageCopies copies{a_map, b_map, full, tiles, at.row, at.column, at.start};
  const int ahead = min(kAhead, at.stages);
  const bool copies_stages = threadIdx.x == 0;
  if (copies_stages) {
    prefetch_tensormap(b_map);
    prefetch_tensormap(a_map);
    for (int slot = 0; slot < kStages; ++slot) full[slot].init(1);
    fence_mbarrier_init();
    for (int stage = 0; stage < ahead; ++stage) copies.start_weights(stage, stage);
  }
  __syncthreads();  // the mbarriers are initialized
  griddepcontrol_wait();
  if (copies_stages)
    for (int stage = 0; stage < ahead; ++stage) copies.start_rows(stage, stage);
  RingPosition<kStages> ring;
  int free_slot = kAhead;
  for (int stage = 0; stage < at.stages; ++stage) {
    full[ring.slot].wait(ring.parity);
    __syncthreads();  // all warps have read the stage that is loaded next
    if (copies_stages && stage + kAhead < at.stages) {
      copies.start_weights(stage + kAhead, free_slot);
      copies.start_rows(stage + kAhead, free_slot);
    }
    const uint32_t tile = tiles + ring.slot * kStageBytes;
    multiply_stage<T>(tile, tile + kABytes + at.warp_column * kInner * 2, at.group, sums);
    ring.next();
    free_slot = free_slot + 1 == kStages ? 0 : free_slot + 1;
  }
}

// Grid (columns / tile, rows / tile, parts of K).
template <class T>
__global__ void __launch_bounds__(kThreads)
    product_kernel(const __grid_constant__ FewRowsProduct p, const __grid_constant__ CUtensorMap a_map,
                   const __grid_constant__ CUtensorMap b_map) {
  extern __shared__ __align__(1024) char memory[];
  griddepcontrol_launch_dependents();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int warp = warp_uniform(thread / 32), group = warp / (kGroupThreads / 32);
  const int warp_column = warp % kSmallTile.warp_columns * kWarpColumns;
  const int first_row = static_cast<int>(blockIdx.y) * kRows;
  const int first_column = static_cast<int>(blockIdx.x) * kColumns;
  const int all_stages = (static_cast<int>(p.inner) + kInner - 1) / kInner;
  const int start = first_stage(all_stages, blockIdx.z, gridDim.z);
  const int stages = first_stage(all_stages, blockIdx.z + 1, gridDim.z) - start;
  const int row = first_row + accumulator_row(lane);
  const int column = first_column + warp_column + accumulator_column(lane);
  prefetch_weights<T, kColumns, kThreads>(p, first_column, start + kAhead, stages - kAhead);
  float bias[kN][2];
  Sums sums = {};
  load_bias(p, column, bias);
  const Place at{first_row, first_column, warp_column, group, start, stages};
  multiply_part<T>(memory, &a_map, &b_map, at, sums);
  if (!add_groups(reinterpret_cast<float*>(memory), group, sums)) return;
  if (p.parts != nullptr) return store_part(p, row, column, sums);
  if (!p.activates) return store_tile<T>(p, row, column, bias, sums, Identity{});
  switch (p.activation) {
    case Activation::gelu: return store_tile<T>(p, row, column, bias, sums, Activate<Activation::gelu, T>{});
    case Activation::gelu_tanh: return store_tile<T>(p, row, column, bias, sums, Activate<Activation::gelu_tanh, T>{});
    case Activation::relu: return store_tile<T>(p, row, column, bias, sums, Activate<Activation::relu, T>{});
    case Activation::silu: return store_tile<T>(p, row, column, bias, sums, Activate<Activation::silu, T>{});
  }
}

template <class T>
Status launch(const FewRowsProduct& call) {
  if (call.tile != 0) return few_rows_pipelined_product(call, call.tile - 1);
  const dim3 grid = grid_of(steps(call.columns, kColumns), steps(call.rows, kRows), call.part_count);
  CUtensorMap a_map, b_map;
  Status status = map_rows(&a_map, call, call.x, call.rows, kRows);
  if (status.code == StatusCode::ok) status = map_rows(&b_map, call, call.weight, call.columns, kColumns);
  if (status.code != StatusCode::ok) return status;
  return launch_after(call.dependent != 0, product_kernel<T>, grid, kThreads, kMemory, call.stream, call, a_map, b_map);
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
  if (call.dtype == DType::bf16) return launch<bf16_t>(call);
  return call.dtype == DType::f16 ? launch<f16_t>(call) : unknown_dtype();
}

}  // namespace cuda
}  // namespace fasttfm
