// Attention of one new token of each sequence to its cached keys, in the kernel for all layers (cuda_layers.cu). A
// cluster has a head. Its warps divide the keys of each sequence, 16 at a time. Each warp computes
//   top = max of the scores,   total = sum of 2^(score - top),   values = sum of 2^(score - top) v
// over its keys. Warps merge these in shared memory, blocks through each other's shared memory.
//
// Tensor cores compute both GEMMs, with the one query in the first eight rows of their tiles, so that each of four
// lanes has all that a softmax needs. The order of the columns of q and k, and of those of v, is the one in which 16
// bytes of global memory are operands.
#pragma once

#include <cstdint>

#include "common/cuda/approximations.cuh"
#include "few_rows/layers_block.cuh"

namespace fasttfm {
namespace cuda {
namespace layers {

constexpr float kLeast = -1e30f;  // below every score; finite, so that differences from it are numbers
constexpr int kGroup = 16;        // keys that a warp reads at a time

// How the keys of a row are divided among the warps of a cluster.
template <class S>
struct Division {
  int warps;  // of a block for a row
  int first_row, first_group;
  __device__ __forceinline__ Division(int tokens, const Place<S>& at) {
    warps = tokens == 1 ? kLayersWarps : tokens == 2 ? kLayersWarps / 2 : tokens <= 4 ? kLayersWarps / 4 : 1;
    first_row = at.warp / warps;
    first_group = at.rank * warps + at.warp % warps;
  }
  __device__ __forceinline__ int row_stride() const { return kLayersWarps / warps; }
  __device__ __forceinline__ int group_stride() const { return S::kCluster * warps; }
};

// The offset of a sequence's first cached key of the cluster's head.
template <class S>
__device__ __forceinline__ int64_t cache_offset(const Cache& cache, const Place<S>& at, int layer, int row) {
  const int64_t index[] = {layer, row, at.head};
  return index[0] * cache.layer_stride + index[1] * cache.sequence_stride + index[2] * cache.head_stride;
}

// Prefetches the block's part of the keys and values into L2. Executed by one warp.
template <class S>
__device__ __forceinline__ void prefetch_cache(const Params& p, const Memory<S>& memory, const Place<S>& at,
                                               int layer) {
  const Division<S> division(p.tokens, at);
  const int block_keys = kGroup * division.warps;
  for (int row = 0; row < p.tokens; ++row) {
    const int64_t offset = cache_offset(p.cache, at, layer, row);
    for (int i = at.lane;; i += 32) {
      const int key = kGroup * (i / block_keys * division.group_stride() + at.rank * division.warps) + i % block_keys;
      if (key >= memory.begin[row]) break;
      prefetch_l2(p.cache.keys + offset + static_cast<int64_t>(key) * S::kHeadDim);
      prefetch_l2(p.cache.values + offset + static_cast<int64_t>(key) * S::kHeadDim);
    }
  }
}

template <class S>
__device__ __forceinline__ uint4 gathered_vector(const Memory<S>& memory, int part, int row, int chunk) {
  return *reinterpret_cast<const uint4*>(memory.gather + S::qkv_place(part, row, chunk));
}

// Appends the block's chunk of the new keys and values to the cache. What a block reads of the cache precedes them.
template <class S>
__device__ __forceinline__ void append(const Params& p, const Memory<S>& memory, const Place<S>& at, int layer) {
  const int row = at.thread / 2, part = 1 + at.thread % 2;
  if (row >= p.tokens) return;
  bf16_t* to = (part == 1 ? p.cache.keys : p.cache.values) + cache_offset(p.cache, at, layer, row) +
               static_cast<int64_t>(memory.begin[row]) * S::kHeadDim + at.rank * kChunk;
  *reinterpret_cast<uint4*>(to) = gathered_vector(memory, part, row, at.rank);
}

// A lane's part of 16 keys and values.
template <class S>
struct KeysAndValues {
  uint4 k[2][2];  // of keys lane / 4 and 8 + lane / 4: chunks lane % 4 and 4 + lane % 4
  uint4 v[2][2];  // of keys 2 * (lane % 4) + {0, 1} and 8 more: chunk lane / 4

  static __device__ __forceinline__ int key_of_k(int lane, int tile) { return 8 * tile + lane / 4; }
  static __device__ __forceinline__ int key_of_v(int lane, int tile, int i) { return 8 * tile + 2 * (lane % 4) + i; }

