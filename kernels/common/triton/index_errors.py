"""index_errors.py for Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def clamped(index, limit):
    """The index, or 0 if it is outside of the table, and whether it is."""
    bad = (index < 0) | (index >= limit)
    return tl.where(bad, 0, index), bad


@triton.jit
def clamp_and_record(raw_index, limit, errors, ARGUMENT: tl.constexpr, ARGUMENTS: tl.constexpr, rows, mask):
    """clamped(), and records the first bad row of an argument in errors: int64 [2, ARGUMENTS]."""
    index, bad = clamped(raw_index, limit)
    words = errors + ARGUMENT + tl.zeros_like(rows)
    saturated = tl.minimum(tl.maximum(raw_index, -2147483648), 2147483647)
    tl.atomic_min(words, (rows << 32) | (saturated & 0xFFFFFFFF), mask=mask & bad)
    tl.store(words + ARGUMENTS, limit, mask=mask & bad)
    return index, bad
