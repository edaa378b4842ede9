"""Views and allocations for row-wise kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def as_rows(x: Tensor) -> Tensor:
    """``[..., C]`` as ``[N, C]`` with unit column stride: a view if one row stride describes it, otherwise a copy."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def readable_rows(x: Tensor) -> Tensor:
    """``[..., C]`` as the native core reads it: x itself where one row stride describes it, else a copy."""
    return x if x.is_contiguous() else as_rows(x)


def aligned(x: Tensor) -> Tensor:
    """x, or a copy if x is not aligned to 16 bytes, which CUDA kernels require. Gradients from autograd can be views
    into larger tensors, for example those of ``torch.cat``, with any alignment."""
    return x.clone() if x.data_ptr() % 16 else x


def contiguous_rows(gradient: Tensor) -> Tensor:
    """A gradient as CUDA kernels read it: contiguous and aligned."""
    return aligned(gradient.contiguous())


def contiguous_like(x: Tensor) -> Tensor:
    """An uninitialized contiguous tensor of x's shape and dtype. ``torch.empty`` takes three times as long on the host,
    because it parses the shape."""
    return torch.empty_like(x) if x.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format)


def empty_numbers(x: Tensor, *sizes: int) -> Tensor:
    """An uninitialized tensor of x's accumulation type, on its device. ``new_empty`` with separate sizes takes half of
    ``torch.empty``'s time on the host."""
    if x.dtype is torch.float32 or x.dtype is torch.float64:
        return x.new_empty(*sizes)
    return x.new_empty(*sizes, dtype=torch.float32)


def in_type(total: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in a type: itself, without a call of torch, if it is of that type."""
    return total if total.dtype is dtype else total.to(dtype)


def row_count(x: Tensor) -> int:
    """N of rows x [..., C]."""
    return x.numel() // x.shape[-1]


def empty_rows(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialized tensor whose rows (the last dimension) begin at multiples of 16 elements: kernels read them in
    vectors. It is a view of a wider one where that makes a difference."""
    *leading, columns = shape
    return torch.empty((*leading, -(-columns // 16) * 16), dtype=dtype, device=device)[..., :columns]


def empty_output(x: Tensor) -> Tensor:
    """An empty tensor in place of an output that is not needed."""
    return torch.empty(0, dtype=x.dtype, device=x.device)


def gradient_like(parameter: Tensor | None, needed: bool, x: Tensor) -> Tensor:
    """An uninitialized gradient of a parameter, with its dtype and shape; empty if it is not ``needed``."""
    return contiguous_like(parameter) if parameter is not None and needed else empty_output(x)
