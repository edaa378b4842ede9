"""Dropout, residual addition and LayerNorm in plain torch: the specification.

    z = residual + dropout(x + linear_bias)        y = LayerNorm(z) * weight + bias

    mean = sum(z) / C        variance = sum((z - mean)^2) / C        rstd = 1 / sqrt(variance + eps)
    xhat = (z - mean) * rstd        y = xhat * weight + bias

    g = dy * weight
    dresidual = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dz        dx = kept * scale * dresidual
    dweight = sum over rows of dy * xhat        dbias = sum over rows of dy        dlinear_bias = sum over rows of dx

dz is the gradient of z, if z is returned. The dropout mask is a function of the seed and of the elements' positions
(common/philox.py). A dropped element does not affect the result, even if it is infinite or NaN.

z is rounded to the residual's type before it is normalized, so that y and the gradients are those of the z that is
stored. Rows are all dimensions but the last; arithmetic is fp32 (fp64 for fp64 input). mean(xhat) is zero except for
the rounding error of the mean, which every implementation subtracts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fasttfm.kernels.common import philox
from fasttfm.kernels.common.linear import accumulate


def dropout_add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    linear_bias: Tensor | None = None,
    p: float = 0.0,
    eps: float = 1e-5,
    prenorm: bool = False,
    cu_seqlens: Tensor | None = None,
    seed: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The forward formula as autograd can differentiate it; tests hold every backend against this."""
    y, z, _ = dropout_add_layer_norm_forward(x, residual, weight, bias, linear_bias, cu_seqlens, seed, p, eps, True)
    return (y, z) if prenorm else y


def dropout_add_layer_norm_forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    linear_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    seed: Tensor | None,
    p: float,
    eps: float,
    want_z: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns y [..., C] in x's type, z in the residual's (empty if not needed), and statistics [2, N]: mean and rstd.
    Without a seed nothing is dropped."""
    branch = accumulate(x)
    if linear_bias is not None:
        branch = branch + accumulate(linear_bias)
    z = (accumulate(residual) + _dropout(branch, cu_seqlens, seed, p)).to(residual.dtype)
    rows = accumulate(z).reshape(-1, x.shape[-1])
    mean = rows.mean(dim=1)
    centered = rows - mean[:, None]
    centered = centered - centered.mean(dim=1, keepdim=True)
    rstd = (centered.square().mean(dim=1) + eps).rsqrt()
    y = centered * rstd[:, None]
    if weight is not None:
        y = y * accumulate(weight)
    if bias is not None:
        y = y + accumulate(bias)
    return y.to(x.dtype).reshape(x.shape), z if want_z else z.new_empty(0), torch.stack([mean, rstd])


def dropout_add_layer_norm_backward(
    dy: Tensor,
    dz: Tensor | None,
    z: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    linear_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    seed: Tensor | None,
    p: float,
    needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns dresidual and dx [..., C], then dweight, dbias and dlinear_bias [C], each empty if not ``needed``. dx is
    also empty if it equals dresidual: without dropout, and if both have the same dtype."""
    mean, rstd = statistics
    columns = z.shape[-1]
    dy_rows = accumulate(dy).reshape(-1, columns)
    xhat = (accumulate(z).reshape(-1, columns) - mean[:, None]) * rstd[:, None]
    xhat = xhat - xhat.mean(dim=1, keepdim=True)
    g = dy_rows if weight is None else dy_rows * accumulate(weight)
    gradient = rstd[:, None] * (g - g.mean(dim=1, keepdim=True) - xhat * (g * xhat).mean(dim=1, keepdim=True))
    gradient = gradient.reshape(z.shape)
    if dz is not None:
        gradient = gradient + accumulate(dz)
    dbranch = _dropout(gradient, cu_seqlens, seed, p)
    want_dweight, want_dbias, want_dlinear_bias = needed
    return (
        gradient.to(z.dtype),
        dy.new_empty(0) if seed is None and dy.dtype == z.dtype else dbranch.to(dy.dtype),
        _sum_rows(dy_rows * xhat).to(weight.dtype) if want_dweight else dy.new_empty(0),
        _sum_rows(dy_rows).to(bias.dtype) if want_dbias else dy.new_empty(0),
        _sum_rows(dbranch).to(linear_bias.dtype) if want_dlinear_bias else dy.new_empty(0),
    )


def _dropout(x: Tensor, cu_seqlens: Tensor | None, seed: Tensor | None, p: float) -> Tensor:
    if seed is None:
        return x
    threshold = philox.threshold(p)
    sequences, tokens = philox.row_positions(x.shape, cu_seqlens, x.device)
    kept = philox.kept(seed, sequences, tokens, x.shape[-1], threshold).reshape(x.shape)
    return torch.where(kept, x * philox.scale(threshold), 0.0)


def _sum_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).sum(dim=0)
