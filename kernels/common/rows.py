"""A tensor seen as rows: what row-wise kernels read."""

from __future__ import annotations

import torch
from torch import Tensor


def as_rows(x: Tensor) -> Tensor:
    """``[..., C]`` as ``[N, C]`` with unit column stride: a view where one row stride describes it, else a copy."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def aligned(x: Tensor) -> Tensor:
    """x, or a copy where x does not start at a multiple of 16 bytes, as CUDA kernels need it: gradients that autograd
    hands out can be parts of larger tensors, those of ``torch.cat`` for example, and start anywhere."""
    return x.clone() if x.data_ptr() % 16 else x


def contiguous_rows(gradient: Tensor) -> Tensor:
    """A gradient as CUDA kernels read it: contiguous and aligned."""
    return aligned(gradient.contiguous())


def contiguous_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Room for a contiguous tensor of x's shape, in its own or another type. ``torch.empty`` would take the host three
    times as long, which it spends on reading the shape."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def unwanted(x: Tensor) -> Tensor:
    """Stands for a result that nobody asked for."""
    return torch.empty(0, dtype=x.dtype, device=x.device)


def gradient_like(parameter: Tensor | None, wanted: bool, x: Tensor) -> Tensor:
    """Room for a parameter's gradient, of its type and shape; empty where it is not wanted."""
    return contiguous_like(parameter) if parameter is not None and wanted else unwanted(x)
