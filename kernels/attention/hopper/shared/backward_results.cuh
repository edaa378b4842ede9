// attention backward for Hopper: the stores of gradients.
#pragma once

#include <cstdint>

#include "attention/hopper/shared/backward_schedule.cuh"
#include "common/cuda/hopper.cuh"

namespace fasttfm {
namespace cuda {
namespace hopper_backward {

// The rows of a gradient's tile: `rows` from `row` on, which is an index among all tokens if they are packed.
struct GradientRows {
  int sequence, head, row, rows;
};

// Two lanes whose indices differ in `bit` exchange words: afterwards the lower lane has both lanes' `low`, and the
// upper one both lanes' `high`.
__device__ __forceinline__ void exchange(uint32_t& low, uint32_t& high, int bit) {
  const bool upper = (reload_tid() & bit) != 0;
  const uint32_t received = __shfl_xor_sync(0xffffffffu, upper ? low : high, bit);
  if (upper)
    low = received;
  else
    high = received;
}

// This is assembly because the compiler would split the store into four.
__device__ __forceinline__ void store_words(void* to, const uint32_t (&word)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word[0]), "r"(word[1]), "r"(word[2]),
               "r"(word[3])
               : "memory");
}

// Writes the first `rows` rows and `columns` columns (a multiple of 8) of a warpgroup's accumulator of 64 rows and
// 2 * COUNT columns, times `factor`. The four threads of a row each hold pairs of columns; they exchange them by
// shuffles, so that each thread writes 8 consecutive columns.
template <class T, int COUNT>
__device__ __forceinline__ void store_product(const float (&value)[COUNT], float factor, T* to, int64_t stride,
                                              int rows, int columns = 2 * COUNT) {
  const int lane = reload_tid() % 32, row = reload_tid() % kWarpgroup / 32 * 16 + lane / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int part = 0; part < COUNT / 16; ++part) {
      uint32_t word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 16 * part + 4 * i + 2 * half;
        word[i] = narrow_word(value[at] * factor, value[at + 1] * factor, T{});
      }
      exchange(word[0], word[1], 1);
      exchange(word[2], word[3], 1);
      exchange(word[0], word[2], 2);
      exchange(word[1], word[3], 2);
      if (row + 8 * half < rows && 32 * part + 8 * (lane % 4) < columns)
        store_words(to + (row + 8 * half) * stride + 32 * part + 8 * (lane % 4), word);
    }
}

// Writes zeros to `rows` rows of `columns` columns, up to COLUMNS. Called by THREADS threads, by default a warpgroup.
template <int THREADS = kWarpgroup, int COLUMNS = kTileColumns, class T>
__device__ __forceinline__ void store_zeros(T* to, int64_t stride, int rows, int columns = COLUMNS) {
  constexpr int kElements = 16 / sizeof(T), kRow = COLUMNS / kElements;  // elements per vector, vectors per row
  for (int i = threadIdx.x % THREADS; i < kRow * rows; i += THREADS)
    if (i % kRow * kElements < columns)
      *reinterpret_cast<uint4*>(to + i / kRow * stride + i % kRow * kElements) = make_uint4(0, 0, 0, 0);
}

template <class T>
__device__ __forceinline__ T* row_of(const Output& output, const Parameters& p, int sequence, int head, int row) {
  const int64_t batch = p.cu_seqlens == nullptr ? sequence : 0;
  return static_cast<T*>(output.data) + batch * output.sequence + head * output.head + row * output.token;
}

}  // namespace hopper_backward
}  // namespace cuda
}  // namespace fasttfm
