"""The only reader of boundaries of packed sequences in Triton; common/packed.h is that of C++ and CUDA.

Boundaries are cu_seqlens, int32 [sequences + 1]: sequence i has the rows cu_seqlens[i] to cu_seqlens[i + 1]. They are
not validated on a GPU. They may be negative, not in order or past the end of the tensor; every function here returns
rows inside of the tensor for all of them, and reads nothing but these sequences + 1 numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def packed_first(cu_seqlens, sequence, size):
    """A boundary, clamped to [0, size]. The last one is the first row after all sequences."""
    return tl.minimum(tl.maximum(tl.load(cu_seqlens + sequence), 0), size)


@triton.jit
def packed_span(cu_seqlens, sequence, size, longest):
    """First row and number of rows of a sequence in a tensor of ``size`` rows; it has no rows beyond ``longest``, which
    is max_seqlen."""
    first = packed_first(cu_seqlens, sequence, size)
    end = packed_first(cu_seqlens, sequence + 1, first + tl.minimum(longest, size - first))
    return first, tl.maximum(end - first, 0)  # the compiler knows it not to be negative: attention has fewer registers


@triton.jit
def row_position(row, cu_seqlens, sequences, tokens_per_sequence, PACKED: tl.constexpr):
    """Sequence and token index of rows (int64 tensor), as uint32. With invalid boundaries, the token index may be any
    number."""
    if PACKED:  # binary search for the last sequence that starts at or before the row
        low = tl.zeros(row.shape, tl.int64)
        high = low + sequences
        for _ in range(32):
            middle = (low + high) // 2
            searching = high - low > 1
            before = tl.load(cu_seqlens + middle, mask=searching, other=0) <= row
            low = tl.where(searching & before, middle, low)
            high = tl.where(searching & (before == 0), middle, high)
        return low.to(tl.uint32), (row - tl.load(cu_seqlens + low)).to(tl.uint32)
    return (row // tokens_per_sequence).to(tl.uint32), (row % tokens_per_sequence).to(tl.uint32)