  // Those of the cache; zeros after its last key. They do not depend on the call's tokens.
  __device__ __forceinline__ void load(const Params& p, const Memory<S>& memory, const Place<S>& at, int layer, int row,
                                       int group) {
    const int count = memory.begin[row] - kGroup * group;  // of the keys from the group's first one on
    const int64_t offset = cache_offset(p.cache, at, layer, row) + static_cast<int64_t>(group) * kGroup * S::kHeadDim;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        k[tile][i] = v[tile][i] = make_uint4(0, 0, 0, 0);
        const int of_k = key_of_k(at.lane, tile), of_v = key_of_v(at.lane, tile, i);
        const int from_k = of_k * S::kHeadDim + (4 * i + at.lane % 4) * kChunk;
        const int from_v = of_v * S::kHeadDim + at.lane / 4 * kChunk;
        if (of_k < count) k[tile][i] = *reinterpret_cast<const uint4*>(p.cache.keys + offset + from_k);
        if (of_v < count) v[tile][i] = *reinterpret_cast<const uint4*>(p.cache.values + offset + from_v);
      }
  }

  // Adds the new token, if it is one of the 16 keys.
  __device__ __forceinline__ void add_new(const Memory<S>& memory, const Place<S>& at, int row, int group) {
    const int key = memory.begin[row] - kGroup * group;
    if (key >= kGroup) return;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (key_of_k(at.lane, tile) == key) k[tile][i] = gathered_vector(memory, 1, row, 4 * i + at.lane % 4);
        if (key_of_v(at.lane, tile, i) == key) v[tile][i] = gathered_vector(memory, 2, row, at.lane / 4);
      }
  }
};

// The result for some of a row's keys. Column 16 * (lane % 4) + 8 * i + t of the values is values[t][i].
template <class S>
struct Attended {
  float top = kLeast, total = 0.0f, values[kChunk][4] = {};
  uint32_t q[4][4] = {};  // operands

  __device__ __forceinline__ Attended(const Memory<S>& memory, const Place<S>& at, int row) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 chunk = gathered_vector(memory, 0, row, 4 * i + at.lane % 4);
      q[2 * i][0] = chunk.x, q[2 * i][2] = chunk.y, q[2 * i + 1][0] = chunk.z, q[2 * i + 1][2] = chunk.w;
    }
  }

  // `count`: the number of keys from the group's first one on. `scale` includes log2(e).
  __device__ __forceinline__ void add(const Place<S>& at, const KeysAndValues<S>& of, int count, float scale) {
    float score[2][4] = {}, next = top, sum = 0.0f;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t words[4] = {of.k[tile][i].x, of.k[tile][i].y, of.k[tile][i].z, of.k[tile][i].w};
        mma_m16n8k16(score[tile], q[2 * i], words, bf16_t{});
        mma_m16n8k16(score[tile], q[2 * i + 1], words + 2, bf16_t{});
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool present = KeysAndValues<S>::key_of_v(at.lane, tile, i) < count;
        score[tile][i] = present ? score[tile][i] * scale : -INFINITY;
        next = fmaxf(next, score[tile][i]);
      }
    }
    next = fmaxf(next, __shfl_xor_sync(0xffffffffu, next, 1));
    next = fmaxf(next, __shfl_xor_sync(0xffffffffu, next, 2));
    const float keep = exp2_approx(top - next);
    uint32_t weights[4] = {};
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const float low = exp2_approx(score[tile][0] - next), high = exp2_approx(score[tile][1] - next);
      sum += low + high;
      weights[2 * tile] = narrow_word(low, high, bf16_t{});
    }
    top = next;
    total = fmaf(total, keep, sum);
    const uint32_t* words = reinterpret_cast<const uint32_t*>(of.v);
#pragma unroll
    for (int t = 0; t < kChunk; ++t) {
      const uint32_t half = t % 2 == 0 ? 0x5410 : 0x7632;  // of two words
      const uint32_t pairs[2] = {__byte_perm(words[t / 2], words[4 + t / 2], half),
                                 __byte_perm(words[8 + t / 2], words[12 + t / 2], half)};
      values[t][0] *= keep, values[t][1] *= keep;
      mma_m16n8k16(values[t], weights, pairs, bf16_t{});
    }
  }

  // Stores the values, top and total; the first four lanes have all of them.
  __device__ __forceinline__ void store(const Place<S>& at, char* to) {
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    if (at.lane >= 4) return;
    auto* vectors = reinterpret_cast<float4*>(to) + 4 * at.lane;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      vectors[i] = make_float4(values[i % 2 * 4][i / 2], values[i % 2 * 4 + 1][i / 2], values[i % 2 * 4 + 2][i / 2],
                               values[i % 2 * 4 + 3][i / 2]);
    if (at.lane == 0) *reinterpret_cast<float2*>(to + S::kTopAt) = make_float2(top, total);
  }
};

