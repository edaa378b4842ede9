"""LayerNorm in Triton. N rows of C columns; the formulas are in reference.py.

Forward: a program takes BLOCK_N whole rows. Backward: persistent programs iterate over the rows and keep partial sums
of dweight and dbias in registers; a second, small kernel adds them in a fixed order. Every element of x and dy is read
once. The number of programs depends only on the device, so repeated calls give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.common.launch import ahead_of_time, cdiv, multiprocessors, on_device
from fasttfm.kernels.common.rows import as_rows, contiguous_like, gradient_like
from fasttfm.kernels.common.triton.launcher import launched_kernel
from fasttfm.kernels.common.triton.normalize import (
    norm_backward_tile,
    norm_forward_tile,
    normalized,
    normalized_gradient,
)
from fasttfm.kernels.common.triton.sum_parts import compile_signature, sum_parts

_PROGRAMS_PER_MULTIPROCESSOR = 4


@launched_kernel
@triton.jit
def _fwd_kernel(
    x,  # [N, C], rows x_stride apart
    weight,  # [C] or unused
    bias,  # [C] or unused
    y,  # [N, C]
    statistics,  # [2, N] fp32: mean, rstd
    N,
    C,
    x_stride,
    eps,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_C)
    in_row = columns < C
    mask = (rows < N)[:, None] & in_row[None, :]
    value = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    out = normalized(value, rows, columns, weight, bias, statistics, N, C, eps, HAS_WEIGHT, HAS_BIAS)
    tl.store(y + rows[:, None] * C + columns[None, :], out.to(y.dtype.element_ty), mask=mask)


@launched_kernel
@triton.jit
def _bwd_kernel(
    dy,  # [N, C]
    x,  # [N, C], rows x_stride apart
    weight,  # [C] or unused
    statistics,  # [2, N] fp32: mean, rstd
    dx,  # [N, C]
    parts,  # [2, programs, C] fp32: each program's partial sums of dweight and dbias
    N,
    C,
    x_stride,
    HAS_WEIGHT: tl.constexpr,
    WANT_PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    columns = tl.arange(0, BLOCK_C)
    in_row = columns < C
    if HAS_WEIGHT:
        scale = tl.load(weight + columns, mask=in_row, other=0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK_C], dtype=tl.float32)
    dbias = tl.zeros([BLOCK_C], dtype=tl.float32)
    for start in range(program * BLOCK_N, N, programs * BLOCK_N):
        rows = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        in_rows = rows < N
        mask = in_rows[:, None] & in_row[None, :]
        value = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        gradient = tl.load(dy + rows[:, None] * C + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        scaled = gradient
        if HAS_WEIGHT:
            scaled = gradient * scale[None, :]
        xhat, out = normalized_gradient(value, scaled, rows, columns, statistics, N, C)
        tl.store(dx + rows[:, None] * C + columns[None, :], out.to(dx.dtype.element_ty), mask=mask)
        if WANT_PARTS:
            dweight += tl.sum(gradient * xhat, axis=0)
            dbias += tl.sum(gradient, axis=0)
    if WANT_PARTS:
        part = program.to(tl.int64) * C + columns
        tl.store(parts + part, dweight, mask=in_row)
        tl.store(parts + programs.to(tl.int64) * C + part, dbias, mask=in_row)


def layer_norm_forward_triton(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    rows = as_rows(x)
    count, columns = rows.shape
    y = contiguous_like(x)
    statistics = torch.empty(2, count, dtype=torch.float32, device=x.device)
    if count == 0:
        return y, statistics
    tile = norm_forward_tile(columns)
    with on_device(x):
        _fwd_kernel[(cdiv(count, tile["BLOCK_N"]),)](
            rows,
            rows if weight is None else weight.contiguous(),
            rows if bias is None else bias.contiguous(),
            y,
            statistics,
            count,
            columns,
            rows.stride(0),
            eps,
            HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None,
            **tile,
        )
    return y, statistics


def layer_norm_backward_triton(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
    want_dweight: bool,
    want_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, dy = as_rows(x), dy.contiguous()
    count, columns = rows.shape
    dx = contiguous_like(x)
    dweight = gradient_like(weight, want_dweight, x)
    dbias = gradient_like(bias, want_dbias, x)
    if count == 0:
        return dx, dweight.zero_(), dbias.zero_()
    want_parts = want_dweight or want_dbias
    tile = norm_backward_tile(columns)
    programs = min(cdiv(count, tile["BLOCK_N"]), _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(x))
    parts = torch.empty(2, programs if want_parts else 0, columns, dtype=torch.float32, device=x.device)
    with on_device(x):
        _bwd_kernel[(programs,)](
            dy,
            rows,
            rows if weight is None else weight.contiguous(),
            statistics,
            dx,
            parts,
            count,
            columns,
            rows.stride(0),
            HAS_WEIGHT=weight is not None,
            WANT_PARTS=want_parts,
            enable_fp_fusion=columns > 1,  # a single column's g - mean(g) is zero only if both are rounded
            **tile,
        )
        if want_parts:
            sum_parts(parts, (dweight, dbias))
    return dx, dweight, dbias


def compile_signatures(columns: int, element: str, parameter: str) -> list[dict[str, object]]:
    """Every kernel as the launchers compile it for rows of ``columns`` elements of Triton type ``element``."""
    x, p, f = f"*{element}", f"*{parameter}", "*fp32"
    sizes = {"N": "i32", "C": "i32", "x_stride": "i32"}
    forward = {"x": x, "weight": p, "bias": p, "y": x, "statistics": f, **sizes, "eps": "fp32"}
    backward = {"dy": x, "x": x, "weight": p, "statistics": f, "dx": x, "parts": f, **sizes}
    return [
        ahead_of_time(_fwd_kernel, forward, norm_forward_tile(columns), HAS_WEIGHT=True, HAS_BIAS=True),
        ahead_of_time(_bwd_kernel, backward, norm_backward_tile(columns), HAS_WEIGHT=True, WANT_PARTS=True),
        compile_signature(parameter, count=2),
    ]
