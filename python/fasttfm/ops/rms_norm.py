"""``rms_norm``: RMSNorm over the last dimension, for any leading shape."""

from __future__ import annotations

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common.rows import contiguous_like, contiguous_rows, gradient_like, readable_rows
from fasttfm.kernels.rms_norm import reference
from fasttfm.ops.core.arguments import like_first, number, parameter, row_statistics, rows
from fasttfm.ops.core.backends import (
    native_cpu,
    native_cuda,
    refuse_backward_memory,
    refuse_columns,
    torch_reference,
    triton_kernels,
)
from fasttfm.ops.core.declare import Op
from fasttfm.ops.layer_norm import one_type


def rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6, backend: str | None = None) -> Tensor:
    """Divides each row of ``x`` by its root mean square and scales it.

    Args:
        x: ``[..., C]``, fp32, bf16 or fp16 (fp64 on the reference backend). Strided rows are read in place.
        weight: ``[C]`` or None for 1. May differ from ``x`` in precision: fp32 next to bf16 activations is usual.
        eps: Added to the mean of the squares.
        backend: Requests one backend; by default the first that supports the call.

    Returns:
        ``[..., C]`` in ``x``'s type, contiguous. Statistics are always fp32, so autocast does not change the op.
    """
    y: Tensor = OP(x, weight, eps, backend=backend)
    return y


def _forward_native(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    y, rstd = OP.make_outputs(x)
    _native.core().rms_norm_forward(readable_rows(x), *one_type(x, weight), y, rstd, eps)
    return y, rstd


def _backward_native(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, want_dweight: bool
) -> tuple[Tensor, Tensor]:
    core = _native.core()
    dx, dweight = contiguous_like(x), gradient_like(weight, want_dweight, x)
    # The CPU reads and sums in fp32 and leaves the rounding to torch.
    total = dweight if x.is_cuda else dweight.float()
    read = weight if x.is_cuda else _native.as_parameter(weight, torch.float32)
    x = readable_rows(x)
    workspace = torch.empty(core.rms_norm_backward_workspace(x), dtype=torch.float32, device=x.device)
    core.rms_norm_backward(contiguous_rows(dy), x, read, rstd, dx, total if want_dweight else None, workspace)
    return dx, total.to(dweight.dtype)


_refuse_columns = refuse_columns(8192)  # both GPU backends keep whole rows in registers

OP = Op(
    "rms_norm",
    inputs=(rows("x"), parameter("weight")),
    options=(number("eps"),),
    outputs=(like_first("y"), row_statistics("rstd")),
    saves=("x", "weight", "rstd"),
    gradients=("x", "weight"),
    instead="torch.nn.functional.rms_norm",
    backends=(
        native_cpu(_forward_native, _backward_native),
        native_cuda(
            _forward_native, _backward_native, refuse=_refuse_columns, refuse_on_gpu=refuse_backward_memory("rms_norm")
        ),
        triton_kernels("rms_norm", refuse=_refuse_columns),
        torch_reference(reference.rms_norm_forward, reference.rms_norm_backward),
    ),
)
