"""The parameters of the layers of one autograd node, and their gradients."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fasttfm.ops import direct_gradients, linear
from fasttfm.ops.transformer_block import BlockParameters
from fasttfm.ops.transformer_native import Layers

# The parameters of a layer that are operands of GEMMs, in x's dtype.
_MULTIPLIED = tuple(
    BlockParameters._fields.index(name) for name in ("qkv_weight", "qkv_bias", "out_weight", "up_weight", "down_weight")
)
# If the multiply-adds of a layer's [C, C] GEMM exceed this, the GPU takes longer for a layer than the host. Then each
# layer is a separate autograd node, whose memory is freed as soon as its backward has run.
_LARGE = 2**34

_requires_grad = operator.attrgetter("requires_grad")


def distinct(layers: Layers) -> dict[int, Tensor]:
    """The parameters, each once, by their ids."""
    present = layers.present()
    return dict(zip(map(id, present), present, strict=True))


def parts_of(x: Tensor, seeds: Tensor | None, layers: Layers) -> list[tuple[Layers, Tensor | None]]:
    """The layers of each autograd node, and their seeds: all in one node, unless layers are large, some gradients are
    not needed, or gradients are used layer by layer, by distributed training or hooks."""
    present = layers.present()
    single = (
        layers.depth == 1
        or is_large(x)
        or (torch.distributed.is_available() and torch.distributed.is_initialized())
        or not all(map(_requires_grad, present))
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


def is_large(x: Tensor) -> bool:
    tokens, width = x.shape
    return tokens * width * width >= _LARGE


def in_type(layers: Layers, dtype: torch.dtype, *, copies: bool) -> list[Tensor | None]:
    """The parameters, with the operands of GEMMs in x's dtype, by one launch for all layers."""
    if layers.dtype == dtype:
        return layers.parameters
    tensors: list[Any] = list(layers.parameters)
    if copies:
        indices = [first + index for first in range(0, len(tensors), layers.fields) for index in _MULTIPLIED]
        cast = linear.in_type([tensors[index] for index in indices], dtype, copies=True)
        for index, tensor in zip(indices, cast, strict=True):
            tensors[index] = tensor
        return tensors
    originals: list[Tensor] = []
    targets: list[Tensor] = []
    for index in _MULTIPLIED:
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
    return [each is not None and by_id[id(each)] for each in layers.parameters]


def summed(gradients: Sequence[Tensor | None], layers: Layers) -> Sequence[Tensor | None]:
    """The gradient of each parameter. The gradients of a shared parameter are added in the order of the backward, as
    autograd does for several nodes."""
    present = layers.present()
    if len(set(map(id, present))) == len(present):
        if len(present) == len(layers.parameters):
            return gradients
        return [gradient for gradient, each in zip(gradients, layers.parameters, strict=True) if each is not None]
    indices: dict[int, list[int]] = {}
    for index, each in enumerate(layers.parameters):
        if each is not None:
            indices.setdefault(id(each), []).append(index)
    totals = [gradients[group[-1]] for group in indices.values()]
    for step in range(2, 1 + max(map(len, indices.values()))):
        pairs = zip(totals, indices.values(), strict=True)
        shared = [(total, group[-step]) for total, group in pairs if total is not None and len(group) >= step]
        terms: Any = [gradients[index] for _, index in shared]
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
    if None in layers.shapes:
        return [None if each is None else torch.empty_like(each) for each in layers.parameters]
    parameters: Any = layers.parameters
    return list(map(torch.empty_like, parameters))
