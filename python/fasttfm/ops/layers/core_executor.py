"""Runs a plan by the native core, on Hopper in 16-bit types and on a CPU in fp32: one call for each direction."""

from __future__ import annotations

import functools
from array import array
from typing import NamedTuple

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common.launch import multiprocessors
from fasttfm.ops.attention_checks import check_values
from fasttfm.ops.backends import dtype_name, requested
from fasttfm.ops.layers.parts import Parts, divided
from fasttfm.ops.layers.plan import BUFFERS, TABLE_FIELDS, Plan, Words
from fasttfm.ops.layers.plan import plan as make_plan
from fasttfm.ops.layers.rules import situation_of, with_rules
from fasttfm.ops.layers.spec import FIELDS, LayerSpec
from fasttfm.ops.layers.torch_executor import Inputs
from fasttfm.ops.transformer_native import Layers, address_table, missing_cpu, missing_cuda

_ROWS = 64  # kernels/layers/op.h: kLayerRows
_ALIGNMENT = 16  # bytes
_MOST_SIZES = 4096  # of calls, whose workspaces a plan remembers


class Sizes(NamedTuple):
    """LAYERS_SIZES in csrc/layers.cpp."""

    tokens: int
    sequences: int
    max_seqlen: int
    processors: int
    dtype: int
    residual_dtype: int
    parameter_dtype: int


def plan_of(specs: tuple[LayerSpec, ...], inputs: Inputs, *, training: bool, precision: str = "") -> Plan:
    """The plan for a call."""
    situation = situation_of(inputs, training=training, precision=precision)
    return make_plan(specs, with_rules(situation, inputs.x.shape[0], inputs.max_seqlen))


