// LayerNorm without a kernel of its own, in the GEMMs for few rows (cuda_gemm.cu). A GEMM reads the mean and the
// deviation of its rows from the statistics that the GEMM before it has written (few_rows/row_statistics.cuh), and
// the GEMMs whose result is added to a residual write those of their result.
//
// If that residual has statistics itself, or K has several parts, the blocks of a cluster have the parts of K. Each
// finishes a share of the tile's rows (gemm_tiles.h): all send their sums of these rows to its shared memory by
// st.async, and it adds them in the order of the parts. Eight lanes have 64 columns of a row: lane l has columns 4 l to
// 4 l + 3 of each half.
#pragma once

#include <cstdint>

#include "few_rows/gemm_block.cuh"
#include "few_rows/row_statistics.cuh"

namespace fasttfm {
namespace cuda {
namespace product {

constexpr int kHeldGroups = 8;  // of the statistics of a row, by each of the two lanes that merge them

// The statistics of 16 rows from `row` on: lanes l and l + 16 have the l-th, and each every other group of its columns.
// The loads of up to 1,024 columns are in flight at once.
template <class T>
struct HeldStatistics {
  RowStatistics statistics;
  int row;
  float2 moments[kHeldGroups];

  // Loads the groups from the first-th on. The statistics are written by the previous kernel, so this follows
  // griddepcontrol_wait().
  __device__ __forceinline__ void load(int first) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const float2* from = statistics.groups + min(row + lane % 16, statistics.rows - 1);
#pragma unroll
    for (int i = 0; i < kHeldGroups; ++i) {
      const int group = first + 2 * i + lane / 16;
      moments[i] = make_float2(0.0f, 0.0f);
      if (group < statistics.count) moments[i] = __ldcg(from + static_cast<int64_t>(group) * statistics.rows);
    }
  }
  __device__ __forceinline__ RowNorm merged();
};

template <class T>
__device__ __forceinline__ RowNorm HeldStatistics<T>::merged() {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float mean = 0.0f, squares = 0.0f;
#pragma unroll 1
  for (int first = 0; first < statistics.count; first += 2 * kHeldGroups) {
    if (first > 0) load(first);
    const int count = min(2 * kHeldGroups, statistics.count - first);
    float total = 0.0f, deviations = 0.0f;
#pragma unroll
    for (int i = 0; i < kHeldGroups; ++i) total += moments[i].x;
    total += __shfl_xor_sync(0xffffffffu, total, 16);
    const float own_mean = __fdividef(total, static_cast<float>(count));
#pragma unroll
    for (int i = 0; i < kHeldGroups; ++i) {
      const float away = 2 * i + lane / 16 < count ? moments[i].x - own_mean : 0.0f;
      deviations += fmaf(static_cast<float>(kStatisticsColumns) * away, away, moments[i].y);
    }
    deviations += __shfl_xor_sync(0xffffffffu, deviations, 16);
    // merges these groups with those before
    const float away = own_mean - mean, part = __fdividef(static_cast<float>(count), static_cast<float>(first + count));
    mean = fmaf(away, part, mean);
    squares += fmaf(static_cast<float>(kStatisticsColumns) * static_cast<float>(first) * part * away, away, deviations);
  }
  const float columns = static_cast<float>(statistics.count * kStatisticsColumns);
  return {mean, inverse_root<T>(__fdividef(squares, columns) + statistics.eps)};
}

// Mean and rstd of the rows that a block finishes. Each consumer warp has 16 of them.
template <class T, class S>
struct Norms {
  int first, rows;  // of the warp, and of the block
  HeldStatistics<T> held;

  // `row`: the block's first. Called after griddepcontrol_wait().
  __device__ __forceinline__ void load(const FewRowsGemm& p, int row, int count, int warp) {
    first = 16 * warp;
    rows = count;
    const int64_t columns = p.residual != nullptr ? p.columns : p.inner;
    held.statistics = {reinterpret_cast<const float2*>(p.statistics), static_cast<int>(p.rows),
                       static_cast<int>(columns / kStatisticsColumns), p.eps};
    held.row = row + first;
    if (p.statistics != nullptr && first < rows) held.load(0);
  }

