"""Linear layers of a model on a CPU with weights that are packed once: fp32, bf16 or int8 products, fp32 results."""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fasttfm.nn import PackedLayer
from fasttfm.nn.plain import is_plain
from fasttfm.ops.int8_linear import int8_linear, pack_int8

_BLOCK = 32  # oneDNN reads bf16 in blocks of columns: with others, what follows a row could be multiplied by 0
# The names of oneDNN's functions after a product, by ours.
_AFTER: dict[str | None, tuple[str, str]] = {
    None: ("none", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "relu": ("relu", ""),
    "silu": ("swish", ""),
}


class PackedProduct(nn.Module):
    """A linear layer without gradients whose weight is in the order in which it is read. ``activated`` applies an
    activation to the product while it is in the cache."""

    def forward(self, x: Tensor) -> Tensor:
        return self.activated(x, None)

    def activated(self, x: Tensor, activation: str | None) -> Tensor:
        raise NotImplementedError


class Int8Product(PackedProduct):
    """Weights with a scale for each row, inputs with a scale for each token (ops/int8_linear.py)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = pack_int8(linear.weight, linear.bias)

    def activated(self, x: Tensor, activation: str | None) -> Tensor:
        return int8_linear(x, self.weight, activation=activation)


class OneDnnProduct(PackedProduct):
    """A weight in oneDNN's own order, in fp32 or bf16."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().to(dtype), None)
        self.bias = None if linear.bias is None else linear.bias.detach().to(dtype)

    def activated(self, x: Tensor, activation: str | None) -> Tensor:
        name, form = _AFTER[activation]
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x.to(self.dtype), self.weight, self.bias, name, [], form)
        return y.float()


def pack_products(model: nn.Module, precision: str) -> None:
    """Replaces the linear layers of a model's transformer layers, in fp32 on the CPU, by packed ones.

    Args:
        precision: ``"int8"`` or ``"bfloat16"``; the latter is left out on a CPU without instructions for it, where
            bf16 products take longer than fp32's.
    """
    make: Callable[[nn.Linear], PackedProduct] = Int8Product
    if precision == "bfloat16":
        if not multiplies_bf16():
            return
        make = _bf16
    for layer in model.modules():
        if isinstance(layer, PackedLayer):
            for name in ("qkv", "out", "up", "down"):
                linear: Any = getattr(layer, name)
                if type(linear) is nn.Linear and is_plain(linear) and linear.in_features % _BLOCK == 0:
                    setattr(layer, name, make(linear))


def _bf16(linear: nn.Linear) -> PackedProduct:
    return OneDnnProduct(linear, torch.bfloat16)


@cache
def multiplies_bf16() -> bool:
    """Whether the CPU has instructions for products of bf16: AMX, AVX512-BF16 or Arm's."""
    if not torch.backends.mkldnn.is_available():
        return False
    if platform.machine() in ("x86_64", "AMD64"):
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
