"""LayerNorms and residual connections of modules that keep their parameters in ``torch.nn.LayerNorm``."""

from __future__ import annotations

import torch
from torch import Tensor

from fasttfm import ops


def norm(layer_norm: torch.nn.LayerNorm, x: Tensor) -> Tensor:
    """LayerNorm of ``x`` without a residual."""
    return ops.layer_norm(x, layer_norm.weight, layer_norm.bias, eps=layer_norm.eps)


def add_norm(
    layer_norm: torch.nn.LayerNorm,
    branch: Tensor,
    residual: Tensor,
    *,
    linear_bias: Tensor | None = None,
    p: float = 0.0,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """``layer_norm(residual + dropout(branch + linear_bias))``: the end of a post-LN block."""
    y = ops.dropout_add_layer_norm(
        branch,
        residual,
        layer_norm.weight,
        layer_norm.bias,
        linear_bias=linear_bias,
        p=p,
        eps=layer_norm.eps,
        cu_seqlens=cu_seqlens,
    )
    assert isinstance(y, Tensor)
    return y


def add_then_norm(
    layer_norm: torch.nn.LayerNorm,
    branch: Tensor,
    residual: Tensor,
    *,
    linear_bias: Tensor | None = None,
    p: float = 0.0,
    cu_seqlens: Tensor | None = None,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same, and the sum before LayerNorm, the residual stream of pre-LN blocks."""
    y, z = ops.dropout_add_layer_norm(
        branch,
        residual,
        layer_norm.weight,
        layer_norm.bias,
        linear_bias=linear_bias,
        p=p,
        eps=layer_norm.eps,
        prenorm=True,
        cu_seqlens=cu_seqlens,
        seed=seed,
    )
    return y, z
