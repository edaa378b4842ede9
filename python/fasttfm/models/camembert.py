"""CamemBERT (Martin et al., 2019): RoBERTa with a French SentencePiece vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fasttfm.models import roberta
from fasttfm.models.bert import BertHead
from fasttfm.models.family import Head
from fasttfm.models.kagnet import GraphChoice, GraphFields


@dataclass
class CamembertConfig(roberta.RobertaConfig):
    model_type: ClassVar[str] = "camembert"

    vocab_size: int = 32005


class CamembertModel(roberta.RobertaModel):
    """The encoder; called as ``RobertaModel`` is."""

    config_class = CamembertConfig


class CamembertHead(BertHead):
    """A model around the encoder."""

    config_class, encoder_class = CamembertConfig, CamembertModel


class CamembertForMaskedLM(CamembertHead, roberta.RobertaForMaskedLM):
    """Predicts masked tokens."""


class CamembertForSequenceClassification(CamembertHead, roberta.RobertaForSequenceClassification):
    """Labels sequences by a two-layer head on the first token."""


class CamembertForTokenClassification(CamembertHead, roberta.RobertaForTokenClassification):
    """Labels tokens."""


class CamembertForQuestionAnswering(CamembertHead, roberta.RobertaForQuestionAnswering):
    """Finds the span that answers a question."""


class CamembertForMultipleChoice(CamembertHead, roberta.RobertaForMultipleChoice):
    """Chooses between continuations."""


@dataclass
class CamembertKagNetConfig(GraphFields, CamembertConfig):
    """The configuration of ``CamembertKagNet``: the encoder's and the graph's."""


class CamembertKagNet(GraphChoice, CamembertForMultipleChoice):  # type: ignore[misc]  # its forward takes a graph
    """Chooses between answers with the paths of a graph of concepts."""

    config_class = CamembertKagNetConfig


FAMILY = replace(
    roberta.FAMILY,
    title="CamemBERT",
    config=CamembertConfig,
    models={
        Head.NONE: CamembertModel,
        Head.MASKED_LM: CamembertForMaskedLM,
        Head.SEQUENCE_CLASSIFICATION: CamembertForSequenceClassification,
        Head.TOKEN_CLASSIFICATION: CamembertForTokenClassification,
        Head.QUESTION_ANSWERING: CamembertForQuestionAnswering,
        Head.MULTIPLE_CHOICE: CamembertForMultipleChoice,
        Head.GRAPH_CHOICE: CamembertKagNet,
        Head.PRETRAINING: CamembertForMaskedLM,
    },
    tokenizer="unigram",
    patching="camembert",
)
