"""GTE (Zhang et al., 2024), the encoder of gte-multilingual and gte-*-v1.5: BERT with rotary positions and gated
feed-forward blocks.

    x_0 = LN(word + segment)
    x_i = LN(y + W (gelu(gate) * up) + b),  (up, gate) = V y,  y = LN(x_(i-1) + Attention(x_(i-1)))    i = 1 ... layers

Classes, arguments, outputs and checkpoints are those of transformers. Internally a batch is packed.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from torch import nn

from fasttfm.models.bert import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertHead,
)
from fasttfm.models.checkpoint_names import Names, rule
from fasttfm.models.family import Family, Head
from fasttfm.models.rotary import rotation
from fasttfm.models.rotary_bert import RotaryBertModel, module_names
from fasttfm.nn import MaskedLMHead, PackedTransformer
from fasttfm.nn.rotation import Theta


@dataclass
class GteConfig(BertConfig):
    model_type: ClassVar[str] = "gte"
    sizes: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": {**BertConfig.sizes["tiny"], "vocab_size": 30528},
        "base": {},
    }

    vocab_size: int = 250048
    attention_probs_dropout_prob: float = 0.0
    max_position_embeddings: int = 8192
    type_vocab_size: int = 1
    pad_token_id: int | None = 1

    def rotation(self) -> Theta:
        return rotation(self, 160_000.0)


_LAYER = "encoder.layer.*"
_HEADS = (rule("lm_head", "lm_head"), rule("classifier", "classifier"))
NAMES = Names(
    prefix="gte",
    former_prefix="new",
    base=(
        rule("embeddings.word", "embeddings.word_embeddings"),
        rule("embeddings.segment", "embeddings.token_type_embeddings"),
        rule("embeddings.norm", "embeddings.LayerNorm"),
        rule("encoder.layers.*.qkv", f"{_LAYER}.attention.qkv_proj"),
        rule("encoder.layers.*.out", f"{_LAYER}.attention.o_proj"),
        rule("encoder.layers.*.norm1", f"{_LAYER}.attn_ln"),
        rule("encoder.layers.*.up", f"{_LAYER}.mlp.up_gate_proj", swapped=True),
        rule("encoder.layers.*.down", f"{_LAYER}.mlp.down_proj"),
        rule("encoder.layers.*.norm2", f"{_LAYER}.mlp_ln"),
        rule("pooler", "pooler.dense"),
    ),
    heads=_HEADS,
    modules=module_names("gte", _HEADS, gated=True),
)


class GteModel(RotaryBertModel):
    """The encoder, called as ``BertModel`` is."""

    config_class, names = GteConfig, NAMES
    layer_options = MappingProxyType({"attention_bias": True})
    drops_inside = True

    def __init__(self, config: Any, add_pooling_layer: bool = False) -> None:
        super().__init__(config, add_pooling_layer)

    def stack_of(self, config: Any) -> PackedTransformer:
        stack = super().stack_of(config)
        for layer in stack.in_order():
            layer.down = nn.Linear(config.intermediate_size, config.hidden_size)  # with a bias, which up has not
        return stack


class GteHead(BertHead):
    """A model around the encoder."""

    config_class, names, untied_names, encoder_class = GteConfig, NAMES, NAMES, GteModel

    def lm_head_of(self, config: Any) -> MaskedLMHead:
        return MaskedLMHead(config.hidden_size, config.vocab_size, eps=config.layer_norm_eps)


class GteForMaskedLM(GteHead, BertForMaskedLM):
    """Predicts masked tokens; called as ``BertForMaskedLM`` is."""


class GteForSequenceClassification(GteHead, BertForSequenceClassification):
    """Labels sequences, by the pooled first token; a reranker has one label."""


class GteForTokenClassification(GteHead, BertForTokenClassification):
    """Labels tokens; those with label -100 do not count."""


FAMILY = Family(
    "GTE",
    GteConfig,
    {
        Head.NONE: GteModel,
        Head.MASKED_LM: GteForMaskedLM,
        Head.SEQUENCE_CLASSIFICATION: GteForSequenceClassification,
        Head.TOKEN_CLASSIFICATION: GteForTokenClassification,
    },
    tokenizer="unigram",
    separators=2,
)
