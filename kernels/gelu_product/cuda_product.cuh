// A Hopper GEMM with an activation in its epilogue; op.h describes the two directions.
//
// A block is persistent and computes one tile of 128 rows by kColumns columns of the result after another. One producer
// warp loads the operands by TMA, 64 elements of K per step, into a ring in shared memory. Two consumer warpgroups
// issue wgmma, 64 rows each, and store their accumulators, rounded to 16 bits, in shared memory. Epilogue warps read
// them from there, compute the activation and write to global memory, while the next tile is computed. The blocks of a
// cluster compute tiles one below the other, which share the operand b: each block loads a part of it and multicasts it
// to all.
//
// Per tile of 128 x 192 at K = 1024 the tensor cores need 12,288 cycles. The epilogue, 18 to 28 instructions and two or
// three special functions per element, takes 3,500 to 5,500 issue slots of each warp scheduler. A backward that loads
// the derivative takes 8 instructions and no special function.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/cuda/activation.cuh"
#include "common/cuda/hopper.cuh"
#include "common/cuda/reduce.cuh"
#include "gelu_product/op.h"

namespace fasttfm {
namespace cuda {

// COLUMNS of a tile, STAGES of the ring, CLUSTER blocks, EPILOGUES epilogue warps.
//
// A consumer needs 154 registers for 256 columns and 120 for 192, and ptxas allows no more than a thread has at launch.
// So EPILOGUES is at most 3 for 256 columns and 7 for 192.
template <int COLUMNS, int STAGES, int CLUSTER, int EPILOGUES>
struct ProductShape {
  static constexpr int kRows = 128, kColumns = COLUMNS, kStages = STAGES, kCluster = CLUSTER;
  static constexpr int kParts = COLUMNS / kTileColumns;  // 64-column parts of a tile of the result
  static constexpr int kPartBytes = kRows * kTileRowBytes;
  static constexpr int kStepBytes = (kRows + COLUMNS) * kTileRowBytes;
  static constexpr int kConsumerWarps = 8, kEpilogueWarps = EPILOGUES;
  static constexpr int kThreads = 32 * (kConsumerWarps + 1 + EPILOGUES);
  static constexpr int kRowGroups = kRows / 4;  // an epilogue warp processes four rows of a part at a time
  static constexpr int kVectors = (kRowGroups + EPILOGUES - 1) / EPILOGUES;  // of 8 elements per thread and part
  // Bytes below a part that the last vectors of some warps read without using them.
  static constexpr int kBytesBelow = 4 * (kVectors * EPILOGUES - kRowGroups) * kTileRowBytes;
};

template <class S>
struct alignas(1024) ProductMemory {
  char a[S::kStages][S::kRows * kTileRowBytes];
  char b[S::kStages][S::kColumns * kTileRowBytes];
  char result[S::kParts * S::kPartBytes + S::kBytesBelow];  // nothing is written below the last part
  alignas(16) float sums[2][S::kEpilogueWarps][kTileColumns];
  Mbarrier full[S::kStages], empty[S::kStages], result_full, result_empty;

  static constexpr int kSlack = 1024;  // dynamic shared memory is aligned only to 16 bytes

  __device__ __forceinline__ void init() {
    for (int i = 0; i < S::kStages; ++i) {
      full[i].init(1);
      empty[i].init(S::kConsumerWarps * S::kCluster);
    }
    result_full.init(S::kConsumerWarps * kWarpArrivals);
    result_empty.init(S::kEpilogueWarps * kWarpArrivals);
    fence_mbarrier_init();
  }
};

// What the forward stores for the backward: h, or the activation's derivative at h + bias.
enum class Kept { product, derivative };

struct ProductParams {
  const void* bias;         // or null
  const char* kept;         // backward
  char* product;            // forward: h or the derivative (Kept), or null; backward: dh
  char* activation;         // a, or null in the backward
  float* sums;              // backward: [row tiles, columns], or null
  int rows, columns;        // of the result
  int steps;                // of 64 elements of K
  int column_tiles, turns;  // turns: tiles of clusters; the tiles of a cluster's blocks are one below the other
  int whole, split;         // turns before the last round, and the number of clusters per tile in the last round
  DType bias_dtype;
};

constexpr int kEpilogueSums = 1;  // the named barrier of the epilogue warps

// The tiles of one block. In each round neighbouring clusters take neighbouring columns of the same rows. From round to
// round the assignment shifts by one cluster; otherwise one cluster might get all of the narrower tiles at the ends of
// rows. In the last round, where few tiles are left, several clusters share the columns of a tile.
template <class S>
struct ProductTileScheduler {
  int first, own;   // the round's first turn, and this cluster's offset from it
  int row, column;  // of the tile's first element

