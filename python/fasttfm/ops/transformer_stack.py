"""A stack of transformer layers: one native call for forward and one for backward if the core supports them
(transformer_native.py), otherwise layer by layer (transformer_block.py)."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common.rows import contiguous_rows
from fasttfm.ops import direct_gradients, few_rows_layers, few_tokens, folded_layers, transformer_native
from fasttfm.ops.attention import TABLE as ATTENTION
from fasttfm.ops.attention import backward_op as attention_backward_op
from fasttfm.ops.backends import Backend, BackendTable, always
from fasttfm.ops.layers import core_executor
from fasttfm.ops.layers.parameters import distinct, gradients_like, in_type, is_large, needed_of, parts_of, summed
from fasttfm.ops.layers.spec import FIELDS, Attention, FeedForward, LayerSpec, Norm, Specs
from fasttfm.ops.layers.torch_executor import Inputs
from fasttfm.ops.library import OpFunction, is_plain, needs_gradient, unshared
from fasttfm.ops.transformer_block import (
    BlockBackward,
    BlockOptions,
    BlockParameters,
    Saved,
    attention_options,
    kept_of,
    separate_seeds,
    transformer_block,
)
from fasttfm.ops.transformer_native import PARAMETERS, Batch, Layers, layers_in, versions


def transformer_stack(
    x: Tensor,
    residual: Tensor | None,
    cu_seqlens: Tensor,
    seeds: Tensor | None,
    options: BlockOptions,
    layers: Sequence[BlockParameters],
) -> tuple[Tensor, Tensor | None]:
    """Runs layers over packed tokens, as successive calls of ``transformer_block``, with ``seeds`` int64 ``[layers,
    3]``. In a pre-LN model a layer's LayerNorm b is the next layer's first norm."""
    return run_layers(x, residual, cu_seqlens, seeds, options, list(chain.from_iterable(layers)))


def run_layers(
    x: Tensor,
    residual: Tensor | None,
    cu_seqlens: Tensor,
    seeds: Tensor | None,
    options: BlockOptions,
    parameters: list[Tensor | None],
) -> tuple[Tensor, Tensor | None]:
    """The same for the parameters of all layers in one list."""
    cu_seqlens, seeds = cu_seqlens.contiguous(), None if seeds is None else seeds.contiguous()
    if is_plain((x, residual, cu_seqlens, seeds)) and 1 < cu_seqlens.shape[0] <= 1 + _MOST_SEQUENCES:
        layers = transformer_native.layers_of(parameters)
        if isinstance(layers, Layers):
            gradient = needs_gradient(x, residual, *parameters)
            few_rows = transformer_native.takes_few_rows(x, gradient=gradient, drops=seeds is not None)
            if transformer_native.refuse(x, residual, layers, options, few_rows=few_rows) is None:
                if x.is_cpu and not gradient and seeds is None:
                    return _run_plan(x, residual, cu_seqlens, options, layers)
                batch = Batch(x, None if residual is None else residual.dtype, cu_seqlens, seeds)
                if gradient:
                    return _run_with_gradient(batch, residual, options, layers)
                return _run_native(batch, residual, options, layers, few_rows=few_rows)
    return _run_op_by_op(x, residual, cu_seqlens, seeds, options, parameters)


_MOST_SEQUENCES = 65535  # of attention's backward on Hopper


def _run_op_by_op(
    x: Tensor,
    residual: Tensor | None,
    cu_seqlens: Tensor,
    seeds: Tensor | None,
    options: BlockOptions,
    parameters: list[Tensor | None],
) -> tuple[Tensor, Tensor | None]:
    for index, layer in enumerate(layers_in(parameters)):
        of_layer = None if seeds is None else seeds[index]
        x, residual = transformer_block(x, residual, cu_seqlens, of_layer, options, layer)
    return x, residual


def refused(x: Tensor, residual: Tensor | None, options: BlockOptions, layers: Sequence[BlockParameters]) -> str | None:
    """Why layers run op by op; None if they run in one native call."""
    return _refused(x, residual, options, layers, few_rows=_has_few_rows(x, residual, options, layers))


def _refused(
    x: Tensor,
    residual: Tensor | None,
    options: BlockOptions,
    layers: Sequence[BlockParameters],
    *,
    few_rows: bool,
) -> str | None:
    if not is_plain((x, residual)):
        return transformer_native.NOT_PLAIN
    native = transformer_native.layers_of(list(chain.from_iterable(layers)))
    if isinstance(native, str):
        return native
    return transformer_native.refuse(x, residual, native, options, few_rows=few_rows)


def _has_few_rows(x: Tensor, residual: Tensor | None, options: BlockOptions, layers: Sequence[BlockParameters]) -> bool:
    gradient = needs_gradient(x, residual, *chain.from_iterable(layers))
    drops = options.attention_p + options.p_a + options.p_b > 0
    return transformer_native.takes_few_rows(x, gradient=gradient, drops=drops)


def _run_native(
    batch: Batch, residual: Tensor | None, options: BlockOptions, layers: Layers, *, few_rows: bool
) -> tuple[Tensor, Tensor | None]:
    kept = few_tokens.current()
    if few_rows and kept is not None and (y := _run_with(kept, batch, options, layers)) is not None:
        return y, None
    cast = in_type(layers, batch.x.dtype, copies=False)
    y, z, _ = transformer_native.forward(batch, residual, layers, cast, options, training=False, few_rows=few_rows)
    return y, z


def _run_plan(
    x: Tensor, residual: Tensor | None, cu_seqlens: Tensor, options: BlockOptions, layers: Layers
) -> tuple[Tensor, Tensor | None]:
    """Inference on a CPU: the plan of the layers, which runs in parts."""
    names = BlockParameters._fields
    present = frozenset(name for name, shape in zip(names, layers.shapes, strict=True) if shape is not None)
    sizes = (x.shape[1], layers.intermediate, layers.depth)
    specs = _specs_of(sizes, residual is not None, options._replace(max_seqlen=0), present)
    inputs = Inputs(x, residual, cu_seqlens, options.max_seqlen)
    plan = core_executor.plan_of(specs, inputs, training=False)
    described = _with_all_fields(layers)
    y, z, _ = core_executor.forward(plan, inputs, described, described.parameters)
    return y, z


def _with_all_fields(layers: Layers) -> Layers:
    """With the FIELDS of each layer, of which the last ones are None."""
    missing = len(FIELDS) - PARAMETERS
    parameters: list[Tensor | None] = []
    table = array("q")
    for first in range(0, len(layers.parameters), PARAMETERS):
        parameters += [*layers.parameters[first : first + PARAMETERS], *[None] * missing]
        table.extend((*layers.table[first : first + PARAMETERS], *[0] * missing))
    return layers._replace(parameters=parameters, table=table, shapes=(*layers.shapes, *[None] * missing))


@functools.lru_cache(maxsize=256)
def _specs_of(sizes: tuple[int, int, int], pre_norm: bool, options: BlockOptions, present: frozenset[str]) -> Specs:
    """The layers as data, without dropout. ``sizes``: their width, the columns of their feed-forward blocks, and how
    many they are."""
    width, intermediate, depth = sizes
    heads = options.heads
    spec = LayerSpec(
        width,
        pre_norm=pre_norm,
        attention=Attention(heads, heads, width // heads, options.window_left, options.window_right),
        feed_forward=FeedForward(intermediate, options.activation),
        norm_a=Norm("layer", options.eps_a),
        norm_b=Norm("layer", options.eps_b),
        present=present,
    )
    return Specs([spec] * depth)


def _run_with(kept: few_tokens.FewTokens, batch: Batch, options: BlockOptions, layers: Layers) -> Tensor | None:
    """The result of all layers by one kernel, or with folded LayerNorms; None if neither supports the call."""
    y = None
    if few_rows_layers.refuse(batch, layers, options) is None:
        y = few_rows_layers.run(kept.workspace, batch, layers, options)
    if y is None and folded_layers.refuse(batch, layers) is None:
        y = folded_layers.run(kept.folded, batch, layers, options)
    return y


def _run_with_gradient(
    batch: Batch, residual: Tensor | None, options: BlockOptions, layers: Layers
) -> tuple[Tensor, Tensor | None]:
    x = batch.x
    for part, seeds in parts_of(x, batch.seeds, layers):
        unique = distinct(part)
        direct = list(unique.values()) if part is layers and direct_gradients.is_accepted(unique) else None
        inputs = unique.values() if direct is None else (direct_gradients.witness(x),)
        call = (x, residual, batch.cu_seqlens, seeds, options, part)
        x, residual = _TransformerStack.apply_plain(*call, direct, *inputs)
    return x, residual


class _TransformerStack(OpFunction):
    op = "transformer_stack"
    instead = "torch.nn.TransformerEncoder"

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        cu_seqlens: Tensor,
        seeds: Tensor | None,
        options: BlockOptions,
        layers: Layers,
        direct: list[Tensor] | None,
        *_: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """``direct`` are the parameters whose gradients the backward writes itself, if they are no inputs."""
        batch = Batch(x, None if residual is None else residual.dtype, cu_seqlens, seeds)
        cast = in_type(layers, x.dtype, copies=True)
        y, z, kept = transformer_native.forward(batch, residual, layers, cast, options, training=True)
        ctx.save_for_backward(x, *unshared(cu_seqlens), seeds, kept, z)
        # Parameters are not saved tensors, which torch would wrap one by one; the backward compares their versions.
        ctx.cast, ctx.versions = cast, versions(cast)
        ctx.layers, ctx.options, ctx.residual_dtype, ctx.direct = layers, options, batch.residual_dtype, direct
        ctx.set_materialize_grads(False)
        return y, z

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dz: Tensor | None) -> tuple[Any, ...]:
        x, cu_seqlens, seeds, kept, z = ctx.saved_tensors
        layers: Layers = ctx.layers
        if ctx.versions != versions(ctx.cast):
            raise RuntimeError(transformer_native.CHANGED_PARAMETERS)
        batch = Batch(x, ctx.residual_dtype, cu_seqlens, seeds)
        dy = torch.zeros_like(x) if dy is None else contiguous_rows(dy)
        dz = None if dz is None else contiguous_rows(dz)
        direct: list[Tensor] | None = ctx.direct
        needed = needed_of(layers, ctx.needs_input_grad[_INPUTS:] if direct is None else [True] * len(direct))
        gradients = gradients_like(ctx.cast, needed, layers)
        arguments = (batch, layers, ctx.cast, ctx.options, kept, z)
        try:
            dx, dresidual = transformer_native.backward(
                *arguments, dy=dy, dz=dz, gradients=gradients, attention=_faster_attention(*arguments)
            )
        except _native.DoesNotFit:  # a part of the GPU is too small for blocks that wait for each other
            dx, dresidual, gradients = _backward_op_by_op(*arguments, dy, dz, needed)
        totals = summed(gradients, layers)
        if direct is not None:
            direct_gradients.accumulate(ctx, direct, totals)
            totals = [None]
        return dx, dresidual, None, None, None, None, None, *totals


_INPUTS = 7  # of the node before the parameters


def _faster_attention(
    batch: Batch, layers: Layers, cast: list[Tensor | None], options: BlockOptions, kept: Tensor, z: Tensor | None
) -> Callable[[Tensor], Tensor] | None:
    """Attention's backward by the op, if a layer is large and another backend than CUDA is faster; otherwise None."""
    x = batch.x
    if not x.is_cuda or layers.depth > 1 or not is_large(x) or options.backend is not None:
        return None
    _, saved = transformer_native.kept_tensors(batch, layers, options, kept, z, 0)
    bounds = {"max_seqlen": options.max_seqlen, "max_seqlen_k": options.max_seqlen}
    window = (options.window_left, options.window_right)
    q, k, v = saved.qkv.unbind(-3)
    chosen = ATTENTION.select_backward(None, q, k, v, window=window, cu_seqlens=batch.cu_seqlens, **bounds)
    return None if chosen.name == "cuda" else functools.partial(_attention_backward, batch, options, saved)


