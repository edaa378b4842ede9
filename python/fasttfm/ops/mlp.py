"""``mlp``: two linear layers with an activation between them, the feed-forward block of a transformer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common.rows import aligned, as_rows
from fasttfm.kernels.mlp import reference
from fasttfm.ops import gelu_gemm, linear
from fasttfm.ops.bias_gelu import forward_op as bias_gelu_forward_op
from fasttfm.ops.column_sum import column_sum_op
from fasttfm.ops.core import checks
from fasttfm.ops.core.arguments import Gradient, Output, checked, converted
from fasttfm.ops.core.backends import CUDA_VECTOR, Backend, always, requested
from fasttfm.ops.core.declare import Op
from fasttfm.ops.core.library import needs_gradient
from fasttfm.ops.linear_gelu import activation_kind

NAME = "mlp"


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
    linear.check_input(NAME, x)
    linear.check_weight(NAME, "w1", w1, x.shape[-1], x)
    linear.check_bias(NAME, "b1", b1, w1, x)
    linear.check_weight(NAME, "w2", w2, w1.shape[0], x)
    linear.check_bias(NAME, "b2", b2, w2, x)
    kind = activation_kind(NAME, activation)
    if not isinstance(recompute, bool):
        raise checks.bad_type(NAME, "recompute", "True or False", type(recompute).__name__)
    OP.table.check_name(backend)  # before it decides what the forward keeps
    tensors = (x, w1, b1, w2, b2)
    if not needs_gradient(*tensors):
        kept = gelu_gemm.NOTHING
    elif recompute:
        kept = gelu_gemm.PRODUCT
    else:
        kept = gelu_gemm.kept_beside(requested(backend), x, w1, w2)
    keep_activation = kept != gelu_gemm.NOTHING and not recompute
    y: Tensor = OP.apply(*tensors, kind, kept, keep_activation, backend=backend)
    return y


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
    needed: Sequence[bool],
) -> tuple[Tensor, ...]:
    want_dx, want_dw1, want_db1, want_dw2, want_db2 = needed
    dy = aligned(dy)
    rows, gradient = as_rows(x), as_rows(dy)
    dx, dw1, db1, dw2, db2 = (linear.empty_output(x) for _ in needed)
    if want_db2:
        db2 = column_sum_op(gradient, x.dtype, None)
    again = want_dw2 and (a is None or a.numel() == 0)
    if want_dx or want_dw1 or want_db1:
        if kept == gelu_gemm.DERIVATIVE:
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
    return y, linear.empty_output(y) if kept == gelu_gemm.NOTHING else h, a


def _backward_reference(*arguments: Any) -> tuple[Tensor, ...]:
    *tensors, a, kind, _, needed = arguments
    return reference.mlp_backward(*tensors, None if a is None or a.numel() == 0 else a, kind, needed)


def _refuse_cuda(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None = None, **_: Any
) -> str | None:
    if w2.shape[0] % CUDA_VECTOR:
        return f"takes sizes that are multiples of {CUDA_VECTOR}, got {w2.shape[0]}"
    return gelu_gemm.refuse_cuda(x, w1, b1, w2)


_TORCH = _Inner(gelu_gemm.forward_torch, gelu_gemm.backward_torch, gelu_gemm.scaled_torch)
_CUDA = _Inner(gelu_gemm.forward_cuda, gelu_gemm.backward_cuda, gelu_gemm.scaled_cuda)


def _make_left(x: Tensor, w1: Tensor, b1: Any, w2: Tensor, b2: Any, kind: str, kept: str, *_: Any) -> Tensor:
    return x.new_empty(0) if kept == gelu_gemm.NOTHING else linear.make_output(x, w1)


def _make_a(x: Tensor, w1: Tensor, *others: Any) -> Tensor:
    keep_activation = others[5]
    return linear.make_output(x, w1) if keep_activation else x.new_empty(0)


def _make_db2(dy: Tensor, x: Tensor, w1: Tensor, b1: Any, w2: Tensor, *_: Any) -> Tensor:
    return w2.new_empty(w2.shape[0])


OP = Op(
    NAME,
    inputs=(
        checked("x", flagged=True),
        checked("w1", flagged=True),
        checked("b1", optional=True, flagged=True),
        checked("w2", flagged=True),
        checked("b2", optional=True, flagged=True),
    ),
    options=(converted("kind", "str"), converted("kept", "str"), converted("keep_activation", "bool")),
    outputs=(
        Output("y", lambda x, w1, b1, w2, *_: linear.make_output(x, w2)),
        Output("left", _make_left),
        Output("a", _make_a, optional=True),
    ),
    saves=("x", "w1", "b1", "w2", "left", "a"),
    backward_options=("kind", "kept"),
    gradients=("x", "w1", "b1", "w2", Gradient("b2", _make_db2)),
    flag_list=True,
    backward_chosen_by=("x", "w1", "b1", "w2"),
    instead="torch.nn.functional.linear and gelu (relu, silu)",
    backends=(
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
