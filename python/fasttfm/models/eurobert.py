"""EuroBERT (Boizard et al., 2025): Llama's network as a bidirectional encoder of European languages, pre-trained on
masked LM.

Classes, arguments, outputs and checkpoints are those of transformers. Internally a batch is packed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from fasttfm import ops
from fasttfm.models.bert import BertForMaskedLM, BertForSequenceClassification, BertForTokenClassification
from fasttfm.models.checkpoint_names import rule
from fasttfm.models.family import Family, Head
from fasttfm.models.objectives import MaskedLM
from fasttfm.models.rotary import RotaryConfig, RotaryHead, RotaryModel, sequence_means
from fasttfm.models.text_model import Encoded
from fasttfm.nn import MaskedLMHead

_POOLING = ("bos", "mean", "late")


@dataclass
class EuroBertConfig(RotaryConfig):
    model_type: ClassVar[str] = "eurobert"
    sizes: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 256},
        "210m": {},
        "610m": {
            "num_hidden_layers": 26,
            "hidden_size": 1152,
            "num_attention_heads": 18,
            "num_key_value_heads": 6,
            "intermediate_size": 4096,
        },
        "2.1b": {
            "num_hidden_layers": 32,
            "hidden_size": 2304,
            "num_attention_heads": 18,
            "num_key_value_heads": 6,
            "intermediate_size": 6144,
        },
    }

    vocab_size: int = 128256
    rope_theta: float = 250_000.0
    pad_token_id: int | None = 128001
    bos_token_id: int | None = 128000
    eos_token_id: int | list[int] | None = 128001
    mask_token_id: int | None = 128002
    tie_word_embeddings: bool = False
    classifier_pooling: str = "late"


class EuroBertModel(RotaryModel):
    """The encoder, called as ``BertModel`` is, without segments."""

    config_class = EuroBertConfig
    head_rules = (rule("lm_head.decoder", "lm_head"), rule("dense", "dense"), rule("classifier", "classifier"))


class EuroBertHead(RotaryHead):
    """A model around the encoder."""

    config_class, encoder_class = EuroBertConfig, EuroBertModel

    def lm_head_of(self, config: Any) -> MaskedLMHead:
        return MaskedLMHead(config.hidden_size, config.vocab_size, transforms=False, decoder_bias=config.mlp_bias)


class EuroBertForMaskedLM(EuroBertHead, BertForMaskedLM):
    """Predicts masked tokens; called as ``BertForMaskedLM`` is."""


class EuroBertForTokenClassification(EuroBertHead, BertForTokenClassification):
    """Labels tokens; those with label -100 do not count."""


class EuroBertForSequenceClassification(EuroBertHead, BertForSequenceClassification):
    """Labels sequences: by the first token, the mean over tokens, or the mean of the tokens' logits
    (``classifier_pooling``: bos, mean or late)."""

    pooler = False

    def __init__(self, config: Any) -> None:
        if config.classifier_pooling not in _POOLING:
            got = repr(config.classifier_pooling)
            raise ValueError(f"{type(self).__name__}: classifier_pooling: expected {', '.join(_POOLING)}, got {got}")
        super().__init__(config)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.finish()

    def classify(self, encoded: Encoded) -> Tensor:
        pooling, batch, x = self.config.classifier_pooling, encoded.batch, encoded.x
        if pooling != "late":
            x = encoded.first_tokens() if pooling == "bos" else sequence_means(x, batch)
        logits: Tensor = self.classifier(ops.linear_gelu(x, self.dense.weight, self.dense.bias))
        return sequence_means(logits, batch) if pooling == "late" else logits


FAMILY = Family(
    "EuroBERT",
    EuroBertConfig,
    {
        Head.NONE: EuroBertModel,
        Head.MASKED_LM: EuroBertForMaskedLM,
        Head.SEQUENCE_CLASSIFICATION: EuroBertForSequenceClassification,
        Head.TOKEN_CLASSIFICATION: EuroBertForTokenClassification,
        Head.PRETRAINING: EuroBertForMaskedLM,
    },
    pretraining=MaskedLM,
    sequences="single",
    tokenizer="bpe",
    patching="eurobert",
)