def _attention_backward(batch: Batch, options: BlockOptions, saved: Saved, dout: Tensor) -> Tensor:
    """The gradient of qkv."""
    seed, _, _ = separate_seeds(None if batch.seeds is None else batch.seeds[0], options)
    call = attention_options(saved.qkv, batch.cu_seqlens, seed, options)
    out = saved.out
    dqkv: Tensor = attention_backward_op.implementation(
        dout.view_as(out), saved.qkv, None, None, out, saved.lse, *call
    )[0]
    return dqkv


def _backward_op_by_op(
    batch: Batch,
    layers: Layers,
    cast: list[Tensor | None],
    options: BlockOptions,
    kept: Tensor,
    z: Tensor | None,
    dy: Tensor | None,
    dz: Tensor | None,
    needed: Sequence[bool],
) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
    """The backward of a native forward by the ops, from what the forward has saved."""
    by_layer: list[list[Tensor | None]] = []
    types = BlockParameters(*([layers.dtype] * PARAMETERS))  # type: ignore[arg-type]
    for index in reversed(range(layers.depth)):
        part = slice(index * PARAMETERS, (index + 1) * PARAMETERS)
        x, saved = transformer_native.kept_tensors(batch, layers, options, kept, z, index)
        parameters: Any = BlockParameters(*cast[part])  # type: ignore[arg-type]
        needed_of_layer: Any = BlockParameters(*needed[part])  # type: ignore[arg-type]
        seeds = None if batch.seeds is None else batch.seeds[index]
        tensors = (x, batch.cu_seqlens, *saved, *parameters, dy, dz)
        block = BlockBackward(tensors, parameters, needed_of_layer, types, options, batch.residual_dtype is not None)
        kind = kept_of(x, parameters, options)
        dy, dz = block.run(x, batch.cu_seqlens, separate_seeds(seeds, options), kind, saved, dy, dz)
        by_layer.append([block.gradients.get(name) for name in BlockParameters._fields])
    assert dy is not None
    return dy, dz, list(chain.from_iterable(reversed(by_layer)))


