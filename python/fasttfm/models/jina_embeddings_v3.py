"""jina-embeddings-v3 (Sturua et al., 2024): XLM-RoBERTa with rotary positions, for texts of up to 8,192 tokens.

    x_0 = LN(word + segment)
    x_i = LN(y + MLP(y)),  y = LN(x_(i-1) + Attention(x_(i-1)))        i = 1 ... layers

Classes, arguments, outputs and checkpoints are those of transformers. Internally a batch is packed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

from fasttfm.models import roberta
from fasttfm.models.bert import BertHead
from fasttfm.models.checkpoint_names import Names, rule
from fasttfm.models.family import Family, Head
from fasttfm.models.rotary import rotation
from fasttfm.models.rotary_bert import RotaryBertModel, module_names
from fasttfm.nn.rotation import Theta


@dataclass
class JinaEmbeddingsV3Config(roberta.RobertaConfig):
    model_type: ClassVar[str] = "jina_embeddings_v3"
    sizes: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": {
            "num_hidden_layers": 2,
            "hidden_size": 128,
            "num_attention_heads": 2,
            "intermediate_size": 512,
        },
        "large": {},
    }

    vocab_size: int = 250002
    hidden_size: int = 1024
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    intermediate_size: int = 4096
    max_position_embeddings: int = 8194

    def rotation(self) -> Theta:
        return rotation(self, 20_000.0)


_LAYER = "encoder.layers.*"
NAMES = Names(
    prefix="roberta",
    base=(
        rule("embeddings.word", "embeddings.word_embeddings"),
        rule("embeddings.segment", "embeddings.token_type_embeddings"),
        rule("embeddings.norm", "emb_ln"),
        rule(f"{_LAYER}.qkv", f"{_LAYER}.mixer.Wqkv"),
        rule(f"{_LAYER}.out", f"{_LAYER}.mixer.out_proj"),
        rule(f"{_LAYER}.norm1", f"{_LAYER}.norm1"),
        rule(f"{_LAYER}.up", f"{_LAYER}.mlp.fc1"),
        rule(f"{_LAYER}.down", f"{_LAYER}.mlp.fc2"),
        rule(f"{_LAYER}.norm2", f"{_LAYER}.norm2"),
        rule("pooler", "pooler.dense"),
    ),
    heads=roberta.NAMES.heads,
    modules=module_names("roberta", roberta.NAMES.heads, gated=False),
)
UNTIED_NAMES = replace(NAMES, heads=roberta.UNTIED_NAMES.heads, ignored=(r"lm_head\.bias",))


class JinaEmbeddingsV3Model(RotaryBertModel):
    """The encoder, called as ``BertModel`` is."""

    config_class, names = JinaEmbeddingsV3Config, NAMES
    layer_options = MappingProxyType({"attention_bias": True, "feed_forward_bias": True, "gated": False})


class JinaEmbeddingsV3Head(BertHead):
    """A model around the encoder."""

    config_class, names, untied_names = JinaEmbeddingsV3Config, NAMES, UNTIED_NAMES
    encoder_class: ClassVar[Any] = JinaEmbeddingsV3Model


class JinaEmbeddingsV3ForMaskedLM(JinaEmbeddingsV3Head, roberta.RobertaForMaskedLM):
    """Predicts masked tokens."""


class JinaEmbeddingsV3ForSequenceClassification(JinaEmbeddingsV3Head, roberta.RobertaForSequenceClassification):
    """Labels sequences by a two-layer head on the first token."""


class JinaEmbeddingsV3ForTokenClassification(JinaEmbeddingsV3Head, roberta.RobertaForTokenClassification):
    """Labels tokens."""


class JinaEmbeddingsV3ForQuestionAnswering(JinaEmbeddingsV3Head, roberta.RobertaForQuestionAnswering):
    """Finds the span that answers a question."""


FAMILY = Family(
    "jina-embeddings-v3",
    JinaEmbeddingsV3Config,
    {
        Head.NONE: JinaEmbeddingsV3Model,
        Head.MASKED_LM: JinaEmbeddingsV3ForMaskedLM,
        Head.SEQUENCE_CLASSIFICATION: JinaEmbeddingsV3ForSequenceClassification,
        Head.TOKEN_CLASSIFICATION: JinaEmbeddingsV3ForTokenClassification,
        Head.QUESTION_ANSWERING: JinaEmbeddingsV3ForQuestionAnswering,
    },
    tokenizer="unigram",
    separators=2,
)
