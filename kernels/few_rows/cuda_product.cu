// GEMMs of 1 to about a thousand rows on Hopper: x [M, K] times weight [N, K]^T, both K-major.
//
// A block computes one tile over one part of K. A producer warp loads stages of 64 elements of K by TMA; consumer
// warpgroups issue wgmma for 64 rows each and write the result themselves. The blocks of a cluster have neighbouring
// columns of the same rows: each loads a part of the stage of x and multicasts it to all, because tiles that fill all
// SMs are small, and without multicast loading them from L2 would take longer than multiplying them.
#include <cstdint>

#include "common/cuda/activation.cuh"
#include "common/cuda/hopper.cuh"
#include "few_rows/dependent.cuh"
#include "few_rows/op.h"
#include "few_rows/product_tiles.h"

namespace fasttfm {
namespace cuda {
namespace {

using namespace few_rows;

template <int INDEX>
struct Shape {
  static constexpr ProductTile kTile = kProductTiles[INDEX];
  static constexpr int kRows = kTile.rows, kColumns = kTile.columns, kStages = kTile.stages, kCluster = kTile.cluster;
  static constexpr int kConsumers = 2 * kRows;  // threads
  static constexpr int kThreads = kConsumers + 32;
  static constexpr int kSums = kColumns / 2;  // a consumer's accumulators
  static constexpr int kShare = kRows / kCluster;
  static constexpr uint32_t kABytes = kRows * kTileRowBytes, kStageBytes = (kRows + kColumns) * kTileRowBytes;
  static_assert(kShare % 8 == 0, "whole swizzled groups of rows");
  static_assert(kRows * result_pitch(kColumns) <= kStages * static_cast<int>(kStageBytes), "room for the result");
};

template <class S>
struct Memory {
  char stage[S::kStages][S::kStageBytes];
  alignas(16) float bias[S::kColumns];
  Mbarrier full[S::kStages], empty[S::kStages];