def forward(
    plan: Plan, inputs: Inputs, layers: Layers, cast: list[Tensor | None], operands: array[int] | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """y, z of a pre-LN model, and what is saved for the backward.

    Args:
        cast: The parameters, weights in x's dtype.
        operands: In int8 and FP8, the addresses of what GEMMs read: ``LINEARS`` and ``OPERANDS`` of plan.py.
    """
    x, residual = inputs.x, inputs.residual
    check_values("attention", x.shape[0], inputs.max_seqlen, inputs.cu_seqlens, None)
    y, z = torch.empty_like(x), None if residual is None else torch.empty_like(residual)
    kept = _rows(plan.kept, x)
    table = layers.table if cast is layers.parameters else address_table(cast)
    parts = _parts_of(plan, inputs)
    if parts is not None:
        _run_parts(plan, inputs, layers, parts, _buffers(inputs, y=y, z=z), parameters=table, operands=operands)
        return y, z, kept
    scratch = _rows(plan.scratch, x)
    buffers = _buffers(inputs, scratch=scratch, kept=kept, y=y, z=z)
    _run(plan.words, inputs, layers, buffers, parameters=table, operands=operands)
    return y, z, kept


def backward(
    plan: Plan,
    inputs: Inputs,
    layers: Layers,
    cast: list[Tensor | None],
    kept: Tensor,
    z: Tensor | None,
    *,
    dy: Tensor,
    dz: Tensor | None,
    gradients: list[Tensor | None],
) -> tuple[Tensor, Tensor | None]:
    """The gradients of x and of the stream. Writes those of the parameters into ``gradients`` that are not None."""
    x, residual = inputs.x, inputs.residual
    dx, dresidual = torch.empty_like(x), None if residual is None else torch.empty_like(residual)
    scratch = _rows(plan.backward_scratch, x)
    buffers = _buffers(inputs, scratch=scratch, kept=kept, z=z, dy=dy, dz=dz, dx=dx, dresidual=dresidual)
    targets = address_table(gradients)
    _run(plan.backward_words, inputs, layers, buffers, parameters=address_table(cast), gradients=targets)
    return dx, dresidual


def _rows(count: int, x: Tensor) -> Tensor:
    """Memory of ``count`` bytes per token."""
    rows = -(-x.shape[0] // _ROWS) * _ROWS
    return torch.empty(count * rows, dtype=torch.uint8, device=x.device)


def _buffers(inputs: Inputs, **others: Tensor | None) -> array[int]:
    """The core's table of buffers."""
    known = {"x": inputs.x, "residual": inputs.residual, "seeds": inputs.seeds, "positions": inputs.positions, **others}
    table = array("q", (0 if (each := known.get(name)) is None else each.data_ptr() for name in BUFFERS))
    for cos, sin in inputs.tables:
        table.extend((cos.data_ptr(), sin.data_ptr(), cos.shape[0]))
    return table


def _run(
    words: Words,
    inputs: Inputs,
    layers: Layers,
    buffers: array[int],
    *,
    parameters: array[int],
    gradients: array[int] | None = None,
    operands: array[int] | None = None,
) -> None:
    x = inputs.x
    sizes = _sizes(inputs, layers, multiprocessors(x) if x.is_cuda else torch.get_num_threads())
    workspace = torch.empty(_workspace_bytes(words, sizes, x), dtype=torch.uint8, device=x.device)
    tables = map(_address, (buffers, parameters, gradients, operands))
    _native.core().layers_run(*words.encoded.buffer_info(), *sizes, inputs.cu_seqlens, workspace, *tables)


def _address(table: array[int] | None) -> int:
    return 0 if table is None else table.buffer_info()[0]


def _sizes(inputs: Inputs, layers: Layers, processors: int) -> Sizes:
    x, stream = inputs.x, inputs.x if inputs.residual is None else inputs.residual
    types = (_native.DTYPE_CODES[x.dtype], _native.DTYPE_CODES[stream.dtype], _native.DTYPE_CODES[layers.dtype])
    tokens, sequences = x.shape[0], inputs.cu_seqlens.shape[0] - 1
    return Sizes(tokens, sequences, min(inputs.max_seqlen, tokens), processors, *types)


def _workspace_bytes(words: Words, sizes: Sizes, x: Tensor) -> int:
    needed = words.workspace_bytes.get(sizes)
    if needed is None:
        counted = array("q", (0,))
        write = _native.core().layers_workspace_cuda if x.is_cuda else _native.core().layers_workspace_cpu
        write(*words.encoded.buffer_info(), *sizes, counted.buffer_info()[0])
        (needed,) = counted
        if len(words.workspace_bytes) < _MOST_SIZES:
            words.workspace_bytes[sizes] = needed
    return needed


# ---- inference on a CPU in parts -------------------------------------------------------------------------------------


def _parts_of(plan: Plan, inputs: Inputs) -> Parts | None:
    """The parts of a call that one thread each runs; None if all threads share each step."""
    x = inputs.x
    if x.is_cuda or plan.backward or inputs.seeds is not None or (inputs.tables and inputs.positions is None):
        return None
    boundaries = inputs.cu_seqlens.tolist()
    return divided(boundaries, torch.get_num_threads()) if boundaries[-1] == x.shape[0] else None


def _run_parts(
    plan: Plan,
    inputs: Inputs,
    layers: Layers,
    parts: Parts,
    buffers: array[int],
    *,
    parameters: array[int],
    operands: array[int] | None,
) -> None:
    threads = min(torch.get_num_threads(), len(parts.first_sequences) - 1)
    rows = -(-parts.rows // _ROWS) * _ROWS
    sizes = _sizes(inputs, layers, threads)
    of_part = sizes._replace(tokens=rows, sequences=1, max_seqlen=min(sizes.max_seqlen, rows), processors=1)
    workspace = _workspace_bytes(plan.words, of_part, inputs.x)
    memory = tuple(-(-size // _PAGE) * _PAGE for size in (4 * (parts.sequences + 1), workspace, plan.scratch * rows))
    table = parts.table(_token_bytes(inputs), memory)
    tables = map(_address, (buffers, parameters, operands, table))
    owned = torch.empty(threads * sum(memory), dtype=torch.uint8, device=inputs.x.device)
    _native.core().layers_run_parts_cpu(*plan.words.encoded.buffer_info(), *sizes, inputs.cu_seqlens, owned, *tables)


_PAGE = 4096  # bytes: no two threads write to one line of the cache


def _token_bytes(inputs: Inputs) -> list[int]:
    """Bytes between the tokens of each buffer: 0 for those that parts share."""
    of_x = inputs.x.shape[1] * inputs.x.element_size()
    of_stream = of_x if inputs.residual is None else inputs.residual.shape[1] * inputs.residual.element_size()
    known = {"x": of_x, "y": of_x, "residual": of_stream, "z": of_stream, "positions": 8}
    return [known.get(name, 0) for name in BUFFERS] + [0] * (TABLE_FIELDS * len(inputs.tables))


# ---- which calls the core supports -----------------------------------------------------------------------------------


def refuse(specs: tuple[LayerSpec, ...], inputs: Inputs, layers: Layers, *, gradient: bool) -> str | None:
    """Why the core does not run a call; None if it does."""
    x, residual = inputs.x, inputs.residual
    if (backend := requested(None)) not in (None, x.device.type):
        return f"takes calls without a backend or for {x.device.type}, got {backend}"
    tokens, width = x.shape
    if tokens == 0 or not x.is_contiguous() or (residual is not None and not residual.is_contiguous()):
        return "takes contiguous rows, at least one"
    if layers.device != x.device or width != specs[0].width:
        return "takes parameters on x's device, in shapes that fit x"
    stream = x.dtype if residual is None else residual.dtype
    types = (x.dtype, stream, layers.dtype)
    reason = _refuse_spec(specs, layers.shapes, x.device, types)
    if reason is not None or not x.is_cuda:
        return reason
    if any(each is not None and each.data_ptr() % _ALIGNMENT for each in (x, residual)):
        return f"takes tensors that start at a multiple of {_ALIGNMENT} bytes"
    return _refuse_backward(specs, types, x.device, inputs.max_seqlen) if gradient else None


Types = tuple[torch.dtype, torch.dtype, torch.dtype]  # of x, of the stream, of parameters


@functools.lru_cache(maxsize=256)
def _refuse_spec(
    specs: tuple[LayerSpec, ...], shapes: tuple[torch.Size | None, ...], device: torch.device, types: Types
) -> str | None:
    named = {name: tuple(shape) for name, shape in zip(FIELDS, shapes, strict=True) if shape is not None}
    for spec in set(specs):
        if spec.shapes() != named:
            return "takes parameters in shapes that fit the layers"
        if spec.attention.rotary_columns % 16 and device.type == "cuda":
            return f"rotates columns in multiples of 16, got {spec.attention.rotary_columns}"
        rms = "rms" in (spec.norm_a.kind, spec.norm_b.kind)
        biased = bool({"out_bias", "down_bias"} & named.keys())
        if rms and (types[0] != types[1] or spec.dropout_a or spec.dropout_b or biased):
            return "takes RMSNorm without dropout, without biases before it, and with a stream in x's dtype"
        reason = (_refuse_cuda if device.type == "cuda" else _refuse_cpu)(spec, types)
        if reason is not None:
            return reason
    return missing_cuda(device) if device.type == "cuda" else missing_cpu()


def _refuse_cpu(spec: LayerSpec, types: Types) -> str | None:
    if set(types) != {torch.float32}:
        return f"takes float32 on a CPU, got {dtype_name(types[0])}"
    if spec.attention.head_dim not in range(16, 257, 8):
        return f"takes head dims of 16 to 256 in steps of 8, got {spec.attention.head_dim}"
    return None


_HEAD_DIMS = (64, 128)


def _refuse_cuda(spec: LayerSpec, types: Types) -> str | None:
    dtype, stream, parameters = types
    attention = spec.attention
    if dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 and float16, got {dtype_name(dtype)}"
    if parameters not in (dtype, torch.float32) or (parameters != torch.float32 and stream != dtype):
        return "takes parameters in x's type or float32, and float32 ones where the stream is float32"
    sizes = (spec.width, spec.feed_forward.columns)
    if attention.head_dim not in _HEAD_DIMS or any(size % 8 for size in sizes) or spec.width > 8192:
        got = f"{attention.head_dim} and {sizes}"
        return f"takes head dims of 64 and 128, up to 8192 columns, in multiples of 8, got {got}"
    if not attention.is_causal_or_full() and attention.dropout:
        return "takes windows without dropout of attention weights"
    if attention.heads != attention.kv_heads and attention.dropout:
        return "takes grouped heads without dropout of attention weights"
    return None


_WINDOW_QUERIES, _WINDOW_KEYS = 512, 321  # kernels/attention/op.h: of the backward with windows and heads of 64


@functools.lru_cache(maxsize=256)
def _refuse_backward(specs: tuple[LayerSpec, ...], types: Types, device: torch.device, max_seqlen: int) -> str | None:
    for spec in set(specs):
        attention = spec.attention
        if not attention.is_causal_or_full():
            sides = (attention.window_left, attention.window_right)
            if min(sides) < 0 or (sum(sides) > _WINDOW_KEYS and max_seqlen > _WINDOW_QUERIES):
                return f"goes backward with windows of up to {_WINDOW_KEYS} keys, got {sides}"
            if attention.heads != attention.kv_heads:
                return "goes backward with grouped heads without a window"
        limit = _native.block_memory(device.index)
        codes = (_native.DTYPE_CODES[types[0]], _native.DTYPE_CODES[types[1]])
        if _native.core().dropout_add_layer_norm_backward_memory_cuda(spec.width, *codes, 1, limit) > limit:
            return "takes GPUs with more shared memory"
    return None