  __device__ __forceinline__ explicit ProductTileScheduler(const ProductParams& p)
      : first(0), own(static_cast<int>(blockIdx.x) / S::kCluster) {
    place(p);
  }
  __device__ __forceinline__ bool valid(const ProductParams& p) const { return first + own < p.turns; }
  __device__ __forceinline__ void next(const ProductParams& p) {
    const int clusters = static_cast<int>(gridDim.x) / S::kCluster;
    first += clusters;
    own = own + 1 == clusters ? 0 : own + 1;
    place(p);
  }
  // The number of 64-column parts that the block computes, which may be 0 in the last round.
  __device__ __forceinline__ int parts(const ProductParams& p) const {
    const int width = first < p.whole ? S::kParts : S::kParts / p.split;
    return min(width, (p.columns - column + kTileColumns - 1) / kTileColumns);
  }

 private:
  __device__ __forceinline__ void place(const ProductParams& p) {
    const int rank = static_cast<int>(blockIdx.x) % S::kCluster;
    int turn = first + own, share = 0;
    if (first >= p.whole) {
      turn = p.whole + own / p.split;
      share = own % p.split * (S::kColumns / p.split);
    }
    row = (turn / p.column_tiles * S::kCluster + rank) * S::kRows;
    column = turn % p.column_tiles * S::kColumns + share;
  }
};

// ---- producer --------------------------------------------------------------------------------------------------------

template <class S>
__device__ __forceinline__ void tma_load_to_cluster(const CUtensorMap* map, Mbarrier& full, uint32_t to, int c0,
                                                    int c1) {
  if constexpr (S::kCluster == 1)
    tma_load(map, full, to, c0, c1, 0, 0);
  else
    tma_load_multicast((1 << S::kCluster) - 1, map, full, to, c0, c1, 0, 0);
}

// Runs in one thread. The block loads a part of b's tile: some of its rows if b is K-major, otherwise some elements of
// K.
template <class S, Major B>
__device__ __forceinline__ void produce(const ProductParams& p, ProductMemory<S>& memory, const CUtensorMap* a_map,
                                        const CUtensorMap* b_map) {
  const int rank = static_cast<int>(blockIdx.x) % S::kCluster;
  RingPosition<S::kStages> at;
  for (ProductTileScheduler<S> tile(p); tile.valid(p); tile.next(p)) {
    for (int step = 0; step < p.steps; ++step) {
      memory.empty[at.slot].wait(at.parity ^ 1);
      Mbarrier& full = memory.full[at.slot];
      full.arrive_expect_tx(S::kStepBytes);
      tma_load(a_map, full, shared_address(memory.a[at.slot]), step * kTileColumns, tile.row, 0, 0);
      const uint32_t b = shared_address(memory.b[at.slot]);
      if constexpr (B == Major::k) {
        const int first = rank * (S::kColumns / S::kCluster);
        tma_load_to_cluster<S>(b_map, full, b + first * kTileRowBytes, step * kTileColumns, tile.column + first);
      } else {
        const int first = rank * (kTileColumns / S::kCluster);
#pragma unroll
        for (int part = 0; part < S::kParts; ++part)
          tma_load_to_cluster<S>(b_map, full, b + (part * kTileColumns + first) * kTileRowBytes,
                                 tile.column + part * kTileColumns, step * kTileColumns + first);
      }
      at.next();
    }
  }
}

// ---- consumers -------------------------------------------------------------------------------------------------------

// Stores a warpgroup's accumulators, rounded, to its 64 rows of the first PARTS parts of the result.
template <class T, class S, int PARTS>
__device__ __forceinline__ void store_result(uint32_t parts, const float (&d)[PARTS * kTileColumns / 2]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, row = 16 * (static_cast<int>(threadIdx.x) / 32 % 4) + lane % 16;
  const uint32_t first = parts + row * kTileRowBytes + (((lane / 16) ^ (row % 8)) << 4);
#pragma unroll
  for (int i = 0; i < PARTS * kTileColumns / 8; i += 2) {  // columns 8 * i to 8 * i + 15
    uint32_t word[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) word[k] = narrow_word(d[4 * i + 2 * k], d[4 * i + 2 * k + 1], T{});
    stmatrix_x4((first ^ (i % 8 << 4)) + i / 8 * S::kPartBytes, word);
  }
}

// The state of a consumer warpgroup: its half of a tile's rows, its position in the ring, and the parity of the result
// buffer.
template <class S>
struct ProductConsumer {
  int group;
  RingPosition<S::kStages> at;
  uint32_t parity = 0, last = 0;
};

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

// A warpgroup computes 64 rows of the tile's first PARTS parts, or of fewer if the tile is narrower. All widths share
// the accumulators `sums`; otherwise ptxas would reserve registers for each.
template <class T, class S, Major B, int PARTS = S::kParts>
__device__ __forceinline__ void multiply_tile(const ProductParams& p, ProductMemory<S>& memory, ProductConsumer<S>& own,
                                              int parts, float (&sums)[S::kColumns / 2]) {
  if constexpr (PARTS > 1) {
    if (parts < PARTS) return multiply_tile<T, S, B, PARTS - 1>(p, memory, own, parts, sums);
  }
  auto& d = reinterpret_cast<float (&)[PARTS * kTileColumns / 2]>(sums);
  for (int step = 0; step < p.steps; ++step) {
    memory.full[own.at.slot].wait(own.at.parity);
    const uint64_t a = k_major(shared_address(memory.a[own.at.slot]) + own.group * 64 * kTileRowBytes);
    const uint32_t b_tile = shared_address(memory.b[own.at.slot]);
    const uint64_t b = B == Major::k ? k_major(b_tile) : mn_major(b_tile, kTileColumns * kTileRowBytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kTileColumns / 16; ++i)
      wgmma<T, Major::k, B>(d, advance(a, i * kKMajorStep),
                            advance(b, i * (B == Major::k ? kKMajorStep : kMnMajorStep)), step > 0 || i > 0);
    wgmma_commit();
    if (step > 0) {
      wgmma_wait<1>();
      release<S>(memory.empty[own.last]);
    }
    own.last = own.at.slot;
    own.at.next();
  }
  wgmma_wait<0>();
  fence_operand(d);
  release<S>(memory.empty[own.last]);
  memory.result_empty.wait(own.parity ^ 1);
  store_result<T, S, PARTS>(shared_address(memory.result) + own.group * 64 * kTileRowBytes, d);
}

template <class T, class S, Major B>
__device__ __forceinline__ void consume(const ProductParams& p, ProductMemory<S>& memory, int group) {
  ProductConsumer<S> own = {group};
  float sums[S::kColumns / 2];
  for (ProductTileScheduler<S> tile(p); tile.valid(p); tile.next(p)) {
    multiply_tile<T, S, B>(p, memory, own, tile.parts(p), sums);
    arrive_warp(memory.result_full);
    own.parity ^= 1;
  }
}

// ---- activations -----------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint4 load_vector(uint32_t shared) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(shared));
  return v;
}
__device__ __forceinline__ void store_vector_if(bool wanted, void* to, uint4 v) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %0, 0; @p st.global.v4.b32 [%1], {%2, %3, %4, %5}; }" ::"r"(
                   static_cast<int>(wanted)),
               "l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
