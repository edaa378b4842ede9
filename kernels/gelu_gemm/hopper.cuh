// The epilogues of the Hopper GEMM (gemm/hopper/gemm.cuh) with an activation, forward and backward (op.h).
//
// For a tile of 128 x 192 with K = 1024 the tensor cores need 12,288 cycles. With the erf form of GELU in bf16, the
// epilogue of the forward has 15 to 23 instructions and one or two special functions per element, which take 2,900 to
// 4,400 issue slots of each warp scheduler. The backward from h has 30 and three, and the one that loads the derivative
// 9 and none.
#pragma once

#include <cstdint>

#include "common/cuda/activation.cuh"
#include "gelu_gemm/op.h"
#include "gemm/hopper/gemm.cuh"
#include "gemm/hopper/gemm_in_place.cuh"

namespace fasttfm {
namespace cuda {

// What the forward stores for the backward: nothing, h, or the activation's derivative at h + bias.
enum class Kept { nothing, product, derivative };

struct GeluGemmParams : GemmSizes {
  const void* bias;  // or null
  const char* kept;  // backward
  char* product;     // forward: h or the derivative (Kept); backward: dh
  char* activation;  // a: of the backward, or null; of the forward with a gate
  float* sums;       // backward: [row tiles, columns], or null
  DType bias_dtype;
  CUtensorMap map;  // forward without a gate: of a
};

constexpr int kEpilogueSums = 1;  // the named barrier of the epilogue warps

// The elementwise product of two words of two 16-bit elements, rounded once.
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

// The activation replaces the sums in shared memory; the kept tensor is stored from registers.
template <class T, class S, Activation A, Kept KEPT>
__device__ __forceinline__ void finish_forward(const GeluGemmParams& p, GemmMemory<S>& memory, int warp) {
  finish_in_place(p, &p.map, memory, warp, [&](int row, int column, uint4 sums, const float (&bias)[kVector]) {
    float value[kVector], derivative[kVector];
    widen_vector<T>(sums, value);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const Activated activation = activated_as<A, T>(value[i] + bias[i]);
      value[i] = activation.value;
      derivative[i] = activation.derivative;
    }
    if constexpr (KEPT == Kept::derivative) sums = narrow_vector<T>(derivative);
    if constexpr (KEPT != Kept::nothing)
      store_vector_if(row < p.rows && column < p.columns,
                      p.product + 2 * (static_cast<int64_t>(row) * p.columns + column), sums);
    return narrow_vector<T>(value);
  });
}

// With a gate: a thread has 8 columns of it or of up. Those of the same columns exchange halves, so that each computes
// 4 elements of a.
template <class T, class S, Activation A>
__device__ __forceinline__ void finish_gated(const GeluGemmParams& p, GemmMemory<S>& memory, int warp) {
  static_assert(S::kWholeTiles && S::kCluster == 2, "each block of a cluster loads the gate or up");
  constexpr int kHalf = kVector / 2, kUpLane = 4;
  const EpilogueThread<S> thread(memory, warp);
  const bool is_up = (thread.lane & kUpLane) != 0;
  const int lane_column = kVector * (thread.lane % kUpLane);  // the thread's first column of 32
  const auto bias_of = [&](int column) {
    return BiasVector(p, column + lane_column < p.gate ? column + lane_column + (is_up ? p.gate : 0) : p.columns);
  };
  uint32_t parity = 0;
  GemmTileScheduler<S> tile(p);
  for (; tile.valid(p); tile.next(p)) {
    memory.result_full[0].wait(parity);
    const int parts = tile.parts(p);
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
      const int column = (tile.column + part * kTileColumns) / 2;
      const bool there = column + lane_column < p.gate;
      float bias[kVector];
      bias_of(column).widen_to(bias, p.bias_dtype);
#pragma unroll
      for (int v = 0; v < S::kVectors; ++v) {
        const uint4 sums = thread.vector(part, v);
        const int row = tile.row + thread.row + v * EpilogueThread<S>::kStep;
        float value[kVector], result[kHalf];
        widen_vector<T>(sums, value);
#pragma unroll
        for (int i = 0; i < kHalf; ++i) {
          const float first = value[i] + bias[i], second = value[kHalf + i] + bias[kHalf + i];
          const float other = __shfl_xor_sync(0xffffffffu, is_up ? first : second, kUpLane);
          const float gate = is_up ? other : first, up = is_up ? second : other;
          result[i] = activated_as<A, T>(gate).value * up;
        }
        char* to = p.activation + 2 * (static_cast<int64_t>(row) * p.gate + column + lane_column + (is_up ? kHalf : 0));
        const uint2 words = {narrow_word(result[0], result[1], T{}), narrow_word(result[2], result[3], T{})};
        if (there && thread.in_tile(v) && row < p.rows) *reinterpret_cast<uint2*>(to) = words;
      }
    }
    release_result(memory, thread);
    parity ^= 1;
  }
}

