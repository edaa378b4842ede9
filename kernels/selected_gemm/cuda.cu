// A block computes 64 rows by 64 columns with mma.sync, for one adapter of its rows after another: rows of the same
// adapter follow each other, so that most blocks have one. Operands are loaded by cp.async, 64 elements of K per step,
// into two buffers; elements outside of the matrices are 0. The sums, in fp32, go through shared memory, and 16 bytes
// of y at a time are read, added to, and written.
#include <climits>
#include <cstdint>

#include "common/cuda/convert.cuh"
#include "common/cuda/hopper.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/rows.cuh"
#include "few_rows/dependent.cuh"
#include "selected_gemm/op.h"

namespace fasttfm {
namespace cuda {
namespace {

constexpr int kTile = 64, kThreads = 128, kStep = 64;
constexpr int kRowBytes = (kStep + kVector) * 2;  // rows of different banks for ldmatrix
constexpr int kOperandBytes = kTile * kRowBytes;
constexpr int kSumColumns = kTile + 4;
constexpr int kBuffers = 2;
static_assert(kTile * kSumColumns * 4 <= kBuffers * 2 * kOperandBytes, "the sums replace the operands");

struct alignas(16) SelectedMemory {
  char operands[kBuffers][2][kOperandBytes];  // of x and b
  int32_t adapters[kTile];
};

// Loads kTile rows of `matrix` from element `k` of each; `rows` of them are inside.
template <class T>
__device__ __forceinline__ void load_operand(char* to, const T* matrix, int64_t stride, int64_t rows, int64_t k,
                                             int64_t inner) {
  for (int vector = static_cast<int>(threadIdx.x); vector < kTile * kStep / kVector; vector += kThreads) {
    const int row = vector / (kStep / kVector), column = vector % (kStep / kVector) * kVector;
    const bool loads = row < rows && k + column < inner;
    cp_async_zfill(loads, shared_address(to) + row * kRowBytes + column * 2,
                   loads ? matrix + row * stride + k + column : matrix);
  }
}

// sums += the product of one step's operands: a warp computes 16 rows.
template <class T>
__device__ __forceinline__ void multiply_step(const char* x, const char* b, int64_t left, float (&sums)[8][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const uint32_t x_at = shared_address(x) + (16 * warp + lane % 16) * kRowBytes + lane / 16 * 16;
  const uint32_t b_at = shared_address(b) + (lane % 8 + lane / 16 * 8) * kRowBytes + lane / 8 % 2 * 16;
#pragma unroll
  for (int part = 0; part < kStep / 16; ++part) {
    if (16 * part >= left) break;
    uint32_t a[4];
    ldmatrix_x4(a, x_at + part * 32);
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      uint32_t words[4];
      ldmatrix_x4(words, b_at + pair * 16 * kRowBytes + part * 32);
      mma_m16n8k16(sums[2 * pair], a, words, T{});
      mma_m16n8k16(sums[2 * pair + 1], a, words + 2, T{});
    }
  }
}

// The smallest adapter of the block's rows above `last`; INT_MAX if there is none.
__device__ __forceinline__ int next_adapter(const int32_t* adapters, int last) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int least = INT_MAX;
  for (int row = lane; row < kTile; row += 32)
    if (adapters[row] > last) least = min(least, adapters[row]);
  return __reduce_min_sync(0xffffffffu, least);
}

// Adds the sums to the rows of `adapter`, or writes them there.
template <class T>
__device__ __forceinline__ void write_rows(const SelectedGemm& p, SelectedMemory& memory, int adapter,
                                           int64_t first_row, int64_t first_column, const float (&sums)[8][4]) {
  auto* shared = reinterpret_cast<float*>(memory.operands);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int tile = 0; tile < 8; ++tile) {
    float* at = shared + (16 * warp + lane / 4) * kSumColumns + 8 * tile + lane % 4 * 2;
    *reinterpret_cast<float2*>(at) = make_float2(sums[tile][0], sums[tile][1]);
    *reinterpret_cast<float2*>(at + 8 * kSumColumns) = make_float2(sums[tile][2], sums[tile][3]);
  }
  __syncthreads();
  for (int vector = static_cast<int>(threadIdx.x); vector < kTile * kTile / kVector; vector += kThreads) {
    const int row = vector / (kTile / kVector), column = vector % (kTile / kVector) * kVector;
    if (memory.adapters[row] != adapter || first_column + column >= p.columns) continue;
    const float* from = shared + row * kSumColumns + column;
    float values[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) values[i] = from[i];
    auto* to = reinterpret_cast<Packed<T>*>(static_cast<T*>(p.y) + (first_row + row) * p.y_stride + p.y_first +
                                            first_column + column);
    if (p.adds) {
      float before[kVector];
      widen(*to, before);
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[i] += before[i];
    }
    *to = narrow<T>(values);
  }
  __syncthreads();
}

template <class T>
__global__ void __launch_bounds__(kThreads) selected_gemm_kernel(const SelectedGemm p) {
  __shared__ SelectedMemory memory;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kTile, first_column = blockIdx.y * kTile;
  const int64_t rows = p.rows - first_row, columns = p.columns - first_column;
  bool has_none = false;
  if (threadIdx.x < kTile) {  // rows outside have none that is computed
    const int32_t adapter = threadIdx.x < rows ? p.adapters[first_row + threadIdx.x] : INT_MAX;
    memory.adapters[threadIdx.x] = adapter;
    has_none = adapter < 0;
  }
  has_none = __syncthreads_or(static_cast<int>(has_none)) != 0;
  const T* x = static_cast<const T*>(p.x) + first_row * p.x_stride + p.x_first;
  if (has_none && !p.adds) {
    const float zeros[8][4] = {};
    write_rows<T>(p, memory, -1, first_row, first_column, zeros);
  }
  for (int adapter = next_adapter(memory.adapters, -1); adapter != INT_MAX;
       adapter = next_adapter(memory.adapters, adapter)) {
    const T* b = static_cast<const T*>(p.b) + (adapter * p.b_rows + p.b_first + first_column) * p.inner;
    float sums[8][4] = {};
    const auto load = [&](int buffer, int64_t k) {
      load_operand(memory.operands[buffer][0], x, p.x_stride, rows, k, p.inner);
      load_operand(memory.operands[buffer][1], b, p.inner, columns, k, p.inner);
      cp_async_commit();
    };
    load(0, 0);
    for (int64_t k = 0, buffer = 0; k < p.inner; k += kStep, buffer ^= 1) {
      if (k + kStep < p.inner) {
        load(static_cast<int>(buffer) ^ 1, k + kStep);
        cp_async_wait<1>();
      } else {
        cp_async_wait<0>();
      }
      __syncthreads();
      multiply_step<T>(memory.operands[buffer][0], memory.operands[buffer][1], p.inner - k, sums);
      __syncthreads();
    }
    write_rows<T>(p, memory, adapter, first_row, first_column, sums);
  }
}

}  // namespace

Status selected_gemm(const SelectedGemm& p) {
  if (!rows_aligned(p.x, p.x_stride) || !rows_aligned(p.b, p.inner) || !rows_aligned(p.y, p.y_stride) ||
      p.x_first % kVector != 0 || p.y_first % kVector != 0 || p.columns % kVector != 0)
    return misaligned_rows();
  if (p.rows == 0) return {};
  const DeviceGuard guard(p.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  const int64_t row_tiles = (p.rows + kTile - 1) / kTile, column_tiles = (p.columns + kTile - 1) / kTile;
  if (row_tiles > INT_MAX || column_tiles > 65535) return bad_size("selected_gemm: too many rows or columns");
  const dim3 grid(static_cast<unsigned>(row_tiles), static_cast<unsigned>(column_tiles));
  const auto start = [&](auto element) {
    return launch(selected_gemm_kernel<decltype(element)>, grid, kThreads, 0, p.stream, p);
  };
  if (p.dtype == DType::bf16) return start(bf16_t{});
  return p.dtype == DType::f16 ? start(f16_t{}) : unknown_dtype();
}

}  // namespace cuda
}  // namespace fasttfm
