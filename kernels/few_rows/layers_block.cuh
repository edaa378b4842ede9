// What the parts of the kernel for all layers (cuda_layers.cu) have in common: its arguments, a block's shared memory,
// and the GEMMs of a block's warps.
#pragma once

#include <cstdint>

#include "few_rows/dependent.cuh"
#include "few_rows/layers_handover.cuh"
#include "few_rows/layers_shape.h"
#include "few_rows/op.h"
#include "few_rows/tiles.h"

namespace fasttfm {
namespace cuda {
namespace layers {

using namespace few_rows;

// The KV cache of a decoder, [layers, sequences, H, capacity, D]. The stream of the launches orders it.
struct Cache {
  bf16_t *keys, *values;
  const int32_t* lengths;  // [T]: cached tokens of each sequence
  int capacity;
  int64_t layer_stride, sequence_stride, head_stride;
  const bf16_t *norm_weight, *norm_bias;  // [C]: of the LayerNorm before the first layer
};

struct Params {
  const bf16_t* x;            // [T, C]
  bf16_t* y;                  // [T, C]
  const int32_t* cu_seqlens;  // [sequences + 1]
  uint32_t* epoch;            // the last tag in use
  PollLimit limit;
  uint4* rows;  // [kRows, kPackets] packets
  uint4* sums;  // [kHeads, kRows, kSums] packets
  int tokens;   // T
  int sequences, layers, tanh;
  float eps_a, eps_b, scale;
  Cache cache;
  const bf16_t* parameters[kMostLayers][kLayerParameters];
};

enum Slot { kQkvSlot, kOutSlot, kUpSlot, kDownSlot, kSlots };

template <class S>
struct Memory {
  alignas(128) char qkv[S::kQkv * S::kWidthPitch];
  char out[S::kOut * S::kHeadPitch];
  char up[S::kUp * S::kWidthPitch];
  char down[S::kOut * S::kDownPitch];
  char rows[S::kRowsBytes];
  alignas(128) char gather[S::kGatherBytes];
  char staging[kLayersWarps][S::kStagingBytes];
  float2 moments[2][kLayersWarps];
  int begin[S::kRows], end[S::kRows];  // of each token's sequence; begin of a decoder: its cached tokens
  uint32_t epoch;
  Mbarrier full[kSlots], empty[kSlots], gathered, attended;
};

// A thread's place.
template <class S>
struct Place {
  int thread = static_cast<int>(threadIdx.x), warp = warp_uniform(thread / 32), lane = thread % 32;
  int block = static_cast<int>(blockIdx.x), head = block / S::kCluster, rank = block % S::kCluster;
  int row_tile = warp % S::kRowTiles, group = warp / S::kRowTiles;
};

constexpr int kConsumerBarrier = 1, kConsumers = 32 * kLayersWarps;
__device__ __forceinline__ void sync_consumers() { named_barrier_sync(kConsumerBarrier, kConsumers); }

// Store 4 or 8 bytes in shared memory.
__device__ __forceinline__ void store_word(uint32_t shared, uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(word) : "memory");
}
__device__ __forceinline__ void store_pair(uint32_t shared, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(shared), "f"(a), "f"(b) : "memory");
}

// ---- GEMMs ----------------------------------------------------------------------------------------------------------

// sum += a b^T over STEPS steps of 16 elements of K. `a(step)`: the address that the lane passes to ldmatrix.x4 for 16
// rows of a; `b`: that of eight rows of b and two steps, whose next eight rows are 8 * `pitch` bytes further.
template <int TILES, int STEPS, class A>
__device__ __forceinline__ void multiply(float (&sum)[TILES][4], A a, uint32_t b, int pitch) {
  static_assert(STEPS % 2 == 0, "two steps at a time");
  uint32_t left[2][2][4], right[2][TILES][4];
  const auto load = [&](int pair) {
    ldmatrix_x4(left[pair % 2][0], a(2 * pair));
    ldmatrix_x4(left[pair % 2][1], a(2 * pair + 1));
#pragma unroll
    for (int t = 0; t < TILES; ++t) ldmatrix_x4(right[pair % 2][t], b + t * 8 * pitch + pair * 64);
  };
  load(0);
#pragma unroll
  for (int pair = 0; pair < STEPS / 2; ++pair) {
    if (pair + 1 < STEPS / 2) load(pair + 1);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int t = 0; t < TILES; ++t)
        mma_m16n8k16(sum[t], left[pair % 2][half], right[pair % 2][t] + 2 * half, bf16_t{});
  }
}

// The lane's part of the address of eight rows of b.
__device__ __forceinline__ int lane_b(int lane, int pitch) { return (lane & 7) * pitch + (lane >> 3) * 16; }

// A GEMM of the rows with TILES x 8 columns: the warp's sums over its part of K go to the area of parts.
template <class S, int TILES>
__device__ __forceinline__ void multiply_rows(Memory<S>& memory, const Place<S>& at, const char* weights, int slot,
                                              uint32_t parity) {
  constexpr int kSteps = S::kWidth / 16 / S::kInnerGroups;
  float sum[TILES][4] = {};
  memory.full[slot].wait(parity);
  const int k = at.group * kSteps * 32;  // in bytes
  const MatrixRow of = matrix_row_a(at.lane);
  const uint32_t a = shared_address(memory.rows) + (at.row_tile * 16 + of.row) * S::kWidthPitch + of.chunk * 16 + k;
  multiply<TILES, kSteps>(
      sum, [&](int step) { return a + step * 32; }, shared_address(weights) + lane_b(at.lane, S::kWidthPitch) + k,
      S::kWidthPitch);
  arrive_warp(memory.empty[slot]);
  sync_consumers();  // all have read the rows
  const uint32_t to = shared_address(memory.rows) +
                      (at.group * S::kRows + at.row_tile * 16 + accumulator_row(at.lane)) * S::kPartPitch +
                      accumulator_column(at.lane) * 4;
#pragma unroll
  for (int t = 0; t < TILES; ++t)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      store_pair(to + half * 8 * S::kPartPitch + t * 32, sum[t][2 * half], sum[t][2 * half + 1]);
  sync_consumers();
}

