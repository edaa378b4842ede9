"""The denominator of a softmax over a row that is processed in tiles, in Triton.

Every thread keeps a maximum and a sum relative to it for its own columns of each tile, so that tiles need no exchange
between threads, for which each tile would wait. ``total`` combines them at the end. Tiles are [groups, group]; a group
is what one thread loads at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Below every logit, and finite, because the difference of two infinities is NaN.
LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def exponential(x, PRECISE: tl.constexpr):
    """exp(x) for x <= 0. The approximation of the hardware has a relative error of 2^-22, and more for larger |x|,
    which is enough for a result in 16 bits; PRECISE is within 1 ulp, except for results below 2^-125, which are 0."""
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
    """Adds the exponentials of x [groups, group] to the running ``sums`` [groups], which are relative to
    ``largest``."""
    now = tl.maximum(largest, tl.max(x, axis=1))
    shares = tl.sum(exponential(x - now[:, None], PRECISE), axis=1)
    return sums * exponential(largest - now, PRECISE) + shares, now


@triton.jit
def total(sums, largest, PRECISE: tl.constexpr):
    """The sum and the largest logit of the whole row."""
    top = tl.max(largest, axis=0)
    return tl.sum(sums * exponential(largest - top, PRECISE), axis=0), top
