"""GPT-3 (Brown et al., 2020): GPT-2 in which every second layer attends only to the nearest tokens, in eight sizes.

In layers 0, 2, ... a token attends to itself and all earlier tokens, in layers 1, 3, ... to the last ``local_window``
of these. The paper does not state the width of its band. transformers has no such model: checkpoints have GPT-2's names
and the model type ``gpt3``, so that they are not read as GPT-2 by mistake.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fasttfm.models.family import Family, Head
from fasttfm.models.gpt import (
    GPT2Config,
    GPT2DoubleHeadsModel,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    GPT2Model,
)
from fasttfm.models.objectives import CausalLM


@dataclass
class GPT3Config(GPT2Config):
    model_type: ClassVar[str] = "gpt3"
    # As in the paper's table 2.1, except for two entries that contradict the rest of their rows: the heads of "xl" (24,
    # of 128 columns each, in a width of 2048) and the width of "13b" (5140, for 40 heads of 128 columns).
    sizes: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": {"n_layer": 2, "n_embd": 128, "n_head": 2},
        "small": {},
        "medium": {"n_layer": 24, "n_embd": 1024, "n_head": 16},
        "large": {"n_layer": 24, "n_embd": 1536, "n_head": 16},
        "xl": {"n_layer": 24, "n_embd": 2048, "n_head": 16},
        "2.7b": {"n_layer": 32, "n_embd": 2560, "n_head": 32},
        "6.7b": {"n_layer": 32, "n_embd": 4096, "n_head": 32},
        "13b": {"n_layer": 40, "n_embd": 5120, "n_head": 40},
        "175b": {"n_layer": 96, "n_embd": 12288, "n_head": 96},
    }

    n_positions: int = 2048
    local_window: int = 256


class GPT3Model(GPT2Model):
    config_class = GPT3Config

    def window(self, layer: int) -> tuple[int, int] | None:
        return (self.config.local_window - 1, 0) if layer % 2 else None


class GPT3LMHeadModel(GPT2LMHeadModel):
    config_class, encoder_class = GPT3Config, GPT3Model


class GPT3ForSequenceClassification(GPT2ForSequenceClassification):
    config_class, encoder_class = GPT3Config, GPT3Model


class GPT3DoubleHeadsModel(GPT2DoubleHeadsModel):
    config_class, encoder_class = GPT3Config, GPT3Model


FAMILY = Family(
    "GPT-3",
    GPT3Config,
    {
        Head.NONE: GPT3Model,
        Head.PRETRAINING: GPT3LMHeadModel,
        Head.CAUSAL_LM: GPT3LMHeadModel,
        Head.SEQUENCE_CLASSIFICATION: GPT3ForSequenceClassification,
        Head.MULTIPLE_CHOICE: GPT3DoubleHeadsModel,
    },
    pretraining=CausalLM,
    sequences="causal",
    tokenizer="bpe",
    positions="n_positions",
)
