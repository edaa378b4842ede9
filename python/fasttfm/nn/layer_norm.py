"""``LayerNorm``: torch.nn's module on top of the fused op."""

from __future__ import annotations

import torch
from torch import Tensor

from fasttfm import ops


class LayerNorm(torch.nn.LayerNorm):
    """Drop-in for ``torch.nn.LayerNorm``: same arguments, same state_dict, same numbers.

    One difference, in memory's favour: under autocast the output keeps the input's type, where torch's becomes fp32.
    """

    def forward(self, input: Tensor) -> Tensor:
        normalized = tuple(self.normalized_shape)
        leading = input.shape[: input.dim() - len(normalized)]
        if tuple(input.shape[len(leading) :]) != normalized:
            raise ValueError(f"LayerNorm: input: expected shape (..., {normalized}), got {tuple(input.shape)}")
        x = input
        weight: Tensor | None = self.weight
        bias: Tensor | None = self.bias
        if len(normalized) > 1:  # the op normalises one dimension
            x = input.reshape(*leading, -1)
            weight = None if weight is None else weight.reshape(-1)
            bias = None if bias is None else bias.reshape(-1)
        return ops.layer_norm(x, weight, bias, eps=self.eps).reshape(input.shape)
