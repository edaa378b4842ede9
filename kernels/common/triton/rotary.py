"""Rotates pairs of columns by the angles of a token's position, for the kernels of rotary and qkv_projection; the
formulas are in kernels/rotary/reference.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_angles(cos, sin, position, pairs, mask, is_rotated, sign, P, PAIRS: tl.constexpr):
    """Cosines and sines of ``pairs`` [n] at ``position`` [m] (int64), in fp32, where ``mask`` [m, n] and ``is_rotated``
    [m] are true. A position outside of the tables [P, PAIRS] reads nothing and gives NaN. A sign of -1 is the inverse
    rotation."""
    known = mask & ((position >= 0) & (position < P) & is_rotated)[:, None]
    angle = position[:, None] * PAIRS + pairs[None, :]
    c = tl.load(cos + angle, mask=known, other=float("nan")).to(tl.float32)
    s = tl.load(sin + angle, mask=known, other=float("nan")).to(tl.float32) * sign
    return c, s


@triton.jit
def rotate(a, b, c, s):
    return a * c - b * s, a * s + b * c