// Loads data that is read once, without allocating it in L1.
__device__ __forceinline__ uint4 load_stream_if(bool wanted, const void* from) {
  uint4 v;
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %4, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;"
      " @p ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%5]; }"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "r"(static_cast<int>(wanted)), "l"(from));
  return v;
}
// Eight elements of the bias in their storage type, loaded ahead of their use; zeros if there is no bias.
struct BiasVector {
  uint4 words[2];

  __device__ __forceinline__ BiasVector(const ProductParams& p, int column) {
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

// Elementwise product, rounded once.
__device__ __forceinline__ uint32_t multiply_words(uint32_t one, uint32_t other, bf16_t) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(one), "r"(other));
  return product;
}
__device__ __forceinline__ uint32_t multiply_words(uint32_t one, uint32_t other, f16_t) {
  uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(one), "r"(other));
  return product;
}
template <class T>
__device__ __forceinline__ uint4 multiply_vectors(uint4 one, uint4 other) {
  return make_uint4(multiply_words(one.x, other.x, T{}), multiply_words(one.y, other.y, T{}),
                    multiply_words(one.z, other.z, T{}), multiply_words(one.w, other.w, T{}));
}

// A thread's position in the 64-column parts of a tile: eight threads process the 128 bytes of a row, a warp four rows,
// and neighbouring warps neighbouring rows. A thread's vectors of a part are kStep rows apart.
template <class S>
struct EpilogueThread {
  static constexpr int kStep = 4 * S::kEpilogueWarps;
  int warp, lane, row, column;
  uint32_t result;  // shared address of its first vector of a part

