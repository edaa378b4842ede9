"""Linear layers on a CPU whose weights are packed once: GEMMs in fp32, bf16 or int8, with fp32 results."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from fasttfm.inference.outliers import outlier_columns
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.nn import PackedLayer, PackedTransformer
from fasttfm.nn.packed_transformer import are_described, specs_of, with_next_norms
from fasttfm.nn.plain import Tree, Uncopied, is_plain
from fasttfm.ops.core.library import is_plain as is_plain_call
from fasttfm.ops.int8_linear import int8_linear, pack_int8
from fasttfm.ops.layers import core_executor
from fasttfm.ops.layers.encoding import OPERANDS
from fasttfm.ops.layers.parameters import Layers, address_table
from fasttfm.ops.layers.spec import FIELDS, Specs
from fasttfm.ops.packed_linear import pack_weight, packed_linear, supported_products

_BLOCK = 6  # linear layers and norms of a layer, without norms of heads


class PackedLinear(nn.Module):
    """A linear layer without gradients whose weight is stored in the order in which the kernel reads it. ``activated``
    applies an activation to the result while it is in the cache."""

    def forward(self, x: Tensor) -> Tensor:
        return self.activated(x, None)

    def activated(self, x: Tensor, activation: str | None) -> Tensor:
        raise NotImplementedError


class Int8Linear(PackedLinear):
    """Weights with a scale for each row, inputs with a scale for each token (ops/int8_linear.py). Columns of the input
    that are ``outliers`` stay in fp32."""

    def __init__(self, linear: nn.Linear, outliers: Sequence[int] | None = None) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.weight = pack_int8(linear.weight, linear.bias, outliers)

    def activated(self, x: Tensor, activation: str | None) -> Tensor:
        return int8_linear(x, self.weight, activation=activation)


class Bf16Linear(PackedLinear):
    """Weights and inputs rounded to bf16 (ops/packed_linear.py)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.weight = pack_weight(linear.weight, linear.bias, dtype=torch.bfloat16)

    def activated(self, x: Tensor, activation: str | None) -> Tensor:
        return packed_linear(x, self.weight, activation=activation)


_LINEARS: dict[str, type[PackedLinear]] = {"int8": Int8Linear, "bf16": Bf16Linear}
# Packed weights in fp32 are a copy, which calls with few rows read. With MiniLM's layers on one thread of a Xeon, their
# GEMMs take half the time of the BLAS for 16 rows, 0.9 of it for 128, and 1.1 of it for 512.
_MOST_FP32_ROWS = 192  # for each thread
_MOST_FP32_BYTES = 512 << 20  # of the copy: that of BERT-base takes 340 MB


def packed_precision(device: torch.device, dtype: torch.dtype, *, int8: bool, may_pack: bool) -> str | None:
    """The precision in which ``pack_linears`` packs the weights; None if they stay as they are. bf16 GEMMs take longer
    than fp32 GEMMs on a CPU without bf16 instructions."""
    if int8:
        return "int8"
    if device.type != "cpu":
        return None
    if dtype == torch.bfloat16 and has_bf16_instructions():
        return "bf16"
    return "fp32" if may_pack or dtype == torch.bfloat16 else None


def pack_linears(model: PretrainedModel, precision: str) -> None:
    """Packs the linear layers of a model's transformer layers, which are in fp32 on the CPU.

    Args:
        precision: ``"int8"`` or ``"bf16"``, in which linear layers are replaced, or ``"fp32"``: they stay, for calls
            with many rows and for those of single modules.
    """
    if precision in _LINEARS:
        layers = [module for module in model.modules() if isinstance(module, PackedLayer)]
        named = [(layer, name, getattr(layer, name)) for layer in layers for name in ("qkv", "out", "up", "down")]
        replaced = [each for each in named if type(each[2]) is nn.Linear and is_plain(each[2])]
        outliers = outlier_columns(model, [linear for *_, linear in replaced]) if precision == "int8" else {}
        for layer, name, linear in replaced:
            packed = Int8Linear(linear, outliers.get(linear)) if precision == "int8" else Bf16Linear(linear)
            setattr(layer, name, packed)
    for encoder in model.modules():
        if isinstance(encoder, PackedTransformer):
            encoder.packed = PackedLayers.of(encoder, precision)


