"""Layers of any description over packed tokens: the core runs their plan if it can, otherwise torch's ops do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common.rows import contiguous_rows
from fasttfm.ops.core import direct_gradients
from fasttfm.ops.core.backends import requested
from fasttfm.ops.core.library import OpFunction, is_plain, needs_gradient, unshared
from fasttfm.ops.layers import core_executor, few_tokens, lora, torch_executor
from fasttfm.ops.layers.parameters import (
    BLOCK_FIELDS,
    CHANGED_PARAMETERS,
    NOT_PLAIN,
    Layers,
    distinct,
    frozen_of,
    gradients_like,
    in_type,
    layers_of,
    needed_of,
    parts_of,
    summed,
    versions,
)
from fasttfm.ops.layers.plan import plan
from fasttfm.ops.layers.rules import Situation
from fasttfm.ops.layers.spec import FIELDS, LayerSpec, Specs
from fasttfm.ops.layers.torch_executor import Inputs
from fasttfm.ops.layers.transformer_block import BlockOptions, BlockParameters, transformer_block

_MOST_SEQUENCES = 65535  # of attention's backward on Hopper


def run_stack(specs: Specs, inputs: Inputs, parameters: list[Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """y, and the stream of a pre-LN model, of layers with ``parameters``, the FIELDS of each in one list."""
    seeds = inputs.seeds
    contiguous = (inputs.cu_seqlens.contiguous(), None if seeds is None else seeds.contiguous())
    inputs = inputs._replace(cu_seqlens=contiguous[0], seeds=contiguous[1])
    gradient = needs_gradient(inputs.x, inputs.residual, *parameters, *lora.tensors_of(inputs.pairs))
    layers = _native_layers(specs, inputs, parameters, gradient=gradient)
    if isinstance(layers, str):
        return _run_by_ops(specs, inputs, parameters)
    if gradient:
        return _run_with_gradient(specs, inputs, layers)
    return _run_inference(specs, inputs, layers)


def _run_inference(specs: Specs, inputs: Inputs, layers: Layers) -> tuple[Tensor, Tensor | None]:
    cast = in_type(layers, inputs.x.dtype, copies=False)
    kept = _sessions_memory(inputs.x)
    situation: Any = {"training": False, "parameter_dtype": layers.dtype, "is_session": kept is not None}
    made = core_executor.plan_of(specs, inputs, **situation)
    without: frozenset[str] = frozenset()
    while kept is not None and made.owner is not None:
        operands = kept.operands(made.owner, specs, layers)
        if operands is not None:
            try:
                return core_executor.forward(made, inputs, layers, cast, operands)[:2]
            except _native.DoesNotFit:
                kept.workspace.fits = False
        without |= {made.owner}
        made = core_executor.plan_of(specs, inputs, without=without, **situation)
    of_adapters = lora.operands_of(specs, inputs)
    return core_executor.forward(made, inputs, layers, cast, None if of_adapters is None else of_adapters.table)[:2]


def run_cached(specs: Specs, inputs: Inputs, parameters: list[Tensor | None]) -> Tensor | None:
    """y of a call without gradients that writes keys and values to ``inputs.cache``, by one call of the core; None if
    the core does not run it: on a GPU it reads prompts only."""
    layers = _native_layers(specs, inputs, parameters, gradient=False)
    if isinstance(layers, str) or (inputs.x.is_cuda and inputs.cache is not None and inputs.cache.kind == "tokens"):
        return None
    return _run_inference(specs, inputs, layers)[0]


def _sessions_memory(x: Tensor) -> few_tokens.FewTokens | None:
    return few_tokens.current() if x.is_cuda else None


def _run_by_ops(specs: Specs, inputs: Inputs, parameters: list[Tensor | None]) -> tuple[Tensor, Tensor | None]:
    if not specs.are_blocks:
        situation = Situation(inputs.x.device.type, False, 4, 4)  # sizes do not matter to torch's ops
        return torch_executor.run(
            plan(specs, situation).forward, inputs, parameters, lora.differentiable(specs, inputs)
        )
    x, residual = inputs.x, inputs.residual
    for index, spec in enumerate(specs):
        options = block_options(spec, inputs.max_seqlen)
        of_layer: list[Any] = parameters[index * len(FIELDS) : index * len(FIELDS) + BLOCK_FIELDS]
        seeds = None if inputs.seeds is None else inputs.seeds[index]
        x, residual = transformer_block(x, residual, inputs.cu_seqlens, seeds, options, BlockParameters(*of_layer))
    return x, residual


def block_options(spec: LayerSpec, max_seqlen: int) -> BlockOptions:
    """A layer's options of ``transformer_block``."""
    attention = spec.attention
    return BlockOptions(
        heads=attention.heads,
        max_seqlen=max_seqlen,
        window_left=attention.window_left,
        window_right=attention.window_right,
        activation=spec.feed_forward.activation,
        attention_p=attention.dropout,
        p_a=spec.dropout_a,
        p_b=spec.dropout_b,
        eps_a=spec.norm_a.eps,
        eps_b=spec.norm_b.eps,
        recompute="y1" in spec.recomputed,
        keep_activation="a" not in spec.recomputed,
        backend=requested(None),
    )


def refused(specs: Specs, inputs: Inputs, parameters: list[Tensor | None]) -> str | None:
    """Why torch's ops run the layers; None if the core does."""
    gradient = needs_gradient(inputs.x, inputs.residual, *parameters, *lora.tensors_of(inputs.pairs))
    layers = _native_layers(specs, inputs, parameters, gradient=gradient)
    return layers if isinstance(layers, str) else None


