"""``layer_norm``: LayerNorm over the last dimension, for any leading shape."""

from __future__ import annotations

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common.rows import (
    contiguous_like,
    contiguous_rows,
    empty_numbers,
    gradient_like,
    in_type,
    readable_rows,
    row_count,
)
from fasttfm.kernels.layer_norm import reference
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


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    backend: str | None = None,
) -> Tensor:
    """Normalises each row of ``x`` to zero mean and unit variance, then scales and shifts it.

    Args:
        x: ``[..., C]``, fp32, bf16 or fp16 (fp64 on the reference backend). Strided rows are read in place.
        weight: ``[C]`` or None for 1. May differ from ``x`` in precision: fp32 next to bf16 activations is usual.
        bias: ``[C]`` or None for 0.
        eps: Added to the variance.
        backend: Requests one backend; by default the first that supports the call.

    Returns:
        ``[..., C]`` in ``x``'s type, contiguous. Statistics are always fp32, so autocast does not affect the op.
    """
    y: Tensor = OP(x, weight, bias, eps, backend=backend)
    return y


# ---- the native core: CPU and CUDA -----------------------------------------------------------------------------------


def _forward_native(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    statistics = empty_numbers(x, 2, row_count(x))
    return _infer_native(x, weight, bias, eps, statistics), statistics


def _infer_native(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, statistics: Tensor | None = None
) -> Tensor:
    """y, and with ``statistics`` also their values."""
    y = contiguous_like(x)
    weight, bias = one_type(x, weight, bias)
    _native.core().layer_norm_forward(readable_rows(x), weight, bias, y, statistics, eps)
    return y


def _backward_native(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
    want_dweight: bool,
    want_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    core = _native.core()
    dx = contiguous_like(x)
    dweight, dbias = gradient_like(weight, want_dweight, x), gradient_like(bias, want_dbias, x)
    # The CPU reads and sums in fp32 and leaves the rounding to torch.
    sums = (dweight, dbias) if x.is_cuda else (in_type(dweight, torch.float32), in_type(dbias, torch.float32))
    read = weight if x.is_cuda else _native.as_parameter(weight, torch.float32)
    x = readable_rows(x)
    workspace = empty_numbers(x, core.layer_norm_backward_workspace(x))
    outputs = (sums[0] if want_dweight else None, sums[1] if want_dbias else None)
    core.layer_norm_backward(contiguous_rows(dy), x, read, statistics, dx, *outputs, workspace)
    return dx, in_type(sums[0], dweight.dtype), in_type(sums[1], dbias.dtype)


def one_type(x: Tensor, *parameters: Tensor | None, residual: Tensor | None = None) -> list[Tensor | None]:
    """Contiguous parameters of one type, as the kernels of norms read them: of x's on a GPU, if all of them and the
    residual are of that type, else fp32."""
    dtype = x.dtype if x.is_cuda else torch.float32
    for tensor in (residual, *parameters):
        if tensor is not None and tensor.dtype is not dtype:
            dtype = torch.float32
            break
    return [_native.as_parameter(parameter, dtype) for parameter in parameters]


# ---- the declaration -------------------------------------------------------------------------------------------------


_refuse_columns = refuse_columns(8192)  # both GPU backends keep whole rows in registers

OP = Op(
    "layer_norm",
    inputs=(rows("x"), parameter("weight"), parameter("bias")),
    options=(number("eps"),),
    outputs=(like_first("y"), row_statistics("statistics", 2)),
    saves=("x", "weight", "bias", "statistics"),
    gradients=("x", "weight", "bias"),
    instead="torch.nn.functional.layer_norm",
    backends=(
        native_cpu(_forward_native, _backward_native, infer=_infer_native),
        native_cuda(
            _forward_native,
            _backward_native,
            refuse=_refuse_columns,
            refuse_on_gpu=refuse_backward_memory("layer_norm"),
            infer=_infer_native,
        ),
        triton_kernels("layer_norm", refuse=_refuse_columns),
        torch_reference(reference.layer_norm_forward, reference.layer_norm_backward),
    ),
)
forward_op = OP.forward  # for composed ops
