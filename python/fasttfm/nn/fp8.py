"""``Fp8Training``: training of transformer layers with FP8 operands in their GEMMs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fasttfm.nn.packed_layer import PackedLayer
from fasttfm.nn.packed_transformer import PackedTransformer
from fasttfm.nn.plain import Uncopied
from fasttfm.ops import fp8
from fasttfm.ops.core import checks
from fasttfm.ops.fp8 import Fp8Linear, LayerFp8, Scales, Slot

_NAME = "Fp8Training"


class _Fp8(Uncopied):
    """The value of ``PackedLayer.fp8``; copies of a layer do not get it."""

    def __init__(self, linears: LayerFp8) -> None:
        self.linears = linears
        self._next: tuple[PackedTransformer, Fp8Linear] | None = None

    def note_next(self, stack: PackedTransformer, layer: PackedLayer) -> None:
        """Records that ``layer`` follows in ``stack``."""
        self._next = stack, layer.fp8.linears.qkv

    @property
    def following(self) -> Fp8Linear | None:
        """The linear layer that reads the layer's output, if there is one. Not with gradient checkpointing: a layer
        that runs again in the backward has no reader."""
        return None if self._next is None or self._next[0].checkpointing else self._next[1]


class Fp8Training:
    """Makes the layers of a model compute their GEMMs in FP8 in training; in evaluation mode and without gradients they
    use the activations' dtype. Use it under bf16 autocast, and call ``update`` after each optimizer step:

        scaling = fasttfm.nn.Fp8Training(model)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        scaling.update()

    Each tensor has one scale, computed from its largest magnitudes in the last steps (delayed scaling), or from the
    tensor itself while it has no finite magnitude of an earlier step. Scales and magnitudes stay on the device, so that
    a CUDA graph can capture steps: best after three steps, when the host knows that nothing is to be measured.

    Args:
        model: A model with ``PackedLayer``s, on its device: those of BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA,
            ALBERT, DistilBERT and GPT-2. GPUs need compute capability 8.9; on a CPU FP8 is emulated, slowly.
        gradients: The format of gradients: "e5m2", or "e4m3", which has one more mantissa bit and less range. Weights
            and activations are e4m3.
        history: The number of steps whose largest magnitudes determine a scale.
        skip_first, skip_last: The number of layers at the start and the end of the model that stay in 16 bits.
    """

    def __init__(
        self, model: nn.Module, *, gradients: str = "e5m2", history: int = 16, skip_first: int = 0, skip_last: int = 0
    ) -> None:
        if gradients not in fp8.FORMATS:
            raise checks.bad_value(_NAME, "gradients", f"one of {', '.join(fp8.FORMATS)}", repr(gradients))
        if history < 1:
            raise checks.bad_value(_NAME, "history", "at least 1", history)
        layers: list[Any] = [module for module in model.modules() if self.is_layer(module)]
        end = len(layers) - skip_last
        self._layers = layers[skip_first:end] if 0 <= skip_first <= end <= len(layers) else []
        if not self._layers:
            got = f"{type(model).__name__} with {len(layers)} of them, skip_first={skip_first}, skip_last={skip_last}"
            raise checks.bad_value(_NAME, "model", "one with PackedLayers to compute in FP8", got)
        for layer in self._layers:
            self.check(layer)
        device = self._layers[0].qkv.weight.device
        if (reason := fp8.missing(device)) is not None:
            raise RuntimeError(f"{_NAME}: {reason}")
        formats = [fp8.E4M3, fp8.E4M3, fp8.FORMATS[gradients]]
        self.scales = Scales(formats * len(LayerFp8._fields) * len(self._layers), history, device)
        slots = iter(self.scales.slots)
        self._linears: list[Fp8Linear] = []
        self._table: Any = None  # the arguments of the launch that casts all weights
        for layer in self._layers:
            linears = [self.make_linear(m, (next(slots), next(slots), next(slots))) for m in linears_of(layer)]
            layer.fp8 = _Fp8(LayerFp8(*linears))
            self._linears += linears
        for stack in (m for m in model.modules() if isinstance(m, PackedTransformer)):
            _note_successors(stack)
        self.refresh()

    @staticmethod
    def is_layer(module: nn.Module) -> bool:
        """Whether a module is a layer that can compute in FP8."""
        return type(module) is PackedLayer

    def check(self, layer: PackedLayer) -> None:
        """Raises ValueError if a layer cannot compute in FP8."""
        check_layer(_NAME, layer, plain=layer.is_fusable())

    def make_linear(self, module: nn.Linear, slots: tuple[Slot, Slot, Slot]) -> Fp8Linear:
        """The FP8 weight of a module; ``train.fp8_all_gather`` has another kind."""
        return Fp8Linear(module.weight, slots)

    def update(self, *, reduce: bool = False) -> None:
        """Ends a step: computes the scales of the next step and casts the weights with them. With ``reduce`` all
        processes get the same scales, from the largest magnitudes of all processes."""
        if reduce:
            torch.distributed.all_reduce(self.scales.amax, torch.distributed.ReduceOp.MAX)
        self.scales.update()
        self._table = fp8.refresh_all(self._linears, self._table)

    def refresh(self) -> None:
        """Casts the weights that have changed since the last ``update``, according to torch's version counters, which
        optimizer steps advance. The forward does this too, but not when a CUDA graph is replayed."""
        for linear in self._linears:
            linear.refresh_changed()

    def remove(self) -> None:
        """Undoes the constructor: the layers compute in the activations' dtype again."""
        for layer in self._layers:
            layer.fp8 = None

    def state_dict(self) -> dict[str, Any]:
        """Scales and histories, on the CPU."""
        return self.scales.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads scales and histories. Load the model's weights of the same step first."""
        self.scales.load_state_dict(state)
        self._table = fp8.refresh_all(self._linears, self._table)


def _note_successors(stack: PackedTransformer) -> None:
    """Tells each FP8 layer which FP8 layer reads its output, if that is always the same one."""
    layers = [layer for layer in stack.in_order() if isinstance(layer, PackedLayer)]
    readers: dict[PackedLayer, set[PackedLayer]] = {}
    for layer, reader in itertools.pairwise(layers):
        readers.setdefault(layer, set()).add(reader)
    for layer, (reader, *others) in readers.items():
        if not others and layer.fp8 is not None and reader.fp8 is not None:
            layer.fp8.note_next(stack, reader)


def linears_of(layer: PackedLayer) -> list[nn.Linear]:
    """The linear layers in the order of ``LayerFp8``."""
    return [layer.qkv, layer.out, layer.up, layer.down]


def check_layer(name: str, layer: PackedLayer, *, plain: bool) -> None:
    """Raises ValueError, in the name of a class, if a layer's GEMMs cannot have FP8 operands. ``plain``: whether none
    of its modules has to be called."""
    if not plain:
        raise checks.bad_value(name, "model", "layers of plain modules", "one with hooks, LoRA or another replacement")
    for linear in linears_of(layer):
        weight = linear.weight
        if not weight.is_contiguous():
            got = f"strides {weight.stride()} of shape {tuple(weight.shape)}"
            raise checks.bad_value(name, "model", "contiguous parameters", got)
        if any(size % fp8.ALIGNMENT for size in weight.shape):
            expected = f"linear layers whose sizes are multiples of {fp8.ALIGNMENT}"
            raise checks.bad_value(name, "model", expected, f"shape {tuple(weight.shape)}")
