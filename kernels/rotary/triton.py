"""Rotary position embedding in Triton: T tokens, H heads of D columns; the formula is in reference.py.

A program takes BLOCK_N heads, counted over all tokens, and all pairs of each. x is read and y written once; the rows of
the tables, which the heads of a token share, come from L1. Memory traffic: 2 * T * H * D elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.common.launch import cdiv, next_power_of_2, on_device
from fasttfm.kernels.common.triton.launcher import launched_kernel
from fasttfm.kernels.common.triton.rotary import load_angles, rotate

_TILE_ELEMENTS = 2048  # of each half of the pairs
_NUM_WARPS = 4


@launched_kernel
@triton.jit
def _rotary_kernel(
    x,  # [T, H, D], strides token_stride, head_stride, 1
    cos,  # [P, PAIRS]
    sin,  # [P, PAIRS]
    positions,  # [T], or unused: a token's position is its index in its sequence of S
    y,  # [T, H, D]
    T,
    S,
    P,
    token_stride,
    head_stride,
    sign,  # -1 for the inverse rotation
    H: tl.constexpr,
    ROTARY_HEADS: tl.constexpr,  # heads from this one on are copied
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,  # columns after the pairs; 0 if there are none
):
    heads = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = heads // H
    real = tokens < T
    head = heads % H
    source = x + tokens * token_stride + head * head_stride
    target = y + heads * D
    position = tokens % S
    if HAS_POSITIONS:
        position = tl.load(positions + tokens, mask=real, other=0).to(tl.int64)
    pairs = tl.arange(0, BLOCK_PAIRS)
    mask = real[:, None] & (pairs < PAIRS)[None, :]
    c, s = load_angles(cos, sin, position, pairs, mask, head < ROTARY_HEADS, sign, P, PAIRS)
    if INTERLEAVED:
        first = 2 * pairs
        second = first + 1
    else:
        first = pairs
        second = pairs + PAIRS
    a = tl.load(source[:, None] + first[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source[:, None] + second[None, :], mask=mask, other=0.0).to(tl.float32)
    rotated_a, rotated_b = rotate(a, b, c, s)
    if ROTARY_HEADS < H:
        rotated_a = tl.where((head < ROTARY_HEADS)[:, None], rotated_a, a)
        rotated_b = tl.where((head < ROTARY_HEADS)[:, None], rotated_b, b)
    tl.store(target[:, None] + first[None, :], rotated_a.to(y.dtype.element_ty), mask=mask)
    tl.store(target[:, None] + second[None, :], rotated_b.to(y.dtype.element_ty), mask=mask)
    if BLOCK_REST > 0:
        rest = 2 * PAIRS + tl.arange(0, BLOCK_REST)
        left = real[:, None] & (rest < D)[None, :]
        tl.store(target[:, None] + rest[None, :], tl.load(source[:, None] + rest[None, :], mask=left), mask=left)


def rotary_triton(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    interleaved: bool,
    rotary_heads: int,
    inverse: bool,
) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    *_, heads, columns = x.shape
    x_rows = x if x.stride(-1) == 1 else x.contiguous()
    x_rows = x_rows.reshape(-1, heads, columns)  # a view where one stride leads from each token to the next
    tile = _tile(columns, cos.shape[-1])
    tokens = x_rows.shape[0]
    with on_device(x):
        _rotary_kernel[(cdiv(tokens * heads, tile["BLOCK_N"]),)](
            x_rows,
            cos.contiguous(),
            sin.contiguous(),
            x if positions is None else positions.contiguous(),
            y,
            tokens,
            x.shape[-3],
            cos.shape[0],
            x_rows.stride(0),
            x_rows.stride(1),
            -1.0 if inverse else 1.0,
            H=heads,
            ROTARY_HEADS=rotary_heads,
            D=columns,
            PAIRS=cos.shape[-1],
            HAS_POSITIONS=positions is not None,
            INTERLEAVED=interleaved,
            num_warps=_NUM_WARPS,
            **tile,
        )
    return y


def _tile(columns: int, pairs: int) -> dict[str, int]:
    width = next_power_of_2(pairs)
    rest = columns - 2 * pairs
    rows = max(1, _TILE_ELEMENTS // max(width, rest))
    return {
        "BLOCK_N": next_power_of_2(rows),
        "BLOCK_PAIRS": width,
        "BLOCK_REST": next_power_of_2(rest) if rest else 0,
    }


def compile_signatures(element: str, columns: int, pairs: int, interleaved: bool) -> list[dict[str, object]]:
    """The kernel as the launcher compiles it for queries, keys and values of 12 heads, forward and backward."""
    pointers = {"x": f"*{element}", "cos": "*fp32", "sin": "*fp32", "positions": "*i64", "y": f"*{element}"}
    sizes = dict.fromkeys(("T", "S", "P", "token_stride", "head_stride"), "i32")
    constants = {
        "H": 36,
        "ROTARY_HEADS": 24,
        "D": columns,
        "PAIRS": pairs,
        "HAS_POSITIONS": True,
        "INTERLEAVED": interleaved,
    }
    return [
        {
            "kernel": _rotary_kernel,
            "signature": {**pointers, **sizes, "sign": "fp32"},
            "num_warps": _NUM_WARPS,
            "constants": {**constants, **_tile(columns, pairs)},
        }
    ]
