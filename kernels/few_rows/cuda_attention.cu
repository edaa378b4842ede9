// Attention forward of packed sequences on Hopper, without dropout and without lse, for inference on few tokens: heads
// of 128, and sequences of more than 128 tokens. Others are those of cuda_short_attention.cu.
//
// A block computes 64 queries of one head in steps of 64 keys, with 16 queries per warp. With SPLIT it computes 16
// queries in steps of 128 keys, with a quarter of the keys per warp, and combines the warps' softmax results at the
// end. This results in four times as many blocks, for calls whose queries would otherwise leave most SMs idle. The
// softmax is online. cp.async loads the keys and values of the next step during the current one. The blocks with
// blockIdx.z = sequences write zeros for the tokens after the last sequence.
#include <algorithm>
#include <cstdint>

#include "attention/hopper/forward/weights.cuh"
#include "common/activation.h"
#include "common/cuda/approximations.cuh"
#include "common/cuda/hopper.cuh"
#include "common/packed.h"
#include "few_rows/attention.cuh"
#include "few_rows/dependent.cuh"
#include "few_rows/op.h"
#include "few_rows/short_attention.h"
#include "few_rows/tiles.h"

namespace fasttfm {
namespace cuda {
namespace {

using namespace few_rows;

constexpr int kWarps = 4, kThreads = 32 * kWarps;

// SPLIT: each warp has all queries and a part of the keys.
template <int D, bool SPLIT>
struct AttentionShape {
  static constexpr int kQueries = SPLIT ? 16 : 16 * kWarps;
  static constexpr int kKeys = SPLIT ? 128 : 64;                    // per step
  static constexpr int kWarpKeys = SPLIT ? kKeys / kWarps : kKeys;  // per warp and step
  static constexpr int kChunks = D / kChunk;                        // per row
  static constexpr uint32_t kQueryBytes = kQueries * D * 2, kKeyBytes = kKeys * D * 2;
  static constexpr int kMemory = kQueryBytes + 4 * kKeyBytes;  // queries, and two stages of keys and values
  static_assert(kThreads * (D / 2 + 4) * 4 <= kMemory, "room for the warps' sums");
};

// Copies ROWS rows of one head, of which those from `rows` on are zeros.
template <class T, int D, int ROWS>
__device__ __forceinline__ void copy_rows(uint32_t shared, const T* from, int64_t stride, int rows) {
  constexpr int kChunks = D / kChunk, kCopies = (ROWS * kChunks + kThreads - 1) / kThreads;
#pragma unroll
  for (int i = 0; i < kCopies; ++i) {
    const int index = static_cast<int>(threadIdx.x) + i * kThreads, row = index / kChunks, chunk = index % kChunks;
    if (ROWS * kChunks % kThreads != 0 && row >= ROWS) continue;
    const bool inside = row < rows;
    const T* source = inside ? from + row * stride + chunk * kChunk : from;
    cp_async_zfill(inside, shared + chunk_offset(row, chunk, kChunks), source);
  }
}

// The scores of a warp's 16 queries and 8 N keys.
template <class T, int D, int N>
__device__ __forceinline__ void scores_of(const uint32_t (&q)[D / 16][4], uint32_t keys, float (&scores)[N][4]) {
  const MatrixRow of = matrix_row_b(static_cast<int>(threadIdx.x) % 32);
#pragma unroll
  for (int step = 0; step < D / 16; ++step)
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      uint32_t k[4];
      ldmatrix_x4(k, keys + chunk_offset(8 * n + of.row, 2 * step + of.chunk, D / kChunk));
      mma_m16n8k16(scores[n], q[step], k, T{});
      mma_m16n8k16(scores[n + 1], q[step], k + 2, T{});
    }
}

// out [16, D] += weights [16, 8 N] values.
template <class T, int D, int N>
__device__ __forceinline__ void add_values(const float (&weights)[N][4], uint32_t values, float (&out)[D / 8][4]) {
  const MatrixRow of = matrix_row_a(static_cast<int>(threadIdx.x) % 32);
#pragma unroll
  for (int step = 0; step < N / 2; ++step) {
    const float (&low)[4] = weights[2 * step];
    const float (&high)[4] = weights[2 * step + 1];
    const uint32_t p[4] = {narrow_word(low[0], low[1], T{}), narrow_word(low[2], low[3], T{}),
                           narrow_word(high[0], high[1], T{}), narrow_word(high[2], high[3], T{})};
#pragma unroll
    for (int n = 0; n < D / 8; n += 2) {
      uint32_t v[4];
      ldmatrix_x4_transposed(v, values + chunk_offset(16 * step + of.row, n + of.chunk, D / kChunk));
      mma_m16n8k16(out[n], p, v, T{});
      mma_m16n8k16(out[n + 1], p, v + 2, T{});
    }
  }
}

// The largest score and the sum of weights of a thread's two rows. The four threads of a quad have the same rows.
struct Softmax {
  float largest[2] = {-INFINITY, -INFINITY}, total[2] = {0.0f, 0.0f};

