// A matrix product on Hopper whose result meets an activation on its way to memory; the two directions are in op.h.
//
// A block stays on the chip and takes tile after tile, 128 rows by kColumns columns of the result. One warp copies
// operands, 64 elements of K a step, into a ring in shared memory; two warpgroups multiply, 64 rows each, and leave
// their sums, rounded to 16 bits, in shared memory; other warpgroups take them from there, compute the activation and
// write to memory, while the next tile is multiplied. Blocks of a cluster take tiles one below the other: each copies a
// share of the operand b, which all of them need.
//
// Per tile of 128 x 192 at K = 1024 the matrix units need 12,288 cycles; the pass over the tile, 18 to 28 instructions
// and two or three special functions per element, 3,500 to 5,500 issue slots of each scheduler. A backward that finds
// the derivative in memory takes 8 instructions and no special function.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/cuda/activation.cuh"
#include "common/cuda/hopper.cuh"
#include "common/cuda/reduce.cuh"
#include "gelu_product/op.h"

namespace fasttfm {
namespace cuda {

// COLUMNS of a tile, STAGES of the ring, CLUSTER blocks, EPILOGUES warps that compute activations.
//
// A product of 256 columns needs 154 registers, one of 192 needs 120, and the assembler allows no more than a thread
// has at the start: that is EPILOGUES of up to 3, or 7.
template <int COLUMNS, int STAGES, int CLUSTER, int EPILOGUES>
struct ProductShape {
  static constexpr int kRows = 128, kColumns = COLUMNS, kStages = STAGES, kCluster = CLUSTER;
  static constexpr int kParts = COLUMNS / kTileColumns;  // of a tile of the result
  static constexpr int kPartBytes = kRows * kTileRowBytes;
  static constexpr int kStepBytes = (kRows + COLUMNS) * kTileRowBytes;
  static constexpr int kConsumerWarps = 8, kEpilogueWarps = EPILOGUES;
  static constexpr int kThreads = 32 * (kConsumerWarps + 1 + EPILOGUES);
  static constexpr int kRowGroups = kRows / 4;  // a warp takes four rows of a part at a time
  static constexpr int kVectors = (kRowGroups + EPILOGUES - 1) / EPILOGUES;  // of 8 elements in a part, a thread's
  // Below a part, that the last vectors of some warps reach: they are read, and not used.
  static constexpr int kBytesBelow = 4 * (kVectors * EPILOGUES - kRowGroups) * kTileRowBytes;
};

template <class S>
struct alignas(1024) ProductMemory {
  char a[S::kStages][S::kRows * kTileRowBytes];
  char b[S::kStages][S::kColumns * kTileRowBytes];
  char result[S::kParts * S::kPartBytes + S::kBytesBelow];  // below the last part nothing is written
  alignas(16) float sums[2][S::kEpilogueWarps][kTileColumns];
  Barrier full[S::kStages], empty[S::kStages], result_full, result_empty;

  static constexpr int kSlack = 1024;  // dynamic shared memory is aligned to 16 bytes only

  __device__ __forceinline__ void initialize() {
    for (int i = 0; i < S::kStages; ++i) {
      full[i].initialize(1);
      empty[i].initialize(S::kConsumerWarps * S::kCluster);
    }
    result_full.initialize(S::kConsumerWarps * kWarpArrivals);
    result_empty.initialize(S::kEpilogueWarps * kWarpArrivals);
    fence_barriers();
  }
};

// What the forward leaves for the backward: h, or the activation's derivative at h + bias.
enum class Kept { product, derivative };

struct ProductParams {
  const void* bias;         // or null
  const char* kept;         // backward
  char* product;            // forward: what is kept, or null; backward: dh
  char* activation;         // a, or null in the backward
  float* sums;              // backward: [row tiles, columns], or null
  int rows, columns;        // of the result
  int steps;                // of 64 elements of K
  int column_tiles, turns;  // a cluster's tiles of one turn lie one below the other
  int whole, split;         // the turns before the last round, and how many share a tile in that
  DType bias_dtype;
};

// The tiles of one block: neighbouring clusters take neighbouring columns of the same rows, in one round of turns after
// another. From round to round a cluster moves on by one among them: the narrower tiles at the ends of rows might all
// be one cluster's otherwise. In the last round, where few tiles are left, several clusters share the columns of one.
template <class S>
struct TileTurns {
  int first, own;   // the round's first turn, and this cluster's behind it
  int row, column;  // of the tile's first element