def _native_layers(specs: Specs, inputs: Inputs, parameters: list[Tensor | None], *, gradient: bool) -> Layers | str:
    """The layers for the core, or why it does not run them."""
    tables = [table for pair in inputs.tables for table in pair]
    others = (inputs.adapters, *tables, *lora.tensors_of(inputs.pairs))
    if not is_plain((inputs.x, inputs.residual, inputs.cu_seqlens, inputs.seeds, inputs.positions, *others)):
        return NOT_PLAIN
    if not 1 < inputs.cu_seqlens.shape[0] <= 1 + _MOST_SEQUENCES:
        return f"takes 1 to {_MOST_SEQUENCES} sequences, got {inputs.cu_seqlens.shape[0] - 1}"
    if any(table.dtype != torch.float32 or not table.is_contiguous() for table in tables):
        return "takes contiguous float32 tables of cosines and sines"
    layers = layers_of(parameters)
    if isinstance(layers, str):
        return layers
    return core_executor.refuse(specs, inputs, layers, gradient=gradient) or layers


def _run_with_gradient(specs: Specs, inputs: Inputs, layers: Layers) -> tuple[Tensor, Tensor | None]:
    x, residual = inputs.x, inputs.residual
    for index, (part, seeds) in enumerate(parts_of(x, inputs.seeds, layers)):
        unique = distinct(part)
        direct = list(unique.values()) if part is layers and direct_gradients.is_accepted(unique) else None
        nodes = unique.values() if direct is None else (direct_gradients.witness(x),)
        of_part = specs if part is layers else specs.singles[index]
        pairs = inputs.pairs if part is layers else inputs.pairs[index : index + 1]
        arguments = (of_part, inputs._replace(seeds=seeds, pairs=pairs), part, direct)
        x, residual = _Stack.apply_plain(x, residual, *arguments, *nodes, *lora.tensors_of(pairs))
    return x, residual


class _Stack(OpFunction):
    op = "transformer_layers"
    instead = "torch.nn.TransformerEncoder"

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        specs: Specs,
        inputs: Inputs,
        layers: Layers,
        direct: list[Tensor] | None,
        *_: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """``x`` and ``residual`` replace those of ``inputs``. ``direct`` are the parameters whose gradients the
        backward writes itself, if they are no inputs. Those of LoRA are the last inputs."""
        call = inputs._replace(x=x, residual=residual)
        ctx.frozen = frozen_of(x, residual, layers)
        plan_of_call = core_executor.plan_of(specs, call, training=True, frozen=ctx.frozen)
        cast = in_type(layers, x.dtype, copies=True)
        ctx.operands = lora.operands_of(specs, call)
        table = None if ctx.operands is None else ctx.operands.table
        y, z, kept = core_executor.forward(plan_of_call, call, layers, cast, table)
        tables = [table for pair in inputs.tables for table in pair]
        shared = unshared(inputs.cu_seqlens, inputs.positions)
        ctx.save_for_backward(x, residual, kept, z, inputs.seeds, *shared, *tables)
        # Parameters are not saved tensors, which torch would wrap one by one; the backward compares their versions.
        ctx.cast, ctx.read = cast, [*cast, *lora.tensors_of(inputs.pairs)]
        ctx.versions = versions(ctx.read)
        ctx.plan, ctx.layers, ctx.direct, ctx.max_seqlen = plan_of_call, layers, direct, inputs.max_seqlen
        ctx.specs = specs
        ctx.set_materialize_grads(False)
        return y, z

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dz: Tensor | None) -> tuple[Any, ...]:
        x, residual, kept, z, seeds, cu_seqlens, positions, *tables = ctx.saved_tensors
        layers: Layers = ctx.layers
        if ctx.versions != versions(ctx.read):
            raise RuntimeError(CHANGED_PARAMETERS)
        pairs = tuple(zip(tables[::2], tables[1::2], strict=True))
        inputs = Inputs(x, residual, cu_seqlens, ctx.max_seqlen, seeds, pairs, positions)
        dy = torch.zeros_like(x) if dy is None else contiguous_rows(dy)
        dz = None if dz is None else contiguous_rows(dz)
        direct: list[Tensor] | None = ctx.direct
        count = len(distinct(layers)) if direct is None else 1
        of_parameters = ctx.needs_input_grad[_INPUTS : _INPUTS + count]
        needed = needed_of(layers, of_parameters if direct is None else [True] * len(direct))
        gradients = gradients_like(ctx.cast, needed, layers)
        operands: lora.Operands | None = ctx.operands
        of_adapters = None if operands is None else operands.gradients(layers.dtype)
        call = (inputs, layers, ctx.cast, kept, z)
        targets: Any = {"gradients": gradients, "operands": None if operands is None else operands.table}
        try:
            dx, dresidual = core_executor.backward(ctx.plan, *call, dy=dy, dz=dz, **targets)
        except _native.DoesNotFit:  # a part of the GPU is too small for blocks that wait for each other
            other = core_executor.plan_with_other_attention(ctx.specs, inputs, ctx.frozen)
            dx, dresidual = core_executor.backward(other, *call, dy=dy, dz=dz, **targets)
        totals: Sequence[Tensor | None] = summed(gradients, layers)
        if direct is not None:
            direct_gradients.accumulate(ctx, direct, totals)
            totals = [None]
        of_pairs = [] if of_adapters is None else of_adapters.of_parameters()
        needs_x, needs_residual = ctx.needs_input_grad[:2]
        inputs_of_node = (dx if needs_x else None, dresidual if needs_residual else None)
        return *inputs_of_node, None, None, None, None, *totals, *of_pairs


_INPUTS = 6  # of the node before the parameters