  __device__ __forceinline__ EpilogueThread(const ProductMemory<S>& memory, int number)
      : warp(number), lane(static_cast<int>(threadIdx.x) % 32), row(4 * number + lane / 8), column(8 * (lane % 8)) {
    result = shared_address(memory.result) + row * kTileRowBytes + (((lane % 8) ^ (row % 8)) << 4);
  }
  // The number of valid rows of a tile from the thread's first row on.
  __device__ __forceinline__ int rows_left(int rows) const { return min(rows, S::kRows) - row; }
  // The thread's v-th vector of a part. In the swizzle, a step of 4 mod 8 rows swaps the first and the last four chunks
  // of a row.
  __device__ __forceinline__ uint4 vector(int part, int v) const {
    const uint32_t swap = kStep % 8 != 0 && v % 2 != 0 ? 64 : 0;
    return load_vector((result ^ swap) + part * S::kPartBytes + v * kStep * kTileRowBytes);
  }
};

// Iterates over the positions of a thread's vectors of one part of a tile in a tensor [rows, columns].
template <class S>
struct PartWalk {
  int column, rows;  // number of valid rows from the next vector's on
  int64_t offset;    // of the next vector, in bytes

  __device__ __forceinline__ PartWalk(const ProductParams& p, const EpilogueThread<S>& thread,
                                      const ProductTileScheduler<S>& tile, int part)
      : column(tile.column + part * kTileColumns + thread.column),
        rows(column < p.columns ? thread.rows_left(p.rows - tile.row) : 0),
        offset(2 * (static_cast<int64_t>(tile.row + thread.row) * p.columns + column)) {}
  __device__ __forceinline__ bool there() const { return rows > 0; }
  // The asm keeps ptxas from computing all positions of a part first, for which there are no registers.
  __device__ __forceinline__ void next(const ProductParams& p) {
    rows -= EpilogueThread<S>::kStep;
    offset += static_cast<int64_t>(p.columns) * (2 * EpilogueThread<S>::kStep);
    asm volatile("" : "+l"(offset), "+r"(rows));
  }
};

// arrive_warp() with thread.lane: reading threadIdx.x takes another register, and some kernels would spill.
template <class S>
__device__ __forceinline__ void release_result(ProductMemory<S>& memory, const EpilogueThread<S>& thread) {
  __syncwarp();
  if (kWarpArrivals > 1 || thread.lane == 0) memory.result_empty.arrive();
}

template <class T, class S, Activation A, Kept KEPT>
__device__ __forceinline__ void finish_forward(const ProductParams& p, ProductMemory<S>& memory, int warp) {
  const EpilogueThread<S> thread(memory, warp);
  uint32_t parity = 0;
  ProductTileScheduler<S> tile(p);
  BiasVector next_bias(p, tile.column + thread.column);
  for (; tile.valid(p); tile.next(p)) {
    memory.result_full.wait(parity);
    const int parts = tile.parts(p);
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
      const bool ends = part == parts - 1;
      PartWalk<S> at(p, thread, tile, part);
      float bias[kVector];
      next_bias.widen_to(bias, p.bias_dtype);
      ProductTileScheduler<S> then = tile;
      if (ends) then.next(p);
      next_bias = BiasVector(p, then.column + (ends ? 0 : part + 1) * kTileColumns + thread.column);
      constexpr int kBatch = 4;  // vectors in flight
#pragma unroll
      for (int first = 0; first < S::kVectors; first += kBatch) {
        uint4 sums[kBatch];
#pragma unroll
        for (int v = first; v < first + kBatch && v < S::kVectors; ++v) sums[v - first] = thread.vector(part, v);
#pragma unroll
        for (int v = first; v < first + kBatch && v < S::kVectors; ++v) {
          float value[kVector], derivative[kVector];
          widen_vector<T>(sums[v - first], value);
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
            const Activated activation = activated<A, false>(value[i] + bias[i]);
            value[i] = activation.value;
            derivative[i] = activation.derivative;
          }
          if constexpr (KEPT == Kept::derivative) sums[v - first] = narrow_vector<T>(derivative);
          store_vector_if(at.there() && p.product != nullptr, p.product + at.offset, sums[v - first]);
          store_vector_if(at.there(), p.activation + at.offset, narrow_vector<T>(value));
          at.next(p);
        }
      }
    }
    release_result(memory, thread);
    parity ^= 1;
  }
}

