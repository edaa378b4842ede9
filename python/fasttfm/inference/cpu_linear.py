"""Linear layers on a CPU whose weights are packed once: GEMMs in fp32, bf16 or int8, with fp32 results."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fasttfm.nn import PackedLayer, PackedTransformer
from fasttfm.nn.parts import layer_norm
from fasttfm.nn.plain import Tree, Uncopied, is_plain, is_plain_norm
from fasttfm.ops import transformer_native
from fasttfm.ops.int8_linear import int8_linear, pack_int8
from fasttfm.ops.library import is_plain as is_plain_call
from fasttfm.ops.linear import bf16_products
from fasttfm.ops.transformer_block import BlockParameters
from fasttfm.ops.transformer_native import PARAMETERS, Layers, address_table

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


_UP_WEIGHT = BlockParameters._fields.index("up_weight")
_UP = 2  # of a layer's linear layers: qkv, out, up, down
_OPERANDS = 4  # of an Int8Weight: the tensors that a GEMM reads


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
    for encoder in model.modules():
        if isinstance(encoder, PackedTransformer) and precision == "int8":
            encoder.int8 = Int8Layers.of(encoder)


class Int8Layers(Uncopied):
    """The value of ``PackedTransformer.int8``: runs its layers, whose linear layers are ``Int8Linear``, in one native
    call. It keeps the addresses of their weights, which do not change.

    Args:
        tree: Of the encoder. While a hook watches one of its modules, the modules are called.
        layers: The layers in their order, with the same options.
        next_norms: In a pre-LN model, the LayerNorm after each layer.
    """

    def __init__(self, tree: Tree, layers: Sequence[PackedLayer], next_norms: Sequence[nn.LayerNorm | None]) -> None:
        self._tree, self._first, self._next_norm = tree, layers[0], next_norms[0]
        modules = [each for layer, norm in zip(layers, next_norms, strict=True) for each in layer.block_modules(norm)]
        # Of linear layers, which have no parameters here, only the weights for the GEMMs are read.
        given = [each._parameters.get(name) for each in modules for name in ("weight", "bias")]
        self._weights = [each.weight for each in modules if isinstance(each, Int8Linear)]
        operands: list[Any] = [each for weight in self._weights for each in weight[:_OPERANDS]]
        self._addresses = array("q", [0 if each is None else each.data_ptr() for each in operands])
        intermediate = self._weights[_UP].shape[0]
        shapes: list[Any] = [None] * PARAMETERS
        shapes[_UP_WEIGHT] = torch.Size((intermediate, self._first.width))
        sizes = (len(layers), torch.float32, intermediate, self._first.norm1.weight.device, tuple(shapes))
        self._layers = Layers(given, *sizes, address_table(given))

    @classmethod
    def of(cls, encoder: PackedTransformer) -> Int8Layers | None:
        """None if the encoder has other layers, or layers with different options."""
        layers, last = encoder.in_order(), encoder.final_norm
        if not layers or any(type(each) is not PackedLayer for each in encoder.layers):
            return None
        next_norms = [None] * len(layers) if last is None else [*(layer.norm1 for layer in layers[1:]), last]
        linears = [each for layer in layers for each in (layer.qkv, layer.out, layer.up, layer.down)]
        norms = [each for layer in layers for each in (layer.norm1, layer.norm2)] + ([] if last is None else [last])
        options = {layer.block_options(1, norm) for layer, norm in zip(layers, next_norms, strict=True)}
        if len(options) > 1 or not is_plain_norm(*norms) or any(type(each) is not Int8Linear for each in linears):
            return None
        return cls(Tree(encoder), layers, next_norms)

    def run(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor | None:
        """As ``PackedTransformer.forward``; None if the layers have to run one by one."""
        if torch.is_grad_enabled() or not is_plain_call((x, cu_seqlens)) or cu_seqlens.shape[0] < 2:
            return None
        if not self._tree.is_unchanged():
            return None
        options = self._first.block_options(max_seqlen, self._next_norm)
        residual = None if self._next_norm is None else x
        if transformer_native.refuse(x, residual, self._layers, options) is not None:
            return None
        if residual is not None:
            x = layer_norm(self._first.norm1, x)
        self._first.check(x, cu_seqlens, residual, None)
        batch = transformer_native.Batch(x, None if residual is None else x.dtype, cu_seqlens.contiguous(), None)
        return transformer_native.forward_int8(batch, residual, self._layers, options, self._addresses)[0]


def _bf16(linear: nn.Linear) -> PackedLinear:
    return OneDnnLinear(linear, torch.bfloat16)


def has_bf16_instructions() -> bool:
    return bf16_products() == "instructions"
