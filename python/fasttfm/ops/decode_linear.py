"""``decode_linear``: a linear layer for few rows, fused with LayerNorm, activation and residual addition."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttfm.kernels.common.rows import empty_rows
from fasttfm.kernels.decode_linear import reference
from fasttfm.ops import linear
from fasttfm.ops.bias_gelu import ACTIVATIONS
from fasttfm.ops.core import checks
from fasttfm.ops.core.arguments import checked, converted
from fasttfm.ops.core.backends import Backend, from_triton, refuse_triton, torch_reference, triton_absent
from fasttfm.ops.core.declare import ForwardOp

NAME = "decode_linear"


def decode_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
    overlap: bool = False,
    backend: str | None = None,
) -> Tensor:
    """``activation(LayerNorm(x) weight^T + bias) + residual``, for inference with few rows, as in a decoding step.

    Args:
        x: ``[..., K]``, fp32, bf16 or fp16 (fp64 on the reference backend); its dtype may differ from the weight's.
        weight: ``[N, K]``.
        bias: ``[N]``.
        norm_weight, norm_bias: ``[K]``: LayerNorm's parameters. Its result is rounded to the weight's dtype.
        eps: Added to LayerNorm's variance; None for no LayerNorm.
        activation: A key of ``ops.ACTIVATIONS``; None for none.
        residual: ``[..., N]``.
        dtype: The dtype of the result; by default the weight's.
        overlap: On GPUs from sm_90 on, lets the kernel load its parameters before the previous kernel has ended
            (programmatic dependent launch). That kernel must not write them.
        backend: Requests one backend; by default the first that supports the call.

    Returns:
        ``[..., N]``, whose rows start at multiples of 16 elements. It has no gradient.
    """
    _check(x, weight, bias, norm_weight, norm_bias, eps, residual)
    kind = _activation(activation)
    dtype = weight.dtype if dtype is None else dtype
    if dtype not in checks.FLOATING or (dtype == torch.float64) != (x.dtype == torch.float64):
        raise checks.bad_type(NAME, "dtype", "a floating-point type, float64 if, and only if, x is", dtype)
    tensors = (x, weight, bias, norm_weight, norm_bias, residual)
    return OP(*tensors, eps, kind, dtype, overlap, backend=backend)


def _activation(name: Any) -> str:
    if name is None:
        return ""
    if not isinstance(name, str):
        raise checks.bad_type(NAME, "activation", "a name or None", type(name).__name__)
    if name not in ACTIVATIONS:
        raise checks.bad_value(NAME, "activation", f"one of {', '.join(ACTIVATIONS)}", repr(name))
    return ACTIVATIONS[name]


def _check(x: Any, weight: Any, bias: Any, norm_weight: Any, norm_bias: Any, eps: Any, residual: Any) -> None:
    linear.check_input(NAME, x)
    columns = x.shape[-1]
    checks.check_floating(NAME, "weight", weight)
    if weight.dim() != 2 or weight.shape[0] == 0 or weight.shape[1] != columns:
        raise checks.bad_value(NAME, "weight", f"shape (at least 1, {columns})", f"shape {tuple(weight.shape)}")
    outputs = weight.shape[0]
    shapes = {
        "weight": (weight, weight.shape),
        "bias": (bias, (outputs,)),
        "norm_weight": (norm_weight, (columns,)),
        "norm_bias": (norm_bias, (columns,)),
        "residual": (residual, (*x.shape[:-1], outputs)),
    }
    for name, (tensor, shape) in shapes.items():
        checks.check_floating(NAME, name, tensor, optional=True)
        checks.check_shape(NAME, name, tensor, shape)
        checks.check_device(NAME, name, tensor, like=x)
    if eps is None:
        for name in ("norm_weight", "norm_bias"):
            if shapes[name][0] is not None:
                raise checks.bad_value(NAME, name, "None without an eps", "a tensor")
    else:
        checks.check_number(NAME, "eps", eps, low=0.0, high=float("inf"))
    checks.check_double(NAME, x=x, **{name: tensor for name, (tensor, _) in shapes.items()})


# ---- backends --------------------------------------------------------------------------------------------------------


def _refuse_triton(x: Tensor, weight: Tensor) -> str | None:
    return refuse_triton(x) or refuse_triton(weight)


def _make_y(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
    dtype = others[6]
    return empty_rows((*x.shape[:-1], weight.shape[0]), dtype, x.device)


OP = ForwardOp(
    NAME,
    inputs=(
        *(checked("x"), checked("weight"), checked("bias", optional=True)),
        *(checked(name, optional=True) for name in ("norm_weight", "norm_bias", "residual")),
    ),
    options=(
        *(converted("eps", "float?"), converted("activation", "str"), converted("dtype", "ScalarType")),
        converted("overlap", "bool"),
    ),
    output=_make_y,
    chosen_by=("weight",),
    backends=(
        Backend("triton", triton_absent, _refuse_triton, from_triton(NAME, "decode_linear_triton")),
        torch_reference(reference.decode_linear),
    ),
)
