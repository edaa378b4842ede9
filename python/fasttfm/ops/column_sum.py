"""``column_sum``: the sum over rows, which is the gradient of a linear layer's bias."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.column_sum import reference
from fasttfm.kernels.common.rows import readable_rows
from fasttfm.ops.core import checks
from fasttfm.ops.core.arguments import checked, converted
from fasttfm.ops.core.backends import (
    Backend,
    dtype_name,
    from_triton,
    refuse_cuda,
    refuse_cuda_rows,
    refuse_native_cpu,
    refuse_triton,
    torch_reference,
    triton_absent,
)
from fasttfm.ops.core.declare import LinearOp

NAME = "column_sum"


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
    checks.check_floating(NAME, "x", x)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise checks.bad_value(NAME, "x", "at least one dimension and one column", f"shape {tuple(x.shape)}")
    dtype = x.dtype if dtype is None else dtype
    if dtype not in checks.FLOATING:
        raise checks.bad_type(NAME, "dtype", ", ".join(dtype_name(known) for known in checks.FLOATING), dtype)
    if (dtype == torch.float64) != (x.dtype == torch.float64):
        raise checks.bad_type(NAME, "dtype", "float64 if, and only if, x is", dtype_name(dtype))
    return OP(x, dtype, backend=backend)


# ---- the native core: CPU and CUDA -----------------------------------------------------------------------------------


def _forward_native(x: Tensor, dtype: torch.dtype) -> Tensor:
    core, rows = _native.core(), readable_rows(x)
    workspace = torch.empty(core.column_sum_workspace(rows), dtype=torch.float32, device=x.device)
    # The CPU sums in fp32 and leaves the rounding to torch.
    total = torch.empty(x.shape[-1], dtype=dtype if x.is_cuda else torch.float32, device=x.device)
    core.column_sum(rows, total, workspace)
    return total if total.dtype == dtype else total.to(dtype)


# ---- backends --------------------------------------------------------------------------------------------------------


def _refuse_cuda(x: Tensor, *_: Any) -> str | None:
    return refuse_cuda(x) or refuse_cuda_rows((x,))


# The CPU core comes before Triton, so that Triton's interpreter runs on CPU tensors only if it is requested by name.
# The gradient is a view, which no backend could do better.
_backward = reference.column_sum_backward
OP = LinearOp(
    NAME,
    inputs=(checked("x"),),
    options=(converted("dtype", "ScalarType"),),
    output=lambda x, dtype, *_: x.new_empty(x.shape[-1], dtype=dtype),
    adjoint=lambda dsum, shape, dtype, *_: _backward(dsum, shape, dtype),
    chosen_by=("dtype",),
    backends=(
        Backend("cpu", _native.missing, refuse_native_cpu, _forward_native, _backward),
        Backend("cuda", _native.missing_cuda, _refuse_cuda, _forward_native, _backward),
        Backend("triton", triton_absent, refuse_triton, from_triton(NAME, "column_sum_triton"), _backward),
        torch_reference(reference.column_sum, _backward),
    ),
)
column_sum_op = OP.forward  # other ops call it inside their backward, without autograd
