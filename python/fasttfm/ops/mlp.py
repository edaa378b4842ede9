"""``mlp``: two linear layers with an activation between them, the feed-forward block of a transformer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common.rows import aligned, as_rows
from fasttfm.kernels.mlp import reference
from fasttfm.ops import checks, gelu_product, linear
from fasttfm.ops.backends import CUDA_VECTOR, Backend, BackendTable, always, requested
from fasttfm.ops.bias_gelu import forward_op as bias_gelu_forward_op
from fasttfm.ops.column_sum import column_sum_op
from fasttfm.ops.library import OpFunction, needs_gradient, register
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
    """``activation(x w1^T + b1) w2^T + b2``: GEMMs of torch, and one pass for bias and activation; in 16-bit types on
    Hopper the activation is computed in the epilogues of the GEMMs next to it, without a pass.

    ``x``, the parameters, the activation, and the first GEMM's result without its bias are saved for the backward; on
    Hopper the activation's derivative is saved instead of the latter.

    Args:
        x: ``[..., C]``, fp32, bf16, fp16 or fp64.
        w1: ``[I, C]``.
        b1: ``[I]`` or None.
        w2: ``[O, I]``.
        b2: ``[O]`` or None.
        activation: A key of ``ACTIVATIONS``, as for ``bias_gelu``.
        recompute: Whether the backward recomputes the activation instead of saving it: half the bytes, for writing it
            once more in the pass over its gradient.
        backend: Requests one backend; by default the first that supports the call.

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
        kept = gelu_product.PRODUCT if recompute else gelu_product.kept_beside(requested(backend), x, w1, w2)
        y: Tensor = _Mlp.apply(*tensors, kind, kept, not recompute, requested(backend))
        return y
    y, *_ = forward_op(*tensors, kind, gelu_product.NOTHING, False, requested(backend))
    return y


class _Mlp(OpFunction):
    op = OP
    instead = "torch.nn.functional.linear and gelu (relu, silu)"

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w1: Tensor,
        b1: Tensor | None,
        w2: Tensor,
        b2: Tensor | None,
        kind: str,
        kept: str,
        keep_activation: bool,
        backend: str | None,
    ) -> Tensor:
        y: Tensor
        y, left, a = forward_op(x, w1, b1, w2, b2, kind, kept, keep_activation, backend)
        ctx.save_for_backward(x, w1, b1, w2, left, a if keep_activation else None)
        ctx.kind, ctx.kept, ctx.backend = kind, kept, backend
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        wanted = list(ctx.needs_input_grad[:5])
        gradients = backward_op(dy, *ctx.saved_tensors, ctx.kind, ctx.kept, wanted, ctx.backend)
        return *(found if want else None for found, want in zip(gradients, wanted, strict=True)), *[None] * 4


# ---- torch.library ---------------------------------------------------------------------------------------------------


