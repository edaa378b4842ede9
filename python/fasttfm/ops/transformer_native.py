"""Layers of transformer_block in one call of the native core: CUDA (Hopper, 16-bit types) and CPU (fp32).

The core places all tensors that layers save or need temporarily in two buffers, and runs the kernels of the op-by-op
path in the same order. GEMMs are those of cuBLASLt or of the BLAS that torch has loaded.
"""

from __future__ import annotations

import functools
import math
import operator
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common import philox
from fasttfm.kernels.common.activation import CODES
from fasttfm.kernels.common.launch import is_hopper, multiprocessors
from fasttfm.ops.attention_checks import check_values
from fasttfm.ops.backends import dtype_name
from fasttfm.ops.library import are_plain_tensors
from fasttfm.ops.transformer_block import BlockOptions, BlockParameters, Saved

PARAMETERS = len(BlockParameters._fields)
_UP_WEIGHT = BlockParameters._fields.index("up_weight")
_ALIGNMENT = 16

# The maximum number of tokens for which a forward without gradients and dropout uses the kernels for few rows
# (kernels/few_rows), and the maximum length of sequences for their attention, with these head dims
# (docs/kernels_few_tokens.md).
MOST_FEW_ROWS = 1280
_MOST_FEW_ELEMENTS = 1 << 23  # of x: as many fp32 sums fit into the workspace
MOST_SHORT_TOKENS = 128
_SHORT_HEAD_DIMS = (32, 64)


class Layers(NamedTuple):
    """The parameters of consecutive layers, for the core."""

    parameters: list[Tensor | None]  # of all layers, in the order of BlockParameters or of layers/spec.py's FIELDS
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
        return [each for each in self.parameters if each is not None]


def layers_in(given: list[Any]) -> list[BlockParameters]:
    """The parameters of each layer, of those of all layers in one list."""
    return [BlockParameters(*given[first : first + PARAMETERS]) for first in range(0, len(given), PARAMETERS)]


# ---- which calls the core supports -----------------------------------------------------------------------------------


def layers_of(given: list[Tensor | None], fields: int = PARAMETERS) -> Layers | str:
    """The layers of a list of parameters, ``fields`` of each, or why the core does not support them: all layers must
    have the same dtypes and shapes, and contiguous parameters."""
    if (missing := _native.missing()) is not None:
        return missing
    table = array("q", bytes(8 * len(given)))
    if _native.core().tensor_table(given, table.buffer_info()[0], fields) < 0:
        if not are_plain_tensors(given):
            return NOT_PLAIN
        if (reason := _differences(given, fields)) is not None:
            return reason
        table = address_table(given)
    first = given[:fields]
    qkv_weight, up_weight = first[0], first[_UP_WEIGHT]
    assert qkv_weight is not None
    assert up_weight is not None
    shapes = tuple(None if each is None else each.shape for each in first)
    depth, dtype, device = len(given) // fields, qkv_weight.dtype, qkv_weight.device
    return Layers(given, depth, dtype, up_weight.shape[0], device, shapes, table)


NOT_PLAIN = "takes plain tensors in eager calls"


