"""BERT (Devlin et al., 2018): a bidirectional transformer encoder, pre-trained on masked LM and sentence pairs.

    x_0 = LN(word + position + segment)
    x_i = LN(y + MLP(y)),    y = LN(x_(i-1) + Attention(x_(i-1)))        i = 1 ... layers
    pooled = tanh(W x_layers[CLS])

Classes, arguments, outputs and checkpoints are those of transformers. Internally a batch is packed: padding is removed
before the embeddings and restored only in outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fasttfm.models.checkpoint_names import Names, rule, untied
from fasttfm.models.config import ModelConfig
from fasttfm.models.family import Family, Head
from fasttfm.models.kagnet import GRAPH_NAMES, GraphChoice, GraphFields
from fasttfm.models.objectives import NextSentence
from fasttfm.models.outputs import (
    BaseModelOutput,
    ClassifierOutput,
    LMOutput,
    PreTrainingOutput,
    QuestionAnsweringOutput,
)
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.models.text_model import Encoded, Layout, TextModel, flatten_choices, text_model
from fasttfm.nn import Embeddings, MaskedLMHead, PackedLayer, PackedTransformer
from fasttfm.nn.losses import classification_loss, span_loss, token_loss

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass
class BertConfig(ModelConfig):
    model_type: ClassVar[str] = "bert"
    sizes: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 512},
        "mini": {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024},
        "small": {"num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048},
        "medium": {"num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048},
        "base": {},
        "large": {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096},
    }
    required: ClassVar[dict[str, tuple[Any, ...]]] = {
        **ModelConfig.required,
        "position_embedding_type": ("absolute",),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
    }

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    classifier_dropout: float | None = None  # hidden_dropout_prob by default
    recompute: bool = False  # PackedLayer's: less memory for a little time
    keep_activation: bool = False  # PackedLayer's: less time for more memory

    def head_dropout(self) -> float:
        """The dropout probability before a classifier."""
        return self.hidden_dropout_prob if self.classifier_dropout is None else self.classifier_dropout


class EncoderConfig(Protocol):
    """The fields of a configuration that the encoder and its heads read, with ``BertConfig``'s names in all
    families."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def hidden_act(self) -> str: ...
    @property
    def hidden_dropout_prob(self) -> float: ...
    @property
    def attention_probs_dropout_prob(self) -> float: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def type_vocab_size(self) -> int: ...
    @property
    def layer_norm_eps(self) -> float: ...
    @property
    def pad_token_id(self) -> int | None: ...
    @property
    def recompute(self) -> bool: ...
    @property
    def keep_activation(self) -> bool: ...
    @property
    def num_labels(self) -> int: ...
    @property
    def tie_word_embeddings(self) -> bool: ...
    def head_dropout(self) -> float: ...


# ---- names in checkpoints --------------------------------------------------------------------------------------------

_LAYER = "encoder.layer.*"
BASE_NAMES = (
    rule("embeddings.word", "embeddings.word_embeddings"),
    rule("embeddings.position", "embeddings.position_embeddings"),
    rule("embeddings.segment", "embeddings.token_type_embeddings"),
    rule("embeddings.norm", "embeddings.LayerNorm"),
    rule("encoder.layers.*.qkv", *(f"{_LAYER}.attention.self.{part}" for part in ("query", "key", "value"))),
    rule("encoder.layers.*.out", f"{_LAYER}.attention.output.dense"),
    rule("encoder.layers.*.norm1", f"{_LAYER}.attention.output.LayerNorm"),
    rule("encoder.layers.*.up", f"{_LAYER}.intermediate.dense"),
    rule("encoder.layers.*.down", f"{_LAYER}.output.dense"),
    rule("encoder.layers.*.norm2", f"{_LAYER}.output.LayerNorm"),
    rule("pooler", "pooler.dense"),
)
NAMES = Names(
    prefix="bert",
    base=BASE_NAMES,
    heads=(
        rule("lm_head.dense", "cls.predictions.transform.dense"),
        rule("lm_head.norm", "cls.predictions.transform.LayerNorm"),
        rule("lm_head.decoder.bias", "cls.predictions.bias"),
        rule("lm_head.decoder", "cls.predictions.decoder"),
        rule("next_sentence", "cls.seq_relationship"),
        rule("classifier", "classifier"),
        *GRAPH_NAMES,
        rule("qa_outputs", "qa_outputs"),
    ),
    ignored=(r"bert\.embeddings\.position_ids",),
)
UNTIED_NAMES = untied(NAMES, r"cls\.predictions\.bias")


