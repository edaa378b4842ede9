"""LayerNorm of GELU(x + linear_bias) in Triton. N rows of C columns; the formulas are in reference.py.

Forward: a program takes BLOCK_N whole rows. Backward: persistent programs iterate over the rows and keep partial sums
of the three gradients in registers; a second, small kernel adds them in a fixed order. Every element of x and dy is
read once. The number of programs depends only on the device, so the same call gives the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.common.launch import ahead_of_time, cdiv, multiprocessors, on_device
from fasttfm.kernels.common.rows import as_rows, gradient_like
from fasttfm.kernels.common.triton.activation import activated
from fasttfm.kernels.common.triton.launcher import launched_kernel
from fasttfm.kernels.common.triton.normalize import normalized, normalized_gradient, row_tile
from fasttfm.kernels.common.triton.sum_parts import compile_signature, sum_parts

_PROGRAMS_PER_MULTIPROCESSOR = 4


@launched_kernel
@triton.jit
def _fwd_kernel(
    x,  # [N, C], rows x_stride apart
    linear_bias,  # [C] or unused
    weight,  # [C] or unused
    bias,  # [C] or unused
    y,  # [N, C]
    statistics,  # [2, N] fp32: mean, rstd
    N,
    C,
    x_stride,
    eps,
    HAS_LINEAR_BIAS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_C)
    in_row = columns < C
    mask = (rows < N)[:, None] & in_row[None, :]
    u = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_LINEAR_BIAS:
        u += tl.load(linear_bias + columns, mask=in_row, other=0.0).to(tl.float32)[None, :]
    h, _ = activated(u, KIND, EXACT=x.dtype.element_ty == tl.float32)  # zero past the row's end
    out = normalized(h, rows, columns, weight, bias, statistics, N, C, eps, HAS_WEIGHT, HAS_BIAS)
    tl.store(y + rows[:, None] * C + columns[None, :], out.to(y.dtype.element_ty), mask=mask)


@launched_kernel
@triton.jit
def _bwd_kernel(
    dy,  # [N, C]
    x,  # [N, C], rows x_stride apart
    linear_bias,  # [C] or unused
    weight,  # [C] or unused
    statistics,  # [2, N] fp32: mean, rstd
    dx,  # [N, C]
    parts,  # [3, programs, C] fp32: each program's partial sums of dlinear_bias, dweight and dbias
    N,
    C,
    x_stride,
    HAS_LINEAR_BIAS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    WANT_PARTS: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    columns = tl.arange(0, BLOCK_C)
    in_row = columns < C
    if HAS_LINEAR_BIAS:
        shift = tl.load(linear_bias + columns, mask=in_row, other=0.0).to(tl.float32)
    if HAS_WEIGHT:
        scale = tl.load(weight + columns, mask=in_row, other=0.0).to(tl.float32)
    dlinear_bias = tl.zeros([BLOCK_C], dtype=tl.float32)
    dweight = tl.zeros([BLOCK_C], dtype=tl.float32)
    dbias = tl.zeros([BLOCK_C], dtype=tl.float32)
    for start in range(program * BLOCK_N, N, programs * BLOCK_N):
        rows = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        in_rows = rows < N
        mask = in_rows[:, None] & in_row[None, :]
        u = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        gradient = tl.load(dy + rows[:, None] * C + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        if HAS_LINEAR_BIAS:
            u += shift[None, :]
        h, derivative = activated(u, KIND, EXACT=x.dtype.element_ty == tl.float32)
        scaled = gradient
        if HAS_WEIGHT:
            scaled = gradient * scale[None, :]
        hhat, out = normalized_gradient(h, scaled, rows, columns, statistics, N, C)
        out = out * derivative
        tl.store(dx + rows[:, None] * C + columns[None, :], out.to(dx.dtype.element_ty), mask=mask)
        if WANT_PARTS:
            dlinear_bias += tl.sum(out, axis=0)
            dweight += tl.sum(gradient * hhat, axis=0)
            dbias += tl.sum(gradient, axis=0)
    if WANT_PARTS:
        part = program.to(tl.int64) * C + columns
        step = programs.to(tl.int64) * C
        tl.store(parts + part, dlinear_bias, mask=in_row)
        tl.store(parts + step + part, dweight, mask=in_row)
        tl.store(parts + 2 * step + part, dbias, mask=in_row)


def _forward_tile(columns: int) -> dict[str, int]:
    return row_tile(columns, elements=4096, per_thread=16)


def _backward_tile(columns: int) -> dict[str, int]:
    return row_tile(columns, elements=2048, per_thread=8)


def gelu_layer_norm_forward_triton(
    x: Tensor, linear_bias: Tensor | None, weight: Tensor | None, bias: Tensor | None, kind: str, eps: float
) -> tuple[Tensor, Tensor]:
    rows = as_rows(x)
    count, columns = rows.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    statistics = torch.empty(2, count, dtype=torch.float32, device=x.device)
    if count == 0:
        return y, statistics
    tile = _forward_tile(columns)
    with on_device(x):
        _fwd_kernel[(cdiv(count, tile["BLOCK_N"]),)](
            rows,
            *(rows if parameter is None else parameter.contiguous() for parameter in (linear_bias, weight, bias)),
            y,
            statistics,
            count,
            columns,
            rows.stride(0),
            eps,
            HAS_LINEAR_BIAS=linear_bias is not None,
            HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None,
            KIND=kind,
            **tile,
        )
    return y, statistics


def gelu_layer_norm_backward_triton(
    dy: Tensor,
    x: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
    kind: str,
    *needed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, dy = as_rows(x), dy.contiguous()
    count, columns = rows.shape
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dlinear_bias, dweight, dbias = sums = [
        gradient_like(parameter, want, x) for parameter, want in zip((linear_bias, weight, bias), needed, strict=True)
    ]
    if count == 0:
        return dx, dlinear_bias.zero_(), dweight.zero_(), dbias.zero_()
    tile = _backward_tile(columns)
    programs = min(cdiv(count, tile["BLOCK_N"]), _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(x))
    parts = torch.empty(3, programs if any(needed) else 0, columns, dtype=torch.float32, device=x.device)
    with on_device(x):
        _bwd_kernel[(programs,)](
            dy,
            rows,
            *(rows if parameter is None else parameter.contiguous() for parameter in (linear_bias, weight)),
            statistics,
            dx,
            parts,
            count,
            columns,
            rows.stride(0),
            HAS_LINEAR_BIAS=linear_bias is not None,
            HAS_WEIGHT=weight is not None,
            WANT_PARTS=any(needed),
            KIND=kind,
            enable_fp_fusion=columns > 1,  # a single column's g - mean(g) is zero only if both products are rounded
            **tile,
        )
        if any(needed):
            sum_parts(parts, sums)
    return dx, dlinear_bias, dweight, dbias


def compile_signatures(columns: int, element: str, parameter: str, kind: str) -> list[dict[str, object]]:
    """Every kernel as the launchers above compile it for rows of ``columns`` elements of Triton type ``element``."""
    x, p, f = f"*{element}", f"*{parameter}", "*fp32"
    sizes = {"N": "i32", "C": "i32", "x_stride": "i32"}
    forward = {"x": x, "linear_bias": p, "weight": p, "bias": p, "y": x, "statistics": f, **sizes, "eps": "fp32"}
    backward = {"dy": x, "x": x, "linear_bias": p, "weight": p, "statistics": f, "dx": x, "parts": f, **sizes}
    constants = {"HAS_LINEAR_BIAS": True, "HAS_WEIGHT": True, "KIND": kind}
    options = {
        "allow_spills": columns > 4096
    }  # one program's rows, sums and parameters are more than all registers hold
    return [
        ahead_of_time(_fwd_kernel, forward, _forward_tile(columns), HAS_BIAS=True, **constants),
        ahead_of_time(_bwd_kernel, backward, _backward_tile(columns), options=options, WANT_PARTS=True, **constants),
        compile_signature(parameter, 3),
    ]