def _differences(given: list[Tensor | None], fields: int) -> str | None:
    present = [each for each in given if each is not None]
    if len({each.dtype for each in present}) > 1:
        return "takes parameters of one type"
    if len({each.device for each in present}) > 1:
        return "takes parameters on one device"
    shapes = [None if each is None else each.shape for each in given]
    if shapes != shapes[:fields] * (len(given) // fields):
        return "takes layers with the same biases, of the same shapes"
    if not all(each.is_contiguous() for each in present):
        return "takes contiguous parameters"
    if any(each.is_cuda and each.data_ptr() % _ALIGNMENT for each in present):
        return f"takes parameters that start at a multiple of {_ALIGNMENT} bytes"
    return None


def most_few_rows(width: int) -> int:
    """The maximum number of tokens of this width for the kernels for few rows."""
    return min(MOST_FEW_ROWS, _MOST_FEW_ELEMENTS // max(width, 1))


def takes_few_rows(x: Tensor, *, gradient: bool, drops: bool) -> bool:
    """Whether a call's tokens are few enough for the kernels for few rows, and it has no backward and no dropout."""
    return x.is_cuda and x.shape[0] <= most_few_rows(x.shape[1]) and not gradient and not drops


def refuse(
    x: Tensor, residual: Tensor | None, layers: Layers, options: BlockOptions, *, few_rows: bool = False
) -> str | None:
    """Why the core does not support a call; None if it does. ``few_rows``: with the kernels for few rows."""
    tokens, width = x.shape
    if tokens == 0 or not x.is_contiguous() or (residual is not None and not residual.is_contiguous()):
        return "takes contiguous rows, at least one"
    if layers.device != x.device or not _fit(layers.shapes, width):
        return "takes parameters on x's device, in shapes that fit x"
    stream = x.dtype if residual is None else residual.dtype
    pointers = x.data_ptr() | (0 if residual is None else residual.data_ptr())
    if x.is_cuda and pointers % _ALIGNMENT:
        return f"takes tensors that start at a multiple of {_ALIGNMENT} bytes"
    window = (options.window_left, options.window_right)
    types = (x.dtype, stream, layers.dtype)
    sizes = (width, options.heads, layers.intermediate)
    if x.is_cuda:
        return _refuse_cuda(x.device, options.backend, types, sizes, window, options.recompute, few_rows)
    return _refuse_cpu(x.device, options.backend, types, sizes)


@functools.lru_cache(maxsize=256)
def _fit(shapes: tuple[torch.Size | None, ...], width: int) -> bool:
    inner = shapes[_UP_WEIGHT][0]  # type: ignore[index]
    projections = ((3 * width, width), (3 * width,), (width, width), (width,))
    expected = (
        *projections,
        (width,),
        (width,),
        (inner, width),
        (inner,),
        (width, inner),
        (width,),
        (width,),
        (width,),
    )
    return all(found is None or found == wanted for found, wanted in zip(shapes, expected, strict=True))


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"


Types = tuple[torch.dtype, torch.dtype, torch.dtype]  # of x, of the stream, of parameters
Sizes = tuple[int, int, int]  # width, heads, intermediate


@functools.lru_cache(maxsize=256)
def _refuse_cuda(
    device: torch.device,
    backend: str | None,
    types: Types,
    sizes: Sizes,
    window: tuple[int, int],
    recompute: bool,
    few_rows: bool,
) -> str | None:
    dtype, stream, parameters = types
    width, heads, intermediate = sizes
    if backend not in (None, "cuda"):
        return f"takes calls without a backend or for cuda, got {backend}"
    if (reason := missing_cuda(device)) is not None:
        return reason
    if dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 and float16, got {dtype_name(dtype)}"
    if parameters not in (dtype, torch.float32) or (parameters != torch.float32 and stream != dtype):
        return "takes parameters in x's type or float32, and float32 ones where the stream is float32"
    head_dims = (32, 64, 128) if few_rows else (64, 128)
    if width // heads not in head_dims or width % 8 or intermediate % 8 or width > 8192:
        dims = _listed(head_dims)
        return f"takes head dims of {dims}, up to 8192 columns, in multiples of 8, got {width // heads} and {width}"
    if window not in ((-1, -1), (-1, 0)) and not few_rows:
        return f"attends to all keys or causally, got a window of {window}"
    if recompute and stream != dtype:
        return "takes no recompute with a float32 stream"
    memory, limit = _native.core().dropout_add_layer_norm_backward_memory_cuda, _native.block_memory(device.index)
    codes = (_native.DTYPE_CODES[dtype], _native.DTYPE_CODES[stream])
    if memory(width, *codes, 1, limit) > limit:
        return "takes GPUs with more shared memory"
    return None


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


@functools.cache
def missing_hopper() -> str | None:
    """Why layers are not run in one native call on GPUs of compute capability 9.0; None if they are."""
    reason = _native.missing_hopper()
    if reason is not None:
        return reason
    return None if _native.core().gemm_library_version_cuda() else "found no libcublasLt in the process"


@functools.cache
def missing_cuda(device: torch.device) -> str | None:
    """Why layers are not run in one native call on a GPU; None if they are."""
    reason = missing_hopper()
    return reason if reason or is_hopper(device) else "takes tensors on a GPU of compute capability 9.0"


@functools.cache
def missing_cpu() -> str | None:
    """Why layers are not run in one native call on the CPU; None if they are."""
    if _native.missing() is not None:
        return _native.missing()
    return None if _native.blas() else "found no BLAS in torch's CPU library"


# ---- calls -----------------------------------------------------------------------------------------------------------


class Memory(NamedTuple):
    """The bytes that a call needs: saved for the backward, and temporarily in each direction."""

    kept: int
    forward: int
    backward: int


class Batch(NamedTuple):
    """The input of a forward, and of its backward."""

    x: Tensor
    residual_dtype: torch.dtype | None  # of a pre-LN model's stream
    cu_seqlens: Tensor
    seeds: Tensor | None  # [layers, 3]


def forward(
    batch: Batch,
    residual: Tensor | None,
    layers: Layers,
    own: list[Tensor | None],
    options: BlockOptions,
    *,
    training: bool,
    few_rows: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns y, z of a pre-LN model, and what is saved for the backward. ``own``: the parameters, weights in x's
    dtype. ``few_rows``: with the kernels for few rows."""
    x = batch.x
    check_values("attention", x.shape[0], options.max_seqlen, batch.cu_seqlens, None)
    shape = shape_of(batch, layers, options, training=training)
    memory = _memory(x.is_cuda, shape)
    scratch = _bytes(memory.forward, x)
    kept = _bytes(memory.kept, x) if training else scratch  # of which nothing is written
    y, z = torch.empty_like(x), None if residual is None else torch.empty_like(residual)
    table = layers.table if own is layers.parameters else address_table(own)
    short = _has_short_sequences(batch, options) and not training
    _native.core().transformer_block_forward(
        *(*shape, *layer_options(batch, layers, options)),
        *(table.buffer_info()[0], x, batch.cu_seqlens, batch.seeds, kept, scratch),
        *(residual, y, z, few_rows, short),
    )
    return y, z, kept


def forward_folded(batch: Batch, layers: Layers, options: BlockOptions, addresses: array[int], norms: int) -> Tensor:
    """Returns y of layers over few tokens whose LayerNorms are folded into their GEMMs: of each layer the first
    (``norms`` is 1) or both (2). ``addresses`` are those of the folded weights: kernels/transformer_block/op.h,
    TransformerFoldedForward."""
    x = batch.x
    check_values("attention", x.shape[0], options.max_seqlen, batch.cu_seqlens, None)
    shape = shape_of(batch, layers, options, training=False)
    kept, scratch, y = _bytes(0, x), _bytes(_memory(True, shape).forward, x), torch.empty_like(x)
    _native.core().transformer_block_folded_forward_cuda(
        *(*shape, *layer_options(batch, layers, options)),
        *(layers.table.buffer_info()[0], x, batch.cu_seqlens, None, kept, scratch),
        *(y, _has_short_sequences(batch, options), addresses.buffer_info()[0], norms),
    )
    return y


def backward(
    batch: Batch,
    layers: Layers,
    own: list[Tensor | None],
    options: BlockOptions,
    kept: Tensor,
    z: Tensor | None,
    *,
    dy: Tensor,
    dz: Tensor | None,
    gradients: list[Tensor | None],
    attention: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of x and of the stream, and writes those of the parameters into ``gradients`` that are not
    None.

    ``attention``, for a single layer, computes the gradient of qkv from that of attention's output, instead of the
    core's kernels.
    """
    x = batch.x
    shape = shape_of(batch, layers, options, training=True)
    scratch = _bytes(_memory(x.is_cuda, shape).backward, x)
    dx, dresidual = torch.empty_like(x), None if z is None else torch.empty_like(z)
    # Not the forward's table: FSDP frees parameters after the forward and gathers them again, in other memory.
    table, targets = address_table(own), address_table(gradients)
    given = (
        *(*shape, *layer_options(batch, layers, options)),
        *(table.buffer_info()[0], x, batch.cu_seqlens, batch.seeds, kept, scratch),
        *(z, dy, dz, dx, dresidual, targets.buffer_info()[0]),
    )
    run = _native.core().transformer_block_backward
    if attention is None:
        run(*given, _WHOLE, None, None)
        return dx, dresidual
    dout = torch.empty_like(x)
    run(*given, _BEFORE_ATTENTION, dout, None)
    dqkv = attention(dout)
    run(*given, _AFTER_ATTENTION, None, dqkv)
    return dx, dresidual


def _has_short_sequences(batch: Batch, options: BlockOptions) -> bool:
    few = batch.x.is_cuda and batch.seeds is None and options.max_seqlen <= MOST_SHORT_TOKENS
    return few and batch.x.shape[1] in [options.heads * size for size in _SHORT_HEAD_DIMS]


_WHOLE, _BEFORE_ATTENTION, _AFTER_ATTENTION = range(3)  # kernels/transformer_block/op.h: BackwardPart


def _bytes(count: int, x: Tensor) -> Tensor:
    return torch.empty(count, dtype=torch.uint8, device=x.device)


def address_table(tensors: list[Tensor | None]) -> array[int]:
    """The addresses of tensors for the core, 0 for None."""
    table = array("q", bytes(8 * len(tensors)))
    if _native.core().tensor_table(tensors, table.buffer_info()[0], PARAMETERS) != _UNREAD:
        return table
    return array("q", [0 if each is None else each.data_ptr() for each in tensors])


_UNREAD = -2  # the core cannot read tensors of torch before 2.10

CHANGED_PARAMETERS = (
    "one of the variables needed for gradient computation has been modified by an inplace operation:"
    " a parameter of a transformer layer has changed between forward and backward"
)
_version_of = operator.attrgetter("_version")


def versions(tensors: Sequence[Tensor | None]) -> list[int]:
    """torch's counters of in-place operations: a backward compares them with those of its forward."""
    return list(map(_version_of, [each for each in tensors if each is not None]))


class Shape(NamedTuple):
    """The parameters that determine the sizes: TransformerShape in kernels/transformer_block/op.h."""

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


def shape_of(batch: Batch, layers: Layers, options: BlockOptions, *, training: bool) -> Shape:
    x = batch.x
    tokens, width = x.shape
    stream = x.dtype if batch.residual_dtype is None else batch.residual_dtype
    sizes = (layers.depth, tokens, width, layers.intermediate, options.heads, batch.cu_seqlens.shape[0] - 1)
    processors = multiprocessors(x) if x.is_cuda else torch.get_num_threads()
    flags = (batch.residual_dtype is not None, training, options.recompute, options.keep_activation)
    types = (_native.DTYPE_CODES[x.dtype], _native.DTYPE_CODES[stream])
    return Shape(*sizes, min(options.max_seqlen, tokens), processors, *flags, *types)


@functools.lru_cache(maxsize=4096)
def _memory(cuda: bool, shape: Shape) -> Memory:
    core, sizes = _native.core(), array("q", (0, 0, 0))
    write = core.transformer_block_sizes_cuda if cuda else core.transformer_block_sizes_cpu
    write(*shape, sizes.buffer_info()[0])
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


def layer_options(batch: Batch, layers: Layers, options: BlockOptions) -> LayerOptions:
    tokens = batch.x.shape[0]
    window = (min(options.window_left, tokens), min(options.window_right, tokens))
    rates = (0.0, 0.0, 0.0) if batch.seeds is None else (options.attention_p, options.p_a, options.p_b)
    dropout, epsilons = _dropout(rates), (options.eps_a, options.eps_b)
    return LayerOptions(*window, CODES[options.activation], *dropout, *epsilons, _native.DTYPE_CODES[layers.dtype])


@functools.lru_cache(maxsize=256)
def _dropout(rates: tuple[float, float, float]) -> tuple[int, float, int, float, int, float]:
    """Threshold and scale of each rate."""
    attention, a, b = map(philox.threshold, rates)
    return attention, philox.scale(attention), a, philox.scale(a), b, philox.scale(b)


# ---- the tensors that a call saves -----------------------------------------------------------------------------------

KEPT, BETWEEN, FORWARD, BACKWARD = range(4)  # kernels/transformer_block/regions.h: RegionsOf
_REGION_ROWS = 33


class Region(NamedTuple):
    bytes: int
    first: int  # step of a layer from which the region is in use
    last: int
    offset: int


def regions(
    kind: int, shape: Shape, *, workspace_bytes: int = 0, fused_activation: bool = True
) -> tuple[list[Region], int]:
    """The regions of one kind, and the bytes of all."""
    table = array("q", bytes(8 * 4 * _REGION_ROWS))
    address = table.buffer_info()[0]
    _native.core().transformer_block_regions(*shape, workspace_bytes, fused_activation, address, kind)
    count, total, *_ = table
    return [Region(*table[4 * row : 4 * row + 4]) for row in range(1, count + 1)], total


def kept_tensors(
    batch: Batch, layers: Layers, options: BlockOptions, kept: Tensor, z: Tensor | None, index: int
) -> tuple[Tensor, Saved]:
    """A layer's input and what it has saved for its backward: views of ``kept``."""
    x, pre_norm = batch.x, batch.residual_dtype is not None
    tokens, width = x.shape
    shape = shape_of(batch, layers, options, training=True)
    of_layer, layer_bytes = regions(KEPT, shape)
    between, between_bytes = regions(BETWEEN, shape)
    start = layers.depth * layer_bytes

    def view(region: Region, base: int, dtype: torch.dtype, *sizes: int) -> Tensor:
        first = base + region.offset
        return kept[first : first + math.prod(sizes) * dtype.itemsize].view(dtype).view(sizes)

    stream, heads = batch.residual_dtype or x.dtype, options.heads
    sizes: tuple[tuple[torch.dtype, ...] | tuple[Any, ...], ...] = (
        (x.dtype, tokens, 3, heads, width // heads),  # qkv
        (x.dtype, tokens, heads, width // heads),  # out
        (torch.float32, heads, tokens),  # lse
        (stream, tokens, width),  # z1
        (torch.float32, 2, tokens),  # statistics1
        (x.dtype, tokens, layers.intermediate),  # left
        (x.dtype, tokens, layers.intermediate),  # a
        (x.dtype, tokens, width),  # y1
        (stream, tokens, width),  # z
        (torch.float32, 2, tokens),  # statistics
    )
    base = index * layer_bytes
    found = [view(region, base, *each) if region.bytes else None for region, each in zip(of_layer, sizes, strict=True)]
    saved = Saved(*found)  # type: ignore[arg-type]
    if pre_norm:
        own = z if index + 1 == layers.depth else view(between[1], start + index * between_bytes, stream, tokens, width)
        assert own is not None
        saved = saved._replace(z=own)
    before = start + (index - 1) * between_bytes
    return x if index == 0 else view(between[0], before, x.dtype, tokens, width), saved
