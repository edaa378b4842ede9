"""The parameters of the layers of one autograd node, and their gradients."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.ops import linear
from fasttfm.ops.core import direct_gradients
from fasttfm.ops.core.library import are_plain_tensors
from fasttfm.ops.layers.spec import FIELDS
from fasttfm.ops.layers.transformer_block import GEMM_PARAMETERS, BlockParameters

BLOCK_FIELDS = len(BlockParameters._fields)
_UP_WEIGHT = FIELDS.index("up_weight")
_ALIGNMENT = 16
# The parameters of a layer that are operands of GEMMs, in x's dtype.
MULTIPLIED = tuple(map(BlockParameters._fields.index, GEMM_PARAMETERS))
# If the multiply-adds of a layer's [C, C] GEMM exceed this, the GPU takes longer for a layer than the host. Then each
# layer is a separate autograd node, whose memory is freed as soon as its backward has run.
_LARGE = 2**34

_requires_grad = operator.attrgetter("requires_grad")


class Layers(NamedTuple):
    """The parameters of consecutive layers, for the core."""

    parameters: list[Tensor | None]  # of all layers, in the order of spec.py's FIELDS or of BlockParameters
    depth: int  # the number of layers
    dtype: torch.dtype  # of all parameters
    intermediate: int
    device: torch.device  # of all parameters
    shapes: tuple[torch.Size | None, ...]  # a layer's
    table: array[int]  # addresses of all parameters, 0 for None

    @property
    def fields(self) -> int:
        """The number of parameters of a layer, those that are None included."""
        return len(self.shapes)

    def present(self) -> list[Tensor]:
        """The parameters that are not None."""
        return [p for p in self.parameters if p is not None]


def layers_of(parameters: list[Tensor | None], fields: int = len(FIELDS)) -> Layers | str:
    """The layers of a list of parameters, ``fields`` of each, or why the core does not support them: all layers must
    have the same dtypes and shapes, and contiguous parameters."""
    if (missing := _native.missing()) is not None:
        return missing
    table = array("q", bytes(8 * len(parameters)))
    if _native.core().tensor_table(parameters, table.buffer_info()[0], fields) < 0:
        if not are_plain_tensors(parameters):
            return NOT_PLAIN
        if (reason := _differences(parameters, fields)) is not None:
            return reason
        table = address_table(parameters)
    first = parameters[:fields]
    qkv_weight, up_weight = first[0], first[_UP_WEIGHT]
    assert qkv_weight is not None
    assert up_weight is not None
    shapes = tuple(None if p is None else p.shape for p in first)
    depth, dtype, device = len(parameters) // fields, qkv_weight.dtype, qkv_weight.device
    return Layers(parameters, depth, dtype, up_weight.shape[0], device, shapes, table)


NOT_PLAIN = "takes plain tensors in eager calls"


def _differences(parameters: list[Tensor | None], fields: int) -> str | None:
    present = [p for p in parameters if p is not None]
    if len({p.dtype for p in present}) > 1:
        return "takes parameters of one type"
    if len({p.device for p in present}) > 1:
        return "takes parameters on one device"
    shapes = [None if p is None else p.shape for p in parameters]
    if shapes != shapes[:fields] * (len(parameters) // fields):
        return "takes layers with the same biases, of the same shapes"
    if not all(p.is_contiguous() for p in present):
        return "takes contiguous parameters"
    if any(p.is_cuda and p.data_ptr() % _ALIGNMENT for p in present):
        return f"takes parameters that start at a multiple of {_ALIGNMENT} bytes"
    return None


def address_table(tensors: list[Tensor | None]) -> array[int]:
    """The addresses of tensors for the core, 0 for None."""
    table = array("q", bytes(8 * len(tensors)))
    if _native.core().tensor_table(tensors, table.buffer_info()[0], BLOCK_FIELDS) != _UNREAD:
        return table
    return array("q", [0 if tensor is None else tensor.data_ptr() for tensor in tensors])


_UNREAD = -2  # the core cannot read tensors of torch before 2.10

CHANGED_PARAMETERS = (
    "one of the variables needed for gradient computation has been modified by an inplace operation:"
    " a parameter of a transformer layer has changed between forward and backward"
)
_version_of = operator.attrgetter("_version")


def versions(tensors: Sequence[Tensor | None]) -> list[int]:
    """torch's counters of in-place operations: a backward compares them with those of its forward."""
    return list(map(_version_of, [tensor for tensor in tensors if tensor is not None]))


def distinct(layers: Layers) -> dict[int, Tensor]:
    """The parameters, each once, by their ids."""
    present = layers.present()
    return dict(zip(map(id, present), present, strict=True))


