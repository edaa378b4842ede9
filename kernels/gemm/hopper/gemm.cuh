// A persistent Hopper GEMM whose epilogue is a template parameter.
// The kernel is persistent: a block computes one tile of 128 rows by kColumns columns of the result after another. One
// producer warp loads the operands by TMA, 64 elements of K per step, into a ring buffer in shared memory. Two consumer
// warpgroups issue wgmma for 64 rows each, round their accumulators to 16 bits (16-bit operands to their own type, FP8
// operands, which are K-major and not yet scaled, to bf16) and store them in shared memory. Epilogue warps read them
// from there, process them and write to global memory, while the next tile is computed. The blocks of a cluster compute
// tiles of the same columns in consecutive rows, which use the same tile of operand b: each block loads a part of it
// and multicasts it to all.
//
// An epilogue E has
//   E::Params   its parameters, derived from GemmSizes
//   E::kB       the layout of operand b; a is K-major
//   E::finish<T, S>(params, memory, warp)   called by each epilogue warp, for all tiles of the block; T is the type of
//                                           the rounded sums
//
// Pairs of FP8 numbers are treated as elements of 16 bits: an "element of K" below has 2 bytes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "common/cuda/dependent.cuh"
#include "common/cuda/hopper.cuh"
#include "common/cuda/hopper_fp8.cuh"
#include "common/cuda/reduce.cuh"
#include "common/cuda/rows.cuh"
#include "common/dtype.h"
#include "common/status.h"
#include "gemm/hopper/schedule.h"

namespace fasttfm {
namespace cuda {

// COLUMNS columns per tile, STAGES pipeline stages, CLUSTER blocks per cluster, EPILOGUES epilogue warps. The consumers
// pass the result to the epilogue as whole tiles, in one slot of shared memory, or as parts of 64 columns, in a ring
// buffer of RING slots (gemm_ring.cuh). UNITS units of a part are processed by one warp each.
//
// A consumer needs 154 registers per thread for 256 columns, 120 for 192 and 90 for 128, and ptxas allows no more
// registers than a thread has at launch. So EPILOGUES is at most 3 for 256 columns, 7 for 192 and 11 for 128.
template <int COLUMNS, int STAGES, int CLUSTER, int EPILOGUES, int UNITS = EPILOGUES, int RING = 0>
struct GemmShape {
  static constexpr int kRows = 128, kColumns = COLUMNS, kStages = STAGES, kCluster = CLUSTER;
  static constexpr int kParts = COLUMNS / kTileColumns;  // 64-column parts of a tile of the result
  static constexpr int kPartBytes = kRows * kTileRowBytes;
  static constexpr int kConsumerWarps = 8, kEpilogueWarps = EPILOGUES, kUnits = UNITS;
  static constexpr int kThreads = 32 * (kConsumerWarps + 1 + EPILOGUES);
  static constexpr int kRowGroups = kRows / 4;  // an epilogue warp processes four rows of a part at a time
  static constexpr int kVectors = (kRowGroups + UNITS - 1) / UNITS;  // of 8 elements per thread and unit
  // Bytes after a part that the last vectors of some units read without using the values.
  static constexpr int kBytesBelow = 4 * (kVectors * UNITS - kRowGroups) * kTileRowBytes;
  // Slots of the result, and the parts that a slot holds.
  static constexpr bool kWholeTiles = RING == 0;
  static constexpr int kSlots = kWholeTiles ? 1 : RING, kSlotParts = kWholeTiles ? kParts : 1;
};

template <class S>
struct alignas(1024) GemmMemory {
  char a[S::kStages][S::kRows * kTileRowBytes];
  char b[S::kStages][S::kColumns * kTileRowBytes];
  // The bytes after the last part are never written.
  char result[S::kSlots * S::kSlotParts * S::kPartBytes + S::kBytesBelow];
  alignas(16) float sums[2][S::kEpilogueWarps][kTileColumns];
  Mbarrier full[S::kStages], empty[S::kStages], result_full[S::kSlots], result_empty[S::kSlots];

  static constexpr int kSlack = 1024;  // dynamic shared memory is aligned only to 16 bytes