# ---- the encoder -----------------------------------------------------------------------------------------------------


def word_embeddings(config: EncoderConfig, width: int, output_width: int | None = None) -> Embeddings:
    return Embeddings(
        config.vocab_size,
        width,
        config.max_position_embeddings,
        config.type_vocab_size,
        output_width=output_width,
        eps=config.layer_norm_eps,
        dropout=config.hidden_dropout_prob,
        padding_idx=config.pad_token_id,
    )


def packed_layer(config: EncoderConfig, *, drop_attention: bool = True, drop_feed_forward: bool = True) -> PackedLayer:
    """A layer; the options say which of its blocks' outputs have dropout."""
    dropout = config.hidden_dropout_prob
    return PackedLayer(
        config.hidden_size,
        config.num_attention_heads,
        config.intermediate_size,
        activation=config.hidden_act,
        dropout=dropout if drop_attention else 0.0,
        feed_forward_dropout=dropout if drop_feed_forward else 0.0,
        attention_dropout=config.attention_probs_dropout_prob,
        eps=config.layer_norm_eps,
        recompute=config.recompute,
        keep_activation=config.keep_activation,
    )


class BertModel(TextModel):
    """The encoder, with a pooler on the first token."""

    config_class: ClassVar[type[ModelConfig]] = BertConfig
    names = NAMES
    stack_class: ClassVar[type[PackedTransformer]] = PackedTransformer

    def __init__(self, config: EncoderConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.embeddings = self.embeddings_of(config)
        self.encoder = self.stack_of(config)
        self.pooler = nn.Linear(width, width) if add_pooling_layer else None
        self.finish()

    def embeddings_of(self, config: EncoderConfig) -> Embeddings:
        return word_embeddings(config, config.hidden_size)

    def stack_of(self, config: EncoderConfig) -> PackedTransformer:
        return self.stack_class(self.layers_of(config))

    def layer_of(self, config: EncoderConfig) -> PackedLayer:
        return packed_layer(config)

    def layers_of(self, config: EncoderConfig) -> list[PackedLayer]:
        return [self.layer_of(config) for _ in range(config.num_hidden_layers)]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        **layout: Unpack[Layout],
    ) -> BaseModelOutput:
        encoded = self.encode_packed(input_ids, attention_mask, token_type_ids, position_ids, **layout)
        pooled = None if self.pooler is None else self.pool(encoded)
        return BaseModelOutput(encoded.batch.unpack(encoded.x), pooled, **encoded.returned())

    def pool(self, encoded: Encoded) -> Tensor:
        """[sequences, C]"""
        if encoded.pooled is not None:
            return encoded.pooled
        assert self.pooler is not None
        return torch.tanh(self.pooler(encoded.first_tokens()))


# ---- heads -----------------------------------------------------------------------------------------------------------


class BertHead(PretrainedModel):
    """A model around the encoder."""

    config_class: ClassVar[type[ModelConfig]] = BertConfig
    names = NAMES
    untied_names: ClassVar[Names] = UNTIED_NAMES
    encoder_class: ClassVar[type[BertModel]] = BertModel

    def __init__(self, config: EncoderConfig, *, pooler: bool = False) -> None:
        super().__init__(config)
        self.names = self.names_of(config)
        setattr(self, self.names.prefix, self.encoder_of(config, pooler))
        self.dropout = nn.Dropout(config.head_dropout())

    def names_of(self, config: EncoderConfig) -> Names:
        return self.names if config.tie_word_embeddings else self.untied_names

    def encoder_of(self, config: EncoderConfig, pooler: bool) -> BertModel:
        return self.encoder_class(config, add_pooling_layer=pooler)

    @property
    def encoder(self) -> BertModel:
        model = text_model(f"{type(self).__name__}.{self.names.prefix}", getattr(self, self.names.prefix))
        assert isinstance(model, BertModel)
        return model

    def lm_head_of(self, config: EncoderConfig) -> MaskedLMHead:
        sizes = (config.hidden_size, config.vocab_size)
        return MaskedLMHead(*sizes, activation=config.hidden_act, eps=config.layer_norm_eps)


