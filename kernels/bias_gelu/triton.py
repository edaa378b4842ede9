"""Activation of x + bias in Triton. N rows of C columns; the formulas are in reference.py.

A program processes a stripe of BLOCK_C columns. In the forward it has one tile of BLOCK_N rows. In the backward the
programs of a stripe share its tiles and keep partial sums of dbias in registers; a second, small kernel adds them in a
fixed order. The number of programs depends only on the shape and the device, so the same call gives the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.common.launch import ahead_of_time, cdiv, multiprocessors, next_power_of_2, on_device
from fasttfm.kernels.common.rows import as_rows, gradient_like
from fasttfm.kernels.common.triton.activation import activated
from fasttfm.kernels.common.triton.launcher import launched_kernel
from fasttfm.kernels.common.triton.sum_parts import compile_signature, sum_parts

_PROGRAMS_PER_MULTIPROCESSOR = 8


@launched_kernel
@triton.jit
def _fwd_kernel(
    x,  # [N, C], rows x_stride apart
    bias,  # [C] or unused
    y,  # [N, C]
    N,
    C,
    x_stride,
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (rows < N)[:, None] & (columns < C)[None, :]
    u = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        u += tl.load(bias + columns, mask=columns < C, other=0.0).to(tl.float32)[None, :]
    value, _ = activated(u, KIND, EXACT=x.dtype.element_ty == tl.float32)
    tl.store(y + rows[:, None] * C + columns[None, :], value.to(y.dtype.element_ty), mask=mask)


@launched_kernel
@triton.jit
def _bwd_kernel(
    dy,  # [N, C]
    x,  # [N, C], rows x_stride apart
    bias,  # [C] or unused
    dx,  # [N, C]
    y,  # [N, C] or unused
    parts,  # [programs, C] fp32: each program's partial sum of dbias
    N,
    C,
    x_stride,
    HAS_BIAS: tl.constexpr,
    WANT_PARTS: tl.constexpr,
    WANT_Y: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    program = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_row = columns < C
    if HAS_BIAS:
        shift = tl.load(bias + columns, mask=in_row, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK_C], dtype=tl.float32)
    for start in range(program * BLOCK_N, N, tl.num_programs(0) * BLOCK_N):
        rows = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        mask = (rows < N)[:, None] & in_row[None, :]
        u = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        gradient = tl.load(dy + rows[:, None] * C + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            u += shift[None, :]
        value, derivative = activated(u, KIND, EXACT=x.dtype.element_ty == tl.float32)
        out = gradient * derivative
        tl.store(dx + rows[:, None] * C + columns[None, :], out.to(dx.dtype.element_ty), mask=mask)
        if WANT_Y:
            tl.store(y + rows[:, None] * C + columns[None, :], value.to(y.dtype.element_ty), mask=mask)
        if WANT_PARTS:
            total += tl.sum(out, axis=0)
    if WANT_PARTS:
        tl.store(parts + program.to(tl.int64) * C + columns, total, mask=in_row)


def _tile(columns: int) -> dict[str, int]:
    """A stripe of up to 512 columns, and rows that make 4096 elements of it."""
    block_c = min(512, next_power_of_2(columns))
    return {"BLOCK_N": max(1, 4096 // max(64, block_c)), "BLOCK_C": block_c, "num_warps": 4}


def bias_gelu_forward_triton(x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    rows = as_rows(x)
    count, columns = rows.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if count == 0:
        return y
    tile = _tile(columns)
    with on_device(x):
        _fwd_kernel[(cdiv(count, tile["BLOCK_N"]), cdiv(columns, tile["BLOCK_C"]))](
            rows,
            rows if bias is None else bias.contiguous(),
            y,
            count,
            columns,
            rows.stride(0),
            HAS_BIAS=bias is not None,
            KIND=kind,
            **tile,
        )
    return y


def bias_gelu_backward_triton(
    dy: Tensor, x: Tensor, bias: Tensor | None, kind: str, want_dbias: bool, want_y: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows, dy = as_rows(x), dy.contiguous()
    count, columns = rows.shape
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y = torch.empty(x.shape if want_y else 0, dtype=x.dtype, device=x.device)
    dbias = gradient_like(bias, want_dbias, x)
    if count == 0:
        return dx, dbias.zero_(), y
    tile = _tile(columns)
    stripes = cdiv(columns, tile["BLOCK_C"])
    most = max(1, _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(x) // stripes)
    programs = min(cdiv(count, tile["BLOCK_N"]), most)
    parts = torch.empty(1, programs if want_dbias else 0, columns, dtype=torch.float32, device=x.device)
    with on_device(x):
        _bwd_kernel[(programs, stripes)](
            dy,
            rows,
            rows if bias is None else bias.contiguous(),
            dx,
            y if want_y else dx,
            parts,
            count,
            columns,
            rows.stride(0),
            HAS_BIAS=bias is not None,
            WANT_PARTS=want_dbias,
            WANT_Y=want_y,
            KIND=kind,
            **tile,
        )
        if want_dbias:
            sum_parts(parts, [dbias])
    return dx, dbias, y


def compile_signatures(columns: int, element: str, parameter: str, kind: str) -> list[dict[str, object]]:
    """Every kernel as the launchers above compile it for rows of ``columns`` elements of Triton type ``element``."""
    x, p = f"*{element}", f"*{parameter}"
    sizes = {"N": "i32", "C": "i32", "x_stride": "i32"}
    forward = {"x": x, "bias": p, "y": x, **sizes}
    backward = {"dy": x, "x": x, "bias": p, "dx": x, "y": x, "parts": "*fp32", **sizes}
    tile, constants = _tile(columns), {"HAS_BIAS": True, "KIND": kind}
    return [
        ahead_of_time(_fwd_kernel, forward, tile, **constants),
        ahead_of_time(_bwd_kernel, backward, tile, WANT_PARTS=True, WANT_Y=True, **constants),
        compile_signature(parameter, 1),
    ]