  __device__ __forceinline__ void init() {
    for (int i = 0; i < S::kStages; ++i) {
      full[i].init(1);
      empty[i].init(S::kConsumerWarps * S::kCluster);
    }
    for (int i = 0; i < S::kSlots; ++i) {
      result_full[i].init(S::kConsumerWarps * kWarpArrivals);
      result_empty[i].init(S::kUnits * kWarpArrivals);
    }
    fence_mbarrier_init();
  }
};

// The tiles of a block, one after another.
template <class S>
struct GemmTileScheduler {
  int cluster_tile;  // index of the cluster's tile
  int row, column;   // of the block's first element

  __device__ __forceinline__ explicit GemmTileScheduler(const GemmSizes& p)
      : cluster_tile(static_cast<int>(blockIdx.x) / S::kCluster) {
    place(p);
  }
  __device__ __forceinline__ bool valid(const GemmSizes& p) const { return cluster_tile < p.cluster_tiles; }
  __device__ __forceinline__ void next(const GemmSizes& p) {
    cluster_tile = next_cluster_tile(cluster_tile, static_cast<int>(gridDim.x) / S::kCluster);
    place(p);
  }
  // The number of 64-column parts that the block computes.
  __device__ __forceinline__ int parts(const GemmSizes& p) const {
    return cluster_tile_parts<S>(p, cluster_tile, column);
  }

 private:
  __device__ __forceinline__ void place(const GemmSizes& p) {
    const ClusterTile at = cluster_tile_at<S>(p, cluster_tile);
    row = at.row + static_cast<int>(blockIdx.x) % S::kCluster * S::kRows;
    column = at.column;
  }
};

// The type of the rounded sums of operands T.
template <class T>
using GemmSum = std::conditional_t<sizeof(T) == 1, bf16_t, T>;

// ---- producer -------------------------------------------------------------------------------------------------------

template <class S>
__device__ __forceinline__ void tma_load_to_cluster(const CUtensorMap* map, Mbarrier& full, uint32_t to, int c0,
                                                    int c1) {
  if constexpr (S::kCluster == 1)
    tma_load(map, full, to, c0, c1, 0, 0);
  else
    tma_load_multicast((1 << S::kCluster) - 1, map, full, to, c0, c1, 0, 0);
}

// The loads of a tile, issued by one thread. Of each part of b the block loads some rows if b is K-major, otherwise
// some elements of K. With a gate, the two blocks of a cluster load its rows and those of up.
template <class S, Major B>
struct GemmCopies {
  GemmMemory<S>& memory;
  const CUtensorMap *a_map, *b_map;
  int gate;  // GemmSizes

