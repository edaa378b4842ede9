"""Layers with FP8 operands and static scales, for inference (linear.py), by plans of the precision "fp8".

Attention, norms and residual additions use the activations' dtype. On Hopper with bf16 all layers are one native call.
LayerNorms and activations without a gate also write their result in FP8; attention's output, and what RMSNorms and
gates compute, are cast by a step of its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm.ops import fp8
from fasttfm.ops.core.library import is_plain
from fasttfm.ops.fp8 import Fp8Weight, Scales
from fasttfm.ops.layers import core_executor
from fasttfm.ops.layers.encoding import LINEARS
from fasttfm.ops.layers.parameters import layers_of
from fasttfm.ops.layers.plan import plan
from fasttfm.ops.layers.rules import situation_of
from fasttfm.ops.layers.spec import Specs
from fasttfm.ops.layers.torch_executor import Inputs, run_all

_ROOM = 2.0  # how far inputs may exceed the calibrated magnitudes before they saturate


class StaticLayer(NamedTuple):
    """The linear layers of a transformer layer, in the order of ``LINEARS``."""

    qkv: Fp8Weight
    out: Fp8Weight
    up: Fp8Weight
    down: Fp8Weight


@torch.no_grad()
def static_layers(weights: list[list[Tensor]], amax: Tensor) -> list[StaticLayer]:
    """Casts the weights of layers, each in the order of ``LINEARS``.

    Args:
        amax: fp32 ``[layers, 4]``, the largest magnitudes of the linear layers' inputs.
    """
    count = len(LINEARS)
    scales = Scales([fp8.E4M3] * (2 * count * len(weights)), 1, weights[0][0].device)
    inputs, weight_slots = scales.slots[: count * len(weights)], scales.slots[count * len(weights) :]
    scales.set_magnitudes(torch.cat([_ROOM * amax.flatten(), torch.zeros_like(amax).flatten()]))
    cast_layers = []
    for index, layer in enumerate(weights):
        linears = []
        for number, weight in enumerate(layer):
            position = count * index + number
            cast_weight = Fp8Weight(weight, (inputs[position], weight_slots[position]))
            cast_weight.weight.measure_changed(weight)
            cast_weight.rows.copy_(fp8.cast(weight, cast_weight.weight, with_columns=False).rows)
            linears.append(cast_weight)
        cast_layers.append(StaticLayer(*linears))
    return cast_layers


def addresses_of(layers: Sequence[StaticLayer]) -> array[int]:
    """The addresses of operands and scales for the native core: ``OPERANDS`` of layers/encoding.py."""
    linears = chain.from_iterable(layers)
    tensors = (
        (linear.rows, linear.weight.inverse, linear.input.scale, linear.input.inverse, linear.input.amax)
        for linear in linears
    )
    return array("q", (tensor.data_ptr() for of_linear in tensors for tensor in of_linear))


def run_native(specs: Specs, inputs: Inputs, parameters: list[Tensor | None], addresses: array[int]) -> Tensor | None:
    """The result of all layers in one native call; None if the core does not support it."""
    x, dtype = inputs.x, torch.bfloat16
    if not x.is_cuda or x.dtype != dtype or not is_plain((x, inputs.residual, inputs.cu_seqlens)):
        return None
    layers = layers_of(parameters)
    if isinstance(layers, str) or layers.dtype != dtype:
        return None
    if core_executor.refuse(specs, inputs, layers, gradient=False) is not None:
        return None
    plan = core_executor.plan_of(specs, inputs, training=False, precision="fp8")
    return core_executor.forward(plan, inputs, layers, layers.parameters, addresses)[0]


def run_by_ops(
    specs: Specs, inputs: Inputs, parameters: list[Tensor | None], layers: Sequence[StaticLayer]
) -> dict[str, Any]:
    """All tensors of the same plan, by their names, op by op."""
    situation = situation_of(inputs, training=False, precision="fp8")
    return run_all(plan(specs, situation).forward, inputs, parameters, operands=layers)


def run_measured(
    specs: Specs, inputs: Inputs, parameters: list[Tensor | None], amax: Sequence[Tensor]
) -> dict[str, Any]:
    """All tensors of the layers in the activations' dtype. ``amax`` [4] of each layer are raised to the largest
    magnitudes of the inputs of its linear layers."""

    def record(weight: str, x: Tensor) -> None:
        layer, _, name = weight.partition(".")
        fp8.record_amax(amax[int(layer)][LINEARS.index(name.removesuffix("_weight"))], x)

    situation = situation_of(inputs, training=False)
    return run_all(plan(specs, situation).forward, inputs, parameters, record=record)
