"""Rotary position embedding, in plain torch: the specification.

A head's first R columns are R/2 pairs (a, b): columns 2i and 2i + 1 if interleaved, else i and i + R/2. The token at
position p rotates pair i by the angle whose cosine and sine are cos[p, i] and sin[p, i]:

    a' = a cos - b sin        b' = a sin + b cos

The gradient is the inverse rotation: the same with -sin. Columns from R on are copied, and so are heads from
rotary_heads on. Arithmetic is fp32 (fp64 for fp64 input).
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    interleaved: bool,
    rotary_heads: int,
    inverse: bool = False,
) -> Tensor:
    """Returns [..., S, H, D] in x's type; autograd can differentiate it."""
    if rotary_heads < x.shape[-2]:
        first = rotary(x[..., :rotary_heads, :], cos, sin, positions, interleaved, rotary_heads, inverse)
        return torch.cat([first, x[..., rotary_heads:, :]], dim=-2)
    if positions is None:
        positions = torch.arange(x.shape[-3], device=x.device).expand(x.shape[:-2])
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    c, s = (table.to(wide)[positions][..., None, :] for table in (cos, sin))
    s = -s if inverse else s
    rotated = 2 * cos.shape[-1]
    pairs, rest = x[..., :rotated].to(wide), x[..., rotated:]
    a, b = (pairs[..., ::2], pairs[..., 1::2]) if interleaved else pairs.chunk(2, dim=-1)
    pair = (a * c - b * s, a * s + b * c)
    out = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat([out.to(x.dtype), rest], dim=-1)
