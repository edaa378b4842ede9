"""A tensor seen as rows: what row-wise kernels read."""

from __future__ import annotations

import torch
from torch import Tensor


def as_rows(x: Tensor) -> Tensor:
    """``[..., C]`` as ``[N, C]`` with unit column stride: a view where one row stride describes it, else a copy."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def gradient_like(parameter: Tensor | None, wanted: bool, x: Tensor) -> Tensor:
    """Room for a parameter's gradient, of its type and shape; empty where it is not wanted."""
    if parameter is None or not wanted:
        return torch.empty(0, dtype=x.dtype, device=x.device)
    return torch.empty(parameter.shape, dtype=parameter.dtype, device=x.device)