  __device__ __forceinline__ explicit TileTurns(const ProductParams& p)
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
  // Of 64 columns, that are the block's and in the result; may be none in the last round.
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
__device__ __forceinline__ void load_shared(const CUtensorMap* map, Barrier& full, uint32_t to, int c0, int c1) {
  if constexpr (S::kCluster == 1)
    load_box(map, full, to, c0, c1, 0, 0);
  else
    load_box_to((1 << S::kCluster) - 1, map, full, to, c0, c1, 0, 0);
}

// One thread. This block's share of b's tile: rows where K lies along them, and otherwise elements of K.
template <class S, Major B>
__device__ __forceinline__ void produce(const ProductParams& p, ProductMemory<S>& memory, const CUtensorMap* a_map,
                                        const CUtensorMap* b_map) {
  const int rank = static_cast<int>(blockIdx.x) % S::kCluster;
  RingPosition<S::kStages> at;
  for (TileTurns<S> tile(p); tile.valid(p); tile.next(p)) {
    for (int step = 0; step < p.steps; ++step) {
      memory.empty[at.slot].wait(at.parity ^ 1);
      Barrier& full = memory.full[at.slot];
      full.arrive_expect(S::kStepBytes);
      load_box(a_map, full, shared_address(memory.a[at.slot]), step * kTileColumns, tile.row, 0, 0);
      const uint32_t b = shared_address(memory.b[at.slot]);
      if constexpr (B == Major::k) {
        const int first = rank * (S::kColumns / S::kCluster);
        load_shared<S>(b_map, full, b + first * kTileRowBytes, step * kTileColumns, tile.column + first);
      } else {
        const int first = rank * (kTileColumns / S::kCluster);
#pragma unroll
        for (int part = 0; part < S::kParts; ++part)
          load_shared<S>(b_map, full, b + (part * kTileColumns + first) * kTileRowBytes,
                         tile.column + part * kTileColumns, step * kTileColumns + first);
      }
      at.next();
    }
  }
}

// ---- consumers -------------------------------------------------------------------------------------------------------

// Four 8 x 8 matrices of 16-bit elements, one word of each a lane; lane l names row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(uint32_t address, const uint32_t (&word)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(word[0]),
               "r"(word[1]), "r"(word[2]), "r"(word[3])
               : "memory");
}

// Sums of a warpgroup's 64 rows, rounded, to its rows of the result's first PARTS.
template <class T, class S, int PARTS>
__device__ __forceinline__ void store_result(uint32_t parts, const float (&d)[PARTS * kTileColumns / 2]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, row = 16 * (static_cast<int>(threadIdx.x) / 32 % 4) + lane % 16;
  const uint32_t first = parts + row * kTileRowBytes + (((lane / 16) ^ (row % 8)) << 4);
#pragma unroll
  for (int i = 0; i < PARTS * kTileColumns / 8; i += 2) {  // columns 8 * i to 8 * i + 15
    uint32_t word[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) word[k] = narrow_word(d[4 * i + 2 * k], d[4 * i + 2 * k + 1], T{});
    store_matrices((first ^ (i % 8 << 4)) + i / 8 * S::kPartBytes, word);
  }
}

// Where a warpgroup stands: its half of a tile's rows, the ring, and whose turn it is with the result.
template <class S>
struct Consumer {
  int group;
  RingPosition<S::kStages> at;
  uint32_t parity = 0, last = 0;
};

template <class S>
__device__ __forceinline__ void release(Barrier& empty) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  __syncwarp();
  if constexpr (S::kCluster == 1) {
    if (lane == 0) empty.arrive();
  } else {
    if (lane < S::kCluster) empty.arrive_remote(lane);
  }
}