// Adds the threads' column sums of a part in a fixed order and writes them. Called by all epilogue threads; consecutive
// calls alternate between two buffers.
template <class S>
__device__ __forceinline__ void store_sums(const ProductParams& p, ProductMemory<S>& memory,
                                           const EpilogueThread<S>& thread, const ProductTileScheduler<S>& tile,
                                           int part, int buffer, float (&sum)[kVector]) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 8);
    sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 16);
  }
  auto& shares = memory.sums[buffer];
  if (thread.lane < 8) store_packed(&shares[thread.warp][thread.column], narrow<float>(sum));
  named_barrier_sync(kEpilogueSums, 32 * S::kEpilogueWarps);
  const int own = 32 * thread.warp + thread.lane, column = tile.column + part * kTileColumns + own;
  if (own < kTileColumns && column < p.columns && tile.row < p.rows) {
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < S::kEpilogueWarps; ++warp) total += shares[warp][own];
    p.sums[static_cast<int64_t>(tile.row / S::kRows) * p.columns + column] = total;
  }
}

// The kept tensor is loaded one part ahead: the registers of a vector receive the next part's as soon as they are free.
template <class T, class S, Activation A, Kept KEPT>
__device__ __forceinline__ void finish_backward(const ProductParams& p, ProductMemory<S>& memory, int warp) {
  const EpilogueThread<S> thread(memory, warp);
  uint32_t parity = 0;
  int buffer = 0;  // of the sums
  uint4 kept[S::kVectors];
  ProductTileScheduler<S> tile(p);
  if (!tile.valid(p)) return;
  PartWalk<S> ahead(p, thread, tile, 0);
  BiasVector next_bias(p, ahead.column);
#pragma unroll
  for (int v = 0; v < S::kVectors; ++v, ahead.next(p)) kept[v] = load_stream_if(ahead.there(), p.kept + ahead.offset);
  for (; tile.valid(p); tile.next(p)) {
    memory.result_full.wait(parity);
    const int parts = tile.parts(p);
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
      const bool ends = part == parts - 1;
      PartWalk<S> at(p, thread, tile, part);
      ProductTileScheduler<S> then = tile;
      if (ends) then.next(p);
      ahead = PartWalk<S>(p, thread, then, ends ? 0 : part + 1);
      if (!then.valid(p)) ahead.rows = 0;
      float bias[kVector], sum[kVector];
      next_bias.widen_to(bias, p.bias_dtype);
      next_bias = BiasVector(p, ahead.column);
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum[i] = 0.0f;
#pragma unroll
      for (int v = 0; v < S::kVectors; ++v, at.next(p), ahead.next(p)) {
        uint4 product = thread.vector(part, v);
        if (S::kVectors * S::kEpilogueWarps > S::kRowGroups && v == S::kVectors - 1 && !at.there())
          product = make_uint4(0, 0, 0, 0);  // below the tile
        float value[kVector], gradient[kVector];
        if constexpr (KEPT == Kept::derivative) {
          product = multiply_vectors<T>(product, kept[v]);
          kept[v] = load_stream_if(ahead.there(), p.kept + ahead.offset);
          widen_vector<T>(product, gradient);
#pragma unroll
          for (int i = 0; i < kVector; ++i) sum[i] += gradient[i];
        } else {
          widen_vector<T>(product, gradient);
          widen_vector<T>(kept[v], value);
          kept[v] = load_stream_if(ahead.there(), p.kept + ahead.offset);
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
            const Activated activation = activated<A, false>(value[i] + bias[i]);
            value[i] = activation.value;
            gradient[i] *= activation.derivative;
            sum[i] += gradient[i];
          }
          product = narrow_vector<T>(gradient);
          store_vector_if(at.there() && p.activation != nullptr, p.activation + at.offset, narrow_vector<T>(value));
        }
        store_vector_if(at.there(), p.product + at.offset, product);
      }
      if (p.sums != nullptr) store_sums<S>(p, memory, thread, tile, part, buffer, sum);
      buffer ^= 1;
    }
    release_result(memory, thread);
    parity ^= 1;
  }
}

