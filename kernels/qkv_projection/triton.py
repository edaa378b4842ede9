"""Queries, keys and values in Triton: N rows of C columns, H heads of D; the formula is in reference.py.

A program computes a tile of BLOCK_M rows by BLOCK_N columns of qkv [N, 3C], BLOCK_K elements of the sum at a time. Sums
are fp32; bias and rotary embedding are applied to them, so that qkv is rounded once and written once. x is read
3C / BLOCK_N times and the weight N / BLOCK_M times, mostly from L2: GROUP row tiles are computed next to each other.

With rotary embedding the two columns of a pair must be in the same thread. Columns 2u and 2u + 1 of a tile are then
those of pair u, whichever columns of the head these are: the rows of the weight can be loaded in any order, because
each is contiguous. Columns that are not rotated are paired in order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.common.launch import ahead_of_time, cdiv, next_power_of_2, on_device
from fasttfm.kernels.common.rows import as_rows
from fasttfm.kernels.common.triton.launcher import launched_kernel
from fasttfm.kernels.common.triton.rotary import load_angles, rotate

_GROUP = 8


@triton.jit
def _column(
    pairs,  # numbers of pairs, counted over all heads
    side,  # 0 or 1
    H: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Columns of qkv, and whether there are such columns; 0 where not."""
    OWN: tl.constexpr = (D + 1) // 2  # pairs of a head
    head = pairs // OWN
    pair = pairs % OWN
    if INTERLEAVED:
        column = 2 * pair + side
    elif 2 * PAIRS == D:
        column = pair + side * PAIRS
    else:
        column = tl.where(pair < PAIRS, pair + side * PAIRS, 2 * pair + side)
    there = (head < 3 * H) & (column < D)
    return tl.where(there, head * D + column, 0), there