// Adds the threads' column sums of a part in a fixed order and writes them. Called by all epilogue threads; consecutive
// calls alternate between two buffers.
template <class S>
__device__ __forceinline__ void store_sums(const GeluGemmParams& p, GemmMemory<S>& memory,
                                           const EpilogueThread<S>& thread, const GemmTileScheduler<S>& tile, int part,
                                           int buffer, float (&sum)[kVector]) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 8);
    sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 16);
  }
  auto& shares = memory.sums[buffer];
  if (thread.lane < 8) store_packed(&shares[thread.warp][thread.column], narrow<float>(sum));
  named_barrier_sync(kEpilogueSums, 32 * S::kEpilogueWarps);
  const int part_column = 32 * thread.warp + thread.lane, column = tile.column + part * kTileColumns + part_column;
  if (part_column < kTileColumns && column < p.columns && tile.row < p.rows) {
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < S::kEpilogueWarps; ++warp) total += shares[warp][part_column];
    p.sums[static_cast<int64_t>(tile.row / S::kRows) * p.columns + column] = total;
  }
}

// The kept tensor is loaded one part ahead: as soon as the registers of a vector are free, the vector of the next part
// is loaded into them.
template <class T, class S, Activation A, Kept KEPT>
__device__ __forceinline__ void finish_backward(const GeluGemmParams& p, GemmMemory<S>& memory, int warp) {
  static_assert(S::kWholeTiles, "the parts of a tile are in one slot");
  const EpilogueThread<S> thread(memory, warp);
  uint32_t parity = 0;
  int buffer = 0;  // index of the buffer of the sums
  uint4 kept[S::kVectors];
  GemmTileScheduler<S> tile(p);
  if (!tile.valid(p)) return;
  PartWalk<S> ahead(p, thread, tile, 0);
  BiasVector next_bias(p, ahead.column);
#pragma unroll
  for (int v = 0; v < S::kVectors; ++v, ahead.next(p)) kept[v] = load_stream_if(ahead.there(), p.kept + ahead.offset);
  for (; tile.valid(p); tile.next(p)) {
    memory.result_full[0].wait(parity);
    const int parts = tile.parts(p);
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
      const bool ends = part == parts - 1;
      PartWalk<S> at(p, thread, tile, part);
      GemmTileScheduler<S> then = tile;
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
          product = make_uint4(0, 0, 0, 0);  // after the last row of the tile
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

// Forward: a is x and b is the weight, both K-major.
template <Activation A, Kept KEPT>
struct GeluForward {
  using Params = GeluGemmParams;
  static constexpr Major kB = Major::k;

  template <class T, class S>
  static __device__ __forceinline__ void finish(const Params& p, GemmMemory<S>& memory, int warp) {
    finish_forward<T, S, A, KEPT>(p, memory, warp);
  }
};

// Forward with a gate: b is the weight of the gate and up.
template <Activation A>
struct GatedForward {
  using Params = GeluGemmParams;
  static constexpr Major kB = Major::k;

  template <class T, class S>
  static __device__ __forceinline__ void finish(const Params& p, GemmMemory<S>& memory, int warp) {
    finish_gated<T, S, A>(p, memory, warp);
  }
};

// Backward: a is dy, K-major, and b is the weight, MN-major.
template <Activation A, Kept KEPT>
struct GeluBackward {
  using Params = GeluGemmParams;
  static constexpr Major kB = Major::mn;

  template <class T, class S>
  static __device__ __forceinline__ void finish(const Params& p, GemmMemory<S>& memory, int warp) {
    finish_backward<T, S, A, KEPT>(p, memory, warp);
  }
};

}  // namespace cuda
}  // namespace fasttfm
