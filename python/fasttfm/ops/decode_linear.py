"""``decode_linear``: a linear layer for few rows, fused with LayerNorm, activation and residual addition."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttfm.kernels.common.rows import empty_rows
from fasttfm.kernels.decode_linear import reference
from fasttfm.ops import checks, linear
from fasttfm.ops.backends import Backend, BackendTable, always, refuse_triton, requested, triton_absent
from fasttfm.ops.bias_gelu import ACTIVATIONS
from fasttfm.ops.library import needs_gradient, register

OP = "decode_linear"


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
        raise checks.bad_type(OP, "dtype", "a floating-point type, float64 if, and only if, x is", dtype)
    TABLE.check_name(backend)
    tensors = (x, weight, bias, norm_weight, norm_bias, residual)
    if needs_gradient(*tensors):
        raise checks.bad_value(OP, "x", "a call under torch.no_grad() (there is no gradient)", "one with gradients")
    y: Tensor = decode_linear_op(*tensors, eps, kind, dtype, overlap, requested(backend))
    return y


def _activation(name: Any) -> str:
    if name is None:
        return ""
    if not isinstance(name, str):
        raise checks.bad_type(OP, "activation", "a name or None", type(name).__name__)
    if name not in ACTIVATIONS:
        raise checks.bad_value(OP, "activation", f"one of {', '.join(ACTIVATIONS)}", repr(name))
    return ACTIVATIONS[name]


def _check(x: Any, weight: Any, bias: Any, norm_weight: Any, norm_bias: Any, eps: Any, residual: Any) -> None:
    linear.check_input(OP, x)
    columns = x.shape[-1]
    checks.check_floating(OP, "weight", weight)
    if weight.dim() != 2 or weight.shape[0] == 0 or weight.shape[1] != columns:
        raise checks.bad_value(OP, "weight", f"shape (at least 1, {columns})", f"shape {tuple(weight.shape)}")
    outputs = weight.shape[0]
    given = {
        "weight": (weight, weight.shape),
        "bias": (bias, (outputs,)),
        "norm_weight": (norm_weight, (columns,)),
        "norm_bias": (norm_bias, (columns,)),
        "residual": (residual, (*x.shape[:-1], outputs)),
    }
    for name, (tensor, shape) in given.items():
        checks.check_floating(OP, name, tensor, optional=True)
        checks.check_shape(OP, name, tensor, shape)
        checks.check_device(OP, name, tensor, like=x)
    if eps is None:
        for name in ("norm_weight", "norm_bias"):
            if given[name][0] is not None:
                raise checks.bad_value(OP, name, "None without an eps", "a tensor")
    else:
        checks.check_number(OP, "eps", eps, low=0.0, high=float("inf"))
    checks.check_double(OP, x=x, **{name: tensor for name, (tensor, _) in given.items()})


# ---- torch.library ---------------------------------------------------------------------------------------------------


def _forward(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
    *given, backend = others
    y: Tensor = TABLE.select(backend, x, weight).forward(x, weight, *given)
    return y


def _fake(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
    return empty_rows((*x.shape[:-1], weight.shape[0]), others[-3], x.device)


decode_linear_op = register(
    "decode_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? norm_weight, Tensor? norm_bias, Tensor? residual,"
    " float? eps, str activation, ScalarType dtype, bool overlap, str? backend) -> Tensor",
    _forward,
    _fake,
)


# ---- backends --------------------------------------------------------------------------------------------------------


def _forward_triton(*given: Any) -> Tensor:
    from fasttfm.kernels.decode_linear import triton

    y: Tensor = triton.decode_linear_triton(*given)
    return y


def _refuse_triton(x: Tensor, weight: Tensor) -> str | None:
    return refuse_triton(x) or refuse_triton(weight)


TABLE = BackendTable(
    OP,
    (
        Backend("triton", triton_absent, _refuse_triton, _forward_triton),
        Backend("reference", always, lambda *_: None, reference.decode_linear),
    ),
)
