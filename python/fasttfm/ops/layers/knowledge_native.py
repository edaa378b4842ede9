"""A layer of knowledge_block in one call of the native core: CUDA (Hopper, 16-bit types) and CPU (fp32).

It is a layer of transformer_block.py whose feed-forward block also reads and writes the entities of aligned tokens
(kernels/knowledge_block).
"""

from __future__ import annotations

import functools
from array import array
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common import philox
from fasttfm.kernels.common.activation import CODES
from fasttfm.kernels.common.launch import multiprocessors
from fasttfm.ops import linear
from fasttfm.ops.attention_checks import check_values
from fasttfm.ops.core.backends import dtype_name
from fasttfm.ops.core.host_blocks import empty_bytes
from fasttfm.ops.layers.parameters import BLOCK_FIELDS, MULTIPLIED, Layers, address_table, layers_of
from fasttfm.ops.layers.support import missing_cpu, missing_cuda
from fasttfm.ops.layers.transformer_block import BlockOptions, BlockParameters

_ATTENTION = BlockParameters._fields[:6]
_ALIGNMENT = 16
_VECTOR = 8  # of entities' columns on a GPU
_MAX_ENTITY_WIDTH = 512  # kernels/knowledge_block/op.h: kMaxEntityWidth


class Batch(NamedTuple):
    """The token stream of a call."""

    x: Tensor  # [T, C]
    cu_seqlens: Tensor
    seeds: Tensor | None  # [6]: of the tokens, then of the entities


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
    parameters: list[Tensor | None]  # the parameters of both streams
    options: BlockOptions


def call_of(batch: Batch, entities: Entities, parameters: list[Tensor | None], options: BlockOptions) -> Call | str:
    """The call, or why the core does not support it."""
    tokens = layers_of(parameters[:BLOCK_FIELDS], BLOCK_FIELDS)
    if isinstance(tokens, str):
        return tokens
    if (reason := _refuse_tokens(batch.x, tokens, options)) is not None:
        return reason
    of_entities = parameters[BLOCK_FIELDS:]
    shapes = tuple(None if p is None else p.shape for p in of_entities)
    if not _fit(shapes, tokens.intermediate, entities.x.shape[1], entities.attention):
        return "takes entities whose linear layers have a bias, in shapes that fit them"
    present = [p for p in of_entities if p is not None]
    if any(p.dtype != tokens.dtype or p.device != tokens.device or not p.is_contiguous() for p in present):
        return "takes contiguous parameters of one type, on one device"
    if not len(entities.x) or not entities.x.is_contiguous():
        return "takes contiguous entities, at least one"
    if batch.x.is_cuda and (entities.x.shape[1] > _MAX_ENTITY_WIDTH or entities.head_dim > 128):
        return f"takes entities of up to {_MAX_ENTITY_WIDTH} columns, in heads of up to 128"
    return Call(batch, entities, tokens, parameters, options)


def _refuse_tokens(x: Tensor, layers: Layers, options: BlockOptions) -> str | None:
    """Why the core does not support the token stream; None if it does."""
    tokens, width = x.shape
    if tokens == 0 or not x.is_contiguous():
        return "takes contiguous rows, at least one"
    if layers.device != x.device or not _fit(layers.shapes, layers.intermediate, width, True):
        return "takes layers with biases on x's device, in shapes that fit x"
    if x.is_cuda and x.data_ptr() % _ALIGNMENT:
        return f"takes tensors that start at a multiple of {_ALIGNMENT} bytes"
    types, sizes = (x.dtype, layers.dtype), (width, options.heads, layers.intermediate)
    if x.is_cuda:
        window = (options.window_left, options.window_right)
        return _refuse_cuda(x.device, options.backend, types, sizes, window)
    return _refuse_cpu(x.device, options.backend, types, sizes)


Types = tuple[torch.dtype, torch.dtype]  # of x and of the parameters
Sizes = tuple[int, int, int]  # width, heads, intermediate


@functools.lru_cache(maxsize=256)
def _refuse_cuda(
    device: torch.device, backend: str | None, types: Types, sizes: Sizes, window: tuple[int, int]
) -> str | None:
    dtype, parameters = types
    width, heads, intermediate = sizes
    if backend not in (None, "cuda"):
        return f"takes calls without a backend or for cuda, got {backend}"
    if (reason := missing_cuda(device)) is not None:
        return reason
    if dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 and float16, got {dtype_name(dtype)}"
    if parameters not in (dtype, torch.float32):
        return f"takes parameters in x's type or float32, got {dtype_name(parameters)}"
    if width // heads not in (64, 128) or width % 8 or intermediate % 8 or width > 8192:
        return f"takes head dims of 64 and 128, up to 8192 columns, in multiples of 8, got {width // heads} and {width}"
    if window not in ((-1, -1), (-1, 0)):
        return f"attends to all keys or causally, got a window of {window}"
    memory, limit = _native.core().dropout_add_layer_norm_backward_memory_cuda, _native.block_memory(device.index)
    code = _native.DTYPE_CODES[dtype]
    return "takes GPUs with more shared memory" if memory(width, code, code, 1, limit) > limit else None


