"""RMSNorm over the last dimension, in plain torch: the specification.

    rstd = 1 / sqrt(sum(x^2) / C + eps)        xhat = x * rstd        y = xhat * weight

    g = dy * weight
    dx = rstd * (g - xhat * mean(g * xhat))
    dweight = sum over rows of dy * xhat

Rows are all dimensions but the last. Arithmetic is fp32 (fp64 for fp64 input); only y, dx and dweight are rounded to
the tensors' own types.
"""

from __future__ import annotations

from torch import Tensor

from fasttfm.kernels.common.linear import accumulate


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """The forward formula as autograd can differentiate it; tests hold every backend against this."""
    return rms_norm_forward(x, weight, eps)[0]


def rms_norm_forward(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Returns y [..., C] in x's type, and rstd [N] in the accumulation type."""
    rows = accumulate(x).reshape(-1, x.shape[-1])
    rstd = (rows.square().mean(dim=1) + eps).rsqrt()
    y = rows * rstd[:, None]
    if weight is not None:
        y = y * accumulate(weight)
    return y.to(x.dtype).reshape(x.shape), rstd


def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, want_dweight: bool
) -> tuple[Tensor, Tensor]:
    """Returns dx [..., C] and dweight [C], each in its tensor's type; dweight is empty if it is not needed."""
    columns = x.shape[-1]
    dy_rows = accumulate(dy).reshape(-1, columns)
    xhat = accumulate(x).reshape(-1, columns) * rstd[:, None]
    g = dy_rows if weight is None else dy_rows * accumulate(weight)
    dx = rstd[:, None] * (g - xhat * (g * xhat).mean(dim=1, keepdim=True))
    dweight = (dy_rows * xhat).sum(dim=0).to(weight.dtype) if want_dweight else dx.new_empty(0)
    return dx.to(x.dtype).reshape(x.shape), dweight
