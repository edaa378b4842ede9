"""A linear layer as the specifications of fused ops write it: products in fp32 (fp64 for fp64), rounded once."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


def without_autocast(tensor: Tensor) -> contextlib.AbstractContextManager[None]:
    """Disables autocast, which would convert the operands of products to 16 bits. It does not support meta tensors."""
    return contextlib.nullcontext() if tensor.is_meta else torch.autocast(tensor.device.type, enabled=False)


def accumulation_type(tensor: Tensor) -> torch.dtype:
    """The type that sums of a tensor's elements are kept in."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def accumulate(tensor: Tensor) -> Tensor:
    """The tensor in the type that sums are kept in."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def fp32_product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of matrices in fp32, or fp64 for fp64. Autograd can differentiate it.

    On a GPU, the values are those of the tensor cores for 16-bit operands: they truncate partial sums where fp32
    arithmetic rounds them, so that errors of one sign add up.
    """
    y = accumulate(a) @ accumulate(b)
    if a.is_cuda and a.dtype.itemsize == 2 and y.numel():
        difference = torch.mm(a.detach(), b.detach(), out_dtype=torch.float32) - y.detach()
        y = y + torch.nan_to_num(difference, 0.0, 0.0, 0.0)
    return y


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
    """``scale * x [..., C] @ weight [O, C]^T + bias [O]``, rounded once to x's type. Autograd can differentiate it."""
    y = _product(accumulate(x), accumulate(weight).t())
    y = y if scale == 1.0 else y * scale
    return (y if bias is None else y + accumulate(bias)).to(x.dtype)


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """``dy [..., O]^T @ x [..., C]`` summed over rows: [O, C] in x's type."""
    dy_rows, x_rows = accumulate(dy).reshape(-1, dy.shape[-1]), accumulate(x).reshape(-1, x.shape[-1])
    return _product(dy_rows.t(), x_rows).to(x.dtype)


def bias_gradient(dy: Tensor) -> Tensor:
    """The sum of ``dy [..., O]`` over rows: [O] in its type."""
    return accumulate(dy).reshape(-1, dy.shape[-1]).sum(dim=0).to(dy.dtype)


def _product(a: Tensor, b: Tensor) -> Tensor:
    with without_autocast(a):
        return a @ b
