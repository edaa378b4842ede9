"""``linear_gelu``: a linear layer and the activation that follows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common.rows import as_rows
from fasttfm.kernels.linear_gelu import reference
from fasttfm.ops import gelu_gemm, linear
from fasttfm.ops.bias_gelu import ACTIVATIONS
from fasttfm.ops.bias_gelu import backward_op as bias_gelu_backward_op
from fasttfm.ops.core import checks
from fasttfm.ops.core.arguments import Output, checked, converted
from fasttfm.ops.core.backends import Backend, always
from fasttfm.ops.core.declare import Op

NAME = "linear_gelu"


def linear_gelu(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str = "gelu", backend: str | None = None
) -> Tensor:
    """``activation(x weight^T + bias)``: a GEMM of torch, then one pass for bias and activation; in 16-bit types on
    Hopper one kernel for all of it.

    ``x``, the parameters and the GEMM's result without the bias are saved for the backward; the activation is
    recomputed, and the bias gradient is computed in the same pass as the activation's derivative.

    Args:
        x: ``[..., C]``, fp32, bf16, fp16 or fp64.
        weight: ``[O, C]``.
        bias: ``[O]`` or None.
        activation: A key of ``ACTIVATIONS``, as for ``bias_gelu``.
        backend: Requests one backend; by default the first that supports the call.

    Returns:
        ``[..., O]``, contiguous. Parameters have x's type; under autocast everything is cast to autocast's, as around
        ``torch.nn.Linear``.
    """
    x, weight, bias = linear.autocast(x, weight, bias)
    linear.check_input(NAME, x)
    linear.check_weight(NAME, "weight", weight, x.shape[-1], x)
    linear.check_bias(NAME, "bias", bias, weight, x)
    kind = activation_kind(NAME, activation)
    y: Tensor = OP.apply(x, weight, bias, kind, backend=backend)
    return y


def activation_kind(op: str, name: Any) -> str:
    """The formula of the activation with this name."""
    if not isinstance(name, str):
        raise checks.bad_type(op, "activation", "a name", type(name).__name__)
    if name not in ACTIVATIONS:
        raise checks.bad_value(op, "activation", f"one of {', '.join(ACTIVATIONS)}", repr(name))
    return ACTIVATIONS[name]


# ---- backends --------------------------------------------------------------------------------------------------------


def _backward_torch(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor, kind: str, needed: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    rows = as_rows(x)
    dh, dbias, _ = bias_gelu_backward_op(dy, h, bias, kind, needed[2], False, None)
    dh = as_rows(dh)
    return (
        linear.matmul(dh, weight, shape=x.shape) if needed[0] else linear.empty_output(x),
        linear.matmul(dh.t(), rows) if needed[1] else linear.empty_output(x),
        dbias,
    )


OP = Op(
    NAME,
    inputs=(checked("x", flagged=True), checked("weight", flagged=True), checked("bias", optional=True, flagged=True)),
    options=(converted("kind", "str"),),
    outputs=(Output("y", linear.make_output), Output("h", linear.make_output)),
    saves=("x", "weight", "bias", "h"),
    backward_options=("kind",),
    gradients=("x", "weight", "bias"),
    flag_list=True,
    instead="torch.nn.functional.linear and gelu (relu, silu)",
    backends=(
        Backend(
            "cuda",
            _native.missing_hopper,
            lambda *tensors, **_: gelu_gemm.refuse_cuda(*tensors),
            gelu_gemm.forward_cuda,
            _backward_torch,
        ),
        Backend("torch", always, lambda *_, **__: None, gelu_gemm.forward_torch, _backward_torch),
        Backend(
            "reference", always, lambda *_, **__: None, reference.linear_gelu_forward, reference.linear_gelu_backward
        ),
    ),
)
