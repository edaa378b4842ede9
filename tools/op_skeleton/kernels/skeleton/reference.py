"""skeleton, in plain torch: the specification.

    y = factor * x
    dx = factor * dy

Arithmetic is fp32 (fp64 for fp64 input); only y and dx are rounded to the tensors' own type.
"""

from __future__ import annotations

from torch import Tensor

from fasttfm.kernels.common.linear import accumulate


def skeleton(x: Tensor, factor: float) -> Tensor:
    """The forward formula as autograd can differentiate it; tests hold every backend against this."""
    return skeleton_forward(x, factor)


def skeleton_forward(x: Tensor, factor: float) -> Tensor:
    """Returns y in x's shape and type, contiguous."""
    return (accumulate(x) * factor).to(x.dtype).contiguous()


def skeleton_backward(dy: Tensor, x: Tensor, factor: float) -> Tensor:
    """Returns dx in x's shape and type, contiguous. The arguments are the gradient, the saved tensors and the
    options."""
    return (accumulate(dy) * factor).to(x.dtype).contiguous()
