"""Post-LN layers over few tokens whose LayerNorms, of each layer the first or both, are folded into the GEMMs around
them (few_rows_forward.py).

A LayerNorm's weight, its bias and the mean of its rows become parts of the weight and the bias of the GEMM that reads
it. The folded weights take memory, and have to follow changes of the layers' parameters. So layers are only folded
inside of ``few_tokens.using``: an inference session keeps their folded weights.
"""

from __future__ import annotations

from array import array
from enum import IntEnum
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm.ops.layers.parameters import Layers
from fasttfm.ops.layers.transformer_block import BlockParameters


class FoldedNorms(IntEnum):
    """Which LayerNorms of a layer are folded: kernels/few_rows/plan.h."""

    NONE, FIRST, BOTH = 0, 1, 2


class FoldedLayer(NamedTuple):
    """A layer's folded weights and biases, the latter in fp32: ``FOLDED`` of encoding.py. With only the first
    LayerNorm, those of up are folded. The first layer's x is normalized: its weight and bias of qkv are the layer's,
    and its residual weight is 1."""

    up_weight: Tensor
    up_bias: Tensor
    qkv_weight: Tensor | None = None
    qkv_bias: Tensor | None = None
    out_bias: Tensor | None = None
    residual_a: Tensor | None = None
    down_bias: Tensor | None = None
    residual_b: Tensor | None = None


def fold_norm(weight: Tensor, bias: Tensor, norm_weight: Tensor, norm_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and bias with which ``rstd * linear(z, weight) + bias`` is ``linear(layer_norm(z), weight, bias)``.

    The rows of the folded weight sum to 0, so that the mean of z does not matter. It is rounded to the dtype of the
    weight; the bias has fp32 at least.
    """
    wide_weight, scale, shift = map(_wide, (weight, norm_weight, norm_bias))
    scaled = wide_weight * scale
    centred = scaled - scaled.mean(1, keepdim=True)
    return centred.to(weight.dtype), _wide(bias) + (wide_weight * shift).sum(1)


def fold_first(layer: BlockParameters) -> FoldedLayer:
    """The folded weights of a layer's first LayerNorm."""
    p: Any = layer
    return FoldedLayer(*fold_norm(p.up_weight, p.up_bias, p.norm_a_weight, p.norm_a_bias))


def fold_both(layer: BlockParameters, before: BlockParameters | None) -> FoldedLayer:
    """The folded weights of both LayerNorms. ``before`` is the previous layer, None if x is already normalized."""
    p: Any = layer
    qkv: tuple[Tensor, Tensor] = (p.qkv_weight, _wide(p.qkv_bias))
    out_bias, residual = _wide(p.out_bias), torch.ones_like(_wide(p.out_bias))
    if before is not None:
        b: Any = before
        qkv = fold_norm(p.qkv_weight, p.qkv_bias, b.norm_b_weight, b.norm_b_bias)
        out_bias, residual = out_bias + _wide(b.norm_b_bias), _wide(b.norm_b_weight)
    down_bias = _wide(p.down_bias) + _wide(p.norm_a_bias)
    return FoldedLayer(*fold_first(layer)[:2], *qkv, out_bias, residual, down_bias, _wide(p.norm_a_weight))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


# ---- the folded weights of a session ---------------------------------------------------------------------------------


class Folded(NamedTuple):
    layers: Layers  # whose parameters were folded
    norms: FoldedNorms
    folded: list[FoldedLayer]
    table: array[int]  # of addresses, 0 for None


class FoldedWeights:
    """The folded weights of layers, in memory that stays the same: CUDA graphs contain its addresses. The stream of the
    session that has them orders them; its network's launches read them."""

    def __init__(self) -> None:
        self._found: dict[bytes, Folded] = {}

    def of(self, layers: Layers, norms: FoldedNorms) -> Folded | None:
        """The folded weights of at least these LayerNorms; None if a capture would have to compute them."""
        key = layers.table.tobytes()
        known = self._found.get(key)
        if known is not None and known.norms >= norms:
            return known
        if layers.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        with torch.inference_mode():
            folded = _fold(layers, norms)
        if known is not None:
            folded = [layer._replace(**_up_of(old)) for layer, old in zip(folded, known.folded, strict=True)]
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in chain.from_iterable(folded)]
        self._found[key] = Folded(layers, norms, folded, array("q", addresses))
        return self._found[key]

    @torch.inference_mode()
    def refresh(self) -> None:
        """Folds the parameters again, after they have changed, on the current stream."""
        for layers, norms, folded, _ in self._found.values():
            pairs = zip(chain.from_iterable(folded), chain.from_iterable(_fold(layers, norms)), strict=True)
            for to, source in pairs:
                # The first layer's weight of qkv is not folded.
                if to is not None and source is not None and to is not source:
                    to.copy_(source)


def _up_of(layer: FoldedLayer) -> dict[str, Tensor]:
    return {"up_weight": layer.up_weight, "up_bias": layer.up_bias}


def _fold(layers: Layers, norms: FoldedNorms) -> list[FoldedLayer]:
    count = len(BlockParameters._fields)
    starts = range(0, len(layers.parameters), layers.fields)
    every = [BlockParameters(*layers.parameters[first : first + count]) for first in starts]  # type: ignore[arg-type]
    by_parameters: dict[tuple[int, ...], FoldedLayer] = {}  # layers that share their parameters share the folded ones
    folded = []
    for before, layer in zip([None, *every], every, strict=False):
        both = norms == FoldedNorms.BOTH
        key = tuple(map(id, chain(layer, (before or ()) if both else ())))
        if key not in by_parameters:
            by_parameters[key] = fold_both(layer, before) if both else fold_first(layer)
        folded.append(by_parameters[key])
    return folded
