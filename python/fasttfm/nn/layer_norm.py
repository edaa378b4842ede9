"""``LayerNorm`` and ``RMSNorm``: torch.nn's modules on top of the fused ops; ``OffsetRMSNorm``: Gemma's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fasttfm import ops


class LayerNorm(torch.nn.LayerNorm):
    """Drop-in for ``torch.nn.LayerNorm``: same arguments, same state_dict, same numbers.

    One difference saves memory: under autocast the output has the input's dtype, while torch's is fp32.
    """

    def forward(self, input: Tensor) -> Tensor:
        x = _flat_input("LayerNorm", "input", input, self.normalized_shape)
        weight: Tensor | None = self.weight
        bias: Tensor | None = self.bias
        if len(self.normalized_shape) > 1:  # the op normalises one dimension
            weight = None if weight is None else weight.reshape(-1)
            bias = None if bias is None else bias.reshape(-1)
        return ops.layer_norm(x, weight, bias, eps=self.eps).reshape(input.shape)


class RMSNorm(torch.nn.RMSNorm):
    """Drop-in for ``torch.nn.RMSNorm``: same arguments, same state_dict, same numbers.

    If ``eps`` is None it is the machine epsilon of the statistics' dtype, as in torch: fp32, or fp64 for fp64 inputs.
    Under autocast the output has the input's dtype.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_parameter("bias", None)  # as a LayerNorm without one: layers read both kinds in the same way

    def forward(self, x: Tensor) -> Tensor:
        rows = _flat_input("RMSNorm", "x", x, self.normalized_shape)
        weight = self.scale()
        if weight is not None and len(self.normalized_shape) > 1:
            weight = weight.reshape(-1)
        eps = self.eps
        if eps is None:
            eps = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
        return ops.rms_norm(rows, weight, eps=eps).reshape(x.shape)

    def scale(self) -> Tensor | None:
        """The factors of the columns."""
        weight: Tensor | None = self.weight
        return weight


class OffsetRMSNorm(RMSNorm):
    """RMSNorm that multiplies with ``1 + weight``, in fp32; the weight is 0 at first."""

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.weight)

    def scale(self) -> Tensor:
        return 1 + self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))


def _flat_input(module: str, argument: str, input: Tensor, normalized_shape: Sequence[int]) -> Tensor:
    """``input`` with the normalised dimensions flattened to one."""
    normalized = tuple(normalized_shape)
    leading = input.shape[: input.dim() - len(normalized)]
    if tuple(input.shape[len(leading) :]) != normalized:
        raise ValueError(f"{module}: {argument}: expected shape (..., {normalized}), got {tuple(input.shape)}")
    return input if len(normalized) == 1 else input.reshape(*leading, -1)
