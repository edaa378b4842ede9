"""Two linear layers with an activation (kernels/common/activation.py) between them, in plain torch: the specification.

    h = x w1^T        a = activation(h + b1)        y = a w2^T + b2

    da = dy w2        dw2 = dy^T a        db2 = sum over rows of dy
    dh = da * activation'(h + b1)        db1 = sum over rows of dh
    dx = dh w1        dw1 = dh^T x

h, a, da and dh are rounded to x's type, in which they are stored; db1 is the sum of dh before it is rounded. Products
are summed and activations computed in fp32 (fp64 for fp64 input).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fasttfm.kernels.common.activation import activate, derivative
from fasttfm.kernels.common.linear import accumulate, bias_gradient, linear, weight_gradient


def mlp(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, kind: str) -> Tensor:
    """The formula as autograd can differentiate it; tests hold every backend against this."""
    return linear(_activated(linear(x, w1), b1, kind), w2, b2)


def mlp_forward(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, kind: str, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns y [..., O], h [..., I] and, with ``keep``, a [..., I], else an empty tensor."""
    h = linear(x, w1)
    a = _activated(h, b1, kind)
    return linear(a, w2, b2), h, a if keep else x.new_empty(0)


def mlp_backward(
    dy: Tensor,
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    h: Tensor,
    a: Tensor | None,
    kind: str,
    needed: Sequence[bool],
) -> tuple[Tensor, ...]:
    """Returns dx, dw1, db1, dw2 and db2; results that are not needed are empty."""
    da = linear(dy, w2.t())
    exact = accumulate(da) * derivative(_biased(h, b1), kind)
    dh = exact.to(x.dtype)
    a = _activated(h, b1, kind) if a is None else a
    gradients = (
        linear(dh, w1.t()),
        weight_gradient(dh, x),
        exact.reshape(-1, h.shape[-1]).sum(dim=0).to(x.dtype),
        weight_gradient(dy, a),
        bias_gradient(dy),
    )
    return tuple(gradient if want else x.new_empty(0) for gradient, want in zip(gradients, needed, strict=True))


def _activated(h: Tensor, b1: Tensor | None, kind: str) -> Tensor:
    return activate(_biased(h, b1), kind).to(h.dtype)


def _biased(h: Tensor, b1: Tensor | None) -> Tensor:
    return accumulate(h) if b1 is None else accumulate(h) + accumulate(b1)
