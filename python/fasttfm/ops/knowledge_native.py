"""A layer of knowledge_block in one call of the native core: CUDA (Hopper, 16-bit types) and CPU (fp32).

It is a layer of transformer_native.py whose feed-forward block also reads and writes the entities of aligned tokens
(kernels/knowledge_block).
"""

from __future__ import annotations

import functools
from array import array
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.ops import linear, transformer_native
from fasttfm.ops.attention_checks import check_values
from fasttfm.ops.transformer_block import BlockOptions, BlockParameters
from fasttfm.ops.transformer_native import PARAMETERS, Batch, Layers, Memory, Shape

_MULTIPLIED = ("qkv_weight", "qkv_bias", "out_weight", "up_weight", "down_weight")
_MULTIPLIED_INDICES = tuple(BlockParameters._fields.index(name) for name in _MULTIPLIED)
_ATTENTION = BlockParameters._fields[:6]
_VECTOR = 8  # of entities' columns on a GPU
_MAX_ENTITY_WIDTH = 512  # kernels/knowledge_block/op.h: kMaxEntityWidth


class Entities(NamedTuple):
    """The entity stream of a call."""

    x: Tensor  # [A, E]
    cu_seqlens: Tensor
    positions: Tensor
    head_dim: int  # of attention, with padding
    options: BlockOptions
    last: bool
    attention: bool

    @property
    def stride(self) -> int:
        """F: the columns of the core's rows of entities."""
        return self.x.shape[1] + (-self.x.shape[1] % _VECTOR if self.x.is_cuda else 0)


class Call(NamedTuple):
    """A call that the core supports."""

    batch: Batch
    entities: Entities
    layers: Layers  # the tokens' parameters
    given: list[Tensor | None]  # the parameters of both streams
    options: BlockOptions


def call_of(batch: Batch, entities: Entities, given: list[Tensor | None], options: BlockOptions) -> Call | str:
    """The call, or why the core does not support it."""
    tokens = transformer_native.layers_of(given[:PARAMETERS])
    if isinstance(tokens, str):
        return tokens
    own = options._replace(recompute=False)  # both are equal here: the fusion's input has the LayerNorm's result
    if (reason := transformer_native.refuse(batch.x, None, tokens, own)) is not None:
        return reason
    of_entities = given[PARAMETERS:]
    shapes = tuple(None if each is None else each.shape for each in of_entities)
    if not _fit(shapes, tokens.intermediate, entities.x.shape[1], entities.attention):
        return "takes entities whose linear layers have a bias, in shapes that fit them"
    present = [each for each in of_entities if each is not None]
    if any(each.dtype != tokens.dtype or each.device != tokens.device or not each.is_contiguous() for each in present):
        return "takes contiguous parameters of one type, on one device"
    if not len(entities.x) or not entities.x.is_contiguous() or any(each is None for each in given[:PARAMETERS]):
        return "takes contiguous entities, at least one, and layers with biases"
    if batch.x.is_cuda and (entities.x.shape[1] > _MAX_ENTITY_WIDTH or entities.head_dim > 128):
        return f"takes entities of up to {_MAX_ENTITY_WIDTH} columns, in heads of up to 128"
    return Call(batch, entities, tokens, given, own)


@functools.lru_cache(maxsize=256)
def _fit(shapes: tuple[torch.Size | None, ...], inner: int, width: int, attention: bool) -> bool:
    projections = ((3 * width, width), (3 * width,), (width, width), (width,), (width,), (width,))
    fusion = ((inner, width), (inner,), (width, inner), (width,), (width,), (width,))
    expected = (*(projections if attention else (None,) * len(_ATTENTION)), *fusion)
    return all(found == wanted for found, wanted in zip(shapes, expected, strict=True))


def operands(call: Call, *, copies: bool) -> list[Tensor | None]:
    """The parameters of both streams, with the operands of GEMMs in x's dtype."""
    dtype = call.batch.x.dtype
    if call.layers.dtype == dtype:
        return call.given
    own = list(call.given)
    indices = [first + index for first in (0, PARAMETERS) for index in _MULTIPLIED_INDICES]
    for index, tensor in zip(
        indices, linear.in_type([own[each] for each in indices], dtype, copies=copies), strict=True
    ):
        own[index] = tensor
    return own


