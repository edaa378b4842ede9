"""RMSNorm in Triton. N rows of C columns; the formulas are in reference.py.

Forward: a program takes BLOCK_N whole rows. Backward: persistent programs iterate over the rows and keep partial sums
of dweight in registers; a second, small kernel adds them in a fixed order. Every element of x and dy is read once. The
number of programs depends only on the device, so repeated calls give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.common.launch import ahead_of_time, cdiv, multiprocessors, on_device
from fasttfm.kernels.common.rows import as_rows, contiguous_like, gradient_like
from fasttfm.kernels.common.triton.launcher import launched_kernel
from fasttfm.kernels.common.triton.normalize import norm_backward_tile, norm_forward_tile
from fasttfm.kernels.common.triton.sum_parts import compile_signature, sum_parts

_PROGRAMS_PER_MULTIPROCESSOR = 4


@launched_kernel
@triton.jit
def _fwd_kernel(
    x,  # [N, C], rows x_stride apart
    weight,  # [C] or unused
    y,  # [N, C]
    rstd,  # [N] fp32
    N,
    C,
    x_stride,
    eps,
    HAS_WEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_C)
    in_row = columns < C
    mask = (rows < N)[:, None] & in_row[None, :]
    value = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=1) / C + eps)
    tl.store(rstd + rows, scale, mask=rows < N)
    out = value * scale[:, None]
    if HAS_WEIGHT:
        out = out * tl.load(weight + columns, mask=in_row, other=0.0).to(tl.float32)[None, :]
    tl.store(y + rows[:, None] * C + columns[None, :], out.to(y.dtype.element_ty), mask=mask)


@launched_kernel
@triton.jit
def _bwd_kernel(
    dy,  # [N, C]
    x,  # [N, C], rows x_stride apart
    weight,  # [C] or unused
    rstd,  # [N] fp32
    dx,  # [N, C]
    parts,  # [1, programs, C] fp32: each program's partial sum of dweight
    N,
    C,
    x_stride,
    HAS_WEIGHT: tl.constexpr,
    WANT_PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK_C)
    in_row = columns < C
    if HAS_WEIGHT:
        factor = tl.load(weight + columns, mask=in_row, other=0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK_C], dtype=tl.float32)
    for start in range(program * BLOCK_N, N, tl.num_programs(0) * BLOCK_N):
        rows = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        mask = (rows < N)[:, None] & in_row[None, :]
        value = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        gradient = tl.load(dy + rows[:, None] * C + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(rstd + rows, mask=rows < N, other=0.0)
        xhat = value * scale[:, None]
        g = gradient
        if HAS_WEIGHT:
            g = gradient * factor[None, :]
        out = scale[:, None] * (g - xhat * (tl.sum(g * xhat, axis=1) / C)[:, None])
        tl.store(dx + rows[:, None] * C + columns[None, :], out.to(dx.dtype.element_ty), mask=mask)
        if WANT_PARTS:
            dweight += tl.sum(gradient * xhat, axis=0)
    if WANT_PARTS:
        tl.store(parts + program.to(tl.int64) * C + columns, dweight, mask=in_row)


def rms_norm_forward_triton(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    rows = as_rows(x)
    count, columns = rows.shape
    y = contiguous_like(x)
    rstd = torch.empty(count, dtype=torch.float32, device=x.device)
    if count == 0:
        return y, rstd
    tile = norm_forward_tile(columns)
    with on_device(x):
        _fwd_kernel[(cdiv(count, tile["BLOCK_N"]),)](
            rows,
            rows if weight is None else weight.contiguous(),
            y,
            rstd,
            count,
            columns,
            rows.stride(0),
            eps,
            HAS_WEIGHT=weight is not None,
            **tile,
        )
    return y, rstd


def rms_norm_backward_triton(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, want_dweight: bool
) -> tuple[Tensor, Tensor]:
    rows, dy = as_rows(x), dy.contiguous()
    count, columns = rows.shape
    dx = contiguous_like(x)
    dweight = gradient_like(weight, want_dweight, x)
    if count == 0:
        return dx, dweight.zero_()
    tile = norm_backward_tile(columns)
    programs = min(cdiv(count, tile["BLOCK_N"]), _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(x))
    parts = torch.empty(1, programs if want_dweight else 0, columns, dtype=torch.float32, device=x.device)
    with on_device(x):
        _bwd_kernel[(programs,)](
            dy,
            rows,
            rows if weight is None else weight.contiguous(),
            rstd,
            dx,
            parts,
            count,
            columns,
            rows.stride(0),
            HAS_WEIGHT=weight is not None,
            WANT_PARTS=want_dweight,
            **tile,
        )
        if want_dweight:
            sum_parts(parts, [dweight])
    return dx, dweight


def compile_signatures(columns: int, element: str, parameter: str) -> list[dict[str, object]]:
    """Every kernel as the launchers compile it for rows of ``columns`` elements of Triton type ``element``."""
    x, p, f = f"*{element}", f"*{parameter}", "*fp32"
    sizes = {"N": "i32", "C": "i32", "x_stride": "i32"}
    forward = {"x": x, "weight": p, "y": x, "rstd": f, **sizes, "eps": "fp32"}
    backward = {"dy": x, "x": x, "weight": p, "rstd": f, "dx": x, "parts": f, **sizes}
    return [
        ahead_of_time(_fwd_kernel, forward, norm_forward_tile(columns), HAS_WEIGHT=True),
        ahead_of_time(_bwd_kernel, backward, norm_backward_tile(columns), HAS_WEIGHT=True, WANT_PARTS=True),
        compile_signature(parameter, count=1),
    ]
