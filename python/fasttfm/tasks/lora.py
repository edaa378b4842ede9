"""LoRA (Hu et al., 2022) in fine-tuning: low-rank updates of the layers' linear modules and the head are trained, the
rest is frozen. An adapter is saved in PEFT's format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fasttfm.models import add_adapter, merge_added_adapter, save_adapter
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.ops.layers.lora import LINEARS
from fasttfm.train.settings import at_least

ADAPTER = "adapter"  # the adapter's directory, in the directory of the merged model


class Lora:
    """LoRA of all layers of a model.

    Args:
        model: The model, which is changed: all parameters but the head's are frozen, and the layers' linear modules get
            low-rank updates.
        rank, alpha, targets, dropout: As ``models.add_adapter`` takes them.
    """

    def __init__(
        self,
        model: PretrainedModel,
        rank: int,
        alpha: float | None = None,
        *,
        targets: Sequence[str] | None = None,
        dropout: float = 0.0,
    ) -> None:
        at_least("lora", rank, 1)
        self.model = model
        self.heads = [name for name, _ in model.named_parameters() if model._head(name)]
        add_adapter(model, rank, alpha=alpha, targets=targets or LINEARS, dropout=dropout)
        for name in self.heads:
            model.get_parameter(name).requires_grad_()

    def save(self, directory: Path) -> None:
        """Writes the adapter in PEFT's format."""
        save_adapter(self.model, directory / ADAPTER, heads=self.heads)

    def merge(self) -> None:
        """Adds the updates to the weights and removes LoRA's modules."""
        merge_added_adapter(self.model)