// A warpgroup: 64 rows of the tile's first PARTS, or of fewer if there are no more. The sums' registers are the same
// for all widths: the assembler would keep room for each.
template <class T, class S, Major B, int PARTS = S::kParts>
__device__ __forceinline__ void multiply_tile(const ProductParams& p, ProductMemory<S>& memory, Consumer<S>& own,
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
    begin_products();
#pragma unroll
    for (int i = 0; i < kTileColumns / 16; ++i)
      multiply<T, Major::k, B>(d, advance(a, i * kKMajorStep),
                               advance(b, i * (B == Major::k ? kKMajorStep : kMnMajorStep)), step > 0 || i > 0);
    commit_products();
    if (step > 0) {
      wait_products<1>();
      release<S>(memory.empty[own.last]);
    }
    own.last = own.at.slot;
    own.at.next();
  }
  wait_products<0>();
  hold_registers(d);
  release<S>(memory.empty[own.last]);
  memory.result_empty.wait(own.parity ^ 1);
  store_result<T, S, PARTS>(shared_address(memory.result) + own.group * 64 * kTileRowBytes, d);
}

template <class T, class S, Major B>
__device__ __forceinline__ void consume(const ProductParams& p, ProductMemory<S>& memory, int group) {
  Consumer<S> own = {group};
  float sums[S::kColumns / 2];
  for (TileTurns<S> tile(p); tile.valid(p); tile.next(p)) {
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
// Read once, and not kept near the multiprocessor.
__device__ __forceinline__ uint4 load_stream_if(bool wanted, const void* from) {
  uint4 v;
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %4, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;"
      " @p ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%5]; }"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "r"(static_cast<int>(wanted)), "l"(from));
  return v;
}
// Eight elements of the bias as they lie in memory, read before they are needed; zeros where there is no bias.
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

// Element by element, rounded once.
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

// A thread's place in the parts of a tile, 64 columns each: eight threads take the 128 bytes of a row, a warp four
// rows, the warps neighbouring ones; a thread's vectors of a part are kStep rows apart.
template <class S>
struct EpilogueThread {
  static constexpr int kStep = 4 * S::kEpilogueWarps;
  int warp, lane, row, column;
  uint32_t result;  // its first vector of a part

  __device__ __forceinline__ EpilogueThread(const ProductMemory<S>& memory, int number)
      : warp(number), lane(static_cast<int>(threadIdx.x) % 32), row(4 * number + lane / 8), column(8 * (lane % 8)) {
    result = shared_address(memory.result) + row * kTileRowBytes + (((lane % 8) ^ (row % 8)) << 4);
  }
  // Rows of a tile that there are, from the thread's first on: those of a vector are there if it begins below.
  __device__ __forceinline__ int rows_left(int rows) const { return min(rows, S::kRows) - row; }
  // Of a part; a step of 4 mod 8 rows swaps the places of the first and the last four chunks of a row.
  __device__ __forceinline__ uint4 vector(int part, int v) const {
    const uint32_t swap = kStep % 8 != 0 && v % 2 != 0 ? 64 : 0;
    return load_vector((result ^ swap) + part * S::kPartBytes + v * kStep * kTileRowBytes);
  }
};

// Where a thread's vectors of one part of a tile lie in a tensor [rows, columns]; goes from one to the next.
template <class S>
struct PartWalk {
  int column, rows;  // rows that there are, from the next vector's on
  int64_t offset;    // of the next vector, in bytes

  __device__ __forceinline__ PartWalk(const ProductParams& p, const EpilogueThread<S>& thread, const TileTurns<S>& tile,
                                      int part)
      : column(tile.column + part * kTileColumns + thread.column),
        rows(column < p.columns ? thread.rows_left(p.rows - tile.row) : 0),
        offset(2 * (static_cast<int64_t>(tile.row + thread.row) * p.columns + column)) {}
  __device__ __forceinline__ bool there() const { return rows > 0; }
  // The assembler would compute all of a part's places first, and has no registers for them.
  __device__ __forceinline__ void next(const ProductParams& p) {
    rows -= EpilogueThread<S>::kStep;
    offset += static_cast<int64_t>(p.columns) * (2 * EpilogueThread<S>::kStep);
    asm volatile("" : "+l"(offset), "+r"(rows));
  }
};

// arrive_warp() with the lane that the thread knows: threadIdx.x takes another register, and some kernels spill then.
template <class S>
__device__ __forceinline__ void release_result(ProductMemory<S>& memory, const EpilogueThread<S>& thread) {
  __syncwarp();
  if (kWarpArrivals > 1 || thread.lane == 0) memory.result_empty.arrive();
}

template <class T, class S, Activation A, Kept KEPT>
__device__ __forceinline__ void finish_forward(const ProductParams& p, ProductMemory<S>& memory, int warp) {
  const EpilogueThread<S> thread(memory, warp);
  uint32_t parity = 0;
  TileTurns<S> tile(p);
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
      TileTurns<S> then = tile;
      if (ends) then.next(p);
      next_bias = BiasVector(p, then.column + (ends ? 0 : part + 1) * kTileColumns + thread.column);
      constexpr int kBatch = 4;  // vectors under way together
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

// Adds the threads' sums of a part's columns up, in a fixed order, and writes them. All threads that compute
// activations; calls take turns with two buffers.
template <class S>
__device__ __forceinline__ void store_sums(const ProductParams& p, ProductMemory<S>& memory,
                                           const EpilogueThread<S>& thread, const TileTurns<S>& tile, int part,
                                           int buffer, float (&sum)[kVector]) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 8);
    sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 16);
  }
  auto& shares = memory.sums[buffer];
  if (thread.lane < 8) store_packed(&shares[thread.warp][thread.column], narrow<float>(sum));
  sync_named(1, 32 * S::kEpilogueWarps);
  const int own = 32 * thread.warp + thread.lane, column = tile.column + part * kTileColumns + own;
  if (own < kTileColumns && column < p.columns && tile.row < p.rows) {
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < S::kEpilogueWarps; ++warp) total += shares[warp][own];
    p.sums[static_cast<int64_t>(tile.row / S::kRows) * p.columns + column] = total;
  }
}

