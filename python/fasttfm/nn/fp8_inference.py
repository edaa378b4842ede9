"""``Fp8Inference``: the layers of a model with FP8 operands in their GEMMs and static scales, without gradients."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fasttfm.nn.fp8 import check_layer, linears_of
from fasttfm.nn.packed_layer import PackedLayer
from fasttfm.nn.packed_transformer import PackedTransformer
from fasttfm.nn.parts import layer_norm
from fasttfm.nn.plain import Uncopied, is_watched
from fasttfm.ops import checks, fp8
from fasttfm.ops.fp8 import Quantized
from fasttfm.ops.fp8_inference import (
    LINEARS,
    StaticLayer,
    addresses_of,
    fp8_layer,
    measured_layer,
    run_native,
    static_layers,
)
from fasttfm.ops.transformer_block import BlockOptions, BlockParameters

_NAME = "Fp8Inference"


class _Stack(Uncopied):
    """The value of ``PackedTransformer.fp8``: runs its layers without gradients. Copies do not get it."""

    def __init__(self, encoder: PackedTransformer) -> None:
        self._encoder: Any = weakref.proxy(encoder)  # which holds this
        self.layers = _checked_layers(encoder)
        following = [layer.norm1 for layer in self.layers[1:]] + [encoder.final_norm]
        self._next_norms = following if encoder.final_norm is not None else [None] * len(self.layers)

    def run(
        self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int, hidden_states: list[Tensor] | None, with_last: bool
    ) -> Tensor:
        """As ``PackedTransformer.forward``."""
        residual: Tensor | None = None
        first = self.layers[0]
        if self._encoder.final_norm is not None:
            residual, x = x, layer_norm(first.norm1, x)
        first.check(x, cu_seqlens, residual, None)
        cu_seqlens = cu_seqlens.contiguous()
        whole = self._run_whole(x, residual, cu_seqlens, max_seqlen) if hidden_states is None else None
        if whole is not None:
            return whole
        x8: Quantized | None = None
        for index, (layer, norm) in enumerate(zip(self.layers, self._next_norms, strict=True)):
            if hidden_states is not None:
                hidden_states.append(x if residual is None else residual)
            options = layer.block_options(max_seqlen, norm)
            x, x8, residual = self._run_layer(index, x, x8, residual, cu_seqlens, options, layer.block_parameters(norm))
        if hidden_states is not None and with_last:
            hidden_states.append(x if residual is None else residual)
        return x

    def _run_whole(self, x: Tensor, residual: Tensor | None, cu_seqlens: Tensor, max_seqlen: int) -> Tensor | None:
        """All layers in one call; None if they have to run one by one."""
        return None

    def _run_layer(
        self,
        index: int,
        x: Tensor,
        x8: Quantized | None,
        residual: Tensor | None,
        cu_seqlens: Tensor,
        options: BlockOptions,
        own: BlockParameters,
    ) -> tuple[Tensor, Quantized | None, Tensor | None]:
        raise NotImplementedError


class _Fp8Stack(_Stack):
    def __init__(self, encoder: PackedTransformer, amax: Tensor) -> None:
        super().__init__(encoder)
        weights = [[each.weight for each in linears_of(layer)] for layer in encoder.layers]  # type: ignore[arg-type]
        layers = static_layers(weights, amax)
        self._static: list[StaticLayer] = [layers[index] for index in encoder.order]
        self._following = [*(each.qkv for each in self._static[1:]), None]
        self._addresses = addresses_of(self._static)

    def _run_whole(self, x: Tensor, residual: Tensor | None, cu_seqlens: Tensor, max_seqlen: int) -> Tensor | None:
        groups = self._encoder.groups(max_seqlen)
        if groups is None or len(groups) > 1:
            return None
        options, parameters = groups[0]
        found = run_native(x, residual, cu_seqlens, options, parameters, self._addresses)
        return None if found is None else found[0]

    def _run_layer(self, index: int, x: Tensor, x8: Any, residual: Any, cu_seqlens: Any, options: Any, own: Any) -> Any:
        return fp8_layer(x, x8, residual, cu_seqlens, options, own, self._static[index], self._following[index])


class _MeasuredStack(_Stack):
    def __init__(self, encoder: PackedTransformer, amax: Tensor) -> None:
        super().__init__(encoder)
        self._amax = amax

    def _run_layer(self, index: int, x: Tensor, x8: Any, residual: Any, cu_seqlens: Any, options: Any, own: Any) -> Any:
        amax = self._amax[self._encoder.order[index]]
        y, z = measured_layer(x, residual, cu_seqlens, options, own, amax)
        return y, None, z


@contextmanager
def measuring(encoder: PackedTransformer) -> Iterator[Tensor]:
    """Within it, forwards without gradients record the largest magnitudes of the inputs of each layer's linear layers:
    fp32 ``[layers, 4]``, in the order of ``LINEARS``."""
    amax = torch.zeros(len(encoder.layers), len(LINEARS), device=_device_of(encoder), dtype=torch.float32)
    before, encoder.fp8 = encoder.fp8, _MeasuredStack(encoder, amax)
    try:
        yield amax
    finally:
        encoder.fp8 = before


def use_fp8(encoder: PackedTransformer, amax: Tensor) -> None:
    """Makes forwards without gradients compute the layers' GEMMs in FP8, with scales that follow from ``amax``, the
    result of ``measuring``. The weights are cast now; a later change of them has no effect."""
    shape = (len(encoder.layers), len(LINEARS))
    if amax.shape != shape or not bool((amax.isfinite() & (amax >= 0)).all()):
        got = f"shape {tuple(amax.shape)}, from {amax.min().item():g} to {amax.max().item():g}"
        raise checks.bad_value(_NAME, "amax", f"finite magnitudes of shape {shape}", got)
    if (reason := fp8.missing(_device_of(encoder))) is not None:
        raise RuntimeError(f"{_NAME}: {reason}")
    encoder.fp8 = _Fp8Stack(encoder, amax)


def _checked_layers(encoder: PackedTransformer) -> list[PackedLayer]:
    if any(type(each) is not PackedLayer for each in encoder.layers) or not len(encoder.layers):
        kinds = ", ".join(sorted({type(each).__name__ for each in encoder.layers})) or "none"
        raise checks.bad_value(_NAME, "model", "one whose layers are PackedLayers", f"layers of {kinds}")
    layers = encoder.in_order()
    for each in dict.fromkeys(layers):
        check_layer(_NAME, each)
        if is_watched(each):
            raise checks.bad_value(_NAME, "model", "layers that are not watched", "one with hooks or another forward")
    return layers


def _device_of(encoder: PackedTransformer) -> torch.device:
    return next(encoder.parameters()).device
