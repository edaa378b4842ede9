"""XLM-RoBERTa (Conneau et al., 2019): RoBERTa with a SentencePiece vocabulary of one hundred languages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fasttfm.models import roberta
from fasttfm.models.bert import BertHead
from fasttfm.models.family import Head
from fasttfm.models.kagnet import GraphChoice, GraphFields


@dataclass
class XLMRobertaConfig(roberta.RobertaConfig):
    model_type: ClassVar[str] = "xlm-roberta"

    vocab_size: int = 250002


class XLMRobertaModel(roberta.RobertaModel):
    """The encoder; called as ``RobertaModel`` is."""

    config_class = XLMRobertaConfig


class XLMRobertaHead(BertHead):
    """A model around the encoder."""

    config_class, encoder_class = XLMRobertaConfig, XLMRobertaModel


class XLMRobertaForMaskedLM(XLMRobertaHead, roberta.RobertaForMaskedLM):
    """Predicts masked tokens."""


class XLMRobertaForSequenceClassification(XLMRobertaHead, roberta.RobertaForSequenceClassification):
    """Labels sequences by a two-layer head on the first token."""


class XLMRobertaForTokenClassification(XLMRobertaHead, roberta.RobertaForTokenClassification):
    """Labels tokens."""


class XLMRobertaForQuestionAnswering(XLMRobertaHead, roberta.RobertaForQuestionAnswering):
    """Finds the span that answers a question."""


class XLMRobertaForMultipleChoice(XLMRobertaHead, roberta.RobertaForMultipleChoice):
    """Chooses between continuations."""


@dataclass
class XLMRobertaKagNetConfig(GraphFields, XLMRobertaConfig):
    """The configuration of ``XLMRobertaKagNet``: the encoder's and the graph's."""


class XLMRobertaKagNet(GraphChoice, XLMRobertaForMultipleChoice):  # type: ignore[misc]  # its forward takes a graph
    """Chooses between answers with the paths of a graph of concepts."""

    config_class = XLMRobertaKagNetConfig


FAMILY = replace(
    roberta.FAMILY,
    title="XLM-RoBERTa",
    config=XLMRobertaConfig,
    models={
        Head.NONE: XLMRobertaModel,
        Head.MASKED_LM: XLMRobertaForMaskedLM,
        Head.SEQUENCE_CLASSIFICATION: XLMRobertaForSequenceClassification,
        Head.TOKEN_CLASSIFICATION: XLMRobertaForTokenClassification,
        Head.QUESTION_ANSWERING: XLMRobertaForQuestionAnswering,
        Head.MULTIPLE_CHOICE: XLMRobertaForMultipleChoice,
        Head.GRAPH_CHOICE: XLMRobertaKagNet,
        Head.PRETRAINING: XLMRobertaForMaskedLM,
    },
    tokenizer="unigram",
    patching="xlm_roberta",
)
