"""RoBERTa (Liu et al., 2019): BERT's encoder with other defaults, positions that start after ``pad_token_id``, and no
sentence pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fasttfm import ops
from fasttfm.models.bert import (
    BASE_NAMES,
    BertConfig,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    EncoderConfig,
)
from fasttfm.models.checkpoint_names import Names, rule, untied
from fasttfm.models.family import Family, Head
from fasttfm.models.kagnet import GRAPH_NAMES, GraphChoice, GraphFields
from fasttfm.models.objectives import MaskedLM
from fasttfm.models.text_model import Encoded
from fasttfm.nn import MaskedLMHead, PackedBatch


@dataclass
class RobertaConfig(BertConfig):
    model_type: ClassVar[str] = "roberta"
    sizes: ClassVar[dict[str, dict[str, Any]]] = {name: BertConfig.sizes[name] for name in ("tiny", "base", "large")}

    vocab_size: int = 50265
    max_position_embeddings: int = 514
    type_vocab_size: int = 1
    layer_norm_eps: float = 1e-5
    pad_token_id: int | None = 1


NAMES = Names(
    prefix="roberta",
    base=BASE_NAMES,
    heads=(
        rule("lm_head.norm", "lm_head.layer_norm"),
        rule("lm_head.decoder.bias", "lm_head.bias"),
        rule("lm_head", "lm_head"),
        rule("classifier", "classifier"),
        *GRAPH_NAMES,
        rule("qa_outputs", "qa_outputs"),
    ),
    ignored=(r"roberta\.embeddings\.position_ids",),
)
UNTIED_NAMES = untied(NAMES, r"lm_head\.bias")


class RobertaModel(BertModel):
    """BERT's encoder; a token that is not padding has position ``pad_token_id`` + its index, counted from 1."""

    config_class = RobertaConfig
    names = NAMES

    def positions(
        self, input_ids: Tensor, ids: Tensor, position_ids: Tensor | None, batch: PackedBatch
    ) -> Tensor | None:
        if position_ids is not None:
            return batch.pack(position_ids.expand_as(input_ids))
        padding = self.config.pad_token_id
        if padding is None:
            expected = "a number, after which positions start, or position_ids in the call"
            raise ValueError(f"{type(self).__name__}: pad_token_id: expected {expected}, got None")
        words = input_ids != padding
        if batch.shape is not None:
            return batch.pack(words.cumsum(1) * words + padding)
        counted = words.cumsum(0)
        index = ops.position_ids_from_cu_seqlens(batch.cu_seqlens, total=batch.tokens)
        first = torch.arange(batch.tokens, device=ids.device) - index
        first = first.clamp(0, batch.tokens - 1)  # boundaries are not validated on a GPU
        before = (counted - words.long())[first]
        return (counted - before) * words + padding


class RobertaForMaskedLM(BertForMaskedLM):
    config_class, names, untied_names, encoder_class = RobertaConfig, NAMES, UNTIED_NAMES, RobertaModel

    def lm_head_of(self, config: EncoderConfig) -> MaskedLMHead:
        return MaskedLMHead(config.hidden_size, config.vocab_size, activation="gelu", eps=config.layer_norm_eps)


class RobertaForTokenClassification(BertForTokenClassification):
    config_class, names, untied_names, encoder_class = RobertaConfig, NAMES, UNTIED_NAMES, RobertaModel


class RobertaForQuestionAnswering(BertForQuestionAnswering):
    config_class, names, untied_names, encoder_class = RobertaConfig, NAMES, UNTIED_NAMES, RobertaModel


class RobertaForMultipleChoice(BertForMultipleChoice):
    config_class, names, untied_names, encoder_class = RobertaConfig, NAMES, UNTIED_NAMES, RobertaModel


class RobertaForSequenceClassification(BertForSequenceClassification):
    """Labels sequences by a two-layer head on the first token."""

    config_class, names, untied_names, encoder_class = RobertaConfig, NAMES, UNTIED_NAMES, RobertaModel
    pooler = False

    def head_of(self, config: EncoderConfig) -> nn.Module:
        return ClassificationHead(config.hidden_size, config.num_labels, torch.tanh)

    def classify(self, encoded: Encoded) -> Tensor:
        logits: Tensor = self.classifier(encoded.first_tokens(), self.dropout)
        return logits


class ClassificationHead(nn.Module):
    """Two layers, with the model's dropout before each."""

    def __init__(self, width: int, labels: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.activation = activation
        self.dense = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, labels)

    def forward(self, x: Tensor, dropout: nn.Module) -> Tensor:
        logits: Tensor = self.out_proj(dropout(self.activation(self.dense(dropout(x)))))
        return logits


@dataclass
class RobertaKagNetConfig(GraphFields, RobertaConfig):
    """The configuration of ``RobertaKagNet``: the encoder's and the graph's."""


class RobertaKagNet(GraphChoice, RobertaForMultipleChoice):  # type: ignore[misc]  # its forward takes a graph
    """Chooses between answers with the paths of a graph of concepts."""

    config_class = RobertaKagNetConfig


FAMILY = Family(
    "RoBERTa",
    RobertaConfig,
    {
        Head.NONE: RobertaModel,
        Head.MASKED_LM: RobertaForMaskedLM,
        Head.SEQUENCE_CLASSIFICATION: RobertaForSequenceClassification,
        Head.TOKEN_CLASSIFICATION: RobertaForTokenClassification,
        Head.QUESTION_ANSWERING: RobertaForQuestionAnswering,
        Head.MULTIPLE_CHOICE: RobertaForMultipleChoice,
        Head.GRAPH_CHOICE: RobertaKagNet,
        Head.PRETRAINING: RobertaForMaskedLM,
    },
    pretraining=MaskedLM,
    sequences="single",
    tokenizer="bpe",
    separators=2,
    unused_positions=2,
    patching="roberta",
)
