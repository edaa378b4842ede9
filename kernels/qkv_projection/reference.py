"""The projection of x to queries, keys and values, in plain torch: the specification.

    qkv = x weight^T + bias, seen as [..., 3, H, D]

    dx = dqkv weight        dweight = dqkv^T x        dbias = sum over rows of dqkv

weight is [3C, C], the rows of q first, then those of k and of v; C = H * D. Products are summed in fp32 (fp64 for fp64
input), results rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fasttfm.kernels.common.linear import bias_gradient, linear, weight_gradient


def qkv_projection(x: Tensor, weight: Tensor, bias: Tensor | None, num_heads: int) -> Tensor:
    """Returns [..., 3, H, D] in x's type; autograd can differentiate it."""
    return linear(x, weight, bias).unflatten(-1, (3, num_heads, x.shape[-1] // num_heads))


def qkv_projection_backward(
    dqkv: Tensor, x: Tensor, weight: Tensor, needed: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dx [..., C], dweight [3C, C] and dbias [3C]; results that are not needed are empty."""
    rows = dqkv.flatten(-3)
    return (
        linear(rows, weight.t()) if needed[0] else x.new_empty(0),
        weight_gradient(rows, x) if needed[1] else x.new_empty(0),
        bias_gradient(rows) if needed[2] else x.new_empty(0),
    )