// Merges `count` results of a row, `pitch` bytes apart: four of the values. A result is the values, top and total.
template <class S>
__device__ __forceinline__ void merge_results(const char* from, int count, int pitch, int quad, float& top,
                                              float& total, float (&values)[4]) {
  top = kLeast;
  for (int i = 0; i < count; ++i) top = fmaxf(top, *reinterpret_cast<const float*>(from + i * pitch + S::kTopAt));
  for (int i = 0; i < count; ++i) {
    const float2 other = *reinterpret_cast<const float2*>(from + i * pitch + S::kTopAt);
    const float4 part = *reinterpret_cast<const float4*>(from + i * pitch + 16 * quad);
    const float keep = exp2_approx(other.x - top);
    total = fmaf(other.y, keep, total);
    values[0] = fmaf(part.x, keep, values[0]), values[1] = fmaf(part.y, keep, values[1]);
    values[2] = fmaf(part.z, keep, values[2]), values[3] = fmaf(part.w, keep, values[3]);
  }
}

// Attention of all rows, whose q, k and v of the cluster's head are in memory.gather; the result follows them there.
// `keys`: the warp's first ones. The blocks' results take the place of the rows, which all blocks of the cluster have
// read: they have sent q, k and v.
template <class S>
__device__ __forceinline__ void attend_cached(const Params& p, Memory<S>& memory, const Place<S>& at,
                                              const Division<S>& division, KeysAndValues<S>& keys, int layer) {
  static_assert(S::kHeadDim == 64 && S::kRows * S::kHeadDim / 4 == kConsumers, "threads of a row");
  constexpr int kResult = S::kResultBytes;
  append<S>(p, memory, at, layer);
  char* results = &memory.staging[0][0];
  const float scale = p.scale * kLog2E;
  for (int row = division.first_row; row < p.tokens; row += division.row_stride()) {
    Attended<S> result(memory, at, row);
    const int next_row = row + division.row_stride();
    for (int group = division.first_group;;) {
      const int next = group + division.group_stride(), count = memory.begin[row] + 1;
      KeysAndValues<S> present = keys;
      if (kGroup * next < count)
        keys.load(p, memory, at, layer, row, next);
      else if (next_row < p.tokens)
        keys.load(p, memory, at, layer, next_row, division.first_group);
      if (kGroup * group < count) {
        present.add_new(memory, at, row, group);
        result.add(at, present, count - kGroup * group, scale);
      }
      if (kGroup * next >= count) break;
      group = next;
    }
    result.store(at, results + (row * division.warps + at.warp % division.warps) * kResult);
  }
  sync_consumers();
  const int row = at.thread / (S::kHeadDim / 4), quad = at.thread % (S::kHeadDim / 4);
  if (at.thread == 0) memory.attended.arrive_expect_tx(S::kCluster * p.tokens * kResult);
  float top, total = 0.0f, values[4] = {};
  if (row < p.tokens) {
    merge_results<S>(results + row * division.warps * kResult, division.warps, kResult, quad, top, total, values);
    const uint4 packed = make_uint4(__float_as_uint(values[0]), __float_as_uint(values[1]), __float_as_uint(values[2]),
                                    __float_as_uint(values[3]));
    const uint32_t to = shared_address(memory.rows) + (at.rank * S::kRows + row) * kResult;
    const uint32_t barrier = memory.attended.address();
#pragma unroll
    for (int i = 0; i < S::kCluster; ++i) {
      const uint32_t block = (at.rank + i) % S::kCluster;
      st_async(mapa(to + 16 * quad, block), packed, mapa(barrier, block));
      if (quad == 0)
        st_async(mapa(to + S::kTopAt, block), make_uint4(__float_as_uint(top), __float_as_uint(total), 0, 0),
                 mapa(barrier, block));
    }
  }
  memory.attended.wait(layer & 1);
  uint2 words = make_uint2(0, 0);  // for rows after the last token
  if (row < p.tokens) {
    total = values[0] = values[1] = values[2] = values[3] = 0.0f;
    merge_results<S>(memory.rows + row * kResult, S::kCluster, S::kRows * kResult, quad, top, total, values);
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
    words = make_uint2(narrow_word(values[0] * inverse, values[1] * inverse, bf16_t{}),
                       narrow_word(values[2] * inverse, values[3] * inverse, bf16_t{}));
  }
  *reinterpret_cast<uint2*>(memory.gather + S::kAttentionAt + row * S::kHeadPitch + 8 * quad) = words;
}

}  // namespace layers
}  // namespace cuda
}  // namespace fasttfm
