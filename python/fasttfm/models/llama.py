"""Llama (Touvron et al., 2023), also TinyLlama and SmolLM: a causal network with rotary positions, RMSNorm, grouped
heads of keys and values, and gated feed-forward blocks.

Classes, arguments, outputs and checkpoints are those of transformers. Internally a batch is packed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fasttfm.models.family import Family, Head
from fasttfm.models.rotary import RotaryConfig, RotaryModel
from fasttfm.models.rotary_decoders import DECODER_RULES, RotaryForCausalLM, RotaryForSequenceClassification


@dataclass
class LlamaConfig(RotaryConfig):
    model_type: ClassVar[str] = "llama"
    sizes: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 256},
        "7b": {},
    }

    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False


class LlamaModel(RotaryModel):
    """The network, called as ``BertModel`` is, without segments."""

    config_class, causal = LlamaConfig, True
    head_rules = DECODER_RULES


class LlamaForCausalLM(RotaryForCausalLM):
    """Predicts the next tokens."""

    config_class, encoder_class = LlamaConfig, LlamaModel


class LlamaForSequenceClassification(RotaryForSequenceClassification):
    """Labels sequences by their last token."""

    config_class, encoder_class = LlamaConfig, LlamaModel


FAMILY = Family(
    "Llama",
    LlamaConfig,
    {
        Head.NONE: LlamaModel,
        Head.CAUSAL_LM: LlamaForCausalLM,
        Head.SEQUENCE_CLASSIFICATION: LlamaForSequenceClassification,
    },
    tokenizer="bpe",
    template=True,
)
