// Attention forward of packed sequences of up to 128 tokens on Hopper, head dims 32 and 64, without dropout and without
// lse, for inference.
//
// A block is a warpgroup that computes 64 queries of one head with wgmma. It has all keys and values of the sequence in
// shared memory, so the softmax is not online, and all of its loads are in flight at once. A sequence of up to 64
// tokens takes half the work. The first block of the last sequence also writes zeros for the tokens after it.
#include <cstdint>

#include "attention/hopper/forward/weights.cuh"
#include "attention/hopper/shared/mask.cuh"
#include "common/activation.h"
#include "common/cuda/approximations.cuh"
#include "common/cuda/hopper.cuh"
#include "common/packed.h"
#include "few_rows/attention.cuh"
#include "few_rows/dependent.cuh"
#include "few_rows/op.h"
#include "few_rows/short_attention.h"

namespace fasttfm {
namespace cuda {
namespace {

using namespace few_rows;

static_assert(kShortThreads == kWarpgroup && kShortRowBytes == kTileRowBytes, "the tiles are those of hopper.cuh");

// The block's part of a call.
struct ShortBlock {
  int begin, length;  // of the sequence
  int first_query;    // of the block
  uint32_t q, k, v;   // tiles in shared memory
};

// Copies the first `end` rows of one head to a tile; those from `rows` on are zeros.
template <class T, int D>
__device__ __forceinline__ void copy_tile(uint32_t tile, const T* from, int64_t stride, int rows, int end) {
  constexpr int kChunks = D / kChunk, kRows = copied_rows(kChunks);
  const MatrixRow of = copied_chunk(static_cast<int>(threadIdx.x), kChunks);
  const T* source = from + of.row * stride + of.chunk * kChunk;
#pragma unroll 8
  for (int row = of.row; row < end; row += kRows, source += kRows * stride) {
    const bool inside = row < rows;
    cp_async_zfill(inside, tile + chunk_offset(row, of.chunk, kTileChunks), inside ? source : from);
  }
}

// Waits until the copies of all but the last PENDING of the thread's groups of cp.async, and those of all other
// threads, are visible to wgmma.
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {
  cp_async_wait<PENDING>();
  fence_proxy_async();
  __syncthreads();
}

// s = q k^T
template <class T, int D, int KEYS>
__device__ __forceinline__ void compute_scores(const ShortBlock& block, float (&s)[KEYS / 2]) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < D / 16; ++step)
    wgmma<T>(s, advance(k_major(block.q), step * kKMajorStep), advance(k_major(block.k), step * kKMajorStep), step > 0);
  wgmma_commit();
  wgmma_wait<0>();
  fence_operand(s);
}

// Sets the scores of keys to which the thread's queries do not attend to -infinity; `query`: its first one. The tile of
// keys has no defined values after the sequence's end.
template <int KEYS>
__device__ __forceinline__ void mask_keys(const FewRowsAttention& p, float (&s)[KEYS / 2], int query, int length) {
  const int left = static_cast<int>(p.window_left), right = static_cast<int>(p.window_right);
  const int column = thread_in_group() % 4 * 2;
  int limit[2];
#pragma unroll
  for (int half = 0; half < 2; ++half)
    limit[half] = (right < 0 ? length : min(length, query + 8 * half + right + 1)) - column;
  mask_scores(s, limit);
  if (left < 0) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) limit[half] = query + 8 * half - left - column;
  mask_scores_before(s, limit);
}

// The largest score of each row, in units of log2; 0 for rows that attend to no keys.
template <int COUNT>
__device__ __forceinline__ void largest_scores(const float (&s)[COUNT], float scale, float (&shift)[2]) {
  float top[2];
  thread_maxima(s, top);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    top[half] = row_maximum(top[half]);
    shift[half] = top[half] == kMinusInfinity ? 0.0f : top[half] * scale;
  }
}

// Computes the weights, rounded to 16 bits, and the inverse of each row's sum of them. `scale` includes log2(e).
template <class T, int COUNT>
__device__ __forceinline__ void softmax(const float (&s)[COUNT], float scale, uint32_t (&weights)[COUNT / 2],
                                        float (&inverse)[2]) {
  float shift[2], total[2] = {0.0f, 0.0f};
  largest_scores(s, scale, shift);
#pragma unroll
  for (int i = 0; i < COUNT; i += 2) {
    const int half = i / 2 % 2;
    const float low = exp2_approx(fmaf(s[i], scale, -shift[half]));
    const float high = exp2_approx(fmaf(s[i + 1], scale, -shift[half]));
    total[half] += low + high;
    weights[i / 2] = narrow_word(low, high, T{});
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    total[half] += __shfl_xor_sync(0xffffffffu, total[half], 1);
    total[half] += __shfl_xor_sync(0xffffffffu, total[half], 2);
    inverse[half] = total[half] == 0.0f ? 0.0f : 1.0f / total[half];
  }
}

// o = weights v
template <class T, int D, int KEYS>
__device__ __forceinline__ void add_values(const ShortBlock& block, uint32_t (&weights)[KEYS / 4], float (&o)[D / 2]) {
  fence_operand(weights);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < KEYS / 16; ++step)
    wgmma<T, Major::mn>(o, weights + 4 * step, advance(mn_major(block.v, kTileRowBytes), step * kMnMajorStep),
                        step > 0);
  wgmma_commit();
  wgmma_wait<0>();
  fence_operand(o);
  fence_operand(weights);
}

