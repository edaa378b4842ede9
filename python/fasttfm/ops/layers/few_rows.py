"""The native kernels for few rows on Hopper (kernels/few_rows) as functions of tensors: GEMMs, and the residual
addition with LayerNorm that adds up the partial sums of a GEMM.

Consecutive calls are a chain of overlapping kernels (programmatic dependent launch): each may load its parameters while
the previous kernel still runs. That kernel must not write them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common.activation import CODES
from fasttfm.kernels.common.launch import multiprocessors
from fasttfm.ops.bias_gelu import ACTIVATIONS
from fasttfm.ops.core.backends import dtype_name
from fasttfm.ops.layers.rules import MOST_FEW_ROWS
from fasttfm.ops.layers.support import missing_cuda

_ALIGNMENT = 16
_DEPENDENT = 1  # on the previous kernel: kernels/few_rows/op.h
_MOST_COLUMNS = 8192  # of a LayerNorm
_OWN_CLUSTER = 0  # as many blocks in a cluster as the tile has
_NO_NORM = (0.0, None, None, None, None, None)  # a GEMM without LayerNorms: kernels/few_rows/op.h
_NO_NORM_OF_RESIDUAL = (None, None, None)


def refuse(rows: int, device: torch.device, parameters: list[Tensor]) -> str | None:
    """Why the kernels do not support layers with these parameters for this many rows; None if they do."""
    dtypes = {p.dtype for p in parameters}
    if not 1 <= rows <= MOST_FEW_ROWS:
        return f"takes 1 to {MOST_FEW_ROWS} rows, got {rows}"
    if device.type != "cuda":
        return f"takes CUDA tensors, got {device.type}"
    if (reason := missing_cuda(device)) is not None:
        return reason
    if len(dtypes) != 1 or not dtypes <= {torch.bfloat16, torch.float16}:
        return f"takes parameters in bfloat16 or float16, got {', '.join(sorted(map(dtype_name, dtypes)))}"
    if any(size % 8 for p in parameters for size in p.shape):
        return "takes sizes that are multiples of 8"
    if any(p.dim() == 2 and min(p.shape) > _MOST_COLUMNS for p in parameters):
        return f"takes up to {_MOST_COLUMNS} columns"
    if any(p.device != device or not p.is_contiguous() or p.data_ptr() % _ALIGNMENT for p in parameters):
        return f"takes contiguous parameters on one device that start at a multiple of {_ALIGNMENT} bytes"
    return None


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None) -> Tensor:
    """``activation(x weight^T + bias)`` for ``x`` [M, K] and ``weight`` [N, K]: [M, N]."""
    y = x.new_empty(len(x), len(weight))
    tile, _ = _plan(x, weight, partial=False)
    _launch_gemm(x, weight, tile, 1, y=y, bias=bias, activation=activation)
    return y


def gemm_parts(x: Tensor, weight: Tensor) -> Tensor:
    """fp32 ``[parts, M, N]``, whose sum over the parts is ``x weight^T``: each is the sum over a part of K."""
    tile, count = _plan(x, weight, partial=True)
    parts = x.new_empty(count, len(x), len(weight), dtype=torch.float32)
    _launch_gemm(x, weight, tile, count, parts=parts)
    return parts


def add_norm(
    parts: Tensor, residual: Tensor, linear_bias: Tensor | None, norm: Any, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """``norm(z)`` in this dtype and ``z = residual + sum of parts + linear_bias``, for ``residual`` [M, N]."""
    _, rows, columns = parts.shape
    y, z = residual.new_empty(rows, columns, dtype=dtype), torch.empty_like(residual)
    _native.core().few_rows_add_norm_cuda(
        parts, residual, linear_bias, norm.weight, norm.bias, y, z, norm.eps, _DEPENDENT, *_NO_NORM_OF_RESIDUAL
    )
    return y, z


def _plan(x: Tensor, weight: Tensor, *, partial: bool) -> tuple[int, int]:
    """The tile of a GEMM, and into how many parts K is split."""
    sizes = (len(x), *weight.shape, multiprocessors(x), int(partial))
    core = _native.core()
    return core.few_rows_tile(*sizes), core.few_rows_parts(*sizes)


def _launch_gemm(
    x: Tensor,
    weight: Tensor,
    tile: int,
    count: int,
    *,
    y: Tensor | None = None,
    parts: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> None:
    code = CODES["gelu" if activation is None else ACTIVATIONS[activation]]
    _native.core().few_rows_gemm_cuda(
        x, weight, bias, y, parts, tile, _OWN_CLUSTER, count, activation is not None, code, _DEPENDENT, *_NO_NORM
    )