  __device__ __forceinline__ void init() {
    for (int slot = 0; slot < S::kStages; ++slot) {
      full[slot].init(1);
      empty[slot].init(S::kConsumers / 32 * S::kCluster);
    }
    fence_mbarrier_init();
  }
};

// The block's tile and part of K.
struct Place {
  int row, column, start, stages;
};

template <class S>
__device__ __forceinline__ Place place_of(const FewRowsProduct& p) {
  const int all = (static_cast<int>(p.inner) + kInner - 1) / kInner;
  const int start = first_stage(all, blockIdx.z, gridDim.z), end = first_stage(all, blockIdx.z + 1, gridDim.z);
  return {static_cast<int>(blockIdx.y) * S::kRows, static_cast<int>(blockIdx.x) * S::kColumns, start, end - start};
}

// Called by one thread.
template <class S>
__device__ __forceinline__ void produce(Memory<S>& memory, const Place& at, const CUtensorMap* a_map,
                                        const CUtensorMap* b_map) {
  const int share = static_cast<int>(blockIdx.x) % S::kCluster * S::kShare;
  const auto load_weights = [&](int stage, int slot) {
    memory.full[slot].arrive_expect_tx(S::kStageBytes);
    tma_load(b_map, memory.full[slot], shared_address(memory.stage[slot]) + S::kABytes, (at.start + stage) * kInner,
             at.column, 0, 0);
  };
  const auto load_rows = [&](int stage, int slot) {
    const uint32_t to = shared_address(memory.stage[slot]) + share * kTileRowBytes;
    const int k = (at.start + stage) * kInner, row = at.row + share;
    if constexpr (S::kCluster == 1)
      tma_load(a_map, memory.full[slot], to, k, row, 0, 0);
    else
      tma_load_multicast((1 << S::kCluster) - 1, a_map, memory.full[slot], to, k, row, 0, 0);
  };
  const int ahead = min(S::kStages, at.stages);
  for (int stage = 0; stage < ahead; ++stage) load_weights(stage, stage);
  griddepcontrol_wait();
  for (int stage = 0; stage < ahead; ++stage) load_rows(stage, stage);
  RingPosition<S::kStages> ring;
  for (int stage = S::kStages; stage < at.stages; ++stage) {
    memory.empty[ring.slot].wait(ring.parity);
    load_weights(stage, static_cast<int>(ring.slot));
    load_rows(stage, static_cast<int>(ring.slot));
    ring.next();
  }
}

// Accumulates a warpgroup's 64 rows. A slot is released only if it is loaded again, so that no block arrives at an
// mbarrier of a block that has ended.
template <class T, class S>
__device__ __forceinline__ void consume(Memory<S>& memory, int stages, int group, float (&sums)[S::kSums]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  RingPosition<S::kStages> ring;
  uint32_t last = 0;
  for (int stage = 0; stage < stages; ++stage) {
    memory.full[ring.slot].wait(ring.parity);
    const uint32_t tile = shared_address(memory.stage[ring.slot]);
    const uint64_t a = k_major(tile + group * 64 * kTileRowBytes), b = k_major(tile + S::kABytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kInner / 16; ++i)
      wgmma<T, Major::k, Major::k>(sums, advance(a, i * kKMajorStep), advance(b, i * kKMajorStep), stage > 0 || i > 0);
    wgmma_commit();
    if (stage > 0) {
      wgmma_wait<1>();
      __syncwarp();
      if (stage - 1 + S::kStages < stages && lane < S::kCluster) memory.empty[last].arrive_remote(lane);
    }
    last = ring.slot;
    ring.next();
  }
  wgmma_wait<0>();
  fence_operand(sums);
}

// Prefetches the weights of COLUMNS columns and `stages` stages of K, from `first` on, into L2. Called by THREADS
// threads; only the blocks of the first rows do this.
template <class T, int COLUMNS, int THREADS>
__device__ __forceinline__ void prefetch_weights(const FewRowsProduct& p, int first_column, int first, int stages) {
  if (blockIdx.y != 0) return;
  for (int line = static_cast<int>(threadIdx.x); line < COLUMNS * stages; line += THREADS) {
    const int column = first_column + line % COLUMNS, k = (first + line / COLUMNS) * kInner;
    if (column < p.columns) prefetch_l2(static_cast<const T*>(p.weight) + column * p.inner + k);
  }
}

__device__ __forceinline__ float bias_at(const FewRowsProduct& p, int column) {
  if (p.bias == nullptr || column >= p.columns) return 0.0f;
  if (p.bias_dtype == DType::f32) return static_cast<const float*>(p.bias)[column];
  const uint32_t bits = static_cast<const uint16_t*>(p.bias)[column];
  return p.bias_dtype == DType::bf16 ? widen_word(bits, bf16_t{}).x : widen_word(bits, f16_t{}).x;
}

// Rounds F(sums + bias) and stores a warp's 16 rows through shared memory, in rows of adjacent vectors.
template <class T, class S, class F>
__device__ __forceinline__ void store_rows(const FewRowsProduct& p, Memory<S>& memory, const Place& at, int warp,
                                           const float (&sums)[S::kSums], F of) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t own = shared_address(memory.stage) + warp * 16 * result_pitch(S::kColumns);
  const uint32_t to = own + result_offset(lane, S::kColumns);
  const float* bias = memory.bias + accumulator_column(lane);
#pragma unroll
  for (int i = 0; i < S::kColumns / 8; i += 2) {  // columns 8 * i to 8 * i + 15
    uint32_t word[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float2 add = *reinterpret_cast<const float2*>(bias + 8 * (i + k / 2));
      word[k] = narrow_word(of(sums[4 * i + 2 * k] + add.x), of(sums[4 * i + 2 * k + 1] + add.y), T{});
    }
    stmatrix_x4(to + 16 * i, word);
  }
  __syncwarp();
#pragma unroll 4
  for (int index = lane; index < 16 * S::kColumns / kChunk; index += 32) {
    const ResultVector at_warp = result_vector(index, S::kColumns);
    const int row = at.row + warp * 16 + at_warp.row, column = at.column + at_warp.column;
    const uint4 v = load_vector(own + at_warp.row * result_pitch(S::kColumns) + at_warp.column * 2);
    if (row < p.rows && column < p.columns)
      *reinterpret_cast<uint4*>(static_cast<T*>(p.y) + row * p.columns + column) = v;
  }
}

template <class S>
__device__ __forceinline__ void store_part(const FewRowsProduct& p, const Place& at, int warp,
                                           const float (&sums)[S::kSums]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, column = at.column + accumulator_column(lane);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = at.row + warp * 16 + accumulator_row(lane) + 8 * half;
    if (row >= p.rows) continue;
    float* to = p.parts + (blockIdx.z * p.rows + row) * p.columns + column;
#pragma unroll
    for (int n = 0; n < S::kColumns / 8; ++n)
      if (column + 8 * n < p.columns)
        *reinterpret_cast<float2*>(to + 8 * n) = make_float2(sums[4 * n + 2 * half], sums[4 * n + 2 * half + 1]);
  }
}

constexpr int kConsumerBarrier = 1;

template <class T, class S>
__device__ __forceinline__ void multiply(const FewRowsProduct& p, Memory<S>& memory, const Place& at, int warp) {
  // of the stages that do not fit into the ring buffer, while the warps wait for the previous kernel
  prefetch_weights<T, S::kColumns, S::kConsumers>(p, at.column, at.start + S::kStages, at.stages - S::kStages);
  for (int i = static_cast<int>(threadIdx.x); i < S::kColumns; i += S::kConsumers)
    memory.bias[i] = bias_at(p, at.column + i);
  float sums[S::kSums];
  consume<T, S>(memory, at.stages, warp / 4, sums);
  if (p.parts != nullptr) return store_part<S>(p, at, warp, sums);
  named_barrier_sync(kConsumerBarrier, S::kConsumers);  // the bias is there, and all warps have read the last stages
  if (!p.activates) return store_rows<T, S>(p, memory, at, warp, sums, [](float u) { return u; });
  const auto store = [&](auto tag) {
    constexpr Activation kActivation = decltype(tag)::value;
    store_rows<T, S>(p, memory, at, warp, sums, [](float u) { return activated_as<kActivation, T>(u).value; });
  };
  switch (p.activation) {
    case Activation::gelu: return store(ActivationTag<Activation::gelu>{});
    case Activation::gelu_tanh: return store(ActivationTag<Activation::gelu_tanh>{});
    case Activation::relu: return store(ActivationTag<Activation::relu>{});
    case Activation::silu: return store(ActivationTag<Activation::silu>{});
  }
}

// Grid (columns / tile, rows / tile, parts of K).
template <class T, class S>
__global__ void __cluster_dims__(S::kCluster, 1, 1) __launch_bounds__(S::kThreads, 1)
    product_kernel(const __grid_constant__ FewRowsProduct p, const __grid_constant__ CUtensorMap a_map,
                   const __grid_constant__ CUtensorMap b_map) {
  extern __shared__ __align__(1024) char dynamic_memory[];
  auto& memory = *reinterpret_cast<Memory<S>*>(dynamic_memory);
  griddepcontrol_launch_dependents();
  const int warp = warp_uniform(static_cast<int>(threadIdx.x) / 32);
  const Place at = place_of<S>(p);
  if (threadIdx.x == 0) memory.init();
  __syncthreads();
  if constexpr (S::kCluster > 1) cluster_sync();
  if (warp < S::kConsumers / 32) {
    multiply<T, S>(p, memory, at, warp);
  } else if (elect_one()) {
    prefetch_tensormap(&b_map);
    prefetch_tensormap(&a_map);
    produce<S>(memory, at, &a_map, &b_map);
  }
}

// Makes the tensor map of a matrix [rows, K] with boxes of `box` rows and 64 elements of K.
Status map_rows(CUtensorMap* map, const FewRowsProduct& call, const void* matrix, int64_t rows, int box) {
  return make_tensor_map(map,
                         {matrix, call.dtype, {call.inner, rows, 1, 1}, {call.inner, 0, 0}, {kTileColumns, box, 1, 1}});
}

dim3 grid_of(int64_t x, int64_t y, int64_t z) {
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z));
}