def forward(call: Call, own: list[Tensor | None], *, training: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns both streams, None for the entities of the last layer, and what is saved for the backward."""
    batch, entities = call.batch, call.entities
    x = batch.x
    check_values("attention", x.shape[0], call.options.max_seqlen, batch.cu_seqlens, None)
    check_values("attention", len(entities.x), entities.options.max_seqlen, entities.cu_seqlens, None)
    shape = _shape(call, training=training)
    memory = _memory(x.is_cuda, shape)
    kept, scratch = _bytes(memory.kept, x), _bytes(memory.forward, x)
    y, e = torch.empty_like(x), None if entities.last else torch.empty_like(entities.x)
    table = transformer_native.address_table(own)
    given = _arguments(call, shape, table, kept, scratch)
    _native.core().knowledge_block_forward(*given, y, e)
    return y, e, kept


def backward(
    call: Call,
    own: list[Tensor | None],
    kept: Tensor,
    dy: Tensor,
    de: Tensor | None,
    wanted: tuple[bool, ...],
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Returns the gradients of both streams and of the parameters that are ``wanted``."""
    batch, entities = call.batch, call.entities
    x, (width, entity_width) = batch.x, (batch.x.shape[1], entities.x.shape[1])
    shape = _shape(call, training=True)
    scratch = _bytes(_memory(x.is_cuda, shape).backward, x)
    dx, dentities = torch.empty_like(x), torch.empty_like(entities.x)
    gradients, ddown = _gradients(call, own, wanted, entity_norm=de is not None)
    table, targets = transformer_native.address_table(own), transformer_native.address_table(gradients)
    given = _arguments(call, shape, table, kept, scratch)
    _native.core().knowledge_block_backward(*given, dy, dx, targets.buffer_info()[0], de, dentities, ddown)
    if ddown is not None:
        down = BlockParameters._fields.index("down_weight")
        gradients[down] = ddown[:width] if wanted[down] else None
        if not entities.last and wanted[PARAMETERS + down]:
            gradients[PARAMETERS + down] = ddown[width : width + entity_width]
    bias = BlockParameters._fields.index("up_bias")
    found = gradients[bias]
    if not wanted[bias]:
        gradients[bias] = None
    if wanted[PARAMETERS + bias]:
        gradients[PARAMETERS + bias] = found if gradients[bias] is None else found.clone()  # type: ignore[union-attr]
    return dx, dentities, gradients


def _gradients(
    call: Call, own: list[Tensor | None], wanted: tuple[bool, ...], *, entity_norm: bool
) -> tuple[list[Tensor | None], Tensor | None]:
    """The tensors that the core writes gradients to. Those of both down_weights are one."""
    names = BlockParameters._fields
    absent = {PARAMETERS + names.index(name) for name in ("up_bias", "down_weight")} | {names.index("down_weight")}
    if not entity_norm:
        absent |= {PARAMETERS + names.index(name) for name in ("down_bias", "norm_b_weight", "norm_b_bias")}
    up, down = names.index("up_bias"), names.index("down_weight")
    dtype = call.layers.dtype
    gradients = [
        torch.empty_like(each, dtype=dtype)
        if each is not None and index not in absent and (want or (index == up and wanted[PARAMETERS + up]))
        else None
        for index, (each, want) in enumerate(zip(own, wanted, strict=True))
    ]
    if not wanted[down] and (call.entities.last or not wanted[PARAMETERS + down]):
        return gradients, None
    rows = call.batch.x.shape[1] + (0 if call.entities.last else call.entities.stride)
    return gradients, torch.empty(rows, call.layers.intermediate, dtype=dtype, device=call.batch.x.device)


def _bytes(count: int, x: Tensor) -> Tensor:
    return torch.empty(count, dtype=torch.uint8, device=x.device)


class EntityShape(NamedTuple):
    """The parameters of the entity stream that determine the sizes: EntityShape in kernels/knowledge_block/op.h."""

    entities: int
    entity_width: int
    entity_stride: int
    entity_heads: int
    entity_head_dim: int
    entity_max_seqlen: int
    entity_attention: int
    last: int


def _shape(call: Call, *, training: bool) -> tuple[Shape, EntityShape]:
    """The parameters that determine the sizes."""
    entities = call.entities
    count, width = entities.x.shape
    shape = transformer_native.shape_of(call.batch, call.layers, call.options, training=training)
    heads, longest = entities.options.heads, min(entities.options.max_seqlen, count)
    sizes = (count, width, entities.stride, heads, entities.head_dim, longest)
    return shape._replace(recompute=1), EntityShape(*sizes, entities.attention, entities.last)


@functools.lru_cache(maxsize=4096)
def _memory(cuda: bool, shape: tuple[Shape, EntityShape]) -> Memory:
    core, sizes = _native.core(), array("q", (0, 0, 0))
    write = core.knowledge_block_sizes_cuda if cuda else core.knowledge_block_sizes_cpu
    write(*shape[0], *shape[1], sizes.buffer_info()[0])
    return Memory(*sizes)


def _arguments(
    call: Call, shape: tuple[Shape, EntityShape], table: array[int], kept: Tensor, scratch: Tensor
) -> tuple[Any, ...]:
    """The arguments of both directions, in the order of csrc/knowledge_block.cpp."""
    batch, entities = call.batch, call.entities
    return (
        *(*shape[0], *shape[1], *transformer_native.layer_options(batch, call.layers, call.options)),
        *(table.buffer_info()[0], batch.x, batch.cu_seqlens, batch.seeds, kept, scratch),
        *(entities.x, entities.cu_seqlens, entities.positions, entities.options.eps_a, entities.options.eps_b),
    )
