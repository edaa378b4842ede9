"""``mlp``: two linear layers with an activation between them, the feed-forward block of a transformer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common.rows import as_rows
from fasttfm.kernels.mlp import reference
from fasttfm.ops import checks, gelu_product, linear
from fasttfm.ops.backends import CUDA_VECTOR, Backend, BackendTable, always, requested
from fasttfm.ops.bias_gelu import forward_op as bias_gelu_forward_op
from fasttfm.ops.column_sum import column_sum_op
from fasttfm.ops.library import needs_gradient, register
from fasttfm.ops.linear_gelu import activation_kind

OP = "mlp"


def mlp(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    *,
    activation: str = "gelu",
    recompute: bool = False,
    backend: str | None = None,
) -> Tensor:
    """``activation(x w1^T + b1) w2^T + b2``: the vendor's matrix products, and one pass for bias and activation; in
    16-bit types on Hopper the activation comes with the products beside it, without a pass.

    Saved for the backward are ``x``, the parameters, the first product without its bias and the activation.

    Args:
        x: ``[..., C]``, fp32, bf16, fp16 or fp64.
        w1: ``[I, C]``.
        b1: ``[I]`` or None.
        w2: ``[O, I]``.
        b2: ``[O]`` or None.
        activation: A name out of ``ACTIVATIONS``, as for ``bias_gelu``.
        recompute: Whether the backward recomputes the activation instead of saving it: half the bytes, for writing it
            once more in the pass over its gradient.
        backend: Requests one backend; by default the first that can serve the call does.

    Returns:
        ``[..., O]``, contiguous. Parameters have x's type; under autocast everything is cast to autocast's, as around
        ``torch.nn.Linear``.
    """
    x, w1, b1, w2, b2 = linear.autocast(x, w1, b1, w2, b2)
    linear.check_input(OP, x)
    linear.check_weight(OP, "w1", w1, x.shape[-1], x)
    linear.check_bias(OP, "b1", b1, w1, x)
    linear.check_weight(OP, "w2", w2, w1.shape[0], x)
    linear.check_bias(OP, "b2", b2, w2, x)
    kind = activation_kind(OP, activation)
    if not isinstance(recompute, bool):
        raise checks.bad_type(OP, "recompute", "True or False", type(recompute).__name__)
    TABLE.check_name(backend)
    tensors = (x, w1, b1, w2, b2)
    if needs_gradient(*tensors):
        y: Tensor = _Mlp.apply(*tensors, kind, not recompute, requested(backend))
        return y
    y, *_ = forward_op(*tensors, kind, False, requested(backend))
    return y


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w1: Tensor,
        b1: Tensor | None,
        w2: Tensor,
        b2: Tensor | None,
        kind: str,
        keep: bool,
        backend: str | None,
    ) -> Tensor:
        y: Tensor
        y, h, a = forward_op(x, w1, b1, w2, b2, kind, keep, backend)
        ctx.save_for_backward(x, w1, b1, w2, h, a if keep else None)
        ctx.kind, ctx.backend = kind, backend
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        wanted = list(ctx.needs_input_grad[:5])
        gradients = backward_op(dy, *ctx.saved_tensors, ctx.kind, wanted, ctx.backend)
        return *(found if want else None for found, want in zip(gradients, wanted, strict=True)), None, None, None


# ---- torch.library ---------------------------------------------------------------------------------------------------


def _forward(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    kind: str,
    keep: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    outputs: tuple[Tensor, Tensor, Tensor] = TABLE.select(backend, x, w1, b1, w2, b2).forward(
        x, w1, b1, w2, b2, kind, keep
    )
    return outputs


def _forward_fake(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    kind: str,
    keep: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    inner = (*x.shape[:-1], w1.shape[0])
    return x.new_empty((*x.shape[:-1], w2.shape[0])), x.new_empty(inner), x.new_empty(inner if keep else 0)


def _backward(
    dy: Tensor,
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    h: Tensor,
    a: Tensor | None,
    kind: str,
    wanted: Sequence[bool],
    backend: str | None,
) -> tuple[Tensor, ...]:
    gradients: tuple[Tensor, ...] = TABLE.select(backend, x, w1, b1, w2).backward(dy, x, w1, b1, w2, h, a, kind, wanted)
    return gradients


def _backward_fake(
    dy: Tensor,
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    h: Tensor,
    a: Tensor | None,
    kind: str,
    wanted: Sequence[bool],
    backend: str | None,
) -> tuple[Tensor, ...]:
    shapes = (x.shape, w1.shape, w1.shape[:1], w2.shape, w2.shape[:1])
    return tuple(x.new_empty(shape if want else 0) for shape, want in zip(shapes, wanted, strict=True))


forward_op = register(
    "mlp_forward(Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, str kind, bool keep, str? backend)"
    " -> (Tensor y, Tensor h, Tensor a)",
    _forward,
    _forward_fake,
)
backward_op = register(
    "mlp_backward(Tensor dy, Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor h, Tensor? a, str kind, bool[] wanted,"
    " str? backend) -> (Tensor dx, Tensor dw1, Tensor db1, Tensor dw2, Tensor db2)",
    _backward,
    _backward_fake,
)


# ---- backends --------------------------------------------------------------------------------------------------------


def _forward_products(
    first: Callable[..., tuple[Tensor, Tensor]],
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    kind: str,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    a, h = first(x, w1, b1, kind)
    y = linear.matmul(as_rows(a), w2.t(), b2, shape=(*x.shape[:-1], w2.shape[0]))
    return y, h, a if keep else linear.unwanted(x)


def _backward_products(
    inner: Callable[..., tuple[Tensor, Tensor, Tensor]],
    dy: Tensor,
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    h: Tensor,
    a: Tensor | None,
    kind: str,
    wanted: Sequence[bool],
) -> tuple[Tensor, ...]:
    want_dx, want_dw1, want_db1, want_dw2, want_db2 = wanted
    rows, gradient = as_rows(x), as_rows(dy)
    dx, dw1, db1, dw2, db2 = (linear.unwanted(x) for _ in wanted)
    if want_db2:
        db2 = column_sum_op(gradient, x.dtype, None)
    again = want_dw2 and a is None
    if want_dx or want_dw1 or want_db1:
        dh, db1, y = inner(dy, w2, h, b1, kind, want_db1, again)
        a = y if again else a
        dh = as_rows(dh)
        dw1 = linear.matmul(dh.t(), rows) if want_dw1 else dw1
        dx = linear.matmul(dh, w1, shape=x.shape) if want_dx else dx
    elif again:
        a = bias_gelu_forward_op(h, b1, kind, None)
    if want_dw2:
        assert a is not None
        dw2 = linear.matmul(gradient.t(), as_rows(a))
    return dx, dw1, db1, dw2, db2


def _refuse_cuda(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None = None, **_: Any
) -> str | None:
    if w2.shape[0] % CUDA_VECTOR:
        return f"takes sizes that are multiples of {CUDA_VECTOR}, got {w2.shape[0]}"
    return gelu_product.refuse_cuda(x, w1, b1, w2)


TABLE = BackendTable(
    OP,
    (
        Backend(
            "cuda",
            _native.missing_hopper,
            _refuse_cuda,
            functools.partial(_forward_products, gelu_product.forward_cuda),
            functools.partial(_backward_products, gelu_product.backward_cuda),
        ),
        Backend(
            "torch",
            always,
            lambda *_, **__: None,
            functools.partial(_forward_products, gelu_product.forward_torch),
            functools.partial(_backward_products, gelu_product.backward_torch),
        ),
        Backend("reference", always, lambda *_, **__: None, reference.mlp_forward, reference.mlp_backward),
    ),
)