template <class T, class S>
Status launch_tile(const FewRowsProduct& call) {
  static_assert(sizeof(Memory<S>) <= 227 * 1024, "more shared memory than an SM has");
  const int64_t clusters = steps(call.columns, S::kColumns * S::kCluster);
  const dim3 grid = grid_of(clusters * S::kCluster, steps(call.rows, S::kRows), call.part_count);
  CUtensorMap a_map, b_map;
  Status status = map_rows(&a_map, call, call.x, call.rows, S::kShare);
  if (status.code == StatusCode::ok) status = map_rows(&b_map, call, call.weight, call.columns, S::kColumns);
  if (status.code != StatusCode::ok) return status;
  return launch_after(call.dependent != 0, product_kernel<T, S>, grid, S::kThreads, sizeof(Memory<S>), call.stream,
                      call, a_map, b_map);
}

template <class T, int INDEX = 0>
Status launch_product(const FewRowsProduct& call) {
  if constexpr (INDEX == kProductTileCount)
    return {StatusCode::bad_value, "few_rows_product: tile: expected an index into the table of tiles"};
  else
    return call.tile == INDEX ? launch_tile<T, Shape<INDEX>>(call) : launch_product<T, INDEX + 1>(call);
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
  if (call.dtype == DType::bf16) return launch_product<bf16_t>(call);
  return call.dtype == DType::f16 ? launch_product<f16_t>(call) : unknown_dtype();
}

}  // namespace cuda
}  // namespace fasttfm