  __device__ __forceinline__ void load_a(uint32_t slot, int step, int row) const {
    tma_load(a_map, memory.full[slot], shared_address(memory.a[slot]), step * kTileColumns, row, 0, 0);
  }
  // Loads the block's part of b, and announces the bytes of a too.
  __device__ __forceinline__ void load_b(uint32_t slot, int step, int column, int parts) const {
    constexpr int kShare = kTileColumns / S::kCluster;
    const int rank = static_cast<int>(blockIdx.x) % S::kCluster, first = rank * kShare;
    const uint32_t to = shared_address(memory.b[slot]);
    memory.full[slot].arrive_expect_tx((S::kRows + parts * kTileColumns) * kTileRowBytes);
#pragma unroll
    for (int part = 0; part < S::kParts; ++part) {
      if (part >= parts) continue;
      const int from = part * kTileColumns;
      const int row = gate == 0 ? column + from + first : (column + from) / 2 + rank * gate;
      tma_load_to_cluster<S>(b_map, memory.full[slot], to + (from + first) * kTileRowBytes,
                             B == Major::k ? step * kTileColumns : column + from,
                             B == Major::k ? row : step * kTileColumns + first);
    }
  }
};

// Called by one thread. Operand b of the first steps is loaded before the previous kernel has ended. `copies` is a
// GemmCopies, or has its members.
template <class S, class Copies>
__device__ __forceinline__ void produce(const GemmSizes& p, const Copies& copies) {
  RingPosition<S::kStages> at;
  GemmTileScheduler<S> tile(p);
  int step = min(S::kStages, p.steps);
  for (int i = 0; i < step; ++i) copies.load_b(i, i, tile.column, tile.parts(p));
  griddepcontrol_wait();
  for (int i = 0; i < step; ++i) {
    copies.load_a(i, i, tile.row);
    at.next();
  }
  for (; tile.valid(p); tile.next(p)) {
    const int parts = tile.parts(p);
    for (; step < p.steps; ++step) {
      copies.memory.empty[at.slot].wait(at.parity ^ 1);
      copies.load_b(at.slot, step, tile.column, parts);
      copies.load_a(at.slot, step, tile.row);
      at.next();
    }
    step = 0;
  }
}

// ---- consumers ------------------------------------------------------------------------------------------------------

// The state of a consumer warpgroup: which half of a tile's rows it computes, and its positions in the ring buffers of
// the operands and of the result.
template <class S>
struct GemmConsumer {
  int group;
  RingPosition<S::kStages> at;
  RingPosition<S::kSlots> to;
  uint32_t last = 0;
};

template <class S>
__device__ __forceinline__ void pass_result(GemmMemory<S>& memory, GemmConsumer<S>& state) {
  arrive_warp(memory.result_full[state.to.slot]);
  state.to.next();
}

// Rounds a warpgroup's accumulators and stores them in its 64 rows of the first PARTS parts of the result, each slot as
// soon as it is empty. Passes the slots to the epilogue if they are not whole tiles.
template <class T, class S, int PARTS>
__device__ __forceinline__ void store_result(GemmMemory<S>& memory, GemmConsumer<S>& state,
                                             const float (&d)[PARTS * kTileColumns / 2]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, row = 16 * (static_cast<int>(threadIdx.x) / 32 % 4) + lane % 16;
  const uint32_t rows = shared_address(memory.result) + state.group * 64 * kTileRowBytes;
  const uint32_t first = rows + row * kTileRowBytes + (((lane / 16) ^ (row % 8)) << 4);
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    if (part % S::kSlotParts == 0) memory.result_empty[state.to.slot].wait(state.to.parity ^ 1);
    const uint32_t slot = S::kWholeTiles ? first : first + state.to.slot * S::kPartBytes;
#pragma unroll
    for (int i = 0; i < kTileColumns / 8; i += 2) {  // columns 8 * i to 8 * i + 15 of the part
      uint32_t word[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int from = part * (kTileColumns / 2) + 4 * i + 2 * k;
        word[k] = narrow_word(d[from], d[from + 1], T{});
      }
      stmatrix_x4((slot ^ (i << 4)) + part % S::kSlotParts * S::kPartBytes, word);
    }
    if constexpr (!S::kWholeTiles) pass_result(memory, state);
  }
}

template <class S>
__device__ __forceinline__ void release(Mbarrier& empty) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  __syncwarp();
  if constexpr (S::kCluster == 1) {
    if (lane == 0) empty.arrive();
  } else {
    if (lane < S::kCluster) empty.arrive_remote(lane);
  }
}

// Computes a warpgroup's 64 rows of the tile's first PARTS parts, or of fewer if the tile is narrower. All widths use
// the same accumulators `sums`; otherwise ptxas would allocate registers for each.
template <class T, class S, Major B, int PARTS = S::kParts, class P>
__device__ __forceinline__ void multiply_tile(const P& p, GemmMemory<S>& memory, GemmConsumer<S>& state, int parts,
                                              float (&sums)[S::kColumns / 2]) {
  if constexpr (PARTS > 1) {
    if (parts < PARTS) return multiply_tile<T, S, B, PARTS - 1>(p, memory, state, parts, sums);
  }
  auto& d = reinterpret_cast<float (&)[PARTS * kTileColumns / 2]>(sums);
  for (int step = 0; step < p.steps; ++step) {
    memory.full[state.at.slot].wait(state.at.parity);
    const uint64_t a = k_major(shared_address(memory.a[state.at.slot]) + state.group * 64 * kTileRowBytes);
    const uint32_t b_tile = shared_address(memory.b[state.at.slot]);
    const uint64_t b = B == Major::k ? k_major(b_tile) : mn_major(b_tile, kTileColumns * kTileRowBytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kTileColumns / 16; ++i) {
      const uint64_t a_part = advance(a, i * kKMajorStep);
      const uint64_t b_part = advance(b, i * (B == Major::k ? kKMajorStep : kMnMajorStep));
      if constexpr (sizeof(T) == 1)
        wgmma_fp8(d, a_part, b_part, step > 0 || i > 0, T{});
      else
        wgmma<T, Major::k, B>(d, a_part, b_part, step > 0 || i > 0);
    }
    wgmma_commit();
    if (step > 0) {
      wgmma_wait<1>();
      release<S>(memory.empty[state.last]);
    }
    state.last = state.at.slot;
    state.at.next();
  }
  wgmma_wait<0>();
  fence_operand(d);
  release<S>(memory.empty[state.last]);
  store_result<GemmSum<T>, S, PARTS>(memory, state, d);
}