# ---- for explain and info --------------------------------------------------------------------------------------------


def _refuse_cpu(x: Tensor, *call: Any) -> str | None:
    return refused(x, *call) if x.is_cpu else f"takes CPU tensors, got {x.device.type}"


def _refuse_few_rows(x: Tensor, *call: Any) -> str | None:
    if not x.is_cuda:
        return f"takes CUDA tensors, got {x.device.type}"
    if not _has_few_rows(x, *call):
        most = transformer_native.most_few_rows(x.shape[1])
        return f"takes up to {most} tokens without gradients and without dropout, got {x.shape[0]} tokens"
    return _refused(x, *call, few_rows=True)


def _refuse_cuda(x: Tensor, *call: Any) -> str | None:
    return _refused(x, *call, few_rows=False) if x.is_cuda else f"takes CUDA tensors, got {x.device.type}"


# ``explain("transformer_stack", x, residual, options, layers)``. "cpu", "cuda" and "cuda_few_rows", which has its own
# kernels for few tokens, are one native call.
TABLE = BackendTable(
    "transformer_stack",
    (
        Backend("cpu", transformer_native.missing_cpu, _refuse_cpu, _run_native),
        Backend("cuda_few_rows", transformer_native.missing_hopper, _refuse_few_rows, _run_native),
        Backend("cuda", transformer_native.missing_hopper, _refuse_cuda, _run_native),
        Backend("ops", always, lambda *_: None, _run_op_by_op),
    ),
)
