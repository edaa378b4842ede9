// GEMMs of 1 to about a thousand rows on Hopper: x [M, K] times weight [N, K]^T, both K-major.
//
// A block computes one tile over one part of K. A producer warp loads stages of 64 elements of K by TMA; consumer
// warpgroups issue wgmma for 64 rows each and write the result themselves. The blocks of a cluster have neighbouring
// columns of the same rows: each loads a part of the stage of x and multicasts it to all, because tiles that fill all
// SMs are small, and without multicast loading them from L2 would take longer than multiplying them.
//
// A residual is added to the result of one part of K (gemm_result.cuh), or of several that the blocks of a cluster
// have (gemm_residual.cuh).
#include <cstdint>

#include "common/cuda/activation.cuh"
#include "common/cuda/hopper.cuh"
#include "few_rows/dependent.cuh"
#include "few_rows/gemm_block.cuh"
#include "few_rows/gemm_residual.cuh"
#include "few_rows/gemm_result.cuh"
#include "few_rows/gemm_tiles.h"
#include "few_rows/op.h"

namespace fasttfm {
namespace cuda {
namespace {

using namespace product;

// Whether the blocks of a cluster add their sums.
template <class S>
__device__ __forceinline__ bool exchanges(const FewRowsGemm& p) {
  return S::kExchanges && p.residual != nullptr && S::kJoined * p.part_count > 1;
}

template <class S>
__device__ __forceinline__ Place place_of(const FewRowsGemm& p) {
  const int all = (static_cast<int>(p.inner) + kInner - 1) / kInner, part = static_cast<int>(blockIdx.z);
  const int start = first_stage(all, part, p.part_count), end = first_stage(all, part + 1, p.part_count);
  Place at;
  at.row = static_cast<int>(blockIdx.y) * S::kRows;
  at.column = static_cast<int>(blockIdx.x) * S::kColumns;
  at.part = part;
  at.start = start;
  at.stages = end - start;
  at.multicast_blocks = p.cluster;
  at.neighbour = static_cast<int>(blockIdx.x) % p.cluster;
  at.first_rank = p.residual != nullptr ? part * p.cluster : 0;
  return at;
}

// Called by one thread.
template <class S>
__device__ __forceinline__ void produce(Memory<S>& memory, const Place& at, const CUtensorMap* a_map,
                                        const CUtensorMap* b_map) {
  const int share = at.neighbour * (S::kRows / at.multicast_blocks);
  const auto blocks = static_cast<uint16_t>(((1 << at.multicast_blocks) - 1) << at.first_rank);
  const auto load_weights = [&](int stage, int slot) {
    memory.full[slot].arrive_expect_tx(S::kStageBytes);
    tma_load(b_map, memory.full[slot], shared_address(memory.stage[slot]) + S::kABytes, (at.start + stage) * kInner,
             at.column, 0, 0);
  };
  const auto load_rows = [&](int stage, int slot) {
    const uint32_t to = shared_address(memory.stage[slot]) + share * kTileRowBytes;
    const int k = (at.start + stage) * kInner, row = at.row + share;
    if (at.multicast_blocks == 1)
      tma_load(a_map, memory.full[slot], to, k, row, 0, 0);
    else
      tma_load_multicast(blocks, a_map, memory.full[slot], to, k, row, 0, 0);
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
__device__ __forceinline__ void consume(Memory<S>& memory, const Place& at, int group, float (&sums)[S::kSums]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  RingPosition<S::kStages> ring;
  uint32_t last = 0;
  for (int stage = 0; stage < at.stages; ++stage) {
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
      if (stage - 1 + S::kStages < at.stages && lane < at.multicast_blocks)
        memory.empty[last].arrive_remote(at.first_rank + lane);
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
__device__ __forceinline__ void prefetch_weights(const FewRowsGemm& p, int first_column, int first, int stages) {
  if (blockIdx.y != 0) return;
  for (int line = static_cast<int>(threadIdx.x); line < COLUMNS * stages; line += THREADS) {
    const int column = first_column + line % COLUMNS, k = (first + line / COLUMNS) * kInner;
    if (column < p.columns) prefetch_l2(static_cast<const T*>(p.weight) + column * p.inner + k);
  }
}

__device__ __forceinline__ float bias_at(const FewRowsGemm& p, int column) {
  if (p.bias == nullptr || column >= p.columns) return 0.0f;
  if (p.bias_dtype == DType::f32) return static_cast<const float*>(p.bias)[column];
  const uint32_t bits = static_cast<const uint16_t*>(p.bias)[column];
  return p.bias_dtype == DType::bf16 ? widen_word(bits, bf16_t{}).x : widen_word(bits, f16_t{}).x;
}

// Loads what the epilogue needs in addition to the sums: parameters, and, after the previous kernel, the rows'
// statistics and the residual.
template <class T, class S>
__device__ __forceinline__ void load_epilogue(const FewRowsGemm& p, Memory<S>& memory, const Place& at,
                                              const Share& share, int warp, Residual<T, S>& residual,
                                              Norms<T, S>& norms) {
  const bool shares = S::kExchanges && p.residual != nullptr;
  const int column = shares ? share.column : at.column, columns = shares ? S::kJoinedColumns : S::kColumns;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < columns; i += S::kConsumers) {
    memory.bias[i] = bias_at(p, column + i);
    if (shares)
      memory.weight[i] = p.residual_weight != nullptr && column + i < p.columns ? p.residual_weight[column + i] : 1.0f;
  }
  if constexpr (S::kReadsStatistics) {
    if (shares || p.statistics != nullptr) griddepcontrol_wait();
    if (shares) residual.load(p, at, share, 0);
    norms.load(p, at.row + (shares ? share.index * share.rows : 0), shares ? share.rows : S::kRows, warp);
  }
}

// Adds a residual of normalized rows.
template <class T, class S>
__device__ __forceinline__ void multiply_and_add(const FewRowsGemm& p, Memory<S>& memory, const Place& at, int warp) {
  for (int i = static_cast<int>(threadIdx.x); i < S::kColumns; i += S::kConsumers)
    memory.bias[i] = bias_at(p, at.column + i);
  griddepcontrol_wait();
  AccumulatorResidual<T, S> residual;
  residual.load(p, at, warp);
  float sums[S::kSums];
  consume<T, S>(memory, at, warp / 4, sums);
  named_barrier_sync(kConsumerBarrier, S::kConsumers);  // the bias is there, and all warps have read the last stages
  store_added<T, S>(p, memory, at, warp, sums, residual);
}

template <class T, class S>
__device__ __forceinline__ void multiply(const FewRowsGemm& p, Memory<S>& memory, const Place& at, int warp) {
  const Share share = share_of<S>(p, memory, at);
  Residual<T, S> residual;
  Norms<T, S> norms;
  load_epilogue<T, S>(p, memory, at, share, warp, residual, norms);
  if constexpr (S::kReadsStatistics) norms.store(p, memory);
  float sums[S::kSums];
  consume<T, S>(memory, at, warp / 4, sums);
  if constexpr (S::kExchanges)
    if (p.residual != nullptr) return store_sums<T, S>(p, memory, at, share, warp, sums, residual);
  if constexpr (!S::kReadsStatistics)
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
__global__ void __launch_bounds__(S::kThreads, 1)
    gemm_kernel(const __grid_constant__ FewRowsGemm p, const __grid_constant__ CUtensorMap a_map,
                const __grid_constant__ CUtensorMap b_map) {
  extern __shared__ __align__(1024) char dynamic_memory[];
  auto& memory = *reinterpret_cast<Memory<S>*>(dynamic_memory);
  griddepcontrol_launch_dependents();
  const int warp = warp_uniform(static_cast<int>(threadIdx.x) / 32);
  const Place at = place_of<S>(p);
  if (threadIdx.x == 0) {
    const int blocks = S::kJoined * p.part_count;
    memory.init(at.multicast_blocks, exchanges<S>(p) ? S::kPartBytes / blocks * (blocks - 1) : 0);
  }
  __syncthreads();
  // Blocks that share the rows of x multicast into each other's memory at once, those that only exchange sums later.
  const bool waits_later = at.multicast_blocks == 1 && exchanges<S>(p);
  if (waits_later || at.multicast_blocks > 1) cluster_arrive_initialized();
  if (at.multicast_blocks > 1) cluster_wait();
  if (warp < S::kConsumers / 32) {
    // of the stages that do not fit into the ring buffer, while the warps wait for the previous kernel
    prefetch_weights<T, S::kColumns, S::kConsumers>(p, at.column, at.start + S::kStages, at.stages - S::kStages);
    if constexpr (S::kAdds && !S::kExchanges)
      multiply_and_add<T, S>(p, memory, at, warp);
    else
      multiply<T, S>(p, memory, at, warp);
  } else {
    if (elect_one()) {
      prefetch_tensormap(&b_map);
      prefetch_tensormap(&a_map);
      produce<S>(memory, at, &a_map, &b_map);
    }
    if (waits_later) cluster_wait();
  }
}

// Makes the tensor map of a matrix [rows, K] with boxes of `box` rows and 64 elements of K.
Status map_rows(CUtensorMap* map, const FewRowsGemm& call, const void* matrix, int64_t rows, int box) {
  return make_tensor_map(map,
                         {matrix, call.dtype, {call.inner, rows, 1, 1}, {call.inner, 0, 0}, {kTileColumns, box, 1, 1}});
}

dim3 grid_of(int64_t x, int64_t y, int64_t z) {
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z));
}

Status unknown_tile() {
  return {StatusCode::bad_value, "few_rows_gemm: tile: expected an index into the table of tiles"};
}

template <class T, class S>
Status launch_tile(const FewRowsGemm& call) {
  static_assert(kExchangeMemory<S> <= kMostMemory, "more shared memory than an SM has");
  const bool exchanges = call.residual != nullptr && S::kJoined * call.part_count > 1;
  const size_t memory = exchanges ? kExchangeMemory<S> : sizeof(Memory<S>);
  const int64_t clusters = steps(call.columns, S::kColumns * call.cluster);
  const dim3 grid = grid_of(clusters * call.cluster, steps(call.rows, S::kRows), call.part_count);
  const dim3 cluster = grid_of(call.cluster, 1, call.residual != nullptr ? call.part_count : 1);
  CUtensorMap a_map, b_map;
  Status status = map_rows(&a_map, call, call.x, call.rows, S::kRows / call.cluster);
  if (status.code == StatusCode::ok) status = map_rows(&b_map, call, call.weight, call.columns, S::kColumns);
  if (status.code != StatusCode::ok) return status;
  return launch_clusters_after(call.dependent != 0, gemm_kernel<T, S>, grid, cluster, S::kThreads, memory, call.stream,
                               call, a_map, b_map);
}

// Whether the blocks of a call exchange nothing, so that it has the smaller kernel that adds a residual.
bool adds_to_one_part(const FewRowsGemm& call, const GemmTile& tile) {
  return few_rows::adds_to_one_part(tile) && call.residual != nullptr && call.part_count == 1 &&
         call.statistics == nullptr && call.residual_weight == nullptr;
}

template <class T, int INDEX = 0>
Status launch_gemm(const FewRowsGemm& call) {
  if constexpr (INDEX < kGemmTileCount) {
    constexpr GemmTile kTile = kGemmTiles[INDEX];
    if (call.tile != INDEX) return launch_gemm<T, INDEX + 1>(call);
    constexpr int kRows = kTile.rows, kColumns = kTile.columns, kStages = kTile.stages;
    if constexpr (few_rows::adds_to_one_part(kTile))
      if (adds_to_one_part(call, kTile)) return launch_tile<T, Shape<kRows, kColumns, kStages, false, true>>(call);
    if (call.residual != nullptr || call.statistics != nullptr)
      return launch_tile<T, Shape<kRows, kColumns, kStages, true, kTile.adds>>(call);
    return launch_tile<T, Shape<kRows, kColumns, kStages, false, false>>(call);
  }
  return unknown_tile();
}

// The number of blocks that share the rows of x, each a multiple of 8 of them.
bool takes_cluster(const GemmTile& tile, int cluster) {
  return cluster >= 1 && cluster <= kMostClusterBlocks && tile.rows % (8 * cluster) == 0;
}

Status check_residual(const FewRowsGemm& call, const GemmTile& tile) {
  if (call.residual == nullptr && call.statistics == nullptr) return {};
  const int64_t columns = call.residual != nullptr ? call.columns : call.inner;
  if (call.parts != nullptr)
    return {StatusCode::bad_value, "few_rows_gemm: residual and statistics: expected a result without parts"};
  if (columns % kGroupColumns != 0) return bad_size("few_rows_gemm: columns with statistics are a multiple of 64");
  const bool added = adds_to_one_part(call, tile) || takes_residual(tile, call.cluster, call.part_count);
  if (call.residual != nullptr && (call.activates || !added))
    return {StatusCode::bad_value,
            "few_rows_gemm: residual: expected a tile and parts that the blocks of a cluster can add"};
  return {};
}

Status check(const FewRowsGemm& call) {
  constexpr int64_t kMost = 1 << 20;
  for (int64_t size : {call.rows, call.columns, call.inner})
    if (size < 1 || size > kMost) return bad_size("few_rows_gemm: sizes are 1 to 2^20");
  if (call.columns % kChunk != 0 || call.inner % kChunk != 0)
    return bad_size("few_rows_gemm: columns and inner are multiples of 8");
  if (call.part_count < 1 || call.part_count > (call.inner + kInner - 1) / kInner ||
      (call.parts == nullptr && call.residual == nullptr && call.part_count > 1))
    return {StatusCode::bad_value, "few_rows_gemm: part_count: expected 1, or at most one part for 64 of K"};
  for (const void* tensor :
       {call.x, call.weight, call.bias, static_cast<const void*>(call.y), static_cast<const void*>(call.parts),
        call.residual, static_cast<const void*>(call.residual_weight), static_cast<const void*>(call.statistics),
        static_cast<const void*>(call.y_statistics), static_cast<const void*>(call.norms)})
    if (reinterpret_cast<uintptr_t>(tensor) % 16 != 0)
      return {StatusCode::bad_alignment, "few_rows_gemm: tensors start at multiples of 16 bytes"};
  if (call.tile < 0 || call.tile >= kGemmTileCount) return unknown_tile();
  if (!takes_cluster(kGemmTiles[call.tile], call.cluster))
    return {StatusCode::bad_value, "few_rows_gemm: cluster: expected blocks that load multiples of 8 rows each"};
  return check_residual(call, kGemmTiles[call.tile]);
}

}  // namespace

Status few_rows_gemm(const FewRowsGemm& requested) {
  FewRowsGemm call = requested;
  if (call.cluster == 0 && call.tile >= 0 && call.tile < kGemmTileCount) call.cluster = kGemmTiles[call.tile].cluster;
  const Status status = check(call);
  if (status.code != StatusCode::ok) return status;
  const DeviceGuard guard(call.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  if (call.dtype == DType::bf16) return launch_gemm<bf16_t>(call);
  return call.dtype == DType::f16 ? launch_gemm<f16_t>(call) : unknown_dtype();
}

}  // namespace cuda
}  // namespace fasttfm
