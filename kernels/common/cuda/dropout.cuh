// Dropout for the row-wise kernels of rows.cuh: which elements of a row are kept (philox.h).
#pragma once

#include <cstdint>

#include "common/cuda/rows.cuh"
#include "common/packed.h"
#include "common/philox.h"

namespace fasttfm {
namespace cuda {

// Gives two neighbouring threads their halves of two draws, of which the even thread has the first and the odd one the
// second: the bytes of the even thread's 8 columns are in the low half of a draw, the other's in the high half. Called
// by all threads of a warp together.
__device__ __forceinline__ void exchange_halves(const Draw& drawn, bool odd, uint32_t (&first)[2],
                                                uint32_t (&second)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t low = drawn.word[half], high = drawn.word[2 + half];
    const uint32_t mine = odd ? high : low;
    const uint32_t received = __shfl_xor_sync(0xffffffffu, odd ? low : high, 1);
    first[half] = odd ? received : mine;
    second[half] = odd ? mine : received;
  }
}

// The random bytes of a thread's vectors of one row: byte i of word[v] belongs to element i of vector v.
//
// A draw covers 16 columns: a vector of an even thread and the vector of its odd neighbour. For two vectors, the even
// thread draws for the first and the odd thread for the second, and they exchange halves. This takes one draw per 16
// elements of a thread.
template <class S>
struct RowDraws {
  uint32_t word[S::kVectors][2];

  // Called by all threads of a warp together.
  __device__ __forceinline__ void draw(uint64_t seed, RowPosition position) {
    const uint32_t thread = threadIdx.x % S::kGroup;
    const bool odd = thread % 2 == 1;
#pragma unroll
    for (int v = 0; v + 1 < S::kVectors; v += 2) {
      const uint32_t vector = static_cast<uint32_t>(v) + (odd ? 1 : 0);
      const Draw drawn = philox(seed, (vector * S::kGroup + thread) / 2, position.token, position.sequence, 0);
      exchange_halves(drawn, odd, word[v], word[v + 1]);
    }
    if constexpr (S::kVectors % 2 == 1) {
      constexpr int v = S::kVectors - 1;
      const Draw drawn = philox(seed, (v * S::kGroup + thread) / 2, position.token, position.sequence, 0);
#pragma unroll
      for (int half = 0; half < 2; ++half) word[v][half] = odd ? drawn.word[2 + half] : drawn.word[half];
    }
  }

  __device__ __forceinline__ void keep_all() {
#pragma unroll
    for (int v = 0; v < S::kVectors; ++v) word[v][0] = word[v][1] = 0xffffffffu;
  }

  // Whether element i of vector v is kept. Its byte is shifted to the top of the word and compared there; the bytes
  // below it cannot change the result.
  __device__ __forceinline__ bool kept(int v, int i, uint32_t limit) const {
    return (word[v][i / 4] << (24 - 8 * (i % 4))) > limit;
  }
};

// The dropout parameters of a params struct; with a null seed everything is kept.
struct Dropout {
  const int64_t* seed;
  RowPositions positions;
  uint32_t limit;  // the largest word that is dropped: (threshold << 24) - 1
  float scale;

  template <class Params>
  explicit __device__ __forceinline__ Dropout(const Params& p)
      : seed(p.seed),
        positions{p.cu_seqlens, p.sequences, p.tokens_per_sequence},
        limit(p.seed == nullptr ? 0 : (static_cast<uint32_t>(p.threshold) << 24) - 1),
        scale(p.scale) {}

  template <class S>
  __device__ __forceinline__ void draw(int64_t row, RowDraws<S>& draws) const {
    if (seed != nullptr)
      draws.draw(static_cast<uint64_t>(*seed), positions(row));
    else
      draws.keep_all();
  }
};

}  // namespace cuda
}  // namespace fasttfm
