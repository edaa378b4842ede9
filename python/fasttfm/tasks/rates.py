"""Learning rates for fine-tuning: smaller ones for lower layers, another for the head, and frozen parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from fasttfm.inference.opening import stack_of
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.models.text_model import BaseModel
from fasttfm.train.optimizers import parameter_groups


@dataclass(frozen=True)
class Rates:
    """The learning rate of each part of a model.

    The last layer has ``rate``, each layer below it ``layer_decay`` times the rate of the layer above, and the
    embeddings ``layer_decay`` times that of the first layer. A pooler and a final LayerNorm have ``rate``, the head
    ``head_rate``.
    """

    rate: float
    head_rate: float | None = None  # rate by default
    layer_decay: float = 1.0
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        for name, value in (("learning_rate", self.rate), ("head_rate", self.head_rate)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"rates: {name}: expected a number above 0, got {value}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"rates: weight_decay: expected a number from 0 on, got {self.weight_decay}")
        if not 0 < self.layer_decay <= 1:
            raise ValueError(f"rates: layer_decay: expected a number above 0 and up to 1, got {self.layer_decay}")

    def groups(self, model: PretrainedModel) -> list[dict[str, Any]]:
        """The optimizer's parameter groups of the model's trained parameters; biases and LayerNorms do not decay."""
        rates = {parameter: self.rate * factor for parameter, factor in self._factors(stack_of(model))}
        head = self.rate if self.head_rate is None else self.head_rate
        groups = []
        for group in parameter_groups(model, self.weight_decay):
            by_rate: dict[float, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                by_rate.setdefault(rates.get(parameter, head), []).append(parameter)
            groups += [{**group, "params": some, "lr": rate} for rate, some in sorted(by_rate.items())]
        return groups

    def _factors(self, base: BaseModel) -> Iterator[tuple[nn.Parameter, float]]:
        layers = len(base.encoder.layers)
        for name, parameter in base.named_parameters():
            layer = re.match(r"encoder\.layers\.(\d+)\.", name)
            below = layers if name.startswith("embeddings.") else layers - 1 - int(layer[1]) if layer else 0
            yield parameter, self.layer_decay**below


def default_rate(model: PretrainedModel, rate: float = 5e-5) -> float:
    """The learning rate of BERT-base or of another model of its width, scaled by the inverse of the model's width."""
    return rate * 768 / stack_of(model).encoder.in_order()[0].width


def freeze(model: PretrainedModel, layers: int | None = None) -> None:
    """Freezes all but the head and the pooler; with ``layers``, only the embeddings and this many of the first layers.
    Frozen layers have no dropout."""
    base = stack_of(model)
    order = base.encoder.in_order()
    if layers is not None:
        if len(base.encoder.layers) < len(order):
            raise ValueError("freeze_layers: expected a model whose layers do not share parameters, got shared ones")
        if not 0 <= layers <= len(order):
            raise ValueError(f"freeze_layers: expected 0 to the model's {len(order)} layers, got {layers}")
    frozen = order if layers is None else order[:layers]
    for part in (base.embeddings, *(frozen if layers is not None else [base.encoder])):
        part.requires_grad_(False)
    base.embeddings.dropout = 0.0
    for layer in frozen:
        layer.dropout = layer.feed_forward_dropout = layer.attention_dropout = 0.0