template <class T, class S, Major B, class P>
__device__ __forceinline__ void consume(const P& p, GemmMemory<S>& memory, int group) {
  GemmConsumer<S> state = {group};
  float sums[S::kColumns / 2];
  for (GemmTileScheduler<S> tile(p); tile.valid(p); tile.next(p)) {
    multiply_tile<T, S, B>(p, memory, state, tile.parts(p), sums);
    if constexpr (S::kWholeTiles) pass_result(memory, state);
  }
}

// ---- epilogue -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void store_vector_if(bool stores, void* to, uint4 v) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %0, 0; @p st.global.v4.b32 [%1], {%2, %3, %4, %5}; }" ::"r"(
                   static_cast<int>(stores)),
               "l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
// Loads data that is read once, without allocating it in L1.
__device__ __forceinline__ uint4 load_stream_if(bool loads, const void* from) {
  uint4 v;
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %4, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;"
      " @p ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%5]; }"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "r"(static_cast<int>(loads)), "l"(from));
  return v;
}
// Eight elements of the bias in their storage type, loaded ahead of their use; zeros if there is no bias.
struct BiasVector {
  uint4 words[2];

  template <class P>
  __device__ __forceinline__ BiasVector(const P& p, int column) {
    const bool wide = p.bias_dtype == DType::f32, there = p.bias != nullptr && column < p.columns;
    const char* from = static_cast<const char*>(p.bias) + column * (wide ? 4 : 2);
    words[0] = load_stream_if(there, from);
    words[1] = load_stream_if(there && wide, from + 16);
  }
  __device__ __forceinline__ void widen_to(float (&to)[kVector], DType dtype) const {
    if (dtype == DType::f32)
      widen(*reinterpret_cast<const Packed<float>*>(words), to);
    else if (dtype == DType::bf16)
      widen(*reinterpret_cast<const Packed<bf16_t>*>(words), to);
    else
      widen(*reinterpret_cast<const Packed<f16_t>*>(words), to);
  }
};

template <class T>
__device__ __forceinline__ void widen_vector(uint4 v, float (&to)[kVector]) {
  widen(*reinterpret_cast<const Packed<T>*>(&v), to);
}
template <class T>
__device__ __forceinline__ uint4 narrow_vector(const float (&from)[kVector]) {
  const Packed<T> packed = narrow<T>(from);
  return *reinterpret_cast<const uint4*>(&packed);
}

// A thread's position in its warp's unit of a 64-column part. Eight threads process the 128 bytes of a row and a warp
// processes four rows; neighbouring units have neighbouring rows. A thread's vectors of a part are kStep rows apart.
template <class S>
struct EpilogueThread {
  static constexpr int kStep = 4 * S::kUnits;
  int warp, lane, row, column;
  uint32_t result;  // shared address of its first vector of a part