  // Replaces scores by weights, and rescales `out` to the new largest scores. `scale` includes log2(e). Each row
  // attends to the keys [first, last), relative to the first of these scores.
  template <int N, int COLUMNS>
  __device__ __forceinline__ void step(float (&scores)[N][4], const int (&first)[2], const int (&last)[2], float scale,
                                       float (&out)[COLUMNS][4]) {
    const int column = accumulator_column(static_cast<int>(threadIdx.x) % 32);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float most = largest[row];
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int key = 8 * n + column + i;
          float& score = scores[n][2 * row + i];
          if (key < first[row] || key >= last[row]) score = -INFINITY;
          most = fmaxf(most, score);
        }
      most = row_maximum(most);
      const float shift = most == -INFINITY ? 0.0f : most * scale;
      const float rescale = exp2_approx(fmaf(largest[row], scale, -shift));
      largest[row] = most;
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = scores[n][2 * row + i];
          score = exp2_approx(fmaf(score, scale, -shift));
          sum += score;
        }
      total[row] = fmaf(total[row], rescale, sum);
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) {
        out[n][2 * row] *= rescale;
        out[n][2 * row + 1] *= rescale;
      }
    }
  }

  // Adds the totals of the quad's threads.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      total[row] += __shfl_xor_sync(0xffffffffu, total[row], 1);
      total[row] += __shfl_xor_sync(0xffffffffu, total[row], 2);
    }
  }

  // The final factor of `out`: 0 for a row that attends to no keys.
  __device__ __forceinline__ float inverse(int row) const { return total[row] > 0.0f ? 1.0f / total[row] : 0.0f; }
};

// Combines the results of all warps for the same queries in the first warp, in the order of the warps. Returns true for
// the first warp's threads.
template <int COLUMNS>
__device__ __forceinline__ bool merge_warps(float* exchange, float scale, Softmax& softmax, float (&out)[COLUMNS][4]) {
  constexpr int kValues = 4 * COLUMNS + 4;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const auto at = [&](int of, int value) -> float& { return exchange[(of * kValues + value) * 32 + lane]; };
  cp_async_wait<0>();
  __syncthreads();  // all warps have read their keys and values
  if (warp > 0) {
#pragma unroll
    for (int i = 0; i < 4 * COLUMNS; ++i) at(warp, i) = out[i / 4][i % 4];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      at(warp, 4 * COLUMNS + row) = softmax.largest[row];
      at(warp, 4 * COLUMNS + 2 + row) = softmax.total[row];
    }
  }
  __syncthreads();
  if (warp > 0) return false;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float most = softmax.largest[row];
