"""The encoder of mT5 (Xue et al., 2020): T5's with gated blocks and a vocabulary of 101 languages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fasttfm.models import t5
from fasttfm.models.family import Head


@dataclass
class MT5Config(t5.T5Config):
    model_type: ClassVar[str] = "mt5"
    sizes: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": {"num_layers": 2, "d_model": 128, "num_heads": 2, "d_ff": 256},
        "small": {},
        "base": {"num_layers": 12, "d_model": 768, "num_heads": 12, "d_ff": 2048},
        "large": {"num_layers": 24, "d_model": 1024, "num_heads": 16, "d_ff": 2816},
    }

    vocab_size: int = 250112
    d_ff: int = 1024
    num_layers: int = 8
    num_heads: int = 6
    n_positions: int = 1024
    feed_forward_proj: str = "gated-gelu"


class MT5EncoderModel(t5.T5EncoderModel):
    """The encoder; called as ``T5EncoderModel`` is."""

    config_class = MT5Config


class MT5ForTokenClassification(t5.T5ForTokenClassification):
    """Labels tokens; those with label -100 do not count."""

    config_class, encoder_class = MT5Config, MT5EncoderModel


FAMILY = replace(
    t5.FAMILY,
    title="mT5",
    config=MT5Config,
    models={Head.NONE: MT5EncoderModel, Head.TOKEN_CLASSIFICATION: MT5ForTokenClassification},
)
