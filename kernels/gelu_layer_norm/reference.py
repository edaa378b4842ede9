"""LayerNorm of GELU(x + linear_bias), in plain torch: the specification. GELU is in kernels/common/activation.py.

    u = x + linear_bias        h = gelu(u)
    mean = sum(h) / C        variance = sum((h - mean)^2) / C        rstd = 1 / sqrt(variance + eps)
    hhat = (h - mean) * rstd        y = hhat * weight + bias

    g = dy * weight
    dx = gelu'(u) * rstd * (g - mean(g) - hhat * mean(g * hhat))
    dlinear_bias = sum over rows of dx        dweight = sum over rows of dy * hhat        dbias = sum over rows of dy

mean(hhat) is zero except for the rounding error of the mean, which implementations subtract where it could be visible.

Rows are all dimensions but the last. Arithmetic is fp32 (fp64 for fp64 input); only y, dx and the parameters' gradients
are rounded to the tensors' own types, dlinear_bias from the sum of unrounded dx.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fasttfm.kernels.common.activation import activate, derivative
from fasttfm.kernels.common.linear import accumulate


def gelu_layer_norm(
    x: Tensor, linear_bias: Tensor | None, weight: Tensor | None, bias: Tensor | None, kind: str, eps: float
) -> Tensor:
    """The forward formula as autograd can differentiate it; tests hold every backend against this."""
    return gelu_layer_norm_forward(x, linear_bias, weight, bias, kind, eps)[0]


def gelu_layer_norm_forward(
    x: Tensor, linear_bias: Tensor | None, weight: Tensor | None, bias: Tensor | None, kind: str, eps: float
) -> tuple[Tensor, Tensor]:
    """Returns y [..., C] in x's type, and statistics [2, N]: mean and rstd of h, in the accumulation type."""
    h = activate(_biased(x, linear_bias), kind)
    mean = h.mean(dim=1)
    centered = h - mean[:, None]
    centered = centered - centered.mean(dim=1, keepdim=True)
    rstd = (centered.square().mean(dim=1) + eps).rsqrt()
    y = centered * rstd[:, None]
    if weight is not None:
        y = y * accumulate(weight)
    if bias is not None:
        y = y + accumulate(bias)
    return y.to(x.dtype).reshape(x.shape), torch.stack([mean, rstd])


def gelu_layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
    kind: str,
    *needed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns dx [..., C] and dlinear_bias, dweight, dbias [C] in their tensors' types; those three are empty if they
    are not needed."""
    mean, rstd = statistics
    dy_rows = accumulate(dy).reshape(-1, x.shape[-1])
    u = _biased(x, linear_bias)
    hhat = (activate(u, kind) - mean[:, None]) * rstd[:, None]
    hhat = hhat - hhat.mean(dim=1, keepdim=True)
    g = dy_rows if weight is None else dy_rows * accumulate(weight)
    dh = rstd[:, None] * (g - g.mean(dim=1, keepdim=True) - hhat * (g * hhat).mean(dim=1, keepdim=True))
    dx = dh * derivative(u, kind)

    def column_sum(rows: Tensor, parameter: Tensor | None, want: bool) -> Tensor:
        return rows.sum(dim=0).to(parameter.dtype) if parameter is not None and want else x.new_empty(0)

    return (
        dx.to(x.dtype).reshape(x.shape),
        column_sum(dx, linear_bias, needed[0]),
        column_sum(dy_rows * hhat, weight, needed[1]),
        column_sum(dy_rows, bias, needed[2]),
    )


def _biased(x: Tensor, linear_bias: Tensor | None) -> Tensor:
    """u as [N, C], in the accumulation type."""
    rows = accumulate(x).reshape(-1, x.shape[-1])
    return rows if linear_bias is None else rows + accumulate(linear_bias)
