"""Step 1: the formula in plain torch, forward and backward."""

from __future__ import annotations

from torch import Tensor


def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    mean = x.mean(dim=-1, keepdim=True)  # [N, 1]
    variance = (x - mean).square().mean(dim=-1, keepdim=True)
    rstd = (variance + eps).rsqrt()  # [N, 1]
    y = (x - mean) * rstd * weight + bias  # [N, C]
    return y, mean, rstd


def backward(dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    xhat = (x - mean) * rstd
    g = dy * weight
    dx = rstd * (g - g.mean(dim=-1, keepdim=True) - xhat * (g * xhat).mean(dim=-1, keepdim=True))
    return dx, (dy * xhat).sum(dim=0), dy.sum(dim=0)  # dx, dweight, dbias
