"""``column_sum``: the sum over rows, which is the gradient of a linear layer's bias."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.column_sum import reference
from fasttfm.kernels.common.launch import multiprocessors
from fasttfm.kernels.common.rows import as_rows
from fasttfm.ops import checks
from fasttfm.ops.backends import (
    Backend,
    BackendTable,
    always,
    dtype_name,
    refuse_cuda,
    refuse_cuda_rows,
    refuse_native_cpu,
    refuse_triton,
    requested,
    triton_absent,
)
from fasttfm.ops.library import OpFunction, needs_gradient, register

OP = "column_sum"


def column_sum(x: Tensor, *, dtype: torch.dtype | None = None, backend: str | None = None) -> Tensor:
    """Adds up the rows of ``x`` in fp32 and a fixed order, and rounds the sum once.

    Args:
        x: ``[..., C]``, fp32, bf16 or fp16 (fp64 on the reference backend). Rows may be strided: they are read in
            place.
        dtype: Type of the sum; by default that of ``x``.
        backend: Requests one backend; by default the first that supports the call.

    Returns:
        ``[C]`` in ``dtype``.
    """
    checks.check_floating(OP, "x", x)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise checks.bad_value(OP, "x", "at least one dimension and one column", f"shape {tuple(x.shape)}")
    dtype = x.dtype if dtype is None else dtype
    if dtype not in checks.FLOATING:
        raise checks.bad_type(OP, "dtype", ", ".join(dtype_name(known) for known in checks.FLOATING), dtype)
    if (dtype == torch.float64) != (x.dtype == torch.float64):
        raise checks.bad_type(OP, "dtype", "float64 if, and only if, x is", dtype_name(dtype))
    TABLE.check_name(backend)
    arguments = (x, dtype, requested(backend))
    total: Tensor = _ColumnSum.apply(*arguments) if needs_gradient(x) else column_sum_op(*arguments)
    return total


class _ColumnSum(OpFunction):
    op = OP
    instead = None

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, backend: str | None) -> Tensor:
        ctx.shape, ctx.dtype = x.shape, x.dtype
        total: Tensor = column_sum_op(x, dtype, backend)
        return total

    @staticmethod
    def backward(ctx: Any, dsum: Tensor) -> tuple[Tensor, None, None]:
        return reference.column_sum_backward(dsum, ctx.shape, ctx.dtype), None, None


# ---- torch.library ---------------------------------------------------------------------------------------------------


def _forward(x: Tensor, dtype: torch.dtype, backend: str | None) -> Tensor:
    total: Tensor = TABLE.select(backend, x, dtype).forward(x, dtype)
    return total


def _forward_fake(x: Tensor, dtype: torch.dtype, backend: str | None) -> Tensor:
    return x.new_empty(x.shape[-1], dtype=dtype)


# Other ops call this inside their backward, without autograd.
column_sum_op = register("column_sum(Tensor x, ScalarType dtype, str? backend) -> Tensor", _forward, _forward_fake)


# ---- the native core: CPU and CUDA -----------------------------------------------------------------------------------

_CUDA_BLOCKS_PER_MULTIPROCESSOR = 4
_CUDA_MIN_ROWS_PER_PART = 64


def _forward_native(x: Tensor, dtype: torch.dtype) -> Tensor:
    core = _native.core()
    rows = as_rows(x)
    count, columns = rows.shape
    parts = 0
    if x.is_cuda:
        strips = -(-columns // core.column_sum_strip)
        most = _CUDA_BLOCKS_PER_MULTIPROCESSOR * multiprocessors(x) // strips
        parts = max(1, min(most, count // _CUDA_MIN_ROWS_PER_PART))
    elements = parts * columns if x.is_cuda else core.column_sum_workspace(count, columns)
    workspace = torch.empty(elements, dtype=torch.float32, device=x.device)
    total = torch.empty(columns, dtype=dtype if x.is_cuda else torch.float32, device=x.device)
    fields = {
        "x": rows.data_ptr(),
        "sum": total.data_ptr(),
        "workspace": workspace.data_ptr(),
        "rows": count,
        "columns": columns,
        "x_stride": rows.stride(0),
        "dtype": _native.DTYPE_CODES[x.dtype],
    }
    if x.is_cuda:
        core.column_sum_cuda(
            **fields,
            sum_dtype=_native.DTYPE_CODES[dtype],
            parts=parts,
            device=x.get_device(),
            stream=_native.stream(x),
        )
        return total
    core.column_sum_cpu(**fields, threads=torch.get_num_threads())
    return total.to(dtype)


# ---- backends --------------------------------------------------------------------------------------------------------


def _forward_triton(x: Tensor, dtype: torch.dtype) -> Tensor:
    from fasttfm.kernels.column_sum import triton

    total: Tensor = triton.column_sum_triton(x, dtype)
    return total


def _refuse_cuda(x: Tensor, *_: Any) -> str | None:
    return refuse_cuda(x) or refuse_cuda_rows((x,))


# The CPU core comes before Triton, so that Triton's interpreter serves a CPU tensor only when it is requested by name.
# The gradient is a view, which no backend could do better.
_backward = reference.column_sum_backward
TABLE = BackendTable(
    OP,
    (
        Backend("cpu", _native.missing, lambda x, *_: refuse_native_cpu(x), _forward_native, _backward),
        Backend("cuda", _native.missing_cuda, _refuse_cuda, _forward_native, _backward),
        Backend("triton", triton_absent, lambda x, *_: refuse_triton(x), _forward_triton, _backward),
        Backend("reference", always, lambda *_: None, reference.column_sum, _backward),
    ),
)