  // Writes them to shared memory, where those of the warp's own rows are after __syncwarp(), and, in the blocks of the
  // first columns, to p.norms.
  __device__ __forceinline__ void store(const FewRowsGemm& p, Memory<S>& memory) {
    if (first >= rows) return;
    const int lane = static_cast<int>(threadIdx.x) % 32, row = held.row + lane;
    const RowNorm norm = held.statistics.groups != nullptr ? held.merged() : RowNorm{0.0f, 1.0f};
    const float2 both = make_float2(norm.mean, norm.rstd);
    if (lane < 16) {
      memory.norm[first + lane] = both;
      if (p.norms != nullptr && blockIdx.x == 0 && row < p.rows) reinterpret_cast<float2*>(p.norms)[row] = both;
    }
    __syncwarp();
  }
};

// The rows that the block finishes, and how their sums are exchanged.
struct Share {
  int index, rows;  // this is the index-th share of the tile's rows, each of `rows` rows
  int joined;       // which of the joined blocks this is
  int column;       // the first column of the joined blocks
  int parts;        // of K
  uint32_t sums;    // where they are in shared memory: [parts, rows, joined columns], swizzled (sums_offset)
};

template <class S>
__device__ __forceinline__ Share share_of(const FewRowsGemm& p, Memory<S>& memory, const Place& at) {
  const int joined = at.neighbour % S::kJoined, blocks = S::kJoined * p.part_count;
  const int slot = blocks > 1 ? S::kStages : 0;
  return {at.part * S::kJoined + joined,    S::kRows / blocks, joined,
          at.column - joined * S::kColumns, p.part_count,      shared_address(memory.stage) + slot * S::kStageBytes};
}

// The row of the share of which an octet of lanes finishes 64 columns in a round.
template <class S>
__device__ __forceinline__ int row_of_octet(int round) {
  return round * S::kOctets + static_cast<int>(threadIdx.x) / 8;
}

// The residual of the columns that a lane finishes in a round. With four parts of K or more there is one round, whose
// loads are in flight during the main loop.
template <class T, class S>
struct Residual {
  uint2 words[2];

  __device__ __forceinline__ void load(const FewRowsGemm& p, const Place& at, const Share& share, int round) {
    const int share_row = row_of_octet<S>(round), row = at.row + share.index * share.rows + share_row;
    const int column = share.column + static_cast<int>(threadIdx.x) % 8 * 4;
    const bool inside = share_row < share.rows && row < p.rows && column < p.columns;
    const T* from = static_cast<const T*>(p.residual) + row * p.columns + column;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      words[half] = make_uint2(0, 0);
      if (inside) words[half] = __ldcg(reinterpret_cast<const uint2*>(from + 32 * half));
    }
  }
};

// Stores 16 bytes in the block's own shared memory, or by st.async in that of another block.
__device__ __forceinline__ void send(bool is_local, uint32_t shared, uint32_t remote, uint32_t barrier, float4 v) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %0, 0; @p st.shared.v4.f32 [%1], {%4, %5, %6, %7};"
      " @!p st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%2], {%4, %5, %6, %7}, [%3]; }" ::"r"(
          static_cast<int>(is_local)),
      "r"(shared), "r"(remote), "r"(barrier), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
      : "memory");
}

// Sends the sums of a warp's 16 rows to the blocks that finish them. Two neighbouring lanes exchange pairs of columns,
// so that each has four: of the first or of the second of two neighbouring tiles of 8 columns.
template <class S>
__device__ __forceinline__ void send_sums(Memory<S>& memory, const Place& at, const Share& share, int warp,
                                          const float (&sums)[S::kSums]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool odd = lane % 2 != 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int first = warp * 16 + 8 * half, to = first / share.rows, row = first % share.rows + lane / 4;
    const auto rank =
        static_cast<uint32_t>(finishing_rank(to, S::kJoined, at.multicast_blocks, at.neighbour - share.joined));
    const uint32_t line = share.sums + (at.part * share.rows + row) * S::kJoinedColumns * 4;
    const uint32_t line_there = mapa(line, rank), barrier = mapa(memory.received.address(), rank);
#pragma unroll
    for (int i = 0; i < S::kColumns / 8; i += 2) {
      const float2 low = make_float2(sums[4 * i + 2 * half], sums[4 * i + 2 * half + 1]);
      const float2 high = make_float2(sums[4 * i + 4 + 2 * half], sums[4 * i + 5 + 2 * half]);
      const float x = __shfl_xor_sync(0xffffffffu, odd ? low.x : high.x, 1);
      const float y = __shfl_xor_sync(0xffffffffu, odd ? low.y : high.y, 1);
      const float4 v = odd ? make_float4(x, y, high.x, high.y) : make_float4(low.x, low.y, x, y);
      const uint32_t offset = sums_offset(row, sent_chunk(lane, i) + share.joined * (S::kColumns / 4));
      send(to == share.index, line + offset, line_there + offset, barrier, v);
    }
  }
}

