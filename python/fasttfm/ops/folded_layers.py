"""Post-LN layers over few tokens whose LayerNorms, of each layer the first or both, are folded into the GEMMs around
them: few_rows_forward.h of kernels/transformer_block.

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

from fasttfm import _native
from fasttfm.kernels.common.launch import multiprocessors
from fasttfm.ops import transformer_native
from fasttfm.ops.backends import dtype_name
from fasttfm.ops.transformer_block import BlockOptions, BlockParameters
from fasttfm.ops.transformer_native import Batch, Layers, layers_in, missing_cuda

LEAST_LAYERS = 2  # of a single one, the LayerNorm after it would be the same kernel as before
_GROUP = 64  # columns, which have statistics of their own


class FoldedNorms(IntEnum):
    """Which LayerNorms of a layer are folded: kernels/few_rows/plan.h."""

    NONE, FIRST, BOTH = 0, 1, 2


class FoldedLayer(NamedTuple):
    """A layer's folded weights and biases, the latter in fp32: TransformerFolded in kernels/transformer_block/op.h.
    With only the first LayerNorm, those of up are folded."""

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
    own, scale, shift = map(_wide, (weight, norm_weight, norm_bias))
    scaled = own * scale
    centred = scaled - scaled.mean(1, keepdim=True)
    return centred.to(weight.dtype), _wide(bias) + (own * shift).sum(1)


def fold_first(own: BlockParameters) -> FoldedLayer:
    """The folded weights of a layer's first LayerNorm."""
    p: Any = own
    return FoldedLayer(*fold_norm(p.up_weight, p.up_bias, p.norm_a_weight, p.norm_a_bias))


def fold_both(own: BlockParameters, before: BlockParameters | None) -> FoldedLayer:
    """Those of both; ``before`` is the layer before it, None if x is already normalized."""
    p: Any = own
    qkv: tuple[Tensor, Tensor] = (p.qkv_weight, _wide(p.qkv_bias))
    out_bias, residual = _wide(p.out_bias), torch.ones_like(_wide(p.out_bias))
    if before is not None:
        b: Any = before
        qkv = fold_norm(p.qkv_weight, p.qkv_bias, b.norm_b_weight, b.norm_b_bias)
        out_bias, residual = out_bias + _wide(b.norm_b_bias), _wide(b.norm_b_weight)
    down_bias = _wide(p.down_bias) + _wide(p.norm_a_bias)
    return FoldedLayer(*fold_first(own)[:2], *qkv, out_bias, residual, down_bias, _wide(p.norm_a_weight))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


# ---- the folded weights of a session ---------------------------------------------------------------------------------


class Folded(NamedTuple):
    layers: Layers  # whose parameters were folded
    norms: FoldedNorms
    found: list[FoldedLayer]
    table: array[int]  # of addresses, 0 for None


class FoldedWeights:
    """The folded weights of layers, in memory that stays the same: CUDA graphs contain its addresses. The stream of the
    session that has them orders them; its network's launches read them."""

    def __init__(self) -> None:
        self._found: dict[bytes, Folded] = {}

    def of(self, layers: Layers, norms: FoldedNorms) -> Folded | None:
        """The folded weights of at least these LayerNorms; None if a capture would have to compute them."""
        key = layers.table.tobytes()
        found = self._found.get(key)
        if found is not None and found.norms >= norms:
            return found
        if layers.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        with torch.inference_mode():
            folded = _fold(layers, norms)
        if found is not None:
            folded = [each._replace(**_up_of(old)) for each, old in zip(folded, found.found, strict=True)]
        addresses = [0 if each is None else each.data_ptr() for each in chain.from_iterable(folded)]
        self._found[key] = Folded(layers, norms, folded, array("q", addresses))
        return self._found[key]

    @torch.inference_mode()
    def refresh(self) -> None:
        """Folds the parameters again, after they have changed, on the current stream."""
        for layers, norms, found, _ in self._found.values():
            pairs = zip(chain.from_iterable(found), chain.from_iterable(_fold(layers, norms)), strict=True)
            for to, given in pairs:
                # The first layer's weight of qkv is not folded.
                if to is not None and given is not None and to is not given:
                    to.copy_(given)


def _up_of(layer: FoldedLayer) -> dict[str, Tensor]:
    return {"up_weight": layer.up_weight, "up_bias": layer.up_bias}


def _fold(layers: Layers, norms: FoldedNorms) -> list[FoldedLayer]:
    every = layers_in(layers.parameters)
    found: dict[tuple[int, ...], FoldedLayer] = {}  # layers that share their parameters share the folded ones
    folded = []
    for before, own in zip([None, *every], every, strict=False):
        both = norms == FoldedNorms.BOTH
        key = tuple(map(id, chain(own, (before or ()) if both else ())))
        if key not in found:
            found[key] = fold_both(own, before) if both else fold_first(own)
        folded.append(found[key])
    return folded


# ---- calls -----------------------------------------------------------------------------------------------------------


def chosen_norms(batch: Batch, layers: Layers) -> FoldedNorms:
    """Which LayerNorms are folded in a call whose layers can be."""
    sizes = (*batch.x.shape, layers.intermediate, multiprocessors(batch.x))
    return FoldedNorms(_native.core().few_rows_folded_norms(*sizes))


def refuse(batch: Batch, layers: Layers) -> str | None:
    """Why layers are not folded in a call that the kernels for few rows take; None if they are."""
    tokens, width = batch.x.shape
    if batch.x.dtype not in (torch.bfloat16, torch.float16) or layers.dtype != batch.x.dtype:
        got = f"{dtype_name(batch.x.dtype)} and parameters in {dtype_name(layers.dtype)}"
        return f"takes bfloat16 or float16, also of parameters, got {got}"
    if layers.depth < LEAST_LAYERS:
        return f"takes {LEAST_LAYERS} layers or more, got {layers.depth}"
    if batch.residual_dtype is not None:
        return "takes post-LN layers"
    if batch.seeds is not None:
        return "takes no dropout"
    if None in layers.shapes:
        return "takes layers with all biases and LayerNorm parameters"
    if width % _GROUP:
        return f"takes a width in multiples of {_GROUP}, got {width}"
    if (reason := missing_cuda(batch.x.device)) is not None:
        return reason
    if chosen_norms(batch, layers) == FoldedNorms.NONE:
        return f"takes sizes for which this is faster (kernels/few_rows/plan.h), got {tokens} tokens of {width} columns"
    return None


def run(weights: FoldedWeights, batch: Batch, layers: Layers, options: BlockOptions) -> Tensor | None:
    """The result of the layers; None if a CUDA graph is captured before their weights are folded."""
    norms = chosen_norms(batch, layers)
    found = weights.of(layers, norms)
    if found is None:
        return None
    return transformer_native.forward_folded(batch, layers, options, found.table, norms)
