"""ALBERT (Lan et al., 2019): BERT with few parameters. Embeddings are narrower than the model, layers share parameters.

    x_0 = W_E LN(word + position + segment)        tables of width E, W_E [H, E]
    x_i = layer_g(i)(x_(i-1))                      BERT's layer, one for all layers of a group

It is pre-trained on masked LM and on the order of two sentences. Shared parameters are one tensor, in memory and in the
optimiser.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from fasttfm.models.bert import (
    BertConfig,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertHead,
    BertModel,
    EncoderConfig,
    Predicted,
    both_losses,
    packed_layer,
    word_embeddings,
)
from fasttfm.models.checkpoint_names import Names, Rule, rule
from fasttfm.models.family import Family, Head
from fasttfm.models.kagnet import GRAPH_NAMES, GraphChoice, GraphFields
from fasttfm.models.objectives import SentenceOrder
from fasttfm.models.outputs import ModelOutput, States
from fasttfm.models.text_model import Layout
from fasttfm.nn import Embeddings, MaskedLMHead, PackedLayer

if TYPE_CHECKING:
    from typing_extensions import Unpack

# The parameters that the layers of a group share, by the value of ``parameter_sharing``.
SHARED = {
    "all": ("qkv", "out", "norm1", "up", "down", "norm2"),
    "attention": ("qkv", "out", "norm1"),
    "ffn": ("up", "down", "norm2"),
    "none": (),
}


@dataclass
class AlbertConfig(BertConfig):
    """The layers of each of ``num_hidden_groups`` groups share the parameters that ``parameter_sharing`` names: all,
    attention, ffn or none. Each of ``num_hidden_layers`` consists of ``inner_group_num`` layers with their own
    parameters.

    transformers only supports sharing all parameters. Otherwise ``config.json`` has as many groups as layers, and the
    checkpoint repeats the shared parameters.
    """

    model_type: ClassVar[str] = "albert"
    sizes: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": BertConfig.sizes["tiny"],
        "base": {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
        "large": {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096},
        "xlarge": {"num_hidden_layers": 24, "hidden_size": 2048, "num_attention_heads": 16, "intermediate_size": 8192},
        "xxlarge": {},
    }

    vocab_size: int = 30000
    embedding_size: int = 128
    hidden_size: int = 4096
    num_hidden_groups: int = 1
    num_attention_heads: int = 64
    intermediate_size: int = 16384
    inner_group_num: int = 1
    hidden_act: str = "gelu_new"
    hidden_dropout_prob: float = 0.0
    attention_probs_dropout_prob: float = 0.0
    classifier_dropout_prob: float = 0.1
    parameter_sharing: str = "all"

    def head_dropout(self) -> float:
        return self.classifier_dropout_prob

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> AlbertConfig:
        known = dict(values)
        groups = known.pop("shared_groups", None)
        return super().from_dict(known if groups is None else {**known, "num_hidden_groups": groups})

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        if self.parameter_sharing == "all":
            return values
        return {**values, "num_hidden_groups": self.num_hidden_layers, "shared_groups": self.num_hidden_groups}

    def groups(self) -> list[int]:
        """The group of each of ``num_hidden_layers``."""
        layers, groups = self.num_hidden_layers, self.num_hidden_groups
        if not 1 <= groups <= layers:
            raise ValueError(f"AlbertConfig: num_hidden_groups: expected 1 to {layers}, got {groups}")
        if self.parameter_sharing not in SHARED:
            expected = ", ".join(SHARED)
            raise ValueError(f"AlbertConfig: parameter_sharing: expected {expected}, got {self.parameter_sharing!r}")
        return [int(index / (layers / groups)) for index in range(layers)]  # transformers' rounding


# ---- names in checkpoints --------------------------------------------------------------------------------------------


def names_of(config: AlbertConfig) -> Names:
    """The names in checkpoints. A layer of a group there is ``inner_group_num`` layers here."""
    return Names(
        prefix="albert",
        base=(
            rule("embeddings.word", "embeddings.word_embeddings"),
            rule("embeddings.position", "embeddings.position_embeddings"),
            rule("embeddings.segment", "embeddings.token_type_embeddings"),
            rule("embeddings.norm", "embeddings.LayerNorm"),
            rule("embeddings.projection", "encoder.embedding_hidden_mapping_in"),
            *_layer_rules(config),
            rule("pooler", "pooler"),
        ),
        heads=(
            rule("lm_head.dense", "predictions.dense"),
            rule("lm_head.norm", "predictions.LayerNorm"),
            # If the decoder is not tied to the word table, it has its own bias, and the other one is unused.
            *([rule("lm_head.decoder.bias", "predictions.bias")] if config.tie_word_embeddings else []),
            rule("lm_head.decoder", "predictions.decoder"),
            rule("sentence_order", "sop_classifier.classifier"),
            rule("classifier", "classifier"),
            *GRAPH_NAMES,
            rule("qa_outputs", "qa_outputs"),
        ),
        ignored=(r"albert\.embeddings\.position_ids", *([] if config.tie_word_embeddings else [r"predictions\.bias"])),
    )


def _layer_rules(config: AlbertConfig) -> Iterator[Rule]:
    inner = config.inner_group_num
    groups = config.num_hidden_groups if config.parameter_sharing == "all" else config.num_hidden_layers
    for index in range(groups * inner):
        ours = f"encoder.layers.{index}"
        theirs = f"encoder.albert_layer_groups.{index // inner}.albert_layers.{index % inner}"
        yield rule(f"{ours}.qkv", *(f"{theirs}.attention.{part}" for part in ("query", "key", "value")))
        yield rule(f"{ours}.out", f"{theirs}.attention.dense")
        yield rule(f"{ours}.norm1", f"{theirs}.attention.LayerNorm")
        yield rule(f"{ours}.up", f"{theirs}.ffn")
        yield rule(f"{ours}.down", f"{theirs}.ffn_output")
        yield rule(f"{ours}.norm2", f"{theirs}.full_layer_layer_norm")


# ---- the encoder -----------------------------------------------------------------------------------------------------


class AlbertModel(BertModel):
    """The encoder, with a pooler on the first token; called as ``BertModel`` is."""

    config_class = AlbertConfig
    config: AlbertConfig

    def __init__(self, config: AlbertConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config, add_pooling_layer)
        self.names = names_of(config)

    def embeddings_of(self, config: EncoderConfig) -> Embeddings:
        assert isinstance(config, AlbertConfig)
        return word_embeddings(config, config.embedding_size, config.hidden_size)

    def layer_of(self, config: EncoderConfig) -> PackedLayer:
        return packed_layer(config, drop_feed_forward=False)

    def layers_of(self, config: EncoderConfig) -> list[PackedLayer]:
        """Layers that share all parameters are one module; if they share only some, those are tied."""
        assert isinstance(config, AlbertConfig)
        groups, inner = config.groups(), range(config.inner_group_num)
        if config.parameter_sharing != "all":
            return [self.layer_of(config) for _ in groups for _ in inner]
        layers_of_groups = [[self.layer_of(config) for _ in inner] for _ in range(config.num_hidden_groups)]
        return [layer for group in groups for layer in layers_of_groups[group]]

    def tied(self) -> dict[str, str]:
        """A layer's shared parameters are those of its group's first layer."""
        config = self.config
        if config.parameter_sharing == "all":
            return {}
        groups, inner = config.groups(), config.inner_group_num
        return {
            f"encoder.layers.{index * inner + offset}.{part}.{kind}": (
                f"encoder.layers.{groups.index(group) * inner + offset}.{part}.{kind}"
            )
            for index, group in enumerate(groups)
            if groups.index(group) != index
            for offset in range(inner)
            for part in SHARED[config.parameter_sharing]
            for kind in ("weight", "bias")
        }

    def repeated(self) -> dict[str, str]:
        return self.tied()


# ---- heads -----------------------------------------------------------------------------------------------------------


class AlbertHead(BertHead):
    """A model around the encoder."""

    config_class, encoder_class = AlbertConfig, AlbertModel

    def names_of(self, config: EncoderConfig) -> Names:
        assert isinstance(config, AlbertConfig)
        return names_of(config)

    def lm_head_of(self, config: EncoderConfig) -> MaskedLMHead:
        assert isinstance(config, AlbertConfig)
        return MaskedLMHead(
            config.hidden_size,
            config.vocab_size,
            embedding_width=config.embedding_size,
            activation=config.hidden_act,
            eps=config.layer_norm_eps,
        )

    def tied(self) -> dict[str, str]:
        return {**super().tied(), **self.repeated()}

    def repeated(self) -> dict[str, str]:
        prefix = self.names.prefix
        return {f"{prefix}.{name}": f"{prefix}.{source}" for name, source in self.encoder.tied().items()}


class AlbertForMaskedLM(AlbertHead, BertForMaskedLM):
    """Predicts masked tokens."""


class AlbertForSequenceClassification(AlbertHead, BertForSequenceClassification):
    """Labels sequences."""


class AlbertForTokenClassification(AlbertHead, BertForTokenClassification):
    """Labels tokens."""


class AlbertForQuestionAnswering(AlbertHead, BertForQuestionAnswering):
    """Finds the span that answers a question."""


class AlbertForMultipleChoice(AlbertHead, BertForMultipleChoice):
    """Chooses between continuations."""


@dataclass
class AlbertForPreTrainingOutput(ModelOutput):
    loss: Tensor | None = None
    prediction_logits: Tensor | None = None
    sop_logits: Tensor | None = None
    hidden_states: States = None
    attentions: States = None


class AlbertForPreTraining(AlbertHead):
    """Predicts masked tokens, and whether two sentences are in their order (label 0) or were swapped (label 1)."""

    def __init__(self, config: AlbertConfig) -> None:
        super().__init__(config, pooler=True)
        self.lm_head = self.lm_head_of(config)
        self.sentence_order = nn.Linear(config.hidden_size, config.num_labels)
        self.finish()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        sentence_order_label: Tensor | None = None,
        positions: Tensor | None = None,
        max_predictions: int | None = None,
        output_logits: bool = False,
        **layout: Unpack[Layout],
    ) -> AlbertForPreTrainingOutput:
        encoded = self.encoder.encode(input_ids, attention_mask, token_type_ids, position_ids, **layout)
        predicted = Predicted(labels, positions, max_predictions, output_logits)
        loss, logits = predicted.run(self.lm_head, encoded)
        order = self.sentence_logits(self.encoder.pool(encoded))
        loss = both_losses(loss, order, sentence_order_label)
        return AlbertForPreTrainingOutput(loss, logits, order, **encoded.returned())

    def sentence_logits(self, pooled: Tensor) -> Tensor:
        """The logits of the pairs' labels."""
        logits: Tensor = self.sentence_order(self.dropout(pooled))
        return logits


@dataclass
class AlbertKagNetConfig(GraphFields, AlbertConfig):
    """The configuration of ``AlbertKagNet``: the encoder's and the graph's."""


class AlbertKagNet(GraphChoice, AlbertForMultipleChoice):  # type: ignore[misc]  # its forward takes a graph
    """Chooses between answers with the paths of a graph of concepts."""

    config_class = AlbertKagNetConfig


FAMILY = Family(
    "ALBERT",
    AlbertConfig,
    {
        Head.NONE: AlbertModel,
        Head.MASKED_LM: AlbertForMaskedLM,
        Head.SEQUENCE_CLASSIFICATION: AlbertForSequenceClassification,
        Head.TOKEN_CLASSIFICATION: AlbertForTokenClassification,
        Head.QUESTION_ANSWERING: AlbertForQuestionAnswering,
        Head.MULTIPLE_CHOICE: AlbertForMultipleChoice,
        Head.GRAPH_CHOICE: AlbertKagNet,
        Head.PRETRAINING: AlbertForPreTraining,
    },
    pretraining=SentenceOrder,
    sequences="sop",
    tokenizer="wordpiece",
    patching="albert",
    benchmark=Head.MASKED_LM,
)
