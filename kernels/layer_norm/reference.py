"""LayerNorm over the last dimension, in plain torch: the specification.

    mean = sum(x) / C        variance = sum((x - mean)^2) / C        rstd = 1 / sqrt(variance + eps)
    xhat = (x - mean) * rstd        y = xhat * weight + bias

    g = dy * weight
    dx = rstd * (g - mean(g) - xhat * mean(g * xhat))
    dweight = sum over rows of dy * xhat        dbias = sum over rows of dy

mean(xhat) is zero except for the rounding error of the mean, which matters if a row's mean is large compared with its
standard deviation: every implementation subtracts it.

Rows are all dimensions but the last. Arithmetic is fp32 (fp64 for fp64 input); only y, dx, dweight and dbias are
rounded to the tensors' own types.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fasttfm.kernels.common.linear import accumulate


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """The forward formula as autograd can differentiate it; tests hold every backend against this."""
    return layer_norm_forward(x, weight, bias, eps)[0]


def layer_norm_forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Returns y [..., C] in x's type, and statistics [2, N]: mean and rstd, in the accumulation type."""
    rows = accumulate(x).reshape(-1, x.shape[-1])
    mean = rows.mean(dim=1)
    centered = rows - mean[:, None]
    centered = centered - centered.mean(dim=1, keepdim=True)
    rstd = (centered.square().mean(dim=1) + eps).rsqrt()
    y = centered * rstd[:, None]
    if weight is not None:
        y = y * accumulate(weight)
    if bias is not None:
        y = y + accumulate(bias)
    return y.to(x.dtype).reshape(x.shape), torch.stack([mean, rstd])


def layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
    want_dweight: bool,
    want_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dx [..., C], dweight [C] and dbias [C], each in its tensor's type; results that are not needed are
    empty."""
    mean, rstd = statistics
    columns = x.shape[-1]
    dy_rows = accumulate(dy).reshape(-1, columns)
    xhat = (accumulate(x).reshape(-1, columns) - mean[:, None]) * rstd[:, None]
    xhat = xhat - xhat.mean(dim=1, keepdim=True)
    g = dy_rows if weight is None else dy_rows * accumulate(weight)
    dx = rstd[:, None] * (g - g.mean(dim=1, keepdim=True) - xhat * (g * xhat).mean(dim=1, keepdim=True))
    dweight = (dy_rows * xhat).sum(dim=0).to(weight.dtype) if want_dweight else dx.new_empty(0)
    dbias = dy_rows.sum(dim=0).to(bias.dtype) if want_dbias else dx.new_empty(0)
    return dx.to(x.dtype).reshape(x.shape), dweight, dbias
