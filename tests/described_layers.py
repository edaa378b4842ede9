"""Layers of ``transformer_block`` as data, for tests that run them by plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fasttfm.ops.layers import stack
from fasttfm.ops.layers.parameters import Layers, layers_of
from fasttfm.ops.layers.spec import FIELDS, Attention, FeedForward, LayerSpec, Norm, Specs
from fasttfm.ops.layers.torch_executor import Inputs
from fasttfm.ops.layers.transformer_block import BlockOptions, BlockParameters


def specs_of(options: BlockOptions, layers: Sequence[BlockParameters], *, pre_norm: bool = False) -> Specs:
    return Specs.of([_spec_of(options, layer, pre_norm) for layer in layers])


def _spec_of(options: BlockOptions, layer: BlockParameters, pre_norm: bool) -> LayerSpec:
    inner, width = layer.up_weight.shape
    heads = options.heads
    sides = (options.window_left, options.window_right)
    again = {"y1": options.recompute, "a": not options.keep_activation}
    return LayerSpec(
        width,
        pre_norm=pre_norm,
        attention=Attention(heads, heads, width // heads, *sides, dropout=options.attention_p),
        feed_forward=FeedForward(inner, options.activation),
        norm_a=Norm("layer", options.eps_a),
        norm_b=Norm("layer", options.eps_b),
        present=frozenset(name for name, each in layer._asdict().items() if each is not None),
        dropout_a=options.p_a,
        dropout_b=options.p_b,
        recomputed=frozenset(name for name, wanted in again.items() if wanted),
    )


def parameters_of(layers: Sequence[BlockParameters]) -> list[Tensor | None]:
    """The FIELDS of each layer, in one list."""
    missing = [None] * (len(FIELDS) - len(BlockParameters._fields))
    return [each for layer in layers for each in (*layer, *missing)]


def native_layers(layers: Sequence[BlockParameters]) -> Layers:
    found = layers_of(parameters_of(layers))
    assert isinstance(found, Layers), found
    return found


Call = tuple[Specs, Inputs, list[Tensor | None]]


def call_of(
    x: Tensor,
    residual: Tensor | None,
    cu_seqlens: Tensor,
    seeds: Tensor | None,
    options: BlockOptions,
    layers: Sequence[BlockParameters],
) -> Call:
    """The arguments of ``run_stack`` for those of ``transformer_block``."""
    specs = specs_of(options, layers, pre_norm=residual is not None)
    return specs, Inputs(x, residual, cu_seqlens, options.max_seqlen, seeds), parameters_of(layers)


def run(*arguments: Any) -> tuple[Tensor, Tensor | None]:
    return stack.run_stack(*call_of(*arguments))