@functools.lru_cache(maxsize=256)
def _refuse_cpu(device: torch.device, backend: str | None, types: Types, sizes: Sizes) -> str | None:
    width, heads, _ = sizes
    if backend not in (None, "cpu"):
        return f"takes calls without a backend or for cpu, got {backend}"
    if (reason := missing_cpu()) is not None:
        return reason
    if device.type != "cpu" or set(types) != {torch.float32}:
        return f"takes float32 on the CPU, got {dtype_name(types[0])} on {device.type}"
    if width // heads not in range(16, 257, 8):
        return f"takes head dims of 16 to 256 in steps of 8, got {width // heads}"
    return None


@functools.lru_cache(maxsize=256)
def _fit(shapes: tuple[torch.Size | None, ...], inner: int, width: int, attention: bool) -> bool:
    """Whether a stream's parameters have these shapes. Without ``attention`` it has none of its parameters."""
    projections = ((3 * width, width), (3 * width,), (width, width), (width,), (width,), (width,))
    fusion = ((inner, width), (inner,), (width, inner), (width,), (width,), (width,))
    expected = (*(projections if attention else (None,) * len(_ATTENTION)), *fusion)
    return all(shape == expected_shape for shape, expected_shape in zip(shapes, expected, strict=True))


def operands(call: Call, *, copies: bool) -> list[Tensor | None]:
    """The parameters of both streams, with the operands of GEMMs in x's dtype."""
    dtype = call.batch.x.dtype
    if call.layers.dtype == dtype:
        return call.parameters
    cast = list(call.parameters)
    indices = [first + index for first in (0, BLOCK_FIELDS) for index in MULTIPLIED]
    tensors = linear.in_type([cast[index] for index in indices], dtype, copies=copies)
    for index, tensor in zip(indices, tensors, strict=True):
        cast[index] = tensor
    return cast