  __device__ __forceinline__ EpilogueThread(const GemmMemory<S>& memory, int number)
      : warp(number), lane(static_cast<int>(threadIdx.x) % 32), row(4 * number + lane / 8), column(8 * (lane % 8)) {
    result = shared_address(memory.result) + row * kTileRowBytes + (((lane % 8) ^ (row % 8)) << 4);
  }
  // The number of valid rows of a tile from the thread's first row on.
  __device__ __forceinline__ int rows_left(int rows) const { return min(rows, S::kRows) - row; }
  // The shared address of the thread's v-th vector of a part in the result. With the swizzle, a step of 4 modulo 8 rows
  // exchanges the first and the last four chunks of a row.
  __device__ __forceinline__ uint32_t address(int part, int v) const {
    const uint32_t swap = kStep % 8 != 0 && v % 2 != 0 ? 64 : 0;
    return (result ^ swap) + part * S::kPartBytes + v * kStep * kTileRowBytes;
  }
  __device__ __forceinline__ uint4 vector(int part, int v) const { return load_vector(address(part, v)); }
  // Whether the v-th vector is in the tile, which only the last one may not be.
  __device__ __forceinline__ bool in_tile(int v) const {
    return (v + 1) * kStep <= S::kRows || row + v * kStep < S::kRows;
  }
};

// Iterates over the positions of a thread's vectors of one part of a tile in a tensor [rows, columns].
template <class S>
struct PartWalk {
  int column, end;  // one past the last row of the tile
  int rows;         // number of valid rows from the next vector's on
  int64_t offset;   // of the next vector, in bytes

  template <class P>
  __device__ __forceinline__ PartWalk(const P& p, const EpilogueThread<S>& thread, const GemmTileScheduler<S>& tile,
                                      int part)
      : column(tile.column + part * kTileColumns + thread.column),
        end(min(p.rows, tile.row + S::kRows)),
        rows(column < p.columns ? thread.rows_left(p.rows - tile.row) : 0),
        offset(2 * (static_cast<int64_t>(tile.row + thread.row) * p.columns + column)) {}
  __device__ __forceinline__ bool there() const { return rows > 0; }
  // The row of the next vector, if it is there.
  __device__ __forceinline__ int row() const { return end - rows; }
  // The asm keeps ptxas from computing all positions of a part in advance, which would take too many registers.
  template <class P>
  __device__ __forceinline__ void next(const P& p) {
    rows -= EpilogueThread<S>::kStep;
    offset += static_cast<int64_t>(p.columns) * (2 * EpilogueThread<S>::kStep);
    asm volatile("" : "+l"(offset), "+r"(rows));
  }
};

// arrive_warp() with thread.lane, because reading threadIdx.x takes another register, with which some kernels would
// spill.
template <class S>
__device__ __forceinline__ void release_result(GemmMemory<S>& memory, const EpilogueThread<S>& thread, int slot = 0) {
  __syncwarp();
  if (kWarpArrivals > 1 || thread.lane == 0) memory.result_empty[slot].arrive();
}

// ---- kernel ---------------------------------------------------------------------------------------------------------

template <class T, class S, class E>
__global__ void __cluster_dims__(S::kCluster, 1, 1) __launch_bounds__(S::kThreads, 1)
    gemm_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                const __grid_constant__ typename E::Params p) {
  static_assert(sizeof(T) == 2 || E::kB == Major::k, "FP8 operands are K-major");
  extern __shared__ char dynamic_memory[];
  auto& memory =
      *reinterpret_cast<GemmMemory<S>*>(dynamic_memory + (1024 - shared_address(dynamic_memory) % 1024) % 1024);
  const int warp = warp_uniform(static_cast<int>(threadIdx.x) / 32);
  griddepcontrol_launch_dependents();
  if (threadIdx.x == 0) memory.init();
  __syncthreads();
  if constexpr (S::kCluster > 1) cluster_sync();
  if (warp < S::kConsumerWarps) {
    consume<T, S, E::kB>(p, memory, warp / 4);
  } else {
    if (warp > S::kConsumerWarps) {
      E::template finish<GemmSum<T>, S>(p, memory, warp - S::kConsumerWarps - 1);
    } else if (elect_one()) {
      prefetch_tensormap(&a_map);
      prefetch_tensormap(&b_map);
      produce<S>(p, GemmCopies<S, E::kB>{memory, &a_map, &b_map, p.gate});
    }
    __syncwarp();
  }
  if constexpr (S::kCluster > 1) cluster_sync();  // another block may still multicast into this block's shared memory
}

// ---- launch ---------------------------------------------------------------------------------------------------------

