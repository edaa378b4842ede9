"""Gemma 3 (Gemma Team, 2025), its network for texts, and EmbeddingGemma (Vera et al., 2025), which is the same with
attention in both directions.

    x_0 = sqrt(C) word
    y   = x_(i-1) + RMS(Attention(RMS(x_(i-1))))
    x_i = y + RMS(W (gelu(gate) * up)),  (gate, up) = V RMS(y)        i = 1 ... layers
    x   = RMS(x_layers)

RMSNorms multiply with 1 + weight; each head of queries and keys has one. Five of six layers attend only to
``sliding_window`` tokens, and rotate with another base of wavelengths.

Classes, arguments, outputs and checkpoints are those of transformers. Internally a batch is packed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from fasttfm.models.checkpoint_names import Names
from fasttfm.models.config import ModelConfig
from fasttfm.models.family import Family, Head
from fasttfm.models.rotary import (
    LOCAL,
    RotaryFields,
    RotaryModel,
    layer_kinds,
    rotary_names,
    rotation_of_kind,
)
from fasttfm.models.rotary_decoders import DECODER_RULES, RotaryForCausalLM, RotaryForSequenceClassification
from fasttfm.nn import Embeddings, PackedTransformer, RotaryLayer, RotaryTransformer
from fasttfm.nn.rotary_layer import rotary_norm
from fasttfm.nn.rotation import Theta


@dataclass
class Gemma3TextConfig(RotaryFields, ModelConfig):
    model_type: ClassVar[str] = "gemma3_text"
    sizes: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": {
            "num_hidden_layers": 2,
            "hidden_size": 128,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "query_pre_attn_scalar": 64,
            "intermediate_size": 256,
            "sliding_window": 512,
        },
        "270m": {
            "vocab_size": 262144,
            "num_hidden_layers": 18,
            "hidden_size": 640,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "intermediate_size": 2048,
            "max_position_embeddings": 32768,
            "sliding_window": 512,
        },
        "embedding": {
            "vocab_size": 262144,
            "num_hidden_layers": 24,
            "hidden_size": 768,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "intermediate_size": 1152,
            "max_position_embeddings": 2048,
            "sliding_window": 512,
            "use_bidirectional_attention": True,
        },
        "1b": {
            "vocab_size": 262144,
            "hidden_size": 1152,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "intermediate_size": 6912,
            "max_position_embeddings": 32768,
            "sliding_window": 512,
        },
    }
    required: ClassVar[dict[str, tuple[Any, ...]]] = {
        **ModelConfig.required,
        "final_logit_softcapping": (None,),
        "attn_logit_softcapping": (None,),
    }

    vocab_size: int = 262208
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    head_dim: int = 256
    hidden_activation: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 131072
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    pad_token_id: int | None = 0
    bos_token_id: int | None = 2
    eos_token_id: int | list[int] | None = 1
    attention_bias: bool = False
    attention_dropout: float = 0.0
    query_pre_attn_scalar: float = 256
    sliding_window: int = 4096
    sliding_window_pattern: int = 6  # the last of each group of this size attends to all tokens
    use_bidirectional_attention: bool | None = False
    rope_theta: float = 1_000_000.0
    rope_local_base_freq: float = 10_000.0

    hidden_act = property(lambda self: self.hidden_activation)

    def layer_kinds(self) -> list[str]:
        """``full_attention`` or ``sliding_attention`` for each layer."""
        every = self.sliding_window_pattern
        return layer_kinds(self.extra, self.num_hidden_layers, lambda layer: (layer + 1) % every != 0)

    def rotation(self, kind: str) -> Theta:
        """The rotation in a kind of layer; only that of global ones may be scaled in released configurations."""
        local = kind == LOCAL
        return rotation_of_kind(self, kind, self.rope_local_base_freq if local else self.rope_theta, scaled=not local)

    def window(self, kind: str) -> tuple[int | None, int | None] | None:
        """How far before and after itself a token attends in a kind of layer."""
        if self.use_bidirectional_attention:
            side = self.sliding_window // 2
            return (side, side) if kind == LOCAL else None
        return (self.sliding_window - 1 if kind == LOCAL else None), 0


class Gemma3TextModel(RotaryModel):
    """The network, called as ``BertModel`` is, without segments."""

    config_class, head_rules = Gemma3TextConfig, DECODER_RULES

    @classmethod
    def names_of(cls, config: Any) -> Names:
        return rotary_names(config, cls.head_rules, block_norms=True)

    def embeddings_of(self, config: Any) -> Embeddings:
        width, padding = config.hidden_size, config.pad_token_id
        return Embeddings(
            config.vocab_size, width, norm=False, dropout=0.0, padding_idx=padding, scale=math.sqrt(width)
        )

    def stack_of(self, config: Any) -> PackedTransformer:
        layers = [
            RotaryLayer(
                config.hidden_size,
                config.num_attention_heads,
                config.intermediate_size,
                theta=config.rotation(kind),
                window=config.window(kind),
                activation=config.hidden_activation,
                attention_dropout=config.attention_dropout,
                eps=config.rms_norm_eps,
                attention_bias=config.attention_bias,
                kv_heads=config.kv_heads,
                head_dim=config.head_dim,
                norm="offset_rms",
                head_norm=True,
                block_norms=True,
                scale=config.query_pre_attn_scalar**-0.5,
            )
            for kind in config.layer_kinds()
        ]
        final_norm: Any = rotary_norm("offset_rms", config.hidden_size, config.rms_norm_eps, bias=False)
        return RotaryTransformer(layers, final_norm, min(config.max_position_embeddings, _POSITIONS))


_POSITIONS = 8192  # of the first tables, which grow if a text is longer


class Gemma3ForCausalLM(RotaryForCausalLM):
    """Predicts the next tokens."""

    config_class, encoder_class = Gemma3TextConfig, Gemma3TextModel


class Gemma3TextForSequenceClassification(RotaryForSequenceClassification):
    """Labels sequences by their last token."""

    config_class, encoder_class = Gemma3TextConfig, Gemma3TextModel


FAMILY = Family(
    "Gemma 3",
    Gemma3TextConfig,
    {
        Head.NONE: Gemma3TextModel,
        Head.CAUSAL_LM: Gemma3ForCausalLM,
        Head.SEQUENCE_CLASSIFICATION: Gemma3TextForSequenceClassification,
    },
    tokenizer="bpe",
    template=True,
)
