"""Runs a plan by the native core, on Hopper in 16-bit types and on a CPU in fp32: one call for each direction."""

from __future__ import annotations

import functools
import math
from array import array
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common import philox
from fasttfm.kernels.common.launch import multiprocessors
from fasttfm.ops.attention import AttentionProblem, write_gradients
from fasttfm.ops.attention_checks import check_values
from fasttfm.ops.core.backends import dtype_name, requested
from fasttfm.ops.core.host_blocks import empty_bytes
from fasttfm.ops.layers import rules, steps
from fasttfm.ops.layers.encoding import BUFFERS, TABLE_FIELDS, EncodedSteps
from fasttfm.ops.layers.parameters import Layers, address_table
from fasttfm.ops.layers.parts import Parts, divided
from fasttfm.ops.layers.plan import Plan
from fasttfm.ops.layers.plan import plan as make_plan
from fasttfm.ops.layers.rules import situation_of, with_rules
from fasttfm.ops.layers.spec import FIELDS, LayerSpec, Specs
from fasttfm.ops.layers.support import missing_cpu, missing_cuda
from fasttfm.ops.layers.torch_executor import Inputs

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


def plan_of(
    specs: Specs,
    inputs: Inputs,
    *,
    training: bool,
    precision: str = "",
    parameter_dtype: torch.dtype | None = None,
    is_session: bool = False,
    without: frozenset[str] = frozenset(),
    frozen: frozenset[str] = frozenset(),
) -> Plan:
    """The plan for a call, ``without`` some rules."""
    situation = situation_of(inputs, training=training, precision=precision, parameter_dtype=parameter_dtype)
    situation = situation._replace(frozen=frozen)
    if is_session:
        situation = situation._replace(is_session=True)
    situation = with_rules(situation, specs, sizes_of(specs, inputs))
    return make_plan(specs, situation._replace(rules=situation.rules - without) if without else situation)


def plan_with_other_attention(specs: Specs, inputs: Inputs, frozen: frozenset[str] = frozenset()) -> Plan:
    """The plan for the backward of a call with gradients on a GPU where the kernel of attention's backward does not
    fit, because its blocks wait for each other. It keeps the same tensors in the same places."""
    situation = situation_of(inputs, training=True)._replace(frozen=frozen)
    situation = with_rules(situation, specs, sizes_of(specs, inputs))
    return make_plan(specs, situation._replace(rules=situation.rules | {rules.OTHER_ATTENTION}))


def sizes_of(specs: Specs, inputs: Inputs) -> rules.Sizes:
    """The sizes of a call that rules depend on."""
    x, sequences = inputs.x, inputs.cu_seqlens.shape[0] - 1
    sizes = (x.shape[0], sequences, inputs.max_seqlen, len(specs))
    return rules.Sizes(*sizes, torch.cuda.is_current_stream_capturing(), multiprocessors(x)) if x.is_cuda else NO_RULES


# Rules are Hopper's: a CPU's plan does not depend on sizes.
NO_RULES = rules.Sizes(0, 1, 0)