def forward(call: Call, parameters: list[Tensor | None], *, training: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns both streams, None for the entities of the last layer, and what is saved for the backward."""
    batch, entities = call.batch, call.entities
    x = batch.x
    check_values("attention", x.shape[0], call.options.max_seqlen, batch.cu_seqlens, None)
    check_values("attention", len(entities.x), entities.options.max_seqlen, entities.cu_seqlens, None)
    shape = _shape(call, training=training)
    memory = _memory(x.is_cuda, shape)
    kept, scratch = _bytes(memory.kept, x), _bytes(memory.forward, x)
    y, e = torch.empty_like(x), None if entities.last else torch.empty_like(entities.x)
    table = address_table(parameters)
    arguments = _arguments(call, shape, table, kept, scratch)
    _native.core().knowledge_block_forward(*arguments, y, e)
    return y, e, kept


def backward(
    call: Call,
    parameters: list[Tensor | None],
    kept: Tensor,
    dy: Tensor,
    de: Tensor | None,
    needed: tuple[bool, ...],
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Returns the gradients of both streams and of the parameters that are ``needed``."""
    batch, entities = call.batch, call.entities
    x, (width, entity_width) = batch.x, (batch.x.shape[1], entities.x.shape[1])
    shape = _shape(call, training=True)
    scratch = _bytes(_memory(x.is_cuda, shape).backward, x)
    dx, dentities = torch.empty_like(x), torch.empty_like(entities.x)
    gradients, ddown = _gradients(call, parameters, needed, entity_norm=de is not None)
    table, targets = address_table(parameters), address_table(gradients)
    arguments = _arguments(call, shape, table, kept, scratch)
    _native.core().knowledge_block_backward(*arguments, dy, dx, targets.buffer_info()[0], de, dentities, ddown)
    if ddown is not None:
        down = BlockParameters._fields.index("down_weight")
        gradients[down] = ddown[:width] if needed[down] else None
        if not entities.last and needed[BLOCK_FIELDS + down]:
            gradients[BLOCK_FIELDS + down] = ddown[width : width + entity_width]
    bias = BlockParameters._fields.index("up_bias")
    dbias = gradients[bias]
    if not needed[bias]:
        gradients[bias] = None
    if needed[BLOCK_FIELDS + bias]:
        gradients[BLOCK_FIELDS + bias] = dbias if gradients[bias] is None else dbias.clone()  # type: ignore[union-attr]
    return dx, dentities, gradients


def _gradients(
    call: Call, parameters: list[Tensor | None], needed: tuple[bool, ...], *, entity_norm: bool
) -> tuple[list[Tensor | None], Tensor | None]:
    """The tensors that the core writes gradients to. Those of both down_weights are one."""
    names = BlockParameters._fields
    absent = {BLOCK_FIELDS + names.index(name) for name in ("up_bias", "down_weight")} | {names.index("down_weight")}
    if not entity_norm:
        absent |= {BLOCK_FIELDS + names.index(name) for name in ("down_bias", "norm_b_weight", "norm_b_bias")}
    up, down = names.index("up_bias"), names.index("down_weight")
    dtype = call.layers.dtype
    gradients = [
        torch.empty_like(parameter, dtype=dtype)
        if parameter is not None and index not in absent and (want or (index == up and needed[BLOCK_FIELDS + up]))
        else None
        for index, (parameter, want) in enumerate(zip(parameters, needed, strict=True))
    ]
    if not needed[down] and (call.entities.last or not needed[BLOCK_FIELDS + down]):
        return gradients, None
    rows = call.batch.x.shape[1] + (0 if call.entities.last else call.entities.stride)
    return gradients, torch.empty(rows, call.layers.intermediate, dtype=dtype, device=call.batch.x.device)


def _bytes(count: int, x: Tensor) -> Tensor:
    return empty_bytes(count, x.device)


class Shape(NamedTuple):
    """The parameters of the token stream that determine the sizes: TransformerShape in kernels/transformer_block/op.h.
    The core computes LayerNorm a's result again, because the fusion's input has it."""

    layers: int
    tokens: int
    width: int
    intermediate: int
    heads: int
    sequences: int
    max_seqlen: int
    processors: int
    pre_norm: int
    training: int
    recompute: int
    keep_activation: int
    dtype: int
    residual_dtype: int


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
    x, options, entities = call.batch.x, call.options, call.entities
    tokens, width = x.shape
    sizes = (1, tokens, width, call.layers.intermediate, options.heads, call.batch.cu_seqlens.shape[0] - 1)
    processors = multiprocessors(x) if x.is_cuda else torch.get_num_threads()
    flags = (False, training, True, options.keep_activation)
    code = _native.DTYPE_CODES[x.dtype]
    shape = Shape(*sizes, min(options.max_seqlen, tokens), processors, *flags, code, code)
    count, width = entities.x.shape
    heads, longest = entities.options.heads, min(entities.options.max_seqlen, count)
    of_entities = (count, width, entities.stride, heads, entities.head_dim, longest)
    return shape, EntityShape(*of_entities, entities.attention, entities.last)


class Memory(NamedTuple):
    """The bytes that a call needs: saved for the backward, and temporarily in each direction."""

    kept: int
    forward: int
    backward: int


@functools.lru_cache(maxsize=4096)
def _memory(cuda: bool, shape: tuple[Shape, EntityShape]) -> Memory:
    core, sizes = _native.core(), array("q", (0, 0, 0))
    write = core.knowledge_block_sizes_cuda if cuda else core.knowledge_block_sizes_cpu
    write(*shape[0], *shape[1], sizes.buffer_info()[0])
    return Memory(*sizes)


class LayerOptions(NamedTuple):
    """TRANSFORMER_OPTIONS in csrc/transformer_call.h."""

    window_left: int
    window_right: int
    activation: int
    attention_threshold: int
    attention_scale: float
    threshold_a: int
    scale_a: float
    threshold_b: int
    scale_b: float
    eps_a: float
    eps_b: float
    parameter_dtype: int


def _layer_options(call: Call) -> LayerOptions:
    tokens, options = call.batch.x.shape[0], call.options
    window = (min(options.window_left, tokens), min(options.window_right, tokens))
    rates = (0.0, 0.0, 0.0) if call.batch.seeds is None else (options.attention_p, options.p_a, options.p_b)
    dropout, epsilons = _dropout(rates), (options.eps_a, options.eps_b)
    return LayerOptions(*window, CODES[options.activation], *dropout, *epsilons, _native.DTYPE_CODES[call.layers.dtype])


@functools.lru_cache(maxsize=256)
def _dropout(rates: tuple[float, float, float]) -> tuple[int, float, int, float, int, float]:
    """Threshold and scale of each rate."""
    attention, a, b = map(philox.threshold, rates)
    return attention, philox.scale(attention), a, philox.scale(a), b, philox.scale(b)


def _arguments(
    call: Call, shape: tuple[Shape, EntityShape], table: array[int], kept: Tensor, scratch: Tensor
) -> tuple[Any, ...]:
    """The arguments of both directions, in the order of csrc/knowledge_block.cpp."""
    batch, entities = call.batch, call.entities
    return (
        *(*shape[0], *shape[1], *_layer_options(call)),
        *(table.buffer_info()[0], batch.x, batch.cu_seqlens, batch.seeds, kept, scratch),
        *(entities.x, entities.cu_seqlens, entities.positions, entities.options.eps_a, entities.options.eps_b),
    )
