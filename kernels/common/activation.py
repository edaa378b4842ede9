"""The activations of transformer MLPs in plain torch: names, values and derivatives. Kernels have their own copies.

    gelu        u * Phi(u), Phi(u) = (1 + erf(u / sqrt 2)) / 2         Phi(u) + u * exp(-u^2 / 2) / sqrt(2 pi)
    gelu_tanh   u * s, s = sigmoid(2 z), z = sqrt(2 / pi) (u + 0.044715 u^3)     s + u * s * (1 - s) * 2 z'
    relu        max(u, 0)                                               1 above 0, else 0
    silu        u * s, s = sigmoid(u)                                   s + u * s * (1 - s)

With sigmoid(2 z) = (1 + tanh(z)) / 2, gelu_tanh is the usual tanh approximation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

# The codes that compiled kernels take (activation.h).
CODES: Mapping[str, int] = MappingProxyType({"gelu": 0, "gelu_tanh": 1, "relu": 2, "silu": 3})

_SLOPE = 2.0 * math.sqrt(2.0 / math.pi)  # of 2 z at 0
_CUBIC = 0.044715


def activate(u: Tensor, kind: str) -> Tensor:
    """The activation of ``u``, in its type, as autograd can differentiate it; finite for every finite ``u``."""
    if kind == "relu":
        return torch.relu(u)
    if kind == "silu":
        return torch.nn.functional.silu(u)
    # Beyond 40 both forms are u or 0 in every type. torch multiplies u by 1 + erf, or cubes it, which may overflow.
    near = torch.nn.functional.gelu(u.clamp(-40.0, 40.0), approximate="tanh" if kind == "gelu_tanh" else "none")
    return torch.where(u.abs() <= 40.0, near, torch.relu(u))


def derivative(u: Tensor, kind: str) -> Tensor:
    """The activation's derivative at ``u``; finite for every finite ``u``."""
    if kind == "gelu":
        density = (u.square() * -0.5).exp() * (1.0 / math.sqrt(2.0 * math.pi))
        # torch.special.ndtr adds 1 to erf, which cancels if u is negative and has a larger error than erfc on Arm.
        return 0.5 * torch.erfc(u * -math.sqrt(0.5)) + u * density
    if kind == "gelu_tanh":
        near = u.clamp(-20.0, 20.0)  # beyond, the derivative is 0 or 1; u^3 would overflow before that shows
        w = _SLOPE * near * (1.0 + _CUBIC * near.square())
        return torch.sigmoid(w) * (1.0 + near * torch.sigmoid(-w) * (_SLOPE * (1.0 + 3.0 * _CUBIC * near.square())))
    if kind == "relu":
        return (u > 0.0).to(u.dtype)
    near = u.clamp(-1e3, 1e3)
    return torch.sigmoid(near) * (1.0 + near * torch.sigmoid(-near))