class PackedLayers(Uncopied):
    """The value of ``PackedTransformer.packed``: runs its layers with weights that are all packed in one precision, by
    one plan, in one native call. It keeps the addresses of the weights, which do not change.

    Args:
        encoder: The encoder. While a hook watches one of its modules, the modules are called.
        precision: That of ``pack_linears``.
        weights: Those of qkv, out, up and down of each layer.
        fields: The FIELDS of all layers, of which linear layers have none.
        specs: The layers as data.
    """

    def __init__(
        self,
        encoder: PackedTransformer,
        precision: str,
        weights: Sequence[Any],
        fields: list[Tensor | None],
        specs: Specs,
    ) -> None:
        self._tree, self._specs, self._precision = Tree(encoder), specs, precision
        self.is_copy = precision == "fp32"  # of linear layers that the modules still have
        operands: list[Any] = [getattr(weight, name) for weight in weights for name in OPERANDS[precision]]
        self._operands = array("q", [0 if operand is None else operand.data_ptr() for operand in operands])
        self._weights = weights  # which the addresses are of
        shapes = tuple(None if field is None else field.shape for field in fields[: len(FIELDS)])
        intermediate, device = specs[0].feed_forward.columns, weights[0].panels.device
        self._layers = Layers(fields, len(specs), torch.float32, intermediate, device, shapes, address_table(fields))

    @classmethod
    def of(cls, encoder: PackedTransformer, precision: str) -> PackedLayers | None:
        """None if the encoder has layers of other classes, or modules that have to be called."""
        if not len(encoder.layers) or not are_described(list(encoder.layers)):
            return None
        layers = encoder.in_order()
        pairs = with_next_norms(layers, encoder.final_norm)
        if not all(layer.has_plain_norms(norm) for layer, norm in pairs):
            return None
        linears = [linear for layer in layers for linear in (layer.qkv, layer.out, layer.up, layer.down)]
        weights = _packed_weights(linears, precision)
        if weights is None:
            return None
        modules = [layer.block_modules(norm) for layer, norm in pairs]
        # Linear layers have no parameters here: their operands are read.
        fields = list(itertools.chain.from_iterable(map(_fields_of, modules)))
        specs = specs_of(pairs, list(encoder.rotations()), [field is None for field in fields])
        return None if specs is None else cls(encoder, precision, weights, fields, specs)

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
        if self.is_copy and x.shape[0] > _MOST_FP32_ROWS * torch.get_num_threads():
            return None
        if not self._tree.is_unchanged():
            return None
        inputs = self._tree.root.unadapted_inputs_of(x, cu_seqlens, max_seqlen, tables, positions)
        if core_executor.refuse(self._specs, inputs, self._layers, gradient=False) is not None:
            return None
        plan = core_executor.plan_of(self._specs, inputs, training=False, precision=self._precision)
        return core_executor.forward(plan, inputs, self._layers, self._layers.parameters, self._operands)[0]


def _packed_weights(linears: Sequence[nn.Module], precision: str) -> list[Any] | None:
    """The weights of linear layers in the kernels' layout; None if a layer has none, or a copy would be too large."""
    if precision in _LINEARS:
        is_packed = all(type(linear) is _LINEARS[precision] for linear in linears)
        return [linear.weight for linear in linears] if is_packed else None
    if not all(type(linear) is nn.Linear and is_plain(linear) for linear in linears):
        return None
    packed: dict[Any, Any] = dict.fromkeys(linears)  # layers that are used several times are packed once
    if sum(linear.weight.nbytes for linear in packed) > _MOST_FP32_BYTES:
        return None
    for linear in packed:
        packed[linear] = pack_weight(linear.weight, linear.bias, dtype=torch.float32)
    return [packed[linear] for linear in linears]


def _fields_of(modules: Sequence[nn.Module]) -> list[Tensor | None]:
    """The FIELDS of a layer, of its ``block_modules``; norms of heads, the last modules, have no bias."""
    linears = (nn.Linear, PackedLinear)
    fields = [
        None if isinstance(module, linears) else module._parameters.get(name)
        for module in modules[:_BLOCK]
        for name in ("weight", "bias")
    ]
    fields += [module._parameters.get("weight") for module in modules[_BLOCK:]]
    return [*fields, *[None] * (len(FIELDS) - len(fields))]


def has_bf16_instructions() -> bool:
    return supported_products()[-1] != "generic"
