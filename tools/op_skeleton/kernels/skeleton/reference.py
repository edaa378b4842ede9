"""skeleton, in plain torch: the specification.

    y = factor * x
    dx = factor * dy

Arithmetic is fp32 (fp64 for fp64 input); only y and dx are rounded to the tensors' own type.
"""

from __future__ import annotations

import torch
from torch import Tensor


def skeleton(x: Tensor, factor: float) -> Tensor:
    """The forward formula as autograd can differentiate it; tests hold every backend against this."""
    return skeleton_forward(x, factor)


def skeleton_forward(x: Tensor, factor: float) -> Tensor:
    """Returns y in x's shape and type, contiguous."""
    return (_accumulate(x) * factor).to(x.dtype).contiguous()


def skeleton_backward(dy: Tensor, x: Tensor, factor: float) -> Tensor:
    """Returns dx in x's shape and type, contiguous. What is saved comes after the gradient, then the options."""
    return (_accumulate(dy) * factor).to(x.dtype).contiguous()


def _accumulate(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
