"""Qwen3 (Yang et al., 2025), as an embedding model and a reranker (Zhang et al., 2025): Llama's causal network with an
RMSNorm of each head of queries and keys. A text's vector is the state of its last token.

Classes, arguments, outputs and checkpoints are those of transformers. Internally a batch is packed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fasttfm.models.family import Family, Head
from fasttfm.models.rotary import RotaryConfig, RotaryModel
from fasttfm.models.rotary_decoders import DECODER_RULES, RotaryForCausalLM, RotaryForSequenceClassification


@dataclass
class Qwen3Config(RotaryConfig):
    model_type: ClassVar[str] = "qwen3"
    sizes: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": {
            "num_hidden_layers": 2,
            "hidden_size": 128,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "intermediate_size": 256,
        },
        "0.6b": {},
        "4b": {
            "num_hidden_layers": 36,
            "hidden_size": 2560,
            "num_attention_heads": 32,
            "intermediate_size": 9728,
        },
    }

    vocab_size: int = 151669
    hidden_size: int = 1024
    intermediate_size: int = 3072
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    bos_token_id: int | None = 151643
    eos_token_id: int | list[int] | None = 151643


class Qwen3Model(RotaryModel):
    """The network, called as ``BertModel`` is, without segments."""

    config_class, causal, head_norm = Qwen3Config, True, True
    head_rules = DECODER_RULES


class Qwen3ForCausalLM(RotaryForCausalLM):
    """Predicts the next tokens."""

    config_class, encoder_class = Qwen3Config, Qwen3Model


class Qwen3ForSequenceClassification(RotaryForSequenceClassification):
    """Labels sequences by their last token; a reranker has one label."""

    config_class, encoder_class = Qwen3Config, Qwen3Model


FAMILY = Family(
    "Qwen3",
    Qwen3Config,
    {
        Head.NONE: Qwen3Model,
        Head.CAUSAL_LM: Qwen3ForCausalLM,
        Head.SEQUENCE_CLASSIFICATION: Qwen3ForSequenceClassification,
    },
    tokenizer="bpe",
    template=True,
)
