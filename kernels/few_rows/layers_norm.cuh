// The second step of each half of a layer in the kernel for all layers (cuda_layers.cu): the block that owns a row adds
// the clusters' sums, bias and residual, and normalizes the row.
#pragma once

#include <cstdint>

#include "common/cuda/normalize.cuh"
#include "few_rows/layers_block.cuh"

namespace fasttfm {
namespace cuda {
namespace layers {

__device__ __forceinline__ float load_element(const bf16_t* from) {
  return widen_word(__ldg(reinterpret_cast<const uint16_t*>(from)), bf16_t{}).x;
}
__device__ __forceinline__ float rounded(float value) {
  return widen_word(narrow_word(value, 0.0f, bf16_t{}), bf16_t{}).x;
}

// A thread's three columns of the row that the block owns.
template <class S>
struct Owner {
  bool owns, active;  // the block; the thread
  int row, column;
  float residual[kPacketSums];
  float linear_bias[kPacketSums], weight[kPacketSums], bias[kPacketSums];

  __device__ __forceinline__ Owner(const Params& p, const Place<S>& at) {
    row = S::row_of(at.block);
    owns = row < p.tokens;
    active = owns && at.thread < S::kSums;
    column = kPacketSums * at.thread;
    if (active) load(p.x + row * S::kWidth, residual);
  }
  __device__ __forceinline__ void load(const bf16_t* from, float (&to)[kPacketSums]) const {
#pragma unroll
    for (int i = 0; i < kPacketSums; ++i) to[i] = load_element(from + column + i);
  }
  // Starts to load the parameters of the next LayerNorm.
  __device__ __forceinline__ void prepare(const bf16_t* linear, const bf16_t* norm, const bf16_t* norm_bias) {
    if (!active) return;
    load(linear, linear_bias);
    load(norm, weight);
    load(norm_bias, bias);
  }
};

// Adds the clusters' sums in a fixed order.
template <class S>
__device__ __forceinline__ void receive_sums(const Params& p, const Place<S>& at, int row, uint32_t tag,
                                             float (&sum)[kPacketSums]) {
  uint4 v[S::kHeads];
  const auto from = [&](int head) { return p.sums + S::sums_packet(head, row, at.thread); };
#pragma unroll
  for (int i = 0; i < S::kHeads; ++i) v[i] = load_packet(from(i));
  wait_for_packets(v, from, tag, p.limit);
#pragma unroll
  for (int i = 0; i < S::kHeads; ++i) {
    sum[0] += __uint_as_float(v[i].x);
    sum[1] += __uint_as_float(v[i].y);
    sum[2] += __uint_as_float(v[i].z);
  }
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

// Normalizes z in place. Each warp computes the mean and the squared deviations of its columns, which are combined.
template <class S>
__device__ __forceinline__ void normalize(float2 (&moments)[kLayersWarps], const Place<S>& at, const Owner<S>& owner,
                                          float eps, float (&z)[kPacketSums]) {
  constexpr int kWarps = S::kSums / 32, kEach = 32 * kPacketSums;
  if (owner.active) {
    const float mean = warp_sum(z[0] + z[1] + z[2]) * (1.0f / kEach);
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kPacketSums; ++i) squares = fmaf(z[i] - mean, z[i] - mean, squares);
    squares = warp_sum(squares);
    if (at.lane == 0) moments[at.warp] = make_float2(mean, squares);
  }
  sync_consumers();
  float mean = 0.0f, squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) mean += moments[i].x;
  mean *= 1.0f / kWarps;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    const float off = moments[i].x - mean;
    squares += fmaf(off * off, static_cast<float>(kEach), moments[i].y);
  }
  const float rstd = inverse_root<bf16_t>(squares * (1.0f / S::kWidth) + eps);
#pragma unroll
  for (int i = 0; i < kPacketSums; ++i) z[i] = fmaf((z[i] - mean) * rstd, owner.weight[i], owner.bias[i]);
}

// Adds the sums, bias and residual of the block's row, normalizes it, and writes it for all blocks, or as the result.
// The residual of a decoder's layers is the sum, in fp32, and that of an encoder's is the normalized row. `step`: the
// index of the half of a layer.
template <class S>
__device__ __forceinline__ void own_row(const Params& p, Memory<S>& memory, const Place<S>& at, Owner<S>& owner,
                                        int step, uint32_t tag) {
  float z[kPacketSums] = {};
  if (owner.active) {
#pragma unroll
    for (int i = 0; i < kPacketSums; ++i) z[i] = owner.linear_bias[i];
    receive_sums<S>(p, at, owner.row, tag, z);
#pragma unroll
    for (int i = 0; i < kPacketSums; ++i) {
      z[i] += owner.residual[i];
      if (S::kDecodes)
        owner.residual[i] = z[i];
      else
        z[i] = rounded(z[i]);
    }
  }
  normalize<S>(memory.moments[step % 2], at, owner, step % 2 == 0 ? p.eps_a : p.eps_b, z);
  if (!owner.active) return;
  // An even lane writes its columns and those of the next lane.
  const float next[3] = {__shfl_down_sync(0xffffffffu, z[0], 1), __shfl_down_sync(0xffffffffu, z[1], 1),
                         __shfl_down_sync(0xffffffffu, z[2], 1)};
  const uint4 packet = make_uint4(narrow_word(z[0], z[1], bf16_t{}), narrow_word(z[2], next[0], bf16_t{}),
                                  narrow_word(next[1], next[2], bf16_t{}), tag);
  if (!S::kDecodes)
#pragma unroll
    for (int i = 0; i < kPacketSums; ++i) owner.residual[i] = rounded(z[i]);
  if (at.lane % 2 != 0) return;
  const int index = S::row_packet(owner.row, at.thread / 2);
  if (step + 1 < 2 * p.layers) {
    store_packet(p.rows + index, packet);
  } else {
    auto* to = reinterpret_cast<uint32_t*>(p.y) + 3 * index;
    to[0] = packet.x, to[1] = packet.y, to[2] = packet.z;
  }
}

// Normalizes rows of the call's input into memory.rows; those after the last token are zeros. A warp has every eighth
// row.
template <class S>
__device__ __forceinline__ void normalize_input(const Params& p, Memory<S>& memory, const Place<S>& at) {
  constexpr int kVectors = S::kWidth / kChunk / 32;
  static_assert(S::kWidth % (kChunk * 32) == 0, "whole warps");
  for (int row = at.warp; row < S::kRows; row += kLayersWarps) {
    float x[kVectors][kChunk] = {};
    float mean = 0.0f, squares = 0.0f;
    const auto widened = [&](const bf16_t* from, int i, float (&to)[kChunk]) {
      const uint4 packed = __ldg(reinterpret_cast<const uint4*>(from) + 32 * i + at.lane);
      const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
      for (int j = 0; j < kChunk / 2; ++j) {
        const float2 pair = widen_word(words[j], bf16_t{});
        to[2 * j] = pair.x, to[2 * j + 1] = pair.y;
      }
    };
    const bool present = row < p.tokens;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (present) widened(p.x + row * S::kWidth, i, x[i]);
#pragma unroll
      for (float value : x[i]) mean += value;
    }
    mean = warp_sum(mean) * (1.0f / S::kWidth);
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
#pragma unroll
      for (float value : x[i]) squares = fmaf(value - mean, value - mean, squares);
    const float rstd = inverse_root<bf16_t>(warp_sum(squares) * (1.0f / S::kWidth) + p.eps_b);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float weight[kChunk], bias[kChunk];
      widened(p.cache.norm_weight, i, weight);
      widened(p.cache.norm_bias, i, bias);
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < kChunk / 2; ++j) {
        const float low = fmaf((x[i][2 * j] - mean) * rstd, weight[2 * j], bias[2 * j]);
        const float high = fmaf((x[i][2 * j + 1] - mean) * rstd, weight[2 * j + 1], bias[2 * j + 1]);
        words[j] = present ? narrow_word(low, high, bf16_t{}) : 0;
      }
      *reinterpret_cast<uint4*>(memory.rows + row * S::kWidthPitch + (32 * i + at.lane) * 16) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

}  // namespace layers
}  // namespace cuda
}  // namespace fasttfm