// Writes the rows [row, rows) of o * inverse; `row` is the thread's first row. Neighbouring threads exchange words, so
// that each thread stores 8 bytes at a time.
template <class T, int D>
__device__ __forceinline__ void store_rows(T* out, int64_t stride, int row, int rows, const float (&o)[D / 2],
                                           const float (&inverse)[2]) {
  const int thread = static_cast<int>(threadIdx.x) % 4;
  const bool odd = thread % 2 != 0;
  out += row * stride + stored_column(thread);
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int column = 0; column < D; column += 16) {
      uint32_t word[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float* pair = o + column / 2 + 4 * i + 2 * half;
        word[i] = narrow_word(pair[0] * inverse[half], pair[1] * inverse[half], T{});
      }
      const uint32_t received = __shfl_xor_sync(0xffffffffu, odd ? word[0] : word[1], 1);
      if (row + 8 * half < rows)
        *reinterpret_cast<uint2*>(out + 8 * half * stride + column) =
            make_uint2(odd ? received : word[0], odd ? word[1] : received);
    }
}

// Computes the block's queries with KEYS keys. The copies of q and k are the thread's last group of cp.async but one,
// those of v the last.
template <class T, int D, int KEYS>
__device__ __forceinline__ void attend(const FewRowsAttention& p, const ShortBlock& block) {
  const int64_t stride = p.heads * D;
  const int query = block.first_query + row_in_group();
  float s[KEYS / 2], o[D / 2], inverse[2];
  uint32_t weights[KEYS / 4];
  wait_for_copies<1>();
  compute_scores<T, D, KEYS>(block, s);
  mask_keys<KEYS>(p, s, query, block.length);
  softmax<T>(s, p.scale * kLog2E, weights, inverse);
  wait_for_copies<0>();
  add_values<T, D, KEYS>(block, weights, o);
  T* out = static_cast<T*>(p.out) + block.begin * stride + blockIdx.y * D;
  store_rows<T, D>(out, stride, query, block.length, o, inverse);
}

// Grid (blocks of queries, heads, sequences).
template <class T, int D>
__global__ void __launch_bounds__(kShortThreads, kShortBlocks)
    short_attention_kernel(const __grid_constant__ FewRowsAttention p) {
  extern __shared__ char memory[];
  griddepcontrol_launch_dependents();
  ShortBlock block;
  const int tokens = static_cast<int>(p.tokens);
  const Span span = packed_span(p.cu_seqlens, blockIdx.z, tokens, static_cast<int>(p.max_seqlen));
  block.begin = span.first;
  block.length = span.length;
  block.first_query = static_cast<int>(blockIdx.x) * kShortQueries;
  block.q = (shared_address(memory) + 1023) / 1024 * 1024;
  block.k = block.q + kShortQueries * kTileRowBytes;
  block.v = block.k + kShortKeys * kTileRowBytes;
  griddepcontrol_wait();
  if (blockIdx.z + 1 == p.sequences && blockIdx.x == 0)
    clear_tokens<T, D>(p, packed_first(p.cu_seqlens, p.sequences, tokens));
  if (block.first_query >= block.length) return;

  const int64_t stride = 3 * p.heads * D;
  const T* q = static_cast<const T*>(p.qkv) + block.begin * stride + blockIdx.y * D;
  const T *k = q + p.heads * D, *v = k + p.heads * D;
  const int queries = min(block.length - block.first_query, kShortQueries);
  const bool half = block.length <= kShortKeys / 2;
  copy_tile<T, D>(block.k, k, stride, block.length, block.length);
  copy_tile<T, D>(block.q, q + block.first_query * stride, stride, queries, queries);
  cp_async_commit();
  // Weights of keys after the sequence's end are 0; a value that is not defined could be a NaN.
  copy_tile<T, D>(block.v, v, stride, block.length, half ? kShortKeys / 2 : kShortKeys);
  cp_async_commit();
  if (half)
    attend<T, D, kShortKeys / 2>(p, block);
  else
    attend<T, D, kShortKeys>(p, block);
}

template <class T, int D>
Status launch_kernel(const FewRowsAttention& call) {
  int processors = 0;
  const Status status = count_multiprocessors(call.device, &processors);
  if (status.code != StatusCode::ok) return status;
  const int64_t tiles = steps(call.max_seqlen, kShortQueries);
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(call.heads),
                  static_cast<unsigned>(call.sequences));
  const int memory = spread_memory(tiles * call.heads * call.sequences, processors);
  return launch_after(call.dependent != 0, short_attention_kernel<T, D>, grid, kShortThreads, memory, call.stream,
                      call);
}

template <class T>
Status launch_kernel(const FewRowsAttention& call) {
  return call.head_dim == 32 ? launch_kernel<T, 32>(call) : launch_kernel<T, 64>(call);
}

}  // namespace

Status launch_short_attention(const FewRowsAttention& call) {
  if (call.dtype == DType::bf16) return launch_kernel<bf16_t>(call);
  return call.dtype == DType::f16 ? launch_kernel<f16_t>(call) : unknown_dtype();
}

}  // namespace cuda
}  // namespace fasttfm