#pragma unroll
    for (int other = 1; other < kWarps; ++other) most = fmaxf(most, at(other, 4 * COLUMNS + row));
    const float shift = most == -INFINITY ? 0.0f : most * scale;
    const float warp_factor = exp2_approx(fmaf(softmax.largest[row], scale, -shift));
    softmax.total[row] *= warp_factor;
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
      for (int i = 2 * row; i < 2 * row + 2; ++i) out[n][i] *= warp_factor;
#pragma unroll
    for (int other = 1; other < kWarps; ++other) {
      const float factor = exp2_approx(fmaf(at(other, 4 * COLUMNS + row), scale, -shift));
      softmax.total[row] = fmaf(at(other, 4 * COLUMNS + 2 + row), factor, softmax.total[row]);
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
        for (int i = 2 * row; i < 2 * row + 2; ++i) out[n][i] = fmaf(at(other, 4 * n + i), factor, out[n][i]);
    }
  }
  return true;
}

// Grid (blocks of queries, heads, sequences + 1).
template <class T, int D, bool SPLIT>
__global__ void __launch_bounds__(kThreads) attention_kernel(const __grid_constant__ FewRowsAttention p) {
  using S = AttentionShape<D, SPLIT>;
  extern __shared__ __align__(128) char memory[];
  griddepcontrol_launch_dependents();
  const int tokens = static_cast<int>(p.tokens);
  const int first_query = static_cast<int>(blockIdx.x) * S::kQueries;
  if (blockIdx.z == p.sequences) {
    griddepcontrol_wait();
    if (blockIdx.x == 0) clear_tokens<T, D>(p, packed_first(p.cu_seqlens, p.sequences, tokens));
    return;
  }
  const Span span = packed_span(p.cu_seqlens, blockIdx.z, tokens, static_cast<int>(p.max_seqlen));
  const int begin = span.first, length = span.length;
  griddepcontrol_wait();
  if (first_query >= length) return;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int warp_row = SPLIT ? 0 : 16 * warp, warp_key = SPLIT ? S::kWarpKeys * warp : 0;
  const int64_t stride = 3 * p.heads * D;
  const T* q = static_cast<const T*>(p.qkv) + begin * stride + blockIdx.y * D;
  const T *k = q + p.heads * D, *v = k + p.heads * D;
  const uint32_t q_tile = shared_address(memory), stages = q_tile + S::kQueryBytes;

  // The keys to which the block's queries attend; first_key is rounded down to a multiple of a step.
  const int left = static_cast<int>(p.window_left), right = static_cast<int>(p.window_right);
  const int last_query = min(first_query + S::kQueries, length) - 1;
  const int first_key = left < 0 ? 0 : max(first_query - left, 0) / S::kKeys * S::kKeys;
  const int end_key = right < 0 ? length : min(length, last_query + right + 1);
  const auto copy_keys = [&](int key, int slot) {
    copy_rows<T, D, S::kKeys>(stages + 2 * slot * S::kKeyBytes, k + key * stride, stride, length - key);
    copy_rows<T, D, S::kKeys>(stages + (2 * slot + 1) * S::kKeyBytes, v + key * stride, stride, length - key);
  };
  copy_rows<T, D, S::kQueries>(q_tile, q + first_query * stride, stride, length - first_query);
  copy_keys(first_key, 0);
  cp_async_commit();

  uint32_t queries[D / 16][4];
  float out[D / 8][4] = {};
  Softmax softmax;
  const float scale = p.scale * kLog2E;
  const int row = first_query + warp_row + accumulator_row(lane);
  int slot = 0;
  for (int key = first_key; key < end_key; key += S::kKeys, slot ^= 1) {
    if (key + S::kKeys < end_key) copy_keys(key + S::kKeys, slot ^ 1);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    if (key == first_key) {
      const MatrixRow of = matrix_row_a(lane);
#pragma unroll
      for (int step = 0; step < D / 16; ++step)
        ldmatrix_x4(queries[step], q_tile + chunk_offset(warp_row + of.row, 2 * step + of.chunk, S::kChunks));
    }
    const uint32_t keys = stages + 2 * slot * S::kKeyBytes + warp_key * D * 2;
    float scores[S::kWarpKeys / 8][4] = {};
    scores_of<T, D>(queries, keys, scores);
    int first[2], last[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = row + 8 * half;
      first[half] = left < 0 ? 0 : query - left - key - warp_key;
      last[half] = (right < 0 ? length : min(length, query + right + 1)) - key - warp_key;
    }
    softmax.step(scores, first, last, scale, out);
    add_values<T, D>(scores, keys + S::kKeyBytes, out);
    __syncthreads();  // all warps have read the stage before the step after next overwrites it
  }

  softmax.finish();
  if constexpr (SPLIT)
    if (!merge_warps(reinterpret_cast<float*>(memory), scale, softmax, out)) return;
  T* to = static_cast<T*>(p.out) + (begin * p.heads + blockIdx.y) * D + accumulator_column(lane);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float inverse = softmax.inverse(half);
    const int query = row + 8 * half;
    if (query >= length) continue;
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
      *reinterpret_cast<uint32_t*>(to + query * p.heads * D + 8 * n) =
          narrow_word(out[n][2 * half] * inverse, out[n][2 * half + 1] * inverse, T{});
  }
}

