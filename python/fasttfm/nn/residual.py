"""LayerNorms and residual connections of modules that keep their parameters in ``torch.nn.LayerNorm``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttfm import ops


def norm(layer_norm: torch.nn.LayerNorm, x: Tensor) -> Tensor:
    """LayerNorm of ``x`` without a residual."""
    return ops.layer_norm(x, layer_norm.weight, layer_norm.bias, eps=layer_norm.eps)


def add_norm(layer_norm: torch.nn.LayerNorm, branch: Tensor, residual: Tensor, **options: Any) -> Tensor:
    """``layer_norm(residual + dropout(branch + linear_bias))``: the end of a post-LN block. ``options`` are those of
    ``ops.dropout_add_layer_norm``."""
    parameters = (layer_norm.weight, layer_norm.bias)
    y = ops.dropout_add_layer_norm(branch, residual, *parameters, eps=layer_norm.eps, **options)
    assert isinstance(y, Tensor)
    return y


def add_then_norm(
    layer_norm: torch.nn.LayerNorm, branch: Tensor, residual: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """The same, and the sum before LayerNorm, the residual stream of pre-LN blocks."""
    parameters = (layer_norm.weight, layer_norm.bias)
    y, z = ops.dropout_add_layer_norm(branch, residual, *parameters, eps=layer_norm.eps, prenorm=True, **options)
    return y, z
