"""A linear layer with LayerNorm, activation and residual addition, as in a decoding step: the specification.

    u = x, or LayerNorm(x) = (x - mean) / sqrt(var + eps) * norm_weight + norm_bias, rounded to the weight's dtype
    y = activation(u weight^T + bias) + residual

Rows are all dimensions but the last. Sums are fp32 (fp64 for fp64 input), and y is rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fasttfm.kernels.common.activation import activate
from fasttfm.kernels.common.linear import accumulate, without_autocast
from fasttfm.kernels.common.rows import empty_rows


def decode_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    residual: Tensor | None,
    eps: float | None,
    activation: str,
    out_dtype: torch.dtype,
    overlap: bool = False,
) -> Tensor:
    """``eps`` is None without LayerNorm, ``activation`` is "" for none; ``overlap`` has no effect here."""
    rows = accumulate(x)
    if eps is not None:
        centered = rows - rows.mean(dim=-1, keepdim=True)
        rows = centered * (centered.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
        rows = rows if norm_weight is None else rows * accumulate(norm_weight)
        rows = rows if norm_bias is None else rows + accumulate(norm_bias)
    rows = accumulate(rows.to(weight.dtype))
    with without_autocast(rows):
        y = rows @ accumulate(weight).t()
    y = y if bias is None else y + accumulate(bias)
    y = activate(y, activation) if activation else y
    y = y if residual is None else y + accumulate(residual)
    return empty_rows(y.shape, out_dtype, y.device).copy_(y)
