"""Layers of any description over packed tokens: the core runs their plan if it can, otherwise torch's ops do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fasttfm.kernels.common.rows import contiguous_rows
from fasttfm.ops import direct_gradients, transformer_native
from fasttfm.ops.layers import core_executor, torch_executor
from fasttfm.ops.layers.parameters import distinct, gradients_like, in_type, needed_of, parts_of, summed
from fasttfm.ops.layers.plan import plan
from fasttfm.ops.layers.rules import Situation
from fasttfm.ops.layers.spec import FIELDS, LayerSpec
from fasttfm.ops.layers.torch_executor import Inputs
from fasttfm.ops.library import OpFunction, is_plain, needs_gradient, unshared
from fasttfm.ops.transformer_native import Layers, versions

_MOST_SEQUENCES = 65535  # of attention's backward on Hopper


def run_stack(
    specs: tuple[LayerSpec, ...], inputs: Inputs, parameters: list[Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    """y, and the stream of a pre-LN model, of layers with ``parameters``, the FIELDS of each in one list."""
    gradient = needs_gradient(inputs.x, inputs.residual, *parameters)
    layers = _native_layers(specs, inputs, parameters, gradient=gradient)
    if isinstance(layers, str):
        situation = Situation(inputs.x.device.type, False, 4, 4)  # sizes do not matter to torch's ops
        return torch_executor.run(plan(specs, situation).forward, inputs, parameters)
    if gradient:
        return _run_with_gradient(specs, inputs, layers)
    cast = in_type(layers, inputs.x.dtype, copies=False)
    y, z, _ = core_executor.forward(core_executor.plan_of(specs, inputs, training=False), inputs, layers, cast)
    return y, z


def refused(specs: tuple[LayerSpec, ...], inputs: Inputs, parameters: list[Tensor | None]) -> str | None:
    """Why torch's ops run the layers; None if the core does."""
    gradient = needs_gradient(inputs.x, inputs.residual, *parameters)
    layers = _native_layers(specs, inputs, parameters, gradient=gradient)
    return layers if isinstance(layers, str) else None


def _native_layers(
    specs: tuple[LayerSpec, ...], inputs: Inputs, parameters: list[Tensor | None], *, gradient: bool
) -> Layers | str:
    """The layers for the core, or why it does not run them."""
    tables = [table for pair in inputs.tables for table in pair]
    if not is_plain((inputs.x, inputs.residual, inputs.cu_seqlens, inputs.seeds, inputs.positions, *tables)):
        return transformer_native.NOT_PLAIN
    if not 1 < inputs.cu_seqlens.shape[0] <= 1 + _MOST_SEQUENCES:
        return f"takes 1 to {_MOST_SEQUENCES} sequences, got {inputs.cu_seqlens.shape[0] - 1}"
    if any(table.dtype != torch.float32 or not table.is_contiguous() for table in tables):
        return "takes contiguous float32 tables of cosines and sines"
    layers = transformer_native.layers_of(parameters, len(FIELDS))
    if isinstance(layers, str):
        return layers
    return core_executor.refuse(specs, inputs, layers, gradient=gradient) or layers


def _run_with_gradient(specs: tuple[LayerSpec, ...], inputs: Inputs, layers: Layers) -> tuple[Tensor, Tensor | None]:
    x, residual = inputs.x, inputs.residual
    first = 0
    for part, seeds in parts_of(x, inputs.seeds, layers):
        unique = distinct(part)
        direct = list(unique.values()) if part is layers and direct_gradients.is_accepted(unique) else None
        nodes = unique.values() if direct is None else (direct_gradients.witness(x),)
        of_part = specs[first : first + part.depth]
        first += part.depth
        call = inputs._replace(seeds=seeds)
        x, residual = _Stack.apply_plain(x, residual, of_part, call, part, direct, *nodes)
    return x, residual


class _Stack(OpFunction):
    op = "transformer_layers"
    instead = "torch.nn.TransformerEncoder"

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        specs: tuple[LayerSpec, ...],
        inputs: Inputs,
        layers: Layers,
        direct: list[Tensor] | None,
        *_: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """``x`` and ``residual`` replace those of ``inputs``. ``direct`` are the parameters whose gradients the
        backward writes itself, if they are no inputs."""
        call = inputs._replace(x=x, residual=residual)
        plan_of_call = core_executor.plan_of(specs, call, training=True)
        cast = in_type(layers, x.dtype, copies=True)
        y, z, kept = core_executor.forward(plan_of_call, call, layers, cast)
        tables = [table for pair in inputs.tables for table in pair]
        shared = unshared(inputs.cu_seqlens, inputs.positions)
        ctx.save_for_backward(x, residual, kept, z, inputs.seeds, *shared, *tables)
        # Parameters are not saved tensors, which torch would wrap one by one; the backward compares their versions.
        ctx.cast, ctx.versions = cast, versions(cast)
        ctx.plan, ctx.layers, ctx.direct, ctx.max_seqlen = plan_of_call, layers, direct, inputs.max_seqlen
        ctx.set_materialize_grads(False)
        return y, z

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dz: Tensor | None) -> tuple[Any, ...]:
        x, residual, kept, z, seeds, cu_seqlens, positions, *tables = ctx.saved_tensors
        layers: Layers = ctx.layers
        if ctx.versions != versions(ctx.cast):
            raise RuntimeError(transformer_native.CHANGED_PARAMETERS)
        pairs = tuple(zip(tables[::2], tables[1::2], strict=True))
        inputs = Inputs(x, residual, cu_seqlens, ctx.max_seqlen, seeds, pairs, positions)
        dy = torch.zeros_like(x) if dy is None else contiguous_rows(dy)
        dz = None if dz is None else contiguous_rows(dz)
        direct: list[Tensor] | None = ctx.direct
        needed = needed_of(layers, ctx.needs_input_grad[_INPUTS:] if direct is None else [True] * len(direct))
        gradients = gradients_like(ctx.cast, needed, layers)
        dx, dresidual = core_executor.backward(
            ctx.plan, inputs, layers, ctx.cast, kept, z, dy=dy, dz=dz, gradients=gradients
        )
        totals: Sequence[Tensor | None] = summed(gradients, layers)
        if direct is not None:
            direct_gradients.accumulate(ctx, direct, totals)
            totals = [None]
        return dx, dresidual, None, None, None, None, *totals


_INPUTS = 6  # of the node before the parameters
