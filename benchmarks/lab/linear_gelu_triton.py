"""Triton kernels for the ways to compute an MLP that benchmarks/lab/mlp_ways.py compares.

A matrix product with three endings (none; bias + GELU; GELU's derivative, the activation again and the bias gradient's
parts), and the elementwise passes that the last two replace. GELU is the one with erf. Sizes are multiples of the
tiles. M rows, I inner columns, K summed over.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PLAIN, FORWARD, BACKWARD = 0, 1, 2

CONFIGS = tuple(
    {"BLOCK_M": m, "BLOCK_I": i, "BLOCK_K": 64, "num_warps": warps, "num_stages": stages}
    for m, i, warps, stages in (
        (128, 256, 8, 3),
        (128, 256, 8, 4),
        (128, 128, 4, 4),
        (128, 128, 8, 4),
        (256, 128, 8, 3),
    )
)


@triton.jit
def _gelu(u):
    return 0.5 * u * (1.0 + tl.math.erf(u * 0.7071067811865476))


@triton.jit
def _gelu_derivative(u):
    return 0.5 * (1.0 + tl.math.erf(u * 0.7071067811865476)) + u * tl.exp(-0.5 * u * u) * 0.3989422804014327


@triton.jit
def _matmul_kernel(
    left,  # [M, K], contiguous
    right,  # [K, I], strides right_k and right_i
    bias,  # [I]
    h,  # [M, I]: written by FORWARD, read by BACKWARD
    out,  # [M, I]: the product (PLAIN), the activation (FORWARD), dh (BACKWARD)
    activation,  # [M, I]: written by BACKWARD
    parts,  # [M / BLOCK_M, I] fp32, written by BACKWARD: dh summed over a tile's rows
    M,
    I,
    K,
    right_k,
    right_i,
    MODE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Eight rows of tiles together, so that programs that run at the same time share operands in the L2.
    tiles_m, tiles_i = M // BLOCK_M, I // BLOCK_I
    program = tl.program_id(0)
    first = program // (8 * tiles_i) * 8
    height = tl.minimum(tiles_m - first, 8)
    tile_m = first + program % (8 * tiles_i) % height
    tile_i = program % (8 * tiles_i) // height
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_i * BLOCK_I + tl.arange(0, BLOCK_I)
    inner = tl.arange(0, BLOCK_K)
    left_at = left + rows.to(tl.int64)[:, None] * K + inner[None, :]
    right_at = right + inner[:, None] * right_k + columns[None, :] * right_i
    total = tl.zeros([BLOCK_M, BLOCK_I], dtype=tl.float32)
    for _ in range(0, K, BLOCK_K):
        total = tl.dot(tl.load(left_at), tl.load(right_at), total)
        left_at += BLOCK_K
        right_at += BLOCK_K * right_k

    at = rows.to(tl.int64)[:, None] * I + columns[None, :]
    rounded = total.to(out.dtype.element_ty)
    if MODE == 0:
        tl.store(out + at, rounded)
    else:
        shift = tl.load(bias + columns).to(tl.float32)[None, :]
        if MODE == 1:
            tl.store(h + at, rounded)
            tl.store(out + at, _gelu(rounded.to(tl.float32) + shift).to(out.dtype.element_ty))
        else:
            u = tl.load(h + at).to(tl.float32) + shift
            tl.store(activation + at, _gelu(u).to(out.dtype.element_ty))
            dh = rounded.to(tl.float32) * _gelu_derivative(u)
            tl.store(out + at, dh.to(out.dtype.element_ty))
            tl.store(parts + tile_m * I + columns, tl.sum(dh, axis=0))


def matmul(left: Tensor, right: Tensor, config: dict[str, int]) -> Tensor:
    """``left @ right`` without an ending."""
    out = torch.empty(left.shape[0], right.shape[1], dtype=left.dtype, device=left.device)
    _launch(PLAIN, left, right, out, out, out, out, out, config)
    return out


def matmul_gelu(x: Tensor, weight: Tensor, bias: Tensor, config: dict[str, int]) -> tuple[Tensor, Tensor]:
    """h = x weight^T and gelu(h + bias)."""
    h = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    a = torch.empty_like(h)
    _launch(FORWARD, x, weight.t(), bias, h, a, a, a, config)
    return h, a


def matmul_gelu_backward(
    dy: Tensor, weight: Tensor, bias: Tensor, h: Tensor, config: dict[str, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """With da = dy weight: dh, gelu(h + bias), and dbias in fp32."""
    dh, a = torch.empty_like(h), torch.empty_like(h)
    parts = torch.empty(h.shape[0] // config["BLOCK_M"], h.shape[1], dtype=torch.float32, device=h.device)
    _launch(BACKWARD, dy, weight, bias, h, dh, a, parts, config)
    return dh, a, parts.sum(dim=0)


def _launch(
    mode: int,
    left: Tensor,
    right: Tensor,
    bias: Tensor,
    h: Tensor,
    out: Tensor,
    activation: Tensor,
    parts: Tensor,
    config: dict[str, int],
) -> None:
    (m, k), i = left.shape, right.shape[1]
    for name, size in (("BLOCK_M", m), ("BLOCK_I", i), ("BLOCK_K", k)):
        if size % config[name]:
            raise ValueError(f"matmul: expected sizes that are multiples of the tiles {config}, got {(m, i, k)}")
    grid = (m // config["BLOCK_M"] * (i // config["BLOCK_I"]),)
    strides = right.stride()
    _matmul_kernel[grid](left, right, bias, h, out, activation, parts, m, i, k, *strides, MODE=mode, **config)


@triton.jit
def _backward_pass_kernel(
    da,  # [M, I]
    h,  # [M, I]
    bias,  # [I]
    dh,  # [M, I]
    activation,  # [M, I]
    parts,  # [programs along M, I] fp32
    I,
    ROWS: tl.constexpr,  # of a program
    BLOCK_M: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    columns = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    shift = tl.load(bias + columns).to(tl.float32)[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_I], dtype=tl.float32)
    for start in range(0, ROWS, BLOCK_M):
        rows = (tl.program_id(1) * ROWS + start + tl.arange(0, BLOCK_M)).to(tl.int64)
        at = rows[:, None] * I + columns[None, :]
        u = tl.load(h + at).to(tl.float32) + shift
        gradient = tl.load(da + at).to(tl.float32) * _gelu_derivative(u)
        tl.store(activation + at, _gelu(u).to(activation.dtype.element_ty))
        tl.store(dh + at, gradient.to(dh.dtype.element_ty))
        total += gradient
    tl.store(parts + tl.program_id(1) * I + columns, tl.sum(total, axis=0))


@triton.jit
def _forward_pass_kernel(h, bias, activation, I, BLOCK_M: tl.constexpr, BLOCK_I: tl.constexpr):
    columns = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    rows = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    at = rows[:, None] * I + columns[None, :]
    u = tl.load(h + at).to(tl.float32) + tl.load(bias + columns).to(tl.float32)[None, :]
    tl.store(activation + at, _gelu(u).to(activation.dtype.element_ty))


_ROWS, _BLOCK_M, _BLOCK_I = 64, 8, 256


def forward_pass(h: Tensor, bias: Tensor, a: Tensor) -> None:
    """a = gelu(h + bias)."""
    grid = (h.shape[1] // _BLOCK_I, h.shape[0] // _BLOCK_M)
    _forward_pass_kernel[grid](h, bias, a, h.shape[1], BLOCK_M=_BLOCK_M, BLOCK_I=_BLOCK_I)


def backward_parts(h: Tensor) -> Tensor:
    """Room for the bias gradient's parts of ``backward_pass``."""
    return torch.empty(h.shape[0] // _ROWS, h.shape[1], dtype=torch.float32, device=h.device)


def backward_pass(da: Tensor, h: Tensor, bias: Tensor, dh: Tensor, a: Tensor, parts: Tensor) -> None:
    """dh, the activation again and the bias gradient's parts in one pass."""
    grid = (h.shape[1] // _BLOCK_I, h.shape[0] // _ROWS)
    _backward_pass_kernel[grid](
        da, h, bias, dh, a, parts, h.shape[1], ROWS=_ROWS, BLOCK_M=_BLOCK_M, BLOCK_I=_BLOCK_I, num_warps=4
    )
