"""Linear layers on a CPU whose weights are packed once: GEMMs in fp32, bf16 or int8, with fp32 results."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from fasttfm.nn import PackedLayer, PackedTransformer
from fasttfm.nn.packed_transformer import are_described, specs_of, with_next_norms
from fasttfm.nn.plain import Tree, Uncopied, is_plain
from fasttfm.ops.int8_linear import int8_linear, pack_int8
from fasttfm.ops.layers import core_executor
from fasttfm.ops.layers.plan import OPERANDS
from fasttfm.ops.layers.spec import FIELDS, Specs
from fasttfm.ops.library import is_plain as is_plain_call
from fasttfm.ops.linear import bf16_products
from fasttfm.ops.transformer_native import Layers, address_table

# oneDNN reads bf16 rows in blocks of 32 columns. With other widths it would read past the end of a row and multiply
# that by 0, which is NaN where it is not finite.
_COLUMNS = 32
# For each activation: the name and the algorithm of oneDNN's post-op.
_ONEDNN_ACTIVATIONS: dict[str | None, tuple[str, str]] = {
    None: ("none", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "relu": ("relu", ""),
    "silu": ("swish", ""),
}


_BLOCK = 6  # linear layers and norms of a layer, without norms of heads


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
        self.in_features = linear.in_features
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
                if type(linear) is nn.Linear and is_plain(linear) and linear.in_features % _COLUMNS == 0:
                    setattr(layer, name, make(linear))
    for encoder in model.modules():
        if isinstance(encoder, PackedTransformer) and precision == "int8":
            encoder.int8 = Int8Layers.of(encoder)


class Int8Layers(Uncopied):
    """The value of ``PackedTransformer.int8``: runs its layers, whose linear layers are ``Int8Linear``, by one plan, in
    one native call. It keeps the addresses of their weights, which do not change.

    Args:
        encoder: The encoder. While a hook watches one of its modules, the modules are called.
        modules: The ``block_modules`` of each layer.
        given: The FIELDS of all layers, of which linear layers have none.
        specs: The layers as data.
    """

    def __init__(
        self,
        encoder: PackedTransformer,
        modules: Sequence[Sequence[nn.Module]],
        given: list[Tensor | None],
        specs: Specs,
    ) -> None:
        self._tree, self._specs = Tree(encoder), specs
        weights = [each.weight for own in modules for each in own if isinstance(each, Int8Linear)]
        operands: list[Any] = [getattr(weight, name) for weight in weights for name in OPERANDS["int8"]]
        self._operands = array("q", [0 if each is None else each.data_ptr() for each in operands])
        self._weights = weights  # which the addresses are of
        shapes = tuple(None if each is None else each.shape for each in given[: len(FIELDS)])
        intermediate, device = specs[0].feed_forward.columns, weights[0].panels.device
        self._layers = Layers(given, len(specs), torch.float32, intermediate, device, shapes, address_table(given))

    @classmethod
    def of(cls, encoder: PackedTransformer) -> Int8Layers | None:
        """None if the encoder has layers of other classes, or modules that have to be called."""
        if not len(encoder.layers) or not are_described(list(encoder.layers)):
            return None
        layers = encoder.in_order()
        pairs = with_next_norms(layers, encoder.final_norm)
        if not all(layer.has_plain_norms(norm) for layer, norm in pairs):
            return None
        linears = [each for layer in layers for each in (layer.qkv, layer.out, layer.up, layer.down)]
        if any(type(each) is not Int8Linear for each in linears):
            return None
        modules = [layer.block_modules(norm) for layer, norm in pairs]
        # Linear layers have no parameters here: their operands are read.
        given = list(itertools.chain.from_iterable(map(_fields_of, modules)))
        specs = specs_of(pairs, list(encoder.rotations()), [each is None for each in given])
        return None if specs is None else cls(encoder, modules, given, specs)

    def run(
        self,
        x: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        tables: Mapping[Any, tuple[Tensor, Tensor]] = MappingProxyType({}),
        positions: Tensor | None = None,
    ) -> Tensor | None:
        """As ``PackedTransformer.forward``; None if the layers have to run one by one."""
        if torch.is_grad_enabled() or not is_plain_call((x, cu_seqlens)) or cu_seqlens.shape[0] < 2:
            return None
        if not self._tree.is_unchanged():
            return None
        inputs = self._tree.root.inputs_of(x, cu_seqlens, max_seqlen, tables, positions)
        if core_executor.refuse(self._specs, inputs, self._layers, gradient=False) is not None:
            return None
        plan = core_executor.plan_of(self._specs, inputs, training=False, precision="int8")
        return core_executor.forward(plan, inputs, self._layers, self._layers.parameters, self._operands)[0]


def _fields_of(modules: Sequence[nn.Module]) -> list[Tensor | None]:
    """The FIELDS of a layer, of its ``block_modules``; norms of heads, the last modules, have no bias."""
    fields = [each._parameters.get(name) for each in modules[:_BLOCK] for name in ("weight", "bias")]
    fields += [each._parameters.get("weight") for each in modules[_BLOCK:]]
    return [*fields, *[None] * (len(FIELDS) - len(fields))]


def _bf16(linear: nn.Linear) -> PackedLinear:
    return OneDnnLinear(linear, torch.bfloat16)


def has_bf16_instructions() -> bool:
    return bf16_products() == "instructions"