class Predicted(NamedTuple):
    """The options of a masked-LM model's call."""

    labels: Tensor | None
    positions: Tensor | None
    max_predictions: int | None
    output_logits: bool

    def run(self, head: MaskedLMHead, encoded: Encoded) -> tuple[Tensor | None, Tensor | None]:
        """Loss and logits. Logits of all tokens take much memory: with a loss they are computed only if requested."""
        loss = None
        if self.labels is not None:
            labels = encoded.batch.pack(self.labels) if self.positions is None else self.labels
            loss = head.loss(encoded.x, labels, positions=self.positions, max_predictions=self.max_predictions)
        logits = encoded.batch.unpack(head(encoded.x)) if self.labels is None or self.output_logits else None
        return loss, logits


def both_losses(loss: Tensor | None, logits: Tensor, labels: Tensor | None) -> Tensor | None:
    """The sum of a masked-LM loss and that of the logits of sentence pairs; None without one of them, as in
    transformers."""
    return None if loss is None or labels is None else loss + token_loss(logits, labels.flatten())


class BertForMaskedLM(BertHead):
    """Predicts masked tokens. ``positions`` and ``max_predictions`` are those of ``nn.MaskedLMHead.loss``."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config, pooler=False)
        self.lm_head = self.lm_head_of(config)
        self.finish()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        max_predictions: int | None = None,
        output_logits: bool = False,
        **layout: Unpack[Layout],
    ) -> LMOutput:
        encoded = self.encoder.encode(input_ids, attention_mask, token_type_ids, position_ids, **layout)
        predicted = Predicted(labels, positions, max_predictions, output_logits)
        loss, logits = predicted.run(self.lm_head, encoded)
        return LMOutput(loss, logits, **encoded.returned())


class BertForPreTraining(BertHead):
    """Predicts masked tokens, and whether the second sentence follows the first (label 0) or not (label 1)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config, pooler=True)
        self.lm_head = self.lm_head_of(config)
        self.next_sentence = nn.Linear(config.hidden_size, 2)
        self.finish()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        positions: Tensor | None = None,
        max_predictions: int | None = None,
        output_logits: bool = False,
        **layout: Unpack[Layout],
    ) -> PreTrainingOutput:
        encoded = self.encoder.encode(input_ids, attention_mask, token_type_ids, position_ids, **layout)
        predicted = Predicted(labels, positions, max_predictions, output_logits)
        loss, logits = predicted.run(self.lm_head, encoded)
        relationship = self.sentence_logits(self.encoder.pool(encoded))
        loss = both_losses(loss, relationship, next_sentence_label)
        return PreTrainingOutput(loss, logits, relationship, **encoded.returned())

    def sentence_logits(self, pooled: Tensor) -> Tensor:
        """The logits of the pairs' labels."""
        logits: Tensor = self.next_sentence(pooled)
        return logits