def parts_of(x: Tensor, seeds: Tensor | None, layers: Layers) -> list[tuple[Layers, Tensor | None]]:
    """The layers of each autograd node, and their seeds: all in one node, unless layers are large, only some layers
    need the gradient of a parameter, or gradients are used layer by layer, by distributed training or hooks."""
    present = layers.present()
    single = (
        layers.depth == 1
        or is_large(*x.shape)
        or (torch.distributed.is_available() and torch.distributed.is_initialized())
        or not _are_alike(layers)
        or any(map(direct_gradients.last_hooks_of, present))
    )
    if not single:
        return [(layers, seeds)]
    parts = []
    for index in range(layers.depth):
        parameters = slice(index * layers.fields, (index + 1) * layers.fields)
        of_layer = None if seeds is None else seeds[index : index + 1]
        tensors, table = layers.parameters[parameters], layers.table[parameters]
        parts.append((layers._replace(parameters=tensors, depth=1, table=table), of_layer))
    return parts


def _are_alike(layers: Layers) -> bool:
    """Whether the same gradients are needed in each layer."""
    needs = [p is not None and p.requires_grad for p in layers.parameters]
    return needs == needs[: layers.fields] * layers.depth


def frozen_of(x: Tensor, residual: Tensor | None, layers: Layers) -> frozenset[str]:
    """The names of the parameters and inputs whose gradients no layer needs."""
    known: list[tuple[str, list[Tensor | None]]] = [("x", [x])]
    known += [] if residual is None else [("residual", [residual])]
    known += [(name, layers.parameters[index :: layers.fields]) for index, name in enumerate(FIELDS)]
    return frozenset(name for name, tensors in known if not any(t is not None and t.requires_grad for t in tensors))


def is_large(tokens: int, width: int) -> bool:
    return tokens * width * width >= _LARGE


def in_type(layers: Layers, dtype: torch.dtype, *, copies: bool) -> list[Tensor | None]:
    """The parameters, with the operands of GEMMs in x's dtype, by one launch for all layers."""
    if layers.dtype == dtype:
        return layers.parameters
    tensors: list[Any] = list(layers.parameters)
    if copies:
        indices = [first + index for first in range(0, len(tensors), layers.fields) for index in MULTIPLIED]
        cast = linear.in_type([tensors[index] for index in indices], dtype, copies=True)
        for index, tensor in zip(indices, cast, strict=True):
            tensors[index] = tensor
        return tensors
    originals: list[Tensor] = []
    targets: list[Tensor] = []
    for index in MULTIPLIED:
        same = tensors[index :: layers.fields]
        if same[0] is not None:  # one tensor for the same parameter of all layers
            originals += same
            tensors[index :: layers.fields] = same[0].new_empty((layers.depth, *same[0].shape), dtype=dtype).unbind()
            targets += tensors[index :: layers.fields]
    torch._foreach_copy_(targets, originals)
    return tensors


def needed_of(layers: Layers, of_unique: Sequence[bool]) -> Sequence[bool]:
    """Whether the gradient of each parameter of each layer is needed."""
    if len(of_unique) == len(layers.parameters):
        return of_unique
    by_id = dict(zip(distinct(layers), of_unique, strict=True))
    return [p is not None and by_id[id(p)] for p in layers.parameters]


def summed(gradients: Sequence[Tensor | None], layers: Layers) -> Sequence[Tensor | None]:
    """The gradient of each parameter. The gradients of a shared parameter are added in the order of the backward, as
    autograd does for several nodes."""
    present = layers.present()
    if len(set(map(id, present))) == len(present):
        if len(present) == len(layers.parameters):
            return gradients
        return [gradient for gradient, p in zip(gradients, layers.parameters, strict=True) if p is not None]
    indices: dict[int, list[int]] = {}
    for index, p in enumerate(layers.parameters):
        if p is not None:
            indices.setdefault(id(p), []).append(index)
    totals = [gradients[group[-1]] for group in indices.values()]
    for step in range(2, 1 + max(map(len, indices.values()))):
        pairs = zip(totals, indices.values(), strict=True)
        shared = [(total, group[-step]) for total, group in pairs if total is not None and len(group) >= step]
        terms: Any = [gradients[index] for _, index in shared]
        if shared:
            torch._foreach_add_([total for total, _ in shared], terms)
    return totals


def gradients_like(operands: list[Tensor | None], needed: Sequence[bool], layers: Layers) -> list[Tensor | None]:
    """Allocates the gradients in the parameters' dtype. Each has a storage of its own, as those of autograd have: its
    owner may free or save it without those of the other layers."""
    if layers.depth == 1:
        return [
            torch.empty_like(operand, dtype=layers.dtype) if operand is not None and is_needed else None
            for operand, is_needed in zip(operands, needed, strict=True)
        ]
    if None in layers.shapes or not all(needed):
        return [
            torch.empty_like(p) if p is not None and is_needed else None
            for p, is_needed in zip(layers.parameters, needed, strict=True)
        ]
    parameters: Any = layers.parameters
    return list(map(torch.empty_like, parameters))