// a: [rows, inner] with row stride a_stride; b: [columns, inner], or [inner, columns] if MN-major.
struct GemmOperands {
  const void *a, *b;
  int64_t a_stride, inner;
  DType dtype;
  int device;
  void* stream;
  // Whether the kernel may start before the previous one in the stream has ended. That one must not write b or the
  // epilogue's inputs.
  bool dependent = false;
};

template <class T, class S, class E>
Status launch_gemm(const GemmOperands& operands, typename E::Params p, int multiprocessors) {
  constexpr size_t kMemory = sizeof(GemmMemory<S>) + GemmMemory<S>::kSlack;
  static_assert(kMemory <= 227 * 1024, "more shared memory than an SM has");
  const int64_t inner = operands.inner, columns = p.gate == 0 ? p.columns : 2 * p.gate;  // of b
  constexpr bool kMn = E::kB == Major::mn;
  const TensorView a_view = {
      operands.a, operands.dtype, {inner, p.rows, 1, 1}, {operands.a_stride, 0, 0}, {kTileColumns, S::kRows, 1, 1}};
  const TensorView b_view = {operands.b,
                             operands.dtype,
                             {kMn ? columns : inner, kMn ? inner : columns, 1, 1},
                             {kMn ? columns : inner, 0, 0},
                             {kTileColumns, kTileColumns / S::kCluster, 1, 1}};
  CUtensorMap a_map, b_map;
  Status status = make_tensor_map(&a_map, a_view);
  if (status.code == StatusCode::ok) status = make_tensor_map(&b_map, b_view);
  if (status.code != StatusCode::ok) return status;
  const int clusters = multiprocessors / S::kCluster;
  plan_cluster_tiles<S>(&p, inner, clusters);
  return launch_after(operands.dependent, gemm_kernel<T, S, E>, dim3(std::min(clusters, p.cluster_tiles) * S::kCluster),
                      dim3(S::kThreads), kMemory, operands.stream, a_map, b_map, p);
}

// Checks the requirements of the kernels. `tensors`: the other tensors that are accessed, which must be aligned to 16
// bytes or null.
inline Status check_gemm(const GemmOperands& operands, int64_t rows, int64_t columns,
                         std::initializer_list<const void*> tensors) {
  if (operands.dtype != DType::bf16 && operands.dtype != DType::f16) return unknown_dtype();
  if (rows < 0 || rows > 0x7fffffff / 2 || operands.inner < kVector || operands.inner % kVector != 0 ||
      operands.inner > 0x7fffffff / 2 || columns < kVector || columns % kVector != 0 || columns > 0x7fffffff / 4)
    return bad_size("Hopper GEMM: inputs and columns must be multiples of 8, and sizes must fit 32-bit indices");
  if (operands.a_stride % kVector != 0) return misaligned_rows();
  for (const void* tensor : tensors)
    if (!rows_aligned(tensor, 0)) return misaligned_rows();
  int major = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, operands.device);
  if (error != cudaSuccess) return status_of(error);
  if (major != 9) return {StatusCode::bad_value, "Hopper GEMM: these kernels require compute capability 9.0"};
  return {};
}

// launch_gemm() for the operands' 16-bit type.
template <class S, class E>
Status run_gemm(const GemmOperands& operands, const typename E::Params& p) {
  int multiprocessors = 0;
  const Status status = count_multiprocessors(operands.device, &multiprocessors);
  if (status.code != StatusCode::ok) return status;
  return operands.dtype == DType::bf16 ? launch_gemm<bf16_t, S, E>(operands, p, multiprocessors)
                                       : launch_gemm<f16_t, S, E>(operands, p, multiprocessors);
}

// The same for FP8 operands, of which a has type T and b is e4m3: their `dtype` is bf16, and a_stride and inner are in
// pairs of elements.
template <class T, class S, class E>
Status run_fp8_gemm(const GemmOperands& operands, const typename E::Params& p) {
  int multiprocessors = 0;
  const Status status = count_multiprocessors(operands.device, &multiprocessors);
  if (status.code != StatusCode::ok) return status;
  return launch_gemm<T, S, E>(operands, p, multiprocessors);
}

}  // namespace cuda
}  // namespace fasttfm
