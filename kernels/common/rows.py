"""A tensor seen as rows: what row-wise kernels read."""

from __future__ import annotations

from torch import Tensor


def as_rows(x: Tensor) -> Tensor:
    """``[..., C]`` as ``[N, C]`` with unit column stride: a view where one row stride describes it, else a contiguous copy."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
