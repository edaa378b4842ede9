"""A linear layer and an activation (kernels/common/activation.py), in plain torch: the specification.

    h = x weight^T        y = activation(h + bias)

    dh = dy * activation'(h + bias)        dbias = sum over rows of dh
    dx = dh weight        dweight = dh^T x

h and dh are rounded to x's type, in which they are stored; dbias is the sum of dh before it is rounded. Products are
summed and activations computed in fp32 (fp64 for fp64 input).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fasttfm.kernels.common.activation import activate, derivative
from fasttfm.kernels.common.linear import accumulate, linear, weight_gradient


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """The formula as autograd can differentiate it; tests hold every backend against this."""
    return linear_gelu_forward(x, weight, bias, kind)[0]


def linear_gelu_forward(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> tuple[Tensor, Tensor]:
    """Returns y and h, both [..., O] in x's type."""
    h = linear(x, weight)
    return activate(_biased(h, bias), kind).to(x.dtype), h


def linear_gelu_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor, kind: str, needed: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dx [..., C], dweight [O, C] and dbias [O]; results that are not needed are empty."""
    exact = accumulate(dy) * derivative(_biased(h, bias), kind)
    dh = exact.to(x.dtype)
    return (
        linear(dh, weight.t()) if needed[0] else x.new_empty(0),
        weight_gradient(dh, x) if needed[1] else x.new_empty(0),
        exact.reshape(-1, dy.shape[-1]).sum(dim=0).to(x.dtype) if needed[2] else x.new_empty(0),
    )


def _biased(h: Tensor, bias: Tensor | None) -> Tensor:
    return accumulate(h) if bias is None else accumulate(h) + accumulate(bias)