def _forward(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    kind: str,
    kept: str,
    keep_activation: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    outputs: tuple[Tensor, Tensor, Tensor] = TABLE.select(backend, x, w1, b1, w2, b2).forward(
        x, w1, b1, w2, b2, kind, kept, keep_activation
    )
    return outputs


def _forward_fake(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    kind: str,
    kept: str,
    keep_activation: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    inner = (*x.shape[:-1], w1.shape[0])
    left = x.new_empty(0 if kept == gelu_product.NOTHING else inner)
    return x.new_empty((*x.shape[:-1], w2.shape[0])), left, x.new_empty(inner if keep_activation else 0)


def _backward(
    dy: Tensor,
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    left: Tensor,
    a: Tensor | None,
    kind: str,
    kept: str,
    wanted: Sequence[bool],
    backend: str | None,
) -> tuple[Tensor, ...]:
    gradients: tuple[Tensor, ...] = TABLE.select(backend, x, w1, b1, w2).backward(
        dy, x, w1, b1, w2, left, a, kind, kept, wanted
    )
    return gradients


def _backward_fake(
    dy: Tensor,
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    left: Tensor,
    a: Tensor | None,
    kind: str,
    kept: str,
    wanted: Sequence[bool],
    backend: str | None,
) -> tuple[Tensor, ...]:
    shapes = (x.shape, w1.shape, w1.shape[:1], w2.shape, w2.shape[:1])
    return tuple(x.new_empty(shape if want else 0) for shape, want in zip(shapes, wanted, strict=True))


forward_op = register(
    "mlp_forward(Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, str kind, str kept, bool keep_activation,"
    " str? backend) -> (Tensor y, Tensor left, Tensor a)",
    _forward,
    _forward_fake,
)
backward_op = register(
    "mlp_backward(Tensor dy, Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor left, Tensor? a, str kind, str kept,"
    " bool[] wanted, str? backend) -> (Tensor dx, Tensor dw1, Tensor db1, Tensor dw2, Tensor db2)",
    _backward,
    _backward_fake,
)


# ---- backends --------------------------------------------------------------------------------------------------------


class _Inner(NamedTuple):
    """A backend's implementations of the GEMMs next to the activation."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]  # from the first GEMM's result
    scaled: Callable[..., tuple[Tensor, Tensor]]  # from the derivative


def _forward_products(
    inner: _Inner,
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    kind: str,
    kept: str,
    keep_activation: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    a, left = inner.forward(x, w1, b1, kind, kept)
    y = linear.matmul(as_rows(a), w2.t(), b2, shape=(*x.shape[:-1], w2.shape[0]))
    return y, left, a if keep_activation else linear.empty_output(x)


def _backward_products(
    inner: _Inner,
    dy: Tensor,
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    left: Tensor,
    a: Tensor | None,
    kind: str,
    kept: str,
    wanted: Sequence[bool],
) -> tuple[Tensor, ...]:
    want_dx, want_dw1, want_db1, want_dw2, want_db2 = wanted
    dy = aligned(dy)
    rows, gradient = as_rows(x), as_rows(dy)
    dx, dw1, db1, dw2, db2 = (linear.empty_output(x) for _ in wanted)
    if want_db2:
        db2 = column_sum_op(gradient, x.dtype, None)
    again = want_dw2 and a is None
    if want_dx or want_dw1 or want_db1:
        if kept == gelu_product.DERIVATIVE:
            dh, db1 = inner.scaled(dy, w2, left, b1, want_db1)
        else:
            dh, db1, y = inner.backward(dy, w2, left, b1, kind, want_db1, again)
            a = y if again else a
        dh = as_rows(dh)
        dw1 = linear.matmul(dh.t(), rows) if want_dw1 else dw1
        dx = linear.matmul(dh, w1, shape=x.shape) if want_dx else dx
    elif again:
        a = bias_gelu_forward_op(left, b1, kind, None)
    if want_dw2:
        assert a is not None
        dw2 = linear.matmul(gradient.t(), as_rows(a))
    return dx, dw1, db1, dw2, db2


def _forward_reference(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, kind, kept, keep_activation = arguments
    y, h, a = reference.mlp_forward(*tensors, kind, keep_activation)
    return y, linear.empty_output(y) if kept == gelu_product.NOTHING else h, a


def _backward_reference(*arguments: Any) -> tuple[Tensor, ...]:
    *tensors, kind, _, wanted = arguments
    return reference.mlp_backward(*tensors, kind, wanted)


def _refuse_cuda(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None = None, **_: Any
) -> str | None:
    if w2.shape[0] % CUDA_VECTOR:
        return f"takes sizes that are multiples of {CUDA_VECTOR}, got {w2.shape[0]}"
    return gelu_product.refuse_cuda(x, w1, b1, w2)


_TORCH = _Inner(gelu_product.forward_torch, gelu_product.backward_torch, gelu_product.scaled_torch)
_CUDA = _Inner(gelu_product.forward_cuda, gelu_product.backward_cuda, gelu_product.scaled_cuda)

TABLE = BackendTable(
    OP,
    (
        Backend(
            "cuda",
            _native.missing_hopper,
            _refuse_cuda,
            functools.partial(_forward_products, _CUDA),
            functools.partial(_backward_products, _CUDA),
        ),
        Backend(
            "torch",
            always,
            lambda *_, **__: None,
            functools.partial(_forward_products, _TORCH),
            functools.partial(_backward_products, _TORCH),
        ),
        # Keeps the result of the first GEMM whatever is requested: kept_beside expects nothing else of a requested
        # backend.
        Backend("reference", always, lambda *_, **__: None, _forward_reference, _backward_reference),
    ),
)