// The rows for which blocks exchange data: an encoder's include zeros after the last token.
template <class S>
__device__ __forceinline__ int rows_of(const Params& p) {
  return S::kDecodes ? p.tokens : S::kRows;
}

// Writes a warp's sums of 16 rows and 24 columns as packets.
template <class S>
__device__ __forceinline__ void publish(const Params& p, Memory<S>& memory, const Place<S>& at,
                                        const float (&sum)[3][4], uint32_t tag) {
  auto* staging = reinterpret_cast<float*>(memory.staging[at.warp]);
  float* to = staging + accumulator_row(at.lane) * S::kWarpColumns + accumulator_column(at.lane);
#pragma unroll
  for (int t = 0; t < 3; ++t)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<float2*>(to + half * 8 * S::kWarpColumns + 8 * t) =
          make_float2(sum[t][2 * half], sum[t][2 * half + 1]);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int index = 32 * i + at.lane, row = at.row_tile * 16 + index / 8;
    const float* from = staging + kPacketSums * index;
    if (row < p.tokens)
      store_packet(p.sums + S::sums_packet(at.head, row, S::first_sums(at.block, at.group) + index % 8),
                   make_uint4(__float_as_uint(from[0]), __float_as_uint(from[1]), __float_as_uint(from[2]), tag));
  }
}

// The second GEMM of a half of a layer: kOut columns over the cluster's part of K. A warp has 24 columns of 16 rows.
template <class S, int STEPS, class A>
__device__ __forceinline__ void multiply_part(const Params& p, Memory<S>& memory, const Place<S>& at, A a,
                                              const char* weights, int pitch, int slot, uint32_t parity, uint32_t tag) {
  memory.full[slot].wait(parity);
  const bool active = at.group < S::kOut / S::kWarpColumns;
  float sum[3][4] = {};
  if (active)
    multiply<3, STEPS>(sum, a, shared_address(weights) + at.group * S::kWarpColumns * pitch + lane_b(at.lane, pitch),
                       pitch);
  arrive_warp(memory.empty[slot]);
  if (active) publish<S>(p, memory, at, sum, tag);
}

// ---- exchange in a cluster ------------------------------------------------------------------------------------------

// Four columns of a row of a GEMM with COLUMNS columns, which a thread adds up and sends to the cluster.
template <class S, int COLUMNS>
struct Quad {
  int row, quad;
  __device__ __forceinline__ explicit Quad(int thread) : row(thread / (COLUMNS / 4)), quad(thread % (COLUMNS / 4)) {}
  // The same in all threads of a warp.
  __device__ __forceinline__ bool active() const { return row < S::kRows; }
};

__device__ __forceinline__ void load_quad(const bf16_t* from, float (&to)[4]) {
  const uint2 words = __ldg(reinterpret_cast<const uint2*>(from));
  const float2 low = widen_word(words.x, bf16_t{}), high = widen_word(words.y, bf16_t{});
  to[0] = low.x, to[1] = low.y, to[2] = high.x, to[3] = high.y;
}

// Adds the parts to the values.
template <class S>
__device__ __forceinline__ void add_parts(const Memory<S>& memory, int row, int quad, float (&value)[4]) {
  float sum[4] = {};
#pragma unroll
  for (int group = 0; group < S::kInnerGroups; ++group) {
    const char* from = memory.rows + (group * S::kRows + row) * S::kPartPitch + 16 * quad;
    const auto part = *reinterpret_cast<const float4*>(from);
    sum[0] += part.x, sum[1] += part.y, sum[2] += part.z, sum[3] += part.w;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) value[i] += sum[i];
}

// Sends four values, rounded, to all blocks of the cluster. Two lanes put 16 bytes together, and each sends them to
// half of the blocks. `place`: the offset of the 16 bytes in the gather area; `sends`: the same in both lanes.
template <class S>
__device__ __forceinline__ void send(Memory<S>& memory, const Place<S>& at, int place, const float (&value)[4],
                                     bool sends) {
  const uint2 words = make_uint2(narrow_word(value[0], value[1], bf16_t{}), narrow_word(value[2], value[3], bf16_t{}));
  const uint2 other = make_uint2(__shfl_xor_sync(0xffffffffu, words.x, 1), __shfl_xor_sync(0xffffffffu, words.y, 1));
  const bool odd = at.lane % 2 != 0;
  const uint4 chunk =
      odd ? make_uint4(other.x, other.y, words.x, words.y) : make_uint4(words.x, words.y, other.x, other.y);
  if (!sends) return;
  const uint32_t to = shared_address(memory.gather) + place, barrier = memory.gathered.address();
#pragma unroll
  for (int i = 0; i < S::kCluster / 2; ++i) {
    // Each block starts with another one.
    const uint32_t block = (at.rank + i + (odd ? S::kCluster / 2 : 0)) % S::kCluster;
    st_async(mapa(to, block), chunk, mapa(barrier, block));
  }
}

}  // namespace layers
}  // namespace cuda
}  // namespace fasttfm