// ---- kernel ----------------------------------------------------------------------------------------------------------

// Forward: a is x and b is the weight, both K-major. Backward: a is dy, K-major, and b is the weight, MN-major.
template <class T, class S, Activation A, bool BACKWARD, Kept KEPT>
__global__ void __cluster_dims__(S::kCluster, 1, 1) __launch_bounds__(S::kThreads, 1)
    product_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                   const __grid_constant__ ProductParams p) {
  extern __shared__ char dynamic_memory[];
  auto& memory =
      *reinterpret_cast<ProductMemory<S>*>(dynamic_memory + (1024 - shared_address(dynamic_memory) % 1024) % 1024);
  constexpr Major kB = BACKWARD ? Major::mn : Major::k;
  const int warp = warp_uniform(static_cast<int>(threadIdx.x) / 32);
  if (threadIdx.x == 0) memory.init();
  __syncthreads();
  if constexpr (S::kCluster > 1) cluster_sync();
  if (warp < S::kConsumerWarps) {
    consume<T, S, kB>(p, memory, warp / 4);
  } else {
    if (warp > S::kConsumerWarps) {
      if constexpr (BACKWARD)
        finish_backward<T, S, A, KEPT>(p, memory, warp - S::kConsumerWarps - 1);
      else
        finish_forward<T, S, A, KEPT>(p, memory, warp - S::kConsumerWarps - 1);
    } else if (elect_one()) {
      prefetch_tensormap(&a_map);
      prefetch_tensormap(&b_map);
      produce<S, kB>(p, memory, &a_map, &b_map);
    }
    __syncwarp();
  }
  if constexpr (S::kCluster > 1) cluster_sync();  // another block may still multicast into this block's shared memory
}

// ---- launch ----------------------------------------------------------------------------------------------------------

struct ProductOperands {
  const void *a, *b;
  int64_t a_stride, inner;  // a: [rows, inner], rows a_stride apart; b: [columns, inner] or, backward, [inner, columns]
  DType dtype;
  int device;
  void* stream;
};

template <class T, class S, Activation A, bool BACKWARD, Kept KEPT>
Status launch_product(const ProductOperands& operands, ProductParams p, int multiprocessors) {
  constexpr size_t kMemory = sizeof(ProductMemory<S>) + ProductMemory<S>::kSlack;
  static_assert(kMemory <= 227 * 1024, "more shared memory than an SM has");
  const int64_t inner = operands.inner, columns = p.columns;
  const TensorView a_view = {
      operands.a, operands.dtype, {inner, p.rows, 1, 1}, {operands.a_stride, 0, 0}, {kTileColumns, S::kRows, 1, 1}};
  const TensorView b_view = BACKWARD ? TensorView{operands.b,
                                                  operands.dtype,
                                                  {columns, inner, 1, 1},
                                                  {columns, 0, 0},
                                                  {kTileColumns, kTileColumns / S::kCluster, 1, 1}}
                                     : TensorView{operands.b,
                                                  operands.dtype,
                                                  {inner, columns, 1, 1},
                                                  {inner, 0, 0},
                                                  {kTileColumns, S::kColumns / S::kCluster, 1, 1}};
  CUtensorMap a_map, b_map;
  Status status = make_tensor_map(&a_map, a_view);
  if (status.code == StatusCode::ok) status = make_tensor_map(&b_map, b_view);
  if (status.code != StatusCode::ok) return status;
  constexpr int kTurnRows = S::kRows * S::kCluster;
  p.steps = static_cast<int>((inner + kTileColumns - 1) / kTileColumns);
  p.column_tiles = (p.columns + S::kColumns - 1) / S::kColumns;
  const int tiles = (p.rows + kTurnRows - 1) / kTurnRows * p.column_tiles, clusters = multiprocessors / S::kCluster;
  p.whole = tiles / clusters * clusters;
  p.split = 1;
  for (int split = 2; split <= S::kParts; ++split)
    if (S::kParts % split == 0 && (tiles - p.whole) * split <= clusters) p.split = split;
  p.turns = p.whole + (tiles - p.whole) * p.split;
  return launch(product_kernel<T, S, A, BACKWARD, KEPT>, dim3(std::min(clusters, p.turns) * S::kCluster),
                dim3(S::kThreads), kMemory, operands.stream, a_map, b_map, p);
}

}  // namespace cuda
}  // namespace fasttfm
