// The only reader of boundaries of packed sequences, for C++ and CUDA; common/triton/packed.py is that of Triton.
//
// Boundaries are cu_seqlens [sequences + 1]: sequence i has the rows cu_seqlens[i] to cu_seqlens[i + 1]. A GPU does not
// validate them. They may be negative, not in order or past the end of the tensor; every function here returns rows
// inside of the tensor for all of them, and reads nothing but these sequences + 1 numbers.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace fasttfm {

#ifdef FASTTFM_ISA
inline namespace FASTTFM_ISA {  // as in isa.h: every instruction set has its own copies of inline functions
#endif

// The number of rows of a packed tensor, for the functions below. Boundaries have 32 bits: rows beyond belong to no
// sequence.
FASTTFM_HOST_DEVICE int packed_size(int64_t rows) { return static_cast<int>(rows < INT32_MAX ? rows : INT32_MAX); }

// A boundary, clamped to [0, size]. The last one is the first row after all sequences.
FASTTFM_HOST_DEVICE int packed_first(const int32_t* cu_seqlens, int64_t sequence, int size) {
  const int first = cu_seqlens[sequence];
  return first < 0 ? 0 : first < size ? first : size;
}

// A sequence's rows in a packed tensor.
struct Span {
  int first, length;
};

// size: rows of the tensor; longest: max_seqlen, beyond which a sequence has no rows.
FASTTFM_HOST_DEVICE Span packed_span(const int32_t* cu_seqlens, int64_t sequence, int size, int longest) {
  const int first = packed_first(cu_seqlens, sequence, size);
  const int length = packed_first(cu_seqlens, sequence + 1, size) - first;
  return {first, length < 0 ? 0 : length < longest ? length : longest};
}

// The rows of the sequences [first, last). Writes their boundaries [last - first + 1], relative to the first row.
inline Span packed_part(const int32_t* cu_seqlens, int64_t first, int64_t last, int size, int32_t* relative) {
  const int start = packed_first(cu_seqlens, first, size);
  int end = start;
  for (int64_t sequence = first; sequence <= last; ++sequence) {
    const int next = packed_first(cu_seqlens, sequence, size);
    end = next > end ? next : end;
    relative[sequence - first] = end - start;
  }
  return {start, end - start};
}

// Whether boundaries start at 0, do not decrease, and have no sequence that is longer than `longest` or ends after the
// last row. For the CPU, which validates them.
inline bool packed_valid(const int32_t* cu_seqlens, int64_t sequences, int64_t size, int64_t longest) {
  if (cu_seqlens[0] != 0 || cu_seqlens[sequences] > size) return false;
  for (int64_t i = 0; i < sequences; ++i) {
    const int64_t length = int64_t{cu_seqlens[i + 1]} - cu_seqlens[i];
    if (length < 0 || length > longest) return false;
  }
  return true;
}

// The position of a row of activations in its batch. With invalid boundaries, `token` may be any number.
struct RowPosition {
  uint32_t sequence, token;
};

// In a dense batch ([B, S, C]), sequence and token follow from the row index.
struct RowPositions {
  const int32_t* cu_seqlens;  // [sequences + 1], or null when dense
  int64_t sequences;
  int64_t tokens_per_sequence;  // when dense

  FASTTFM_HOST_DEVICE RowPosition operator()(int64_t row) const {
    if (cu_seqlens == nullptr)
      return {static_cast<uint32_t>(row / tokens_per_sequence), static_cast<uint32_t>(row % tokens_per_sequence)};
    // Finds the last sequence that starts at or before the row, which is not empty.
    int64_t low = 0, high = sequences;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      if (cu_seqlens[middle] <= row)
        low = middle;
      else
        high = middle;
    }
    return {static_cast<uint32_t>(low), static_cast<uint32_t>(row - cu_seqlens[low])};
  }

#ifdef __CUDACC__
  // Does the same with a whole warp: every step divides the sequences by 32.
  __device__ __forceinline__ RowPosition found_by_warp(int row) const {
    if (cu_seqlens == nullptr) {
      const auto length = static_cast<uint32_t>(tokens_per_sequence);
      return {static_cast<uint32_t>(row) / length, static_cast<uint32_t>(row) % length};
    }
    const int lane = static_cast<int>(threadIdx.x % 32);
    int low = 0, count = static_cast<int>(sequences);
    while (count > 1) {
      const int step = (count + 31) / 32, offset = lane * step;
      const bool before = offset < count && cu_seqlens[low + offset] <= row;
      const int passed = max(__popc(__ballot_sync(0xffffffffu, before)) - 1, 0);  // none if the first one is above 0
      low += passed * step;
      count = min(step, count - passed * step);
    }
    return {static_cast<uint32_t>(low), static_cast<uint32_t>(row - cu_seqlens[low])};
  }
#endif
};

#ifdef FASTTFM_ISA
}  // namespace FASTTFM_ISA
#endif

}  // namespace fasttfm
