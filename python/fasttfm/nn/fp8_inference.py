"""``Fp8Inference``: the layers of a model with FP8 operands in their GEMMs and static scales, without gradients."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fasttfm.nn.fp8 import check_layer, linears_of
from fasttfm.nn.packed_transformer import PackedTransformer, are_described
from fasttfm.nn.plain import Uncopied, is_watched
from fasttfm.ops import fp8
from fasttfm.ops.core import checks
from fasttfm.ops.fp8.inference import (
    LINEARS,
    StaticLayer,
    addresses_of,
    run_by_ops,
    run_measured,
    run_native,
    static_layers,
)
from fasttfm.ops.layers.spec import Specs
from fasttfm.ops.layers.torch_executor import Inputs

_NAME = "Fp8Inference"


class _Stack(Uncopied):
    """The value of ``PackedTransformer.fp8``: runs its layers without gradients. Copies do not get it."""

    def __init__(self, encoder: PackedTransformer) -> None:
        self._encoder: Any = weakref.proxy(encoder)  # which holds this
        _check_layers(encoder)

    def run(
        self,
        x: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        hidden_states: list[Tensor] | None,
        with_last: bool,
        *,
        tables: Mapping[Any, tuple[Tensor, Tensor]] = MappingProxyType({}),
        positions: Tensor | None = None,
    ) -> Tensor:
        """Runs the layers: the arguments are those of ``PackedTransformer.forward``."""
        described = self._encoder.described([*tables])
        if described is None:
            raise RuntimeError(f"{_NAME}: model: expected layers of plain modules, got one that has to be called")
        specs, parameters = described
        inputs = self._encoder.inputs_of(x, cu_seqlens, max_seqlen, tables, positions)
        whole = self.run_whole(specs, inputs, parameters) if hidden_states is None else None
        if whole is not None:
            return whole
        tensors = self._run_by_ops(specs, inputs, parameters)
        if hidden_states is not None:
            stream, last = ("y2", "y") if inputs.residual is None else ("z2", "z")
            inner = [tensors[f"{index}.{stream}"] for index in range(len(specs) - 1)]
            hidden_states += [x, *inner, *([tensors[last]] if with_last else [])]
        y: Tensor = tensors["y"]
        return y

    def run_whole(self, specs: Specs, inputs: Inputs, parameters: list[Tensor | None]) -> Tensor | None:
        """The result in one call; None if the layers have to run op by op."""
        return None

    def _run_by_ops(self, specs: Specs, inputs: Inputs, parameters: list[Tensor | None]) -> dict[str, Any]:
        """All tensors of the plan, by their names."""
        raise NotImplementedError


class _Fp8Stack(_Stack):
    def __init__(self, encoder: PackedTransformer, amax: Tensor) -> None:
        super().__init__(encoder)
        weights = [[linear.weight for linear in linears_of(layer)] for layer in encoder.layers]  # type: ignore[arg-type]
        layers = static_layers(weights, amax)
        self._static: list[StaticLayer] = [layers[index] for index in encoder.order]
        self._addresses = addresses_of(self._static)

    def run_whole(self, specs: Specs, inputs: Inputs, parameters: list[Tensor | None]) -> Tensor | None:
        return run_native(specs, inputs, parameters, self._addresses)

    def _run_by_ops(self, specs: Specs, inputs: Inputs, parameters: list[Tensor | None]) -> dict[str, Any]:
        return run_by_ops(specs, inputs, parameters, self._static)


class _MeasuredStack(_Stack):
    def __init__(self, encoder: PackedTransformer, amax: Tensor) -> None:
        super().__init__(encoder)
        self._amax = [amax[index] for index in encoder.order]

    def _run_by_ops(self, specs: Specs, inputs: Inputs, parameters: list[Tensor | None]) -> dict[str, Any]:
        return run_measured(specs, inputs, parameters, self._amax)


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


def _check_layers(encoder: PackedTransformer) -> None:
    if not are_described(list(encoder.layers)) or not len(encoder.layers):
        kinds = ", ".join(sorted({type(layer).__name__ for layer in encoder.layers})) or "none"
        raise checks.bad_value(
            _NAME, "model", "one whose layers are PackedLayers or RotaryLayers", f"layers of {kinds}"
        )
    for layer in dict.fromkeys(encoder.in_order()):
        check_layer(_NAME, layer, plain=layer.has_plain_modules())
        if is_watched(layer):
            raise checks.bad_value(_NAME, "model", "layers that are not watched", "one with hooks or another forward")


def _device_of(encoder: PackedTransformer) -> torch.device:
    return next(encoder.parameters()).device
