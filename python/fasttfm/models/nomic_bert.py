"""NomicBERT (Nussbaum et al., 2024): BERT with rotary positions and gated feed-forward blocks without biases, the
network of nomic-embed-text.

    x_0 = LN(word + segment)
    x_i = LN(y + W (up * silu(gate))),  (gate, up) = V y,  y = LN(x_(i-1) + Attention(x_(i-1)))        i = 1 ... layers

Classes, arguments, outputs and checkpoints are those of transformers. Internally a batch is packed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fasttfm.models.bert import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
)
from fasttfm.models.checkpoint_names import Names, rule, untied
from fasttfm.models.family import Family, Head
from fasttfm.models.objectives import MaskedLM
from fasttfm.models.rotary import rotation
from fasttfm.models.rotary_bert import RotaryBertModel, module_names
from fasttfm.nn.rotation import Theta


@dataclass
class NomicBertConfig(BertConfig):
    model_type: ClassVar[str] = "nomic_bert"
    sizes: ClassVar[dict[str, dict[str, Any]]] = {name: BertConfig.sizes[name] for name in ("tiny", "base")}

    vocab_size: int = 30528
    hidden_act: str = "silu"
    hidden_dropout_prob: float = 0.0
    attention_probs_dropout_prob: float = 0.0
    max_position_embeddings: int = 2048
    head_dim: int | None = None  # hidden_size / num_attention_heads if None

    def rotation(self) -> Theta:
        return rotation(self, 1000.0)


_LAYER = "encoder.layers.*"
_HEADS = (
    rule("lm_head.dense", "cls.predictions.transform.dense"),
    rule("lm_head.norm", "cls.predictions.transform.layer_norm"),
    rule("lm_head.decoder.bias", "cls.predictions.bias"),
    rule("lm_head.decoder", "cls.predictions.decoder"),
    rule("classifier", "classifier"),
)
NAMES = Names(
    prefix="nomic_bert",
    base=(
        rule("embeddings.word", "embeddings.word_embeddings"),
        rule("embeddings.segment", "embeddings.token_type_embeddings"),
        rule("embeddings.norm", "emb_ln"),
        rule(f"{_LAYER}.qkv", f"{_LAYER}.attn.Wqkv"),
        rule(f"{_LAYER}.out", f"{_LAYER}.attn.out_proj"),
        rule(f"{_LAYER}.norm1", f"{_LAYER}.norm1"),
        rule(f"{_LAYER}.up", f"{_LAYER}.mlp.fc12", f"{_LAYER}.mlp.fc11"),  # the gate, and what it multiplies
        rule(f"{_LAYER}.down", f"{_LAYER}.mlp.fc2"),
        rule(f"{_LAYER}.norm2", f"{_LAYER}.norm2"),
        rule("pooler", "pooler.dense"),
    ),
    heads=_HEADS,
    modules=module_names("nomic_bert", _HEADS, gated=True),
)
UNTIED_NAMES = untied(NAMES, r"cls\.predictions\.bias")


class NomicBertModel(RotaryBertModel):
    """The encoder, called as ``BertModel`` is."""

    config_class, names = NomicBertConfig, NAMES

    def __init__(self, config: Any, add_pooling_layer: bool = False) -> None:
        super().__init__(config, add_pooling_layer)


class NomicBertForMaskedLM(BertForMaskedLM):
    """Predicts masked tokens; called as ``BertForMaskedLM`` is."""

    config_class, names, untied_names, encoder_class = NomicBertConfig, NAMES, UNTIED_NAMES, NomicBertModel


class NomicBertForSequenceClassification(BertForSequenceClassification):
    """Labels sequences, by the pooled first token."""

    config_class, names, untied_names, encoder_class = NomicBertConfig, NAMES, UNTIED_NAMES, NomicBertModel


class NomicBertForTokenClassification(BertForTokenClassification):
    """Labels tokens; those with label -100 do not count."""

    config_class, names, untied_names, encoder_class = NomicBertConfig, NAMES, UNTIED_NAMES, NomicBertModel


FAMILY = Family(
    "NomicBERT",
    NomicBertConfig,
    {
        Head.NONE: NomicBertModel,
        Head.MASKED_LM: NomicBertForMaskedLM,
        Head.SEQUENCE_CLASSIFICATION: NomicBertForSequenceClassification,
        Head.TOKEN_CLASSIFICATION: NomicBertForTokenClassification,
        Head.PRETRAINING: NomicBertForMaskedLM,
    },
    pretraining=MaskedLM,
    sequences="single",
    tokenizer="wordpiece",
    patching="nomic_bert",
)
