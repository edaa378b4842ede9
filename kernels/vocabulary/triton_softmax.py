"""A softmax's denominator over a row that comes in tiles, in Triton.

Every thread keeps a largest logit and a sum relative to it for its own few columns of each tile: tiles need no exchange
between threads, which would make each wait for the one before. ``total`` brings them together at the end. Tiles are
[rows of groups, group], a group being what one thread loads at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Below every logit that counts, and no infinity, whose difference to another is no number.
LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def exponential(x, PRECISE: tl.constexpr):
    """exp(x) for x <= 0. The hardware's has a relative error of 2^-22, and more for larger arguments, which is enough
    for a result in 16 bits; PRECISE is within 1 ulp, but for results below 2^-125, which are 0."""
    if PRECISE:
        whole = tl.maximum(tl.floor(x * 1.4426950408889634 + 0.5), -126.0)
        r = (x - whole * 0.693359375) + whole * 2.12194440e-4
        p = 1.9875691500e-4 * r + 1.3981999507e-3
        p = p * r + 8.3334519073e-3
        p = p * r + 4.1665795894e-2
        p = p * r + 1.6666665459e-1
        p = p * r + 5.0000001201e-1
        p = p * (r * r) + r + 1.0
        scale = ((whole.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
        result = tl.where(x < -86.6, 0.0, p * scale)
    else:
        result = tl.exp2(x * 1.4426950408889634)
    return result


@triton.jit
def added(sums, largest, x, PRECISE: tl.constexpr):
    """Sums [groups] of exponentials relative to their largest so far, with those of x [groups, group]."""
    now = tl.maximum(largest, tl.max(x, axis=1))
    shares = tl.sum(exponential(x - now[:, None], PRECISE), axis=1)
    return sums * exponential(largest - now, PRECISE) + shares, now


@triton.jit
def total(sums, largest, PRECISE: tl.constexpr):
    """The whole row's sum and largest."""
    top = tl.max(largest, axis=0)
    return tl.sum(sums * exponential(largest - top, PRECISE), axis=0), top