constexpr int kPartsAtOnce = 4;  // whose loads are in flight at the same time

// Adds the sums of all parts, bias and residual, for a row of the share; writes them and their statistics.
template <class T, class S>
__device__ __forceinline__ void finish_row(const FewRowsGemm& p, const Memory<S>& memory, const Place& at,
                                           const Share& share, int share_row, const uint2 (&residual)[2]) {
  const int lane = static_cast<int>(threadIdx.x) % 8, lane_column = lane * 4;
  float4 sum[2] = {};
#pragma unroll 1
  for (int part = 0; part < share.parts; part += kPartsAtOnce) {
    uint4 v[kPartsAtOnce][2] = {};
#pragma unroll
    for (int i = 0; i < kPartsAtOnce; ++i) {
      const uint32_t line = share.sums + ((part + i) * share.rows + share_row) * S::kJoinedColumns * 4;
      if (part + i < share.parts)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          v[i][half] = load_vector(line + sums_offset(share_row, lane_column / 4 + 8 * half));
    }
#pragma unroll
    for (int i = 0; i < kPartsAtOnce; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        sum[half].x += __uint_as_float(v[i][half].x);
        sum[half].y += __uint_as_float(v[i][half].y);
        sum[half].z += __uint_as_float(v[i][half].z);
        sum[half].w += __uint_as_float(v[i][half].w);
      }
  }
  const int row = at.row + share.index * share.rows + share_row;
  const float2 norm = memory.norm[share_row];
  float z[8];
  uint2 word[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float4 bias = *reinterpret_cast<const float4*>(memory.bias + lane_column + 32 * half);
    const float4 weight = *reinterpret_cast<const float4*>(memory.weight + lane_column + 32 * half);
    const float2 low = widen_word(residual[half].x, T{}), high = widen_word(residual[half].y, T{});
    const auto add = [&](float s, float b, float r, float w) { return fmaf((r - norm.x) * norm.y, w, s + b); };
    word[half].x =
        narrow_word(add(sum[half].x, bias.x, low.x, weight.x), add(sum[half].y, bias.y, low.y, weight.y), T{});
    word[half].y =
        narrow_word(add(sum[half].z, bias.z, high.x, weight.z), add(sum[half].w, bias.w, high.y, weight.w), T{});
    const float2 first = widen_word(word[half].x, T{}), second = widen_word(word[half].y, T{});
    z[4 * half] = first.x;
    z[4 * half + 1] = first.y;
    z[4 * half + 2] = second.x;
    z[4 * half + 3] = second.y;
  }
  const float2 statistics = group_statistics<8>(z);
  const int column = share.column + lane_column;
  if (row >= p.rows || column >= p.columns) return;
  T* to = static_cast<T*>(p.y) + row * p.columns + column;
#pragma unroll
  for (int half = 0; half < 2; ++half) *reinterpret_cast<uint2*>(to + 32 * half) = word[half];
  if (lane == 0 && p.y_statistics != nullptr)
    reinterpret_cast<float2*>(p.y_statistics)[column / kStatisticsColumns * p.rows + row] = statistics;
}

// Writes y with the residual, of which the first round is given. Called by all consumer warps. The rounds are a loop
// that is not unrolled, because a kernel's instructions take time to load.
template <class T, class S>
__device__ __forceinline__ void store_sums(const FewRowsGemm& p, Memory<S>& memory, const Place& at, const Share& share,
                                           int warp, const float (&sums)[S::kSums], Residual<T, S> residual) {
  const bool exchanges = S::kJoined * share.parts > 1;
  if (!exchanges) named_barrier_sync(kConsumerBarrier, S::kConsumers);  // the sums replace the last stages
  if (exchanges && at.multicast_blocks == 1) cluster_wait();            // all blocks have begun
  send_sums<S>(memory, at, share, warp, sums);
  named_barrier_sync(kConsumerBarrier, S::kConsumers);
  if (exchanges) memory.received.wait(0);
#pragma unroll 1
  for (int round = 0; row_of_octet<S>(round) < share.rows; ++round) {  // the same for all octets of a warp
    Residual<T, S> next;
    next.load(p, at, share, round + 1);
    finish_row<T, S>(p, memory, at, share, row_of_octet<S>(round), residual.words);
    residual = next;
  }
}

}  // namespace product
}  // namespace cuda
}  // namespace fasttfm
