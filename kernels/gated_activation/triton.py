"""Gated activations in Triton. N rows of C columns, which x has twice; the formulas are in reference.py.

A program processes a stripe of BLOCK_C columns of the gate and the same columns of up. In the forward it has one tile
of BLOCK_N rows. In the backward the programs of a stripe share its tiles and keep partial sums of dbias in registers; a
second, small kernel adds them in a fixed order. The number of programs depends only on the shape and the device, so the
same call gives the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.common.launch import ahead_of_time, cdiv, multiprocessors, next_power_of_2, on_device
from fasttfm.kernels.common.rows import as_rows, contiguous_like, gradient_like
from fasttfm.kernels.common.triton.activation import activated
from fasttfm.kernels.common.triton.launcher import launched_kernel
from fasttfm.kernels.common.triton.sum_parts import compile_signature, sum_parts

_PROGRAMS_PER_MULTIPROCESSOR = 8


@launched_kernel
@triton.jit
def _fwd_kernel(
    x,  # [N, 2 C], rows x_stride apart
    bias,  # [2 C] or unused
    y,  # [N, C]
    N,
    C,
    x_stride,
    GATE_FIRST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    gate_columns = columns if GATE_FIRST else columns + C
    up_columns = columns + C if GATE_FIRST else columns
    mask = (rows < N)[:, None] & (columns < C)[None, :]
    gate = tl.load(x + rows[:, None] * x_stride + gate_columns[None, :], mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + rows[:, None] * x_stride + up_columns[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        gate += tl.load(bias + gate_columns, mask=columns < C, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + up_columns, mask=columns < C, other=0.0).to(tl.float32)[None, :]
    value, _ = activated(gate, KIND, EXACT=x.dtype.element_ty == tl.float32)
    tl.store(y + rows[:, None] * C + columns[None, :], (value * up).to(y.dtype.element_ty), mask=mask)


@launched_kernel
@triton.jit
def _bwd_kernel(
    dy,  # [N, C]
    x,  # [N, 2 C], rows x_stride apart
    bias,  # [2 C] or unused
    dx,  # [N, 2 C]
    parts,  # [1, programs, 2 C] fp32: each program's partial sum of dbias
    N,
    C,
    x_stride,
    GATE_FIRST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WANT_PARTS: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    program = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    gate_columns = columns if GATE_FIRST else columns + C
    up_columns = columns + C if GATE_FIRST else columns
    in_row = columns < C
    if HAS_BIAS:
        gate_bias = tl.load(bias + gate_columns, mask=in_row, other=0.0).to(tl.float32)
        up_bias = tl.load(bias + up_columns, mask=in_row, other=0.0).to(tl.float32)
    gate_sum = tl.zeros([BLOCK_C], dtype=tl.float32)
    up_sum = tl.zeros([BLOCK_C], dtype=tl.float32)
    for start in range(program * BLOCK_N, N, tl.num_programs(0) * BLOCK_N):
        rows = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        mask = (rows < N)[:, None] & in_row[None, :]
        gate = tl.load(x + rows[:, None] * x_stride + gate_columns[None, :], mask=mask, other=0.0).to(tl.float32)
        up = tl.load(x + rows[:, None] * x_stride + up_columns[None, :], mask=mask, other=0.0).to(tl.float32)
        gradient = tl.load(dy + rows[:, None] * C + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            gate += gate_bias[None, :]
            up += up_bias[None, :]
        value, derivative = activated(gate, KIND, EXACT=x.dtype.element_ty == tl.float32)
        dgate = gradient * up * derivative
        dup = gradient * value
        tl.store(dx + rows[:, None] * (2 * C) + gate_columns[None, :], dgate.to(dx.dtype.element_ty), mask=mask)
        tl.store(dx + rows[:, None] * (2 * C) + up_columns[None, :], dup.to(dx.dtype.element_ty), mask=mask)
        if WANT_PARTS:
            gate_sum += tl.sum(dgate, axis=0)
            up_sum += tl.sum(dup, axis=0)
    if WANT_PARTS:
        part = parts + program.to(tl.int64) * (2 * C)
        tl.store(part + gate_columns, gate_sum, mask=in_row)
        tl.store(part + up_columns, up_sum, mask=in_row)


def _tile(columns: int) -> dict[str, int]:
    """A stripe of up to 512 columns, and rows that make 2048 elements of it."""
    block_c = min(512, next_power_of_2(columns))
    return {"BLOCK_N": max(1, 2048 // max(64, block_c)), "BLOCK_C": block_c, "num_warps": 4}


def gated_activation_forward_triton(x: Tensor, bias: Tensor | None, kind: str, gate_first: bool) -> Tensor:
    rows = as_rows(x)
    count, columns = rows.shape[0], rows.shape[1] // 2
    y = torch.empty((*x.shape[:-1], columns), dtype=x.dtype, device=x.device)
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
            GATE_FIRST=gate_first,
            HAS_BIAS=bias is not None,
            KIND=kind,
            **tile,
        )
    return y


def gated_activation_backward_triton(
    dy: Tensor, x: Tensor, bias: Tensor | None, kind: str, gate_first: bool, want_dbias: bool
) -> tuple[Tensor, Tensor]:
    rows, dy = as_rows(x), dy.contiguous()
    count, columns = rows.shape[0], rows.shape[1] // 2
    dx = contiguous_like(x)
    dbias = gradient_like(bias, want_dbias, x)
    if count == 0:
        return dx, dbias.zero_()
    tile = _tile(columns)
    stripes = cdiv(columns, tile["BLOCK_C"])
    most = max(1, _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(x) // stripes)
    programs = min(cdiv(count, tile["BLOCK_N"]), most)
    parts = torch.empty(1, programs if want_dbias else 0, 2 * columns, dtype=torch.float32, device=x.device)
    with on_device(x):
        _bwd_kernel[(programs, stripes)](
            dy,
            rows,
            rows if bias is None else bias.contiguous(),
            dx,
            parts,
            count,
            columns,
            rows.stride(0),
            GATE_FIRST=gate_first,
            HAS_BIAS=bias is not None,
            WANT_PARTS=want_dbias,
            KIND=kind,
            **tile,
        )
        if want_dbias:
            sum_parts(parts, [dbias])
    return dx, dbias


def compile_signatures(columns: int, element: str, parameter: str, kind: str) -> list[dict[str, object]]:
    """Every kernel as the launchers above compile it for ``columns`` of Triton type ``element`` in either half of x."""
    x, p = f"*{element}", f"*{parameter}"
    sizes = {"N": "i32", "C": "i32", "x_stride": "i32"}
    forward = {"x": x, "bias": p, "y": x, **sizes}
    backward = {"dy": x, "x": x, "bias": p, "dx": x, "parts": "*fp32", **sizes}
    tile, constants = _tile(columns), {"GATE_FIRST": True, "HAS_BIAS": True, "KIND": kind}
    return [
        ahead_of_time(_fwd_kernel, forward, tile, **constants),
        ahead_of_time(_bwd_kernel, backward, tile, WANT_PARTS=True, **constants),
        compile_signature(parameter, 1),
    ]
