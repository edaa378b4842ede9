"""``linear_gelu``: a linear layer and the activation that follows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common.rows import as_rows
from fasttfm.kernels.linear_gelu import reference
from fasttfm.ops import checks, gelu_product, linear
from fasttfm.ops.backends import Backend, BackendTable, always, requested
from fasttfm.ops.bias_gelu import ACTIVATIONS
from fasttfm.ops.bias_gelu import backward_op as bias_gelu_backward_op
from fasttfm.ops.library import OpFunction, needs_gradient, register

OP = "linear_gelu"


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
    linear.check_input(OP, x)
    linear.check_weight(OP, "weight", weight, x.shape[-1], x)
    linear.check_bias(OP, "bias", bias, weight, x)
    kind = activation_kind(OP, activation)
    TABLE.check_name(backend)
    arguments = (x, weight, bias, kind, requested(backend))
    y: Tensor = _LinearGelu.apply(*arguments) if needs_gradient(x, weight, bias) else forward_op(*arguments)[0]
    return y


def activation_kind(op: str, name: Any) -> str:
    """The formula of the activation with this name."""
    if not isinstance(name, str):
        raise checks.bad_type(op, "activation", "a name", type(name).__name__)
    if name not in ACTIVATIONS:
        raise checks.bad_value(op, "activation", f"one of {', '.join(ACTIVATIONS)}", repr(name))
    return ACTIVATIONS[name]


class _LinearGelu(OpFunction):
    op = OP
    instead = "torch.nn.functional.linear and gelu (relu, silu)"

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, backend: str | None) -> Tensor:
        y: Tensor
        y, h = forward_op(x, weight, bias, kind, backend)
        ctx.save_for_backward(x, weight, bias, h)
        ctx.kind, ctx.backend = kind, backend
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        wanted = list(ctx.needs_input_grad[:3])
        gradients = backward_op(dy, *ctx.saved_tensors, ctx.kind, wanted, ctx.backend)
        return *(found if want else None for found, want in zip(gradients, wanted, strict=True)), None, None


# ---- torch.library ---------------------------------------------------------------------------------------------------


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, backend: str | None) -> tuple[Tensor, Tensor]:
    outputs: tuple[Tensor, Tensor] = TABLE.select(backend, x, weight, bias).forward(x, weight, bias, kind)
    return outputs


def _forward_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, backend: str | None
) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], weight.shape[0])
    return x.new_empty(shape), x.new_empty(shape)


def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    h: Tensor,
    kind: str,
    wanted: Sequence[bool],
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor, Tensor] = TABLE.select(backend, x, weight, bias).backward(
        dy, x, weight, bias, h, kind, wanted
    )
    return gradients


def _backward_fake(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    h: Tensor,
    kind: str,
    wanted: Sequence[bool],
    backend: str | None,
) -> tuple[Tensor, ...]:
    shapes = (x.shape, weight.shape, weight.shape[:1])
    return tuple(x.new_empty(shape if want else 0) for shape, want in zip(shapes, wanted, strict=True))


forward_op = register(
    "linear_gelu_forward(Tensor x, Tensor weight, Tensor? bias, str kind, str? backend) -> (Tensor y, Tensor h)",
    _forward,
    _forward_fake,
)
backward_op = register(
    "linear_gelu_backward(Tensor dy, Tensor x, Tensor weight, Tensor? bias, Tensor h, str kind, bool[] wanted,"
    " str? backend) -> (Tensor dx, Tensor dweight, Tensor dbias)",
    _backward,
    _backward_fake,
)


# ---- backends --------------------------------------------------------------------------------------------------------


def _backward_torch(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor, kind: str, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    rows = as_rows(x)
    dh, dbias, _ = bias_gelu_backward_op(dy, h, bias, kind, wanted[2], False, None)
    dh = as_rows(dh)
    return (
        linear.matmul(dh, weight, shape=x.shape) if wanted[0] else linear.empty_output(x),
        linear.matmul(dh.t(), rows) if wanted[1] else linear.empty_output(x),
        dbias,
    )


TABLE = BackendTable(
    OP,
    (
        Backend(
            "cuda",
            _native.missing_hopper,
            lambda *tensors, **_: gelu_product.refuse_cuda(*tensors),
            gelu_product.forward_cuda,
            _backward_torch,
        ),
        Backend("torch", always, lambda *_, **__: None, gelu_product.forward_torch, _backward_torch),
        Backend(
            "reference", always, lambda *_, **__: None, reference.linear_gelu_forward, reference.linear_gelu_backward
        ),
    ),
)
