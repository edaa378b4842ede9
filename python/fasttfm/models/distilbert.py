"""DistilBERT (Sanh et al., 2019): BERT's encoder with half the layers, no segments and no pooler.

A student is initialized with every second layer of its teacher: ``DistilBertForMaskedLM.from_teacher``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from fasttfm.models.bert import (
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertHead,
    BertModel,
    EncoderConfig,
    packed_layer,
)
from fasttfm.models.checkpoint_names import Names, rule
from fasttfm.models.config import ModelConfig
from fasttfm.models.family import Family, Head
from fasttfm.models.kagnet import GRAPH_NAMES, GraphChoice, GraphFields
from fasttfm.models.objectives import MaskedLM
from fasttfm.models.text_model import Encoded
from fasttfm.nn import PackedLayer

_EPS = 1e-12


@dataclass
class DistilBertConfig(ModelConfig):
    """Fields have transformers' names; the encoder reads them by BERT's names."""

    model_type: ClassVar[str] = "distilbert"
    sizes: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": {"n_layers": 2, "dim": 128, "n_heads": 2, "hidden_dim": 512},
        "base": {},
    }
    required: ClassVar[dict[str, tuple[Any, ...]]] = {**ModelConfig.required, "sinusoidal_pos_embds": (False,)}

    vocab_size: int = 30522
    max_position_embeddings: int = 512
    n_layers: int = 6
    n_heads: int = 12
    dim: int = 768
    hidden_dim: int = 3072
    dropout: float = 0.1
    attention_dropout: float = 0.1
    activation: str = "gelu"
    initializer_range: float = 0.02
    qa_dropout: float = 0.1
    seq_classif_dropout: float = 0.2
    pad_token_id: int | None = 0
    recompute: bool = False  # PackedLayer's: less memory for a little time
    keep_activation: bool = False  # PackedLayer's: less time for more memory

    hidden_size = property(lambda self: self.dim)
    num_hidden_layers = property(lambda self: self.n_layers)
    num_attention_heads = property(lambda self: self.n_heads)
    intermediate_size = property(lambda self: self.hidden_dim)
    hidden_act = property(lambda self: self.activation)
    hidden_dropout_prob = property(lambda self: self.dropout)
    attention_probs_dropout_prob = property(lambda self: self.attention_dropout)
    type_vocab_size = property(lambda self: 0)
    layer_norm_eps = property(lambda self: _EPS)

    def head_dropout(self) -> float:
        return self.dropout


_LAYER = "transformer.layer.*"
NAMES = Names(
    prefix="distilbert",
    base=(
        rule("embeddings.word", "embeddings.word_embeddings"),
        rule("embeddings.position", "embeddings.position_embeddings"),
        rule("embeddings.norm", "embeddings.LayerNorm"),
        rule("encoder.layers.*.qkv", *(f"{_LAYER}.attention.{part}_lin" for part in ("q", "k", "v"))),
        rule("encoder.layers.*.out", f"{_LAYER}.attention.out_lin"),
        rule("encoder.layers.*.norm1", f"{_LAYER}.sa_layer_norm"),
        rule("encoder.layers.*.up", f"{_LAYER}.ffn.lin1"),
        rule("encoder.layers.*.down", f"{_LAYER}.ffn.lin2"),
        rule("encoder.layers.*.norm2", f"{_LAYER}.output_layer_norm"),
    ),
    heads=(
        rule("lm_head.dense", "vocab_transform"),
        rule("lm_head.norm", "vocab_layer_norm"),
        rule("lm_head.decoder", "vocab_projector"),
        rule("pre_classifier", "pre_classifier"),
        rule("classifier", "classifier"),
        *GRAPH_NAMES,
        rule("qa_outputs", "qa_outputs"),
    ),
    ignored=(r"distilbert\.embeddings\.position_ids",),
)


class DistilBertModel(BertModel):
    """The encoder; called as ``BertModel`` is, without segments."""

    config_class = DistilBertConfig
    names = NAMES

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config, add_pooling_layer=False)

    def layer_of(self, config: EncoderConfig) -> PackedLayer:
        return packed_layer(config, drop_attention=False)


class DistilBertHead(BertHead):
    """A model around the encoder."""

    config_class, names, untied_names = DistilBertConfig, NAMES, NAMES

    def encoder_of(self, config: EncoderConfig, pooler: bool) -> BertModel:
        return DistilBertModel(config)


class DistilBertForMaskedLM(DistilBertHead, BertForMaskedLM):
    """Predicts masked tokens."""

    @classmethod
    def from_teacher(
        cls, teacher: BertForMaskedLM | BertForPreTraining, layers: Sequence[int] | None = None, **changes: Any
    ) -> DistilBertForMaskedLM:
        """A student with copies of the teacher's embeddings, of some of its layers, and of its head.

        The student has no segments: the row of the first segment is added to every position, so that single sentences
        have the same embeddings.

        Args:
            teacher: A BERT.
            layers: The teacher's layers that are copied; every second one from the first by default.
            changes: Fields of the student's configuration to override, such as ``dropout``.
        """
        theirs = teacher.config
        if theirs.model_type != "bert" or theirs.layer_norm_eps != _EPS:
            got = f"model_type {theirs.model_type!r} with layer_norm_eps {theirs.layer_norm_eps}"
            raise ValueError(f"{cls.__name__}: teacher: expected a BERT with layer_norm_eps {_EPS}, got {got}")
        chosen = range(0, theirs.num_hidden_layers, 2) if layers is None else layers
        fields = {
            "vocab_size": theirs.vocab_size,
            "max_position_embeddings": theirs.max_position_embeddings,
            "n_layers": len(chosen),
            "n_heads": theirs.num_attention_heads,
            "dim": theirs.hidden_size,
            "hidden_dim": theirs.intermediate_size,
            "dropout": theirs.hidden_dropout_prob,
            "attention_dropout": theirs.attention_probs_dropout_prob,
            "activation": theirs.hidden_act,
            "initializer_range": theirs.initializer_range,
            "pad_token_id": theirs.pad_token_id,
            "tie_word_embeddings": theirs.tie_word_embeddings,
            "recompute": theirs.recompute,
            "keep_activation": theirs.keep_activation,
        }
        student = cls(DistilBertConfig(**{**fields, **changes}))
        student.to(next(teacher.parameters()))
        student._copy(teacher, chosen)
        return student

    @torch.no_grad()
    def _copy(self, teacher: BertForMaskedLM | BertForPreTraining, layers: Sequence[int]) -> None:
        source, student = teacher.encoder, self.encoder
        for mine, index in zip(student.encoder.layers, layers, strict=True):
            mine.load_state_dict(source.encoder.layers[index].state_dict())
        tables = source.embeddings.state_dict()
        segments = tables.pop("segment.weight")
        tables["position.weight"] = tables["position.weight"] + segments[0]
        student.embeddings.load_state_dict(tables)
        self.lm_head.load_state_dict(teacher.lm_head.state_dict())


class DistilBertForTokenClassification(DistilBertHead, BertForTokenClassification):
    """Labels tokens."""


class DistilBertForQuestionAnswering(DistilBertHead, BertForQuestionAnswering):
    """Finds the span that answers a question."""

    def __init__(self, config: DistilBertConfig) -> None:
        super().__init__(config)
        self.dropout = nn.Dropout(config.qa_dropout)

    def spans(self, encoded: Encoded) -> Tensor:
        logits: Tensor = self.qa_outputs(self.dropout(encoded.x))
        return logits


class FirstTokenHead(DistilBertHead):
    """A model with a layer on the first token, instead of a pooler."""

    def __init__(self, config: DistilBertConfig) -> None:
        super().__init__(config)
        self.pre_classifier = nn.Linear(config.dim, config.dim)
        self.dropout = nn.Dropout(config.seq_classif_dropout)
        self.finish()

    def summarise(self, encoded: Encoded) -> Tensor:
        """[sequences, C]"""
        first = self.pre_classifier(encoded.first_tokens())
        summary: Tensor = self.dropout(functional.relu(first))
        return summary


class DistilBertForMultipleChoice(FirstTokenHead, BertForMultipleChoice):
    """Chooses between continuations."""


class DistilBertForSequenceClassification(FirstTokenHead, BertForSequenceClassification):
    """Labels sequences."""

    def classify(self, encoded: Encoded) -> Tensor:
        logits: Tensor = self.classifier(self.summarise(encoded))
        return logits


@dataclass
class DistilBertKagNetConfig(GraphFields, DistilBertConfig):
    """The configuration of ``DistilBertKagNet``: the encoder's and the graph's."""


class DistilBertKagNet(GraphChoice, DistilBertForMultipleChoice):  # type: ignore[misc]  # its forward takes a graph
    """Chooses between answers with the paths of a graph of concepts."""

    config_class = DistilBertKagNetConfig


FAMILY = Family(
    "DistilBERT",
    DistilBertConfig,
    {
        Head.NONE: DistilBertModel,
        Head.MASKED_LM: DistilBertForMaskedLM,
        Head.SEQUENCE_CLASSIFICATION: DistilBertForSequenceClassification,
        Head.TOKEN_CLASSIFICATION: DistilBertForTokenClassification,
        Head.QUESTION_ANSWERING: DistilBertForQuestionAnswering,
        Head.MULTIPLE_CHOICE: DistilBertForMultipleChoice,
        Head.PRETRAINING: DistilBertForMaskedLM,
        Head.GRAPH_CHOICE: DistilBertKagNet,
    },
    pretraining=MaskedLM,
    sequences="single",
    tokenizer="wordpiece",
    patching="distilbert",
)
