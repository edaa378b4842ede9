"""index_errors.py for Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def clamped(index, limit):
    """The index, or 0 where it names no row; and whether it names none."""
    bad = (index < 0) | (index >= limit)
    return tl.where(bad, 0, index), bad


@triton.jit
def noted(given, limit, errors, ARGUMENT: tl.constexpr, ARGUMENTS: tl.constexpr, rows, mask):
    """clamped(), and the first bad row of an argument goes to errors: int64 [2, ARGUMENTS]."""
    index, bad = clamped(given, limit)
    words = errors + ARGUMENT + tl.zeros_like(rows)
    saturated = tl.minimum(tl.maximum(given, -2147483648), 2147483647)
    tl.atomic_min(words, (rows << 32) | (saturated & 0xFFFFFFFF), mask=mask & bad)
    tl.store(words + ARGUMENTS, limit, mask=mask & bad)
    return index, bad
