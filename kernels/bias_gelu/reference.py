"""An activation of x + bias, in plain torch: the specification. The activations are in kernels/common/activation.py.

    u = x + bias        y = activation(u)
    dx = dy * activation'(u)        dbias = sum over rows of dx

Rows are all dimensions but the last. Arithmetic is fp32 (fp64 for fp64 input); only y, dx and dbias are rounded to the
tensors' own types, dbias from the sum of unrounded dx.
"""

from __future__ import annotations

from torch import Tensor

from fasttfm.kernels.common.activation import activate, derivative
from fasttfm.kernels.common.linear import accumulate


def bias_gelu(x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """The formula as autograd can differentiate it; tests hold every backend against this."""
    return activate(_biased(x, bias), kind).to(x.dtype)


def bias_gelu_forward(x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """Returns y [..., C] in x's type, contiguous."""
    return bias_gelu(x, bias, kind).contiguous()


def bias_gelu_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, kind: str, want_dbias: bool, want_y: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dx [..., C] and dbias [C], each in its tensor's type, and y again; results that are not needed are
    empty."""
    dx = accumulate(dy) * derivative(_biased(x, bias), kind)
    dbias = x.new_empty(0)
    if bias is not None and want_dbias:
        dbias = dx.reshape(-1, x.shape[-1]).sum(dim=0).to(bias.dtype)
    y = bias_gelu_forward(x, bias, kind) if want_y else x.new_empty(0)
    return dx.to(x.dtype).contiguous(), dbias, y


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    return accumulate(x) if bias is None else accumulate(x) + accumulate(bias)