// What was kept is read a part ahead: a vector's registers take the next part's as soon as they are free.
template <class T, class S, Activation A, Kept KEPT>
__device__ __forceinline__ void finish_backward(const ProductParams& p, ProductMemory<S>& memory, int warp) {
  const EpilogueThread<S> thread(memory, warp);
  uint32_t parity = 0;
  int buffer = 0;  // of the sums
  uint4 kept[S::kVectors];
  TileTurns<S> tile(p);
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
      TileTurns<S> then = tile;
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

// Forward: a is x, b the weight, both along K. Backward: a is dy, along K, b the weight, across.
template <class T, class S, Activation A, bool BACKWARD, Kept KEPT>
__global__ void __cluster_dims__(S::kCluster, 1, 1) __launch_bounds__(S::kThreads, 1)
    product_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                   const __grid_constant__ ProductParams p) {
  extern __shared__ char dynamic_memory[];
  auto& memory =
      *reinterpret_cast<ProductMemory<S>*>(dynamic_memory + (1024 - shared_address(dynamic_memory) % 1024) % 1024);
  constexpr Major kB = BACKWARD ? Major::mn : Major::k;
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
  if (threadIdx.x == 0) memory.initialize();
  __syncthreads();
  if constexpr (S::kCluster > 1) sync_cluster();
  if (warp < S::kConsumerWarps) {
    consume<T, S, kB>(p, memory, warp / 4);
  } else {
    if (warp > S::kConsumerWarps) {
      if constexpr (BACKWARD)
        finish_backward<T, S, A, KEPT>(p, memory, warp - S::kConsumerWarps - 1);
      else
        finish_forward<T, S, A, KEPT>(p, memory, warp - S::kConsumerWarps - 1);
    } else if (elected()) {
      prefetch_map(&a_map);
      prefetch_map(&b_map);
      produce<S, kB>(p, memory, &a_map, &b_map);
    }
    __syncwarp();
  }
  if constexpr (S::kCluster > 1) sync_cluster();  // another block may still copy to this one's memory
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
  static_assert(kMemory <= 227 * 1024, "more shared memory than a multiprocessor has");
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