@triton.jit
def _place(numbers, columns: tl.constexpr, N, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The row tile and the column tile of a program: GROUP row tiles take turns, column tile by column tile."""
    row_tiles = tl.cdiv(N, BLOCK_M)
    of_group = GROUP * tl.cdiv(columns, BLOCK_N)
    first = numbers // of_group * GROUP
    size = tl.minimum(row_tiles - first, GROUP)
    return first + numbers % of_group % size, numbers % of_group // size


@launched_kernel
@triton.jit
def _forward_kernel(
    x,  # [N, C], rows x_stride apart
    weight,  # [3C, C], rows weight_stride apart
    bias,  # [3C] or unused
    cos,  # [P, PAIRS] or unused
    sin,  # [P, PAIRS] or unused
    positions,  # [N], or unused: a row's position is its index in its sequence of S
    qkv,  # [N, 3C]
    N,
    S,
    P,
    x_stride,
    weight_stride,
    H: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,  # 0: no rotary embedding
    HAS_BIAS: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    C: tl.constexpr = H * D
    # Whether the columns of a tile are neighbours in qkv.
    NEIGHBOURS: tl.constexpr = PAIRS == 0 or (INTERLEAVED and D % 2 == 0)
    row_tile, column_tile = _place(
        tl.program_id(0), 3 * C if NEIGHBOURS else 6 * H * ((D + 1) // 2), N, GROUP, BLOCK_M, BLOCK_N
    )
    rows = row_tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    tile = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if NEIGHBOURS:
        there = tile < 3 * C
        columns = tl.where(there, tile, 0)
    else:
        columns, there = _column(tile // 2, tile % 2, H, D, PAIRS, INTERLEAVED)
    # Rows and columns past the end are computed as the first and not stored, so that the loop needs no mask.
    inner = tl.arange(0, BLOCK_K)
    x_tile = x + tl.where(rows < N, rows, 0)[:, None] * x_stride + inner[None, :]
    weight_tile = weight + columns.to(tl.int64)[None, :] * weight_stride + inner[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, C, BLOCK_K):
        if C % BLOCK_K == 0:
            left = tl.load(x_tile + start)
            right = tl.load(weight_tile + start)
        else:
            left = tl.load(x_tile + start, mask=(inner < C - start)[None, :], other=0.0)
            right = tl.load(weight_tile + start, mask=(inner < C - start)[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias + columns).to(tl.float32)[None, :]
    target = qkv + rows[:, None] * (3 * C)
    real = (rows < N)[:, None]
    if PAIRS > 0:
        a, b = tl.split(tl.reshape(total, (BLOCK_M, BLOCK_N // 2, 2)))
        numbers = column_tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        OWN: tl.constexpr = (D + 1) // 2
        pair = numbers % OWN
        is_rotated = ((numbers // OWN < 2 * H) & (pair < PAIRS))[None, :]
        position = rows % S
        if HAS_POSITIONS:
            position = tl.load(positions + rows, mask=rows < N, other=0).to(tl.int64)
        c, s = load_angles(cos, sin, position, pair, is_rotated, rows < N, 1.0, P, PAIRS)
        rotated_a, rotated_b = rotate(a, b, c, s)
        a = tl.where(is_rotated, rotated_a, a)
        b = tl.where(is_rotated, rotated_b, b)
        if NEIGHBOURS:
            total = tl.reshape(tl.join(a, b), (BLOCK_M, BLOCK_N))
        else:
            first, first_there = _column(numbers, 0, H, D, PAIRS, INTERLEAVED)
            second, second_there = _column(numbers, 1, H, D, PAIRS, INTERLEAVED)
            tl.store(target + first[None, :], a.to(qkv.dtype.element_ty), mask=real & first_there[None, :])
            tl.store(target + second[None, :], b.to(qkv.dtype.element_ty), mask=real & second_there[None, :])
    if NEIGHBOURS:
        tl.store(target + tile[None, :], total.to(qkv.dtype.element_ty), mask=real & there[None, :])


def qkv_projection_forward_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    num_heads: int,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    interleaved: bool,
) -> Tensor:
    """qkv [..., 3, H, D] in x's type."""
    head_columns = x.shape[-1] // num_heads
    qkv = torch.empty((*x.shape[:-1], 3, num_heads, head_columns), dtype=x.dtype, device=x.device)
    if qkv.numel() == 0:
        return qkv
    rows, weight = as_rows(x), as_rows(weight)
    tile = _tile(*rows.shape, x.element_size())
    pairs = 0 if cos is None else cos.shape[-1]
    with on_device(x):
        _forward_kernel[(_programs(rows.shape[0], num_heads, head_columns, pairs, tile),)](
            rows,
            weight,
            weight if bias is None else bias.contiguous(),
            weight if cos is None else cos.contiguous(),
            weight if sin is None else sin.contiguous(),
            weight if positions is None else positions.contiguous(),
            qkv,
            rows.shape[0],
            x.shape[-2] if x.dim() > 1 else 1,
            0 if cos is None else cos.shape[0],
            rows.stride(0),
            weight.stride(0),
            HAS_BIAS=bias is not None,
            HAS_POSITIONS=positions is not None,
            INTERLEAVED=interleaved,
            **_constants(num_heads, head_columns, pairs, x.element_size()),
            **tile,
        )
    return qkv


def _programs(rows: int, heads: int, head_columns: int, pairs: int, tile: dict[str, int]) -> int:
    in_pairs = head_columns + head_columns % 2 if pairs else head_columns
    return cdiv(rows, tile["BLOCK_M"]) * cdiv(3 * heads * in_pairs, tile["BLOCK_N"])


def _constants(heads: int, head_columns: int, pairs: int, element_bytes: int) -> dict[str, Any]:
    precision = "ieee" if element_bytes == 4 else "tf32"
    return {"H": heads, "D": head_columns, "PAIRS": pairs, "PRECISION": precision, "GROUP": _GROUP}


def _tile(rows: int, columns: int, element_bytes: int) -> dict[str, int]:
    """fp32 products do not use tensor cores: their operands are in registers, so tiles are small. They are also small
    for rows that may not start at a multiple of 16 bytes, which are loaded through registers."""
    if element_bytes == 4:
        return {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 16, "num_warps": 4, "num_stages": 3}
    block_m = min(128, max(16, next_power_of_2(rows)))
    if columns % 64:
        return {"BLOCK_M": min(64, block_m), "BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 4, "num_stages": 3}
    return {"BLOCK_M": block_m, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8 if block_m == 128 else 4, "num_stages": 3}


def compile_signatures(
    element: str, rows: int, heads: int, head_columns: int, pairs: int = 0, interleaved: bool = False
) -> list[dict[str, object]]:
    """The kernel as the launcher compiles it; ``pairs`` with rotary embedding."""
    e, element_bytes = f"*{element}", 4 if element == "fp32" else 2
    pointers = {"x": e, "weight": e, "bias": e, "cos": "*fp32", "sin": "*fp32", "positions": "*i64", "qkv": e}
    sizes = dict.fromkeys(("N", "S", "P", "x_stride", "weight_stride"), "i32")
    tile = _tile(rows, heads * head_columns, element_bytes)
    options = {"HAS_BIAS": True, "HAS_POSITIONS": pairs > 0, "INTERLEAVED": interleaved}
    constants = {**_constants(heads, head_columns, pairs, element_bytes), **options}
    return [ahead_of_time(_forward_kernel, {**pointers, **sizes}, tile, **constants)]
