"""dropout_add_layer_norm in Triton. N rows of C columns; the formulas are in reference.py.

Forward: a program takes BLOCK_N whole rows. Backward: persistent programs iterate over the rows and keep partial sums
over rows in registers; a second, small kernel adds them in a fixed order. Every element is read once. The number of
programs depends only on the device, so repeated calls give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.common import philox
from fasttfm.kernels.common.launch import ahead_of_time, cdiv, multiprocessors, on_device
from fasttfm.kernels.common.rows import as_rows, contiguous_like, empty_output, gradient_like
from fasttfm.kernels.common.triton.launcher import launched_kernel
from fasttfm.kernels.common.triton.normalize import normalized, normalized_gradient, row_tile
from fasttfm.kernels.common.triton.packed import row_position
from fasttfm.kernels.common.triton.philox import kept
from fasttfm.kernels.common.triton.sum_parts import compile_signature, sum_parts

_PROGRAMS_PER_MULTIPROCESSOR = 4


@triton.jit
def _dropout(
    value,  # [BLOCK_N, BLOCK_C] fp32
    rows,  # [BLOCK_N] int64
    seed,
    cu_seqlens,
    sequences,
    tokens_per_sequence,
    threshold,
    scale,
    PACKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    sequence, token = row_position(rows, cu_seqlens, sequences, tokens_per_sequence, PACKED)
    keep = kept(tl.load(seed), sequence, token, threshold, 0, BLOCK_N, BLOCK_C)
    return tl.where(keep, value * scale, 0.0)


@launched_kernel
@triton.jit
def _fwd_kernel(
    x,  # [N, C], rows x_stride apart
    residual,  # [N, C], rows residual_stride apart
    weight,  # [C] or unused
    bias,  # [C] or unused
    linear_bias,  # [C] or unused
    y,  # [N, C]
    z,  # [N, C] or unused, in the residual's type
    statistics,  # [2, N] fp32: mean, rstd
    seed,  # [1] int64 or unused
    cu_seqlens,  # [sequences + 1] int32 or unused
    N,
    C,
    x_stride,
    residual_stride,
    eps,
    sequences,
    tokens_per_sequence,
    threshold,
    scale,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LINEAR_BIAS: tl.constexpr,
    WANT_Z: tl.constexpr,
    DROPOUT: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_C)
    in_row = columns < C
    mask = (rows < N)[:, None] & in_row[None, :]
    branch = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    stream = tl.load(residual + rows[:, None] * residual_stride + columns[None, :], mask=mask, other=0.0)
    if HAS_LINEAR_BIAS:
        branch += tl.load(linear_bias + columns, mask=in_row, other=0.0).to(tl.float32)[None, :]
    if DROPOUT:
        branch = _dropout(
            branch,
            rows,
            seed,
            cu_seqlens,
            sequences,
            tokens_per_sequence,
            threshold,
            scale,
            PACKED,
            BLOCK_N,
            BLOCK_C,
        )
    added = (stream.to(tl.float32) + branch).to(residual.dtype.element_ty)
    if WANT_Z:
        tl.store(z + rows[:, None] * C + columns[None, :], added, mask=mask)
    value = added.to(tl.float32)
    out = normalized(value, rows, columns, weight, bias, statistics, N, C, eps, HAS_WEIGHT, HAS_BIAS)
    tl.store(y + rows[:, None] * C + columns[None, :], out.to(y.dtype.element_ty), mask=mask)


@launched_kernel
@triton.jit
def _bwd_kernel(
    dy,  # [N, C]
    dz,  # [N, C] or unused, in the residual's type
    z,  # [N, C], in the residual's type
    weight,  # [C] or unused
    statistics,  # [2, N] fp32: mean, rstd
    dresidual,  # [N, C]
    dx,  # [N, C] or unused
    parts,  # [3, programs, C] fp32: each program's partial sums of dweight, dbias and dlinear_bias
    seed,  # [1] int64 or unused
    cu_seqlens,  # [sequences + 1] int32 or unused
    N,
    C,
    sequences,
    tokens_per_sequence,
    threshold,
    scale,
    HAS_WEIGHT: tl.constexpr,
    HAS_DZ: tl.constexpr,
    WANT_DX: tl.constexpr,
    WANT_PARTS: tl.constexpr,
    WANT_DLINEAR_BIAS: tl.constexpr,
    DROPOUT: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    columns = tl.arange(0, BLOCK_C)
    in_row = columns < C
    if HAS_WEIGHT:
        gain = tl.load(weight + columns, mask=in_row, other=0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK_C], dtype=tl.float32)
    dbias = tl.zeros([BLOCK_C], dtype=tl.float32)
    dlinear_bias = tl.zeros([BLOCK_C], dtype=tl.float32)
    for start in range(program * BLOCK_N, N, programs * BLOCK_N):
        rows = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        in_rows = rows < N
        mask = in_rows[:, None] & in_row[None, :]
        at = rows[:, None] * C + columns[None, :]
        gradient = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(z + at, mask=mask, other=0.0).to(tl.float32)
        scaled = gradient
        if HAS_WEIGHT:
            scaled = gradient * gain[None, :]
        xhat, out = normalized_gradient(value, scaled, rows, columns, statistics, N, C)
        if HAS_DZ:
            out += tl.load(dz + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(dresidual + at, out.to(dresidual.dtype.element_ty), mask=mask)
        if DROPOUT:
            out = _dropout(
                out,
                rows,
                seed,
                cu_seqlens,
                sequences,
                tokens_per_sequence,
                threshold,
                scale,
                PACKED,
                BLOCK_N,
                BLOCK_C,
            )
        if WANT_DX:
            tl.store(dx + at, out.to(dx.dtype.element_ty), mask=mask)
        if WANT_PARTS:
            dweight += tl.sum(gradient * xhat, axis=0)
            dbias += tl.sum(gradient, axis=0)
        if WANT_DLINEAR_BIAS:
            dlinear_bias += tl.sum(out, axis=0)  # rstd, and so the gradient, is zero past the last row
    part = program.to(tl.int64) * C + columns
    if WANT_PARTS:
        tl.store(parts + part, dweight, mask=in_row)
        tl.store(parts + programs.to(tl.int64) * C + part, dbias, mask=in_row)
    if WANT_DLINEAR_BIAS:
        tl.store(parts + 2 * programs.to(tl.int64) * C + part, dlinear_bias, mask=in_row)


# One draw of dropout decides 16 columns.
def _forward_tile(columns: int) -> dict[str, int]:
    return row_tile(columns, elements=4096, per_thread=16, least_columns=16)


def _backward_tile(columns: int) -> dict[str, int]:
    return row_tile(columns, elements=2048, per_thread=8, least_columns=16)


def _dropout_arguments(
    x: Tensor, cu_seqlens: Tensor | None, seed: Tensor | None, p: float
) -> tuple[dict[str, Any], dict[str, bool]]:
    """The dropout arguments of both kernels, and their compile-time flags."""
    threshold = philox.threshold(p)
    arguments = {
        "seed": x if seed is None else seed,
        "cu_seqlens": x if cu_seqlens is None else cu_seqlens,
        "sequences": 1 if cu_seqlens is None else len(cu_seqlens) - 1,
        "tokens_per_sequence": x.shape[-2] if x.dim() > 1 else 1,
        "threshold": threshold,
        "scale": philox.scale(threshold),
    }
    return arguments, {"DROPOUT": seed is not None, "PACKED": cu_seqlens is not None}


def dropout_add_layer_norm_forward_triton(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    linear_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    seed: Tensor | None,
    p: float,
    eps: float,
    want_z: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, residual_rows = as_rows(x), as_rows(residual)
    count, columns = rows.shape
    y = contiguous_like(x)
    z = contiguous_like(residual) if want_z else empty_output(residual)
    statistics = torch.empty(2, count, dtype=torch.float32, device=x.device)
    if count == 0:
        return y, z, statistics
    tile = _forward_tile(columns)
    dropout, flags = _dropout_arguments(x, cu_seqlens, seed, p)
    with on_device(x):
        _fwd_kernel[(cdiv(count, tile["BLOCK_N"]),)](
            rows,
            residual_rows,
            rows if weight is None else weight.contiguous(),
            rows if bias is None else bias.contiguous(),
            rows if linear_bias is None else linear_bias.contiguous(),
            y,
            z,
            statistics,
            N=count,
            C=columns,
            x_stride=rows.stride(0),
            residual_stride=residual_rows.stride(0),
            eps=eps,
            **dropout,
            HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None,
            HAS_LINEAR_BIAS=linear_bias is not None,
            WANT_Z=want_z,
            **flags,
            **tile,
        )
    return y, z, statistics


def dropout_add_layer_norm_backward_triton(
    dy: Tensor,
    dz: Tensor | None,
    z: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    linear_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    seed: Tensor | None,
    p: float,
    needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    want_dx = seed is not None or dy.dtype != z.dtype
    want_dweight, want_dbias, want_dlinear_bias = needed
    dresidual = contiguous_like(z)
    dx = contiguous_like(dy) if want_dx else empty_output(dy)
    dweight = gradient_like(weight, want_dweight, dy)
    dbias = gradient_like(bias, want_dbias, dy)
    dlinear_bias = gradient_like(linear_bias, want_dlinear_bias, dy)
    count, columns = statistics.shape[1], z.shape[-1]
    if count == 0:
        return dresidual, dx, dweight.zero_(), dbias.zero_(), dlinear_bias.zero_()
    tile = _backward_tile(columns)
    programs = min(cdiv(count, tile["BLOCK_N"]), _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(z))
    parts = torch.empty(3, programs if any(needed) else 0, columns, dtype=torch.float32, device=z.device)
    dropout, flags = _dropout_arguments(z, cu_seqlens, seed, p)
    with on_device(z):
        _bwd_kernel[(programs,)](
            dy,
            z if dz is None else dz,
            z,
            z if weight is None else weight.contiguous(),
            statistics,
            dresidual,
            dx,
            parts,
            N=count,
            C=columns,
            **dropout,
            HAS_WEIGHT=weight is not None,
            HAS_DZ=dz is not None,
            WANT_DX=want_dx,
            WANT_PARTS=want_dweight or want_dbias,
            WANT_DLINEAR_BIAS=want_dlinear_bias,
            **flags,
            enable_fp_fusion=columns > 1,  # a single column's g - mean(g) is zero only if both are rounded
            **tile,
        )
        if any(needed):
            sum_parts(parts, (dweight, dbias, dlinear_bias))
    return dresidual, dx, dweight, dbias, dlinear_bias


def compile_signatures(columns: int, element: str, stream: str, parameter: str) -> list[dict[str, object]]:
    """Every kernel as the launchers compile it for rows of ``columns`` elements, ``stream`` the residual's type."""
    x, r, w, f = f"*{element}", f"*{stream}", f"*{parameter}", "*fp32"
    sizes = {"N": "i32", "C": "i32"}
    dropout = {
        "seed": "*i64",
        "cu_seqlens": "*i32",
        "sequences": "i32",
        "tokens_per_sequence": "i32",
        "threshold": "i32",
        "scale": "fp32",
    }
    parameters = {"weight": w, "bias": w, "linear_bias": w}
    forward = {"x": x, "residual": r, **parameters, "y": x, "z": r, "statistics": f, **sizes, **dropout}
    forward |= {"x_stride": "i32", "residual_stride": "i32", "eps": "fp32"}
    backward = {"dy": x, "dz": r, "z": r, "weight": w, "statistics": f, "dresidual": r, "dx": x, "parts": f}
    flags = {"HAS_WEIGHT": True, "DROPOUT": True, "PACKED": True}
    forward_flags = {**flags, **dict.fromkeys(("HAS_BIAS", "HAS_LINEAR_BIAS", "WANT_Z"), True)}
    backward_flags = {**flags, **dict.fromkeys(("HAS_DZ", "WANT_DX", "WANT_PARTS", "WANT_DLINEAR_BIAS"), True)}
    narrow = {"allow_spills": columns <= 64}  # four words on sm_80
    wide = {"allow_spills": columns > 4096}  # 8 elements a thread and three sums: a few words of the widest rows
    backward |= {**sizes, **dropout}
    return [
        ahead_of_time(_fwd_kernel, forward, _forward_tile(columns), options=narrow, **forward_flags),
        ahead_of_time(_bwd_kernel, backward, _backward_tile(columns), options=wide, **backward_flags),
        compile_signature(parameter, count=3),
    ]