def forward(
    plan: Plan, inputs: Inputs, layers: Layers, cast: list[Tensor | None], operands: array[int] | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """y, z of a pre-LN model, and what is saved for the backward.

    Args:
        cast: The parameters, weights in x's dtype.
        operands: The addresses of what GEMMs read in int8, of packed weights, in FP8 and of LoRA (``LINEARS`` and
            ``OPERANDS`` of encoding.py), or of what a session keeps for the plan's ``owner``.
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
    operands: array[int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gradients of x and of the stream, if the plan computes them. Writes those of the parameters into
    ``gradients`` that are not None."""
    x, residual = inputs.x, inputs.residual
    dx, dresidual = torch.empty_like(x), None if residual is None else torch.empty_like(residual)
    scratch = _rows(plan.backward_scratch, x)
    buffers = _buffers(inputs, scratch=scratch, kept=kept, z=z, dy=dy, dz=dz, dx=dx, dresidual=dresidual)
    tables: dict[str, Any] = {"parameters": address_table(cast), "gradients": address_table(gradients)}
    tables["operands"] = operands
    for part in plan.backward_parts:
        if isinstance(part, EncodedSteps):
            _run(part, inputs, layers, buffers, **tables)
        else:
            _other_attention(part, plan, inputs, {"scratch": scratch, "kept": kept})
    return dx, dresidual


def _other_attention(
    step: steps.OtherAttentionBackward, plan: Plan, inputs: Inputs, buffers: dict[str, Tensor]
) -> None:
    """The gradients of q, k and v by the op."""
    x = inputs.x
    tokens = x.shape[0]
    rows = -(-tokens // _ROWS) * _ROWS

    def tensor(name: str, dtype: torch.dtype, *sizes: int) -> Tensor:
        index, offset = divmod(plan.places[name], 1 << 40)
        start = offset * rows
        whole = buffers[BUFFERS[index]][start : start + math.prod(sizes) * dtype.itemsize]
        return whole.view(dtype).view(sizes)

    heads, kv_heads, head_dim = step.heads, step.kv_heads, step.head_dim
    qkv, dqkv = (tensor(name, x.dtype, tokens, heads + 2 * kv_heads, head_dim) for name in (step.qkv, step.dqkv))
    dout, out = (tensor(name, x.dtype, tokens, heads, head_dim) for name in (step.dout, step.out))
    seed = None if step.seed is None or inputs.seeds is None else inputs.seeds.flatten()[step.seed_index, None]
    problem = AttentionProblem(
        cu_seqlens=inputs.cu_seqlens,
        seed=seed,
        max_seqlen=inputs.max_seqlen,
        max_seqlen_k=inputs.max_seqlen,
        window_left=step.window_left,
        window_right=step.window_right,
        scale=step.scale,
        p=philox.probability(step.threshold),
    )
    parts = [heads, kv_heads, kv_heads]
    write_gradients(
        *(None, dout, *qkv.split(parts, 1), out, tensor(step.lse, torch.float32, heads, tokens), problem),
        *dqkv.split(parts, 1),
    )


def _rows(count: int, x: Tensor) -> Tensor:
    """Memory of ``count`` bytes per token."""
    rows = -(-x.shape[0] // _ROWS) * _ROWS
    return empty_bytes(count * rows, x.device)


def _buffers(inputs: Inputs, **others: Tensor | None) -> array[int]:
    """The core's table of buffers."""
    known = {"x": inputs.x, "residual": inputs.residual, "seeds": inputs.seeds, "positions": inputs.positions}
    known |= {"adapters": inputs.adapters, **others}
    cache = inputs.cache
    if cache is not None:
        known |= cache._asdict()
    table = array("q", (0 if (each := known.get(name)) is None else each.data_ptr() for name in BUFFERS))
    if cache is not None:
        _, slots, heads, capacity, _ = cache.keys.shape
        table[BUFFERS.index("capacity")], table[BUFFERS.index("cache_rows")] = capacity, slots * heads * capacity
    for cos, sin in inputs.tables:
        table.extend((cos.data_ptr(), sin.data_ptr(), cos.shape[0]))
    return table


def _run(
    words: EncodedSteps,
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
    workspace = empty_bytes(_workspace_bytes(words, sizes, x), x.device)
    tables = map(_address, (buffers, parameters, gradients, operands))
    _native.core().layers_run(*words.encoded.buffer_info(), *sizes, inputs.cu_seqlens, workspace, *tables)


def _address(table: array[int] | None) -> int:
    return 0 if table is None else table.buffer_info()[0]


def _sizes(inputs: Inputs, layers: Layers, processors: int) -> Sizes:
    x, stream = inputs.x, inputs.x if inputs.residual is None else inputs.residual
    types = (_native.DTYPE_CODES[x.dtype], _native.DTYPE_CODES[stream.dtype], _native.DTYPE_CODES[layers.dtype])
    tokens, sequences = x.shape[0], inputs.cu_seqlens.shape[0] - 1
    return Sizes(tokens, sequences, min(inputs.max_seqlen, tokens), processors, *types)


def _workspace_bytes(words: EncodedSteps, sizes: Sizes, x: Tensor) -> int:
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
    attends = inputs.cache is not None and inputs.cache.kind == "tokens"  # each part would read all weights
    if (
        x.is_cuda
        or attends
        or plan.backward
        or inputs.seeds is not None
        or (inputs.tables and inputs.positions is None)
    ):
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
    owned = empty_bytes(threads * sum(memory), inputs.x.device)
    _native.core().layers_run_parts_cpu(*plan.words.encoded.buffer_info(), *sizes, inputs.cu_seqlens, owned, *tables)


_PAGE = 4096  # bytes: no two threads write to one line of the cache


def _token_bytes(inputs: Inputs) -> list[int]:
    """Bytes between the tokens of each buffer: 0 for those that parts share."""
    of_x = inputs.x.shape[1] * inputs.x.element_size()
    of_stream = of_x if inputs.residual is None else inputs.residual.shape[1] * inputs.residual.element_size()
    known = {"x": of_x, "y": of_x, "residual": of_stream, "z": of_stream, "positions": 8, "places": 8, "adapters": 4}
    return [known.get(name, 0) for name in BUFFERS] + [0] * (TABLE_FIELDS * len(inputs.tables))


# ---- which calls the core supports -----------------------------------------------------------------------------------


def refuse(specs: Specs, inputs: Inputs, layers: Layers, *, gradient: bool) -> str | None:
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
    few_rows = x.is_cuda and not gradient and not specs.drop and rules.has_few_rows(tokens, width)
    reason = _refuse_spec(specs, layers.shapes, x.device, types, few_rows)
    if reason is not None or not x.is_cuda:
        return reason
    if any(each is not None and each.data_ptr() % _ALIGNMENT for each in (x, residual)):
        return f"takes tensors that start at a multiple of {_ALIGNMENT} bytes"
    return _refuse_backward(specs, types, x.device, inputs.max_seqlen) if gradient else None


Types = tuple[torch.dtype, torch.dtype, torch.dtype]  # of x, of the stream, of parameters


@functools.lru_cache(maxsize=256)
def _refuse_spec(
    specs: Specs, shapes: tuple[torch.Size | None, ...], device: torch.device, types: Types, few_rows: bool
) -> str | None:
    named = {name: tuple(shape) for name, shape in zip(FIELDS, shapes, strict=True) if shape is not None}
    for spec in specs.kinds:
        if spec.shapes() != named:
            return "takes parameters in shapes that fit the layers"
        if spec.attention.rotary_columns % 16 and device.type == "cuda":
            return f"rotates columns in multiples of 16, got {spec.attention.rotary_columns}"
        if "y1" in spec.recomputed and types[0] != types[1]:
            return f"takes no recompute with a {dtype_name(types[1])} stream"
        rms = "rms" in (spec.norm_a.kind, spec.norm_b.kind)
        biased = bool({"out_bias", "down_bias"} & named.keys())
        if rms and (types[0] != types[1] or spec.dropout_a or spec.dropout_b or biased):
            return "takes RMSNorm without dropout, without biases before it, and with a stream in x's dtype"
        short = few_rows and spec.is_block
        reason = _refuse_cuda(spec, types, short) if device.type == "cuda" else _refuse_cpu(spec, types)
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


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"


def _refuse_cuda(spec: LayerSpec, types: Types, few_rows: bool) -> str | None:
    dtype, stream, parameters = types
    attention = spec.attention
    if dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 and float16, got {dtype_name(dtype)}"
    if parameters not in (dtype, torch.float32) or (parameters != torch.float32 and stream != dtype):
        return "takes parameters in x's type or float32, and float32 ones where the stream is float32"
    sizes = (spec.width, spec.feed_forward.columns)
    head_dims = rules.FEW_ROWS_HEAD_DIMS if few_rows else _HEAD_DIMS
    if attention.head_dim not in head_dims or any(size % 8 for size in sizes) or spec.width > 8192:
        got = f"{attention.head_dim} and {sizes}"
        return f"takes head dims of {_listed(head_dims)}, up to 8192 columns, in multiples of 8, got {got}"
    if not attention.is_causal_or_full() and attention.dropout:
        return "takes windows without dropout of attention weights"
    if attention.heads != attention.kv_heads and attention.dropout:
        return "takes grouped heads without dropout of attention weights"
    return None


_WINDOW_QUERIES, _WINDOW_KEYS = 512, 321  # kernels/attention/op.h: of the backward with windows and heads of 64


@functools.lru_cache(maxsize=256)
def _refuse_backward(specs: Specs, types: Types, device: torch.device, max_seqlen: int) -> str | None:
    for spec in specs.kinds:
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