template <class T, int D, bool SPLIT>
Status launch_attention(const FewRowsAttention& call) {
  using S = AttentionShape<D, SPLIT>;
  const dim3 grid(static_cast<unsigned>((call.max_seqlen + S::kQueries - 1) / S::kQueries),
                  static_cast<unsigned>(call.heads), static_cast<unsigned>(call.sequences + 1));
  return launch_after(call.dependent != 0, attention_kernel<T, D, SPLIT>, grid, kThreads, S::kMemory, call.stream,
                      call);
}

template <class T, int D>
Status launch_attention(const FewRowsAttention& call) {
  return call.split_keys ? launch_attention<T, D, true>(call) : launch_attention<T, D, false>(call);
}

template <class T>
Status launch_attention(const FewRowsAttention& call) {
  switch (call.head_dim) {
    case 32: return launch_attention<T, 32>(call);
    case 64: return launch_attention<T, 64>(call);
    case 128: return launch_attention<T, 128>(call);
    default: return bad_size("few_rows_attention: head_dim is 32, 64 or 128");
  }
}

Status check(const FewRowsAttention& call) {
  constexpr int64_t kMostGrid = 65535, kMostTokens = 1 << 20;
  if (call.tokens < 1 || call.tokens > kMostTokens || call.max_seqlen < 1 || call.max_seqlen > kMostTokens)
    return bad_size("few_rows_attention: tokens and max_seqlen are 1 to 2^20");
  if (call.heads < 1 || call.heads > kMostGrid || call.sequences < 1 || call.sequences >= kMostGrid)
    return bad_size("few_rows_attention: heads and sequences are 1 to 65534");
  for (const void* tensor : {call.qkv, static_cast<const void*>(call.out)})
    if (reinterpret_cast<uintptr_t>(tensor) % 16 != 0)
      return {StatusCode::bad_alignment, "few_rows_attention: tensors start at multiples of 16 bytes"};
  return {};
}

}  // namespace

Status few_rows_attention(const FewRowsAttention& call) {
  const Status status = check(call);
  if (status.code != StatusCode::ok) return status;
  const DeviceGuard guard(call.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  FewRowsAttention bounded = call;  // whose windows fit into 32 bits
  bounded.window_left = std::min(call.window_left, call.max_seqlen);
  bounded.window_right = std::min(call.window_right, call.max_seqlen);
  if (is_short_attention(call.head_dim, call.max_seqlen)) return launch_short_attention(bounded);
  if (call.dtype == DType::bf16) return launch_attention<bf16_t>(bounded);
  return call.dtype == DType::f16 ? launch_attention<f16_t>(bounded) : unknown_dtype();
}

}  // namespace cuda
}  // namespace fasttfm
