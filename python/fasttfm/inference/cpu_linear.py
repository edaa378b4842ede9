"""Linear layers on a CPU whose weights are packed once: GEMMs in fp32, bf16 or int8, with fp32 results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fasttfm.nn import PackedLayer
from fasttfm.nn.plain import is_plain
from fasttfm.ops.int8_linear import int8_linear, pack_int8
from fasttfm.ops.linear import bf16_products

# oneDNN reads bf16 rows in blocks of 32 columns. With other widths it would read past the end of a row and multiply
# that by 0, which is NaN where it is not finite.
_BLOCK = 32
# For each activation: the name and the algorithm of oneDNN's post-op.
_ONEDNN_ACTIVATIONS: dict[str | None, tuple[str, str]] = {
    None: ("none", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "relu": ("relu", ""),
    "silu": ("swish", ""),
}


class PackedLinear(nn.Module):
    """A linear layer without gradients whose weight is stored in the order in which the kernel reads it. ``activated``
    applies an activation to the result while it is in the cache."""

    def forward(self, x: Tensor) -> Tensor:
        return self.activated(x, None)

    def activated(self, x: Tensor, activation: str | None) -> Tensor:
        raise NotImplementedError


class Int8Linear(PackedLinear):
    """Weights with a scale for each row, inputs with a scale for each token (ops/int8_linear.py)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = pack_int8(linear.weight, linear.bias)

    def activated(self, x: Tensor, activation: str | None) -> Tensor:
        return int8_linear(x, self.weight, activation=activation)


class OneDnnLinear(PackedLinear):
    """A weight in oneDNN's blocked layout, in fp32 or bf16."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().to(dtype), None)
        self.bias = None if linear.bias is None else linear.bias.detach().to(dtype)

    def activated(self, x: Tensor, activation: str | None) -> Tensor:
        name, algorithm = _ONEDNN_ACTIVATIONS[activation]
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x.to(self.dtype), self.weight, self.bias, name, [], algorithm)
        return y.float()


def pack_linears(model: nn.Module, precision: str) -> None:
    """Replaces the linear layers of a model's transformer layers, which are in fp32 on the CPU, by packed ones.

    Args:
        precision: ``"int8"`` or ``"bfloat16"``. On a CPU without bf16 instructions ``"bfloat16"`` changes nothing,
            because bf16 GEMMs take longer than fp32 GEMMs there.
    """
    make: Callable[[nn.Linear], PackedLinear] = Int8Linear
    if precision == "bfloat16":
        if not has_bf16_instructions():
            return
        make = _bf16
    for layer in model.modules():
        if isinstance(layer, PackedLayer):
            for name in ("qkv", "out", "up", "down"):
                linear: Any = getattr(layer, name)
                if type(linear) is nn.Linear and is_plain(linear) and linear.in_features % _BLOCK == 0:
                    setattr(layer, name, make(linear))


def _bf16(linear: nn.Linear) -> PackedLinear:
    return OneDnnLinear(linear, torch.bfloat16)


def has_bf16_instructions() -> bool:
    return bf16_products() == "instructions"