class BertForNextSentencePrediction(BertHead):
    """Predicts whether the second sentence follows the first."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config, pooler=True)
        self.next_sentence = nn.Linear(config.hidden_size, 2)
        self.finish()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        **layout: Unpack[Layout],
    ) -> ClassifierOutput:
        inputs = (input_ids, attention_mask, token_type_ids, position_ids)
        encoded = self.encoder.encode(*inputs, reads_first=True, **layout)
        logits = self.next_sentence(self.encoder.pool(encoded))
        loss = None if labels is None else token_loss(logits, labels.flatten())
        return ClassifierOutput(loss, logits, **encoded.returned())


class BertForSequenceClassification(BertHead):
    """Labels sequences. The loss follows ``config.problem_type`` (nn.losses.classification_loss)."""

    pooler: ClassVar[bool] = True

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config, pooler=self.pooler)
        self.classifier = self.head_of(config)
        self.finish()

    def head_of(self, config: EncoderConfig) -> nn.Module:
        return nn.Linear(config.hidden_size, config.num_labels)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        **layout: Unpack[Layout],
    ) -> ClassifierOutput:
        inputs = (input_ids, attention_mask, token_type_ids, position_ids)
        encoded = self.encoder.encode(*inputs, reads_first=True, **layout)
        logits = self.classify(encoded)
        loss = None if labels is None else self.loss(logits, labels)
        return ClassifierOutput(loss, logits, **encoded.returned())

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return classification_loss(logits, labels, self.config.problem_type)

    def classify(self, encoded: Encoded) -> Tensor:
        """[sequences, labels]"""
        logits: Tensor = self.classifier(self.dropout(self.encoder.pool(encoded)))
        return logits


class BertForMultipleChoice(BertHead):
    """Chooses between continuations: ``input_ids`` [B, choices, S], or packed with ``num_choices`` sequences per
    question."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config, pooler=True)
        self.classifier = nn.Linear(config.hidden_size, 1)
        self.finish()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        num_choices: int | None = None,
        **layout: Unpack[Layout],
    ) -> ClassifierOutput:
        choices, ids, others = flatten_choices(
            type(self).__name__, num_choices, input_ids, attention_mask, token_type_ids, position_ids
        )
        encoded = self.encoder.encode(ids, *others, reads_first=True, **layout)
        logits = self.classifier(self.summarise(encoded)).view(-1, choices)
        loss = None if labels is None else token_loss(logits, labels)
        return ClassifierOutput(loss, logits, **encoded.returned())

    def summarise(self, encoded: Encoded) -> Tensor:
        """[sequences, C]"""
        summary: Tensor = self.dropout(self.encoder.pool(encoded))
        return summary


class BertForTokenClassification(BertHead):
    """Labels tokens; those with label -100 do not count."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config, pooler=False)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.finish()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        **layout: Unpack[Layout],
    ) -> ClassifierOutput:
        encoded = self.encoder.encode(input_ids, attention_mask, token_type_ids, position_ids, **layout)
        logits = self.classifier(self.summarise(encoded))
        loss = None if labels is None else token_loss(logits, encoded.batch.pack(labels))
        return ClassifierOutput(loss, encoded.batch.unpack(logits), **encoded.returned())

    def summarise(self, encoded: Encoded) -> Tensor:
        """[T, C]"""
        summary: Tensor = self.dropout(encoded.x)
        return summary


class BertForQuestionAnswering(BertHead):
    """Finds the span that answers a question. Padding is excluded; labels outside of the sequence are ignored."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config, pooler=False)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.finish()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **layout: Unpack[Layout],
    ) -> QuestionAnsweringOutput:
        encoded = self.encoder.encode(input_ids, attention_mask, token_type_ids, position_ids, **layout)
        logits = self.spans(encoded)
        padded = encoded.batch.per_sequence(logits, fill=torch.finfo(logits.dtype).min)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = span_loss(padded[..., 0], padded[..., 1], start_positions, end_positions)
        start, end = (logits if encoded.batch.shape is None else padded).unbind(-1)
        return QuestionAnsweringOutput(loss, start.contiguous(), end.contiguous(), **encoded.returned())

    def spans(self, encoded: Encoded) -> Tensor:
        """[T, 2]"""
        logits: Tensor = self.qa_outputs(encoded.x)
        return logits


@dataclass
class BertKagNetConfig(GraphFields, BertConfig):
    """The configuration of ``BertKagNet``: the encoder's and the graph's."""


class BertKagNet(GraphChoice, BertForMultipleChoice):  # type: ignore[misc]  # its forward takes a graph
    """Chooses between answers with the paths of a graph of concepts."""

    config_class = BertKagNetConfig


FAMILY = Family(
    "BERT",
    BertConfig,
    {
        Head.NONE: BertModel,
        Head.MASKED_LM: BertForMaskedLM,
        Head.SEQUENCE_CLASSIFICATION: BertForSequenceClassification,
        Head.TOKEN_CLASSIFICATION: BertForTokenClassification,
        Head.QUESTION_ANSWERING: BertForQuestionAnswering,
        Head.MULTIPLE_CHOICE: BertForMultipleChoice,
        Head.GRAPH_CHOICE: BertKagNet,
        Head.PRETRAINING: BertForPreTraining,
    },
    pretraining=NextSentence,
    sequences="nsp",
    tokenizer="wordpiece",
    patching="bert",
    benchmark=Head.MASKED_LM,
)
