"""ERNIE of Tsinghua University (Zhang et al., 2019, "Enhanced Language Representation with Informative Entities").

BERT whose upper layers read a knowledge graph: a token that begins the mention of an entity is aligned with it, and the
K-Encoder's aggregators let tokens and entities attend among themselves and mix each aligned pair (nn/knowledge_layer.py
has the equations). Entities come in as vectors of a graph, from TransE, which are not trained here. It is not the model
of the same name by Baidu.

    "sim"    a layer of BERT; the entities wait                             T-Encoder
    "mix"    a layer of BERT whose feed-forward block mixes entities in     T-Encoder's last
    "norm"   an aggregator                                                  K-Encoder

Called as BERT's models are, with ``entities=``: the row of each token's entity in the table of vectors, -1 for none, in
the shape of ``input_ids``; or ``nn.AlignedEntities``, which needs no synchronization with the GPU. Checkpoints are
those of github.com/thunlp/ERNIE (``ernie_config.json``, ``pytorch_model.bin``) or this package's own, which also hold
the entities.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from fasttfm import ops
from fasttfm.models.bert import (
    BASE_NAMES,
    BertConfig,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertHead,
    BertModel,
    EncoderConfig,
    Predicted,
)
from fasttfm.models.bert import NAMES as BERT_NAMES
from fasttfm.models.checkpoint_files import CONFIG, CheckpointError
from fasttfm.models.checkpoint_names import Names, rule, untied
from fasttfm.models.directories import checkpoint_directory
from fasttfm.models.entity_files import ENTITY_IDS, read_names, write_names
from fasttfm.models.family import Family, Head
from fasttfm.models.objectives import IGNORED, NextSentence
from fasttfm.models.outputs import ModelOutput, States
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.models.text_model import LAST_STATES, Encoded, Layout
from fasttfm.nn import AlignedEntities, KnowledgeLayer, KnowledgeTransformer, PackedBatch, PackedLayer
from fasttfm.nn.losses import token_loss
from fasttfm.nn.parts import masked_lm_transform

if TYPE_CHECKING:
    from typing_extensions import Unpack

Model = TypeVar("Model", bound="KnowledgeModel")

LAYER_TYPES = ("sim", "mix", "norm")


@dataclass
class ErnieKnowledgeConfig(BertConfig):
    model_type: ClassVar[str] = "ernie_knowledge"
    config_files: ClassVar[tuple[str, ...]] = (CONFIG, "ernie_config.json")
    sizes: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": {
            **BertConfig.sizes["tiny"],
            "entity_hidden_size": 32,
            "entity_num_attention_heads": 2,
            "layer_types": ["norm", "norm"],  # two layers have no room for a T-Encoder
        },
        "mini": {**BertConfig.sizes["mini"], "entity_hidden_size": 64},
        "base": {},
    }

    layer_types: list[str] | None = None  # by default the lower half is the T-Encoder, as in the released model
    entity_hidden_size: int = 100
    entity_num_attention_heads: int = 4
    entity_embedding_size: int | None = None  # the width of the entities' vectors: entity_hidden_size by default
    num_entities: int = 0  # rows of the table of vectors

    def types(self) -> list[str]:
        """Each layer's type; layers that ``layer_types`` does not name are BERT's."""
        layers = self.num_hidden_layers
        if self.layer_types is None:
            below = max(0, layers // 2 - 1)
            return [*["sim"] * below, *["mix"] * (layers > 1), *["norm"] * (layers - below - (layers > 1))]
        return [*self.layer_types, *["sim"] * (layers - len(self.layer_types))]

    def vector_size(self) -> int:
        return self.entity_embedding_size or self.entity_hidden_size

    def _wrong(self) -> str | None:
        if (wrong := super()._wrong()) is not None:
            return wrong
        unknown = [name for name in self.types() if name not in LAYER_TYPES]
        if unknown or len(self.types()) > self.num_hidden_layers:
            got = repr(unknown[0]) if unknown else f"{len(self.types())} layers"
            return f"layer_types: expected up to {self.num_hidden_layers} of {', '.join(LAYER_TYPES)}, got {got}"
        if self.entity_hidden_size % self.entity_num_attention_heads:
            expected = f"a divisor of entity_hidden_size, {self.entity_hidden_size}"
            return f"entity_num_attention_heads: expected {expected}, got {self.entity_num_attention_heads}"
        return None


# ---- names in checkpoints --------------------------------------------------------------------------------------------

_LAYER, _OURS = "encoder.layer.*", "encoder.layers.*"
NAMES = Names(
    prefix="bert",
    base=(
        *BASE_NAMES,
        rule(f"{_OURS}.entity_qkv", *(f"{_LAYER}.attention.self_ent.{part}" for part in ("query", "key", "value"))),
        rule(f"{_OURS}.entity_out", f"{_LAYER}.attention.output_ent.dense"),
        rule(f"{_OURS}.entity_norm1", f"{_LAYER}.attention.output_ent.LayerNorm"),
        rule(f"{_OURS}.entity_up", f"{_LAYER}.intermediate.dense_ent"),
        rule(f"{_OURS}.entity_down", f"{_LAYER}.output.dense_ent"),
        rule(f"{_OURS}.entity_norm2", f"{_LAYER}.output.LayerNorm_ent"),
        rule("entity_embeddings", "entity_embeddings"),
    ),
    heads=(
        *BERT_NAMES.heads,
        rule("entity_head.dense", "cls.predictions_ent.transform.dense"),
        rule("entity_head.norm", "cls.predictions_ent.transform.LayerNorm"),
    ),
    ignored=BERT_NAMES.ignored,
)
UNTIED_NAMES = untied(NAMES, r"cls\.predictions\.bias")


# ---- the encoder -----------------------------------------------------------------------------------------------------


class KnowledgeModel(PretrainedModel):
    """A model with a table of entities, whose names are in its checkpoint's directory."""

    config_class = ErnieKnowledgeConfig
    names = NAMES

    @property
    def knowledge(self) -> ErnieKnowledgeModel:
        """The model without a head."""
        model = self if self.base else getattr(self, self.names.prefix)
        assert isinstance(model, ErnieKnowledgeModel)
        return model

    @property
    def entity_names(self) -> list[str]:
        """The names of the table's rows; empty where it has none."""
        return self.knowledge.names_of_entities

    def set_entities(self, names: Sequence[str], vectors: Tensor) -> None:
        """Takes the entities of a graph: ``vectors`` [entities, entity_embedding_size], for example of
        ``models.entity_files.read_entities``. They are not trained."""
        width = self.config.vector_size()
        if vectors.shape != (len(names), width):
            expected = f"shape {(len(names), width)}: a vector of the model's width for each name"
            raise ValueError(f"{type(self).__name__}.set_entities: vectors: expected {expected}, got {vectors.shape}")
        table = self.knowledge.entity_embeddings
        table.weight = nn.Parameter(vectors.detach().clone().to(self.knowledge.embeddings.word.weight), False)
        self.knowledge.names_of_entities = list(names)
        self.config.num_entities = len(names)

    @classmethod
    def from_pretrained(cls: type[Model], directory: str | Path, **options: Any) -> Model:
        model = super().from_pretrained(directory, **options)
        path = checkpoint_directory(directory) / ENTITY_IDS
        if model.config.num_entities and path.is_file():
            names = read_names(path)
            if len(names) != model.config.num_entities:
                raise CheckpointError(f"{path}: expected {model.config.num_entities} entities, got {len(names)}")
            model.knowledge.names_of_entities = names
        return model

    def save_pretrained(self, directory: str | Path, **options: Any) -> None:
        super().save_pretrained(directory, **options)
        if self.entity_names:
            write_names(Path(directory) / ENTITY_IDS, self.entity_names)


class EntityEmbeddings(nn.Module):
    """The vectors of entities, which are not trained, and a linear layer where the model's entity stream has another
    width. The null entity, -1, is 0."""

    def __init__(self, entities: int, vector_size: int, width: int) -> None:
        super().__init__()
        self.vector_size = vector_size
        self.weight = nn.Parameter(torch.zeros(entities, vector_size), requires_grad=False) if entities else None
        self.projection = None if vector_size == width else nn.Linear(vector_size, width, bias=False)

    def forward(self, ids: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """``[A, width]``; without entities in ``dtype``."""
        vectors = self.vectors(ids, dtype)
        return vectors if self.projection is None else self.projection(vectors)

    def vectors(self, ids: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """``[A, vector_size]``; without entities in ``dtype``."""
        count = 0 if self.weight is None else len(self.weight)
        if ids.device.type == "cpu" and len(ids) and not -1 <= int(ids.min()) <= int(ids.max()) < count:
            got = int(ids.max()) if int(ids.max()) >= count else int(ids.min())
            raise ValueError(f"EntityEmbeddings: ids: expected a number from -1 to {count - 1}, got {got}")
        if self.weight is None:
            return torch.zeros(len(ids), self.vector_size, dtype=dtype, device=ids.device)
        known = (ids >= 0).unsqueeze(-1)
        return functional.embedding(ids.clamp(min=0), self.weight).masked_fill(~known, 0.0)


class ErnieKnowledgeModel(KnowledgeModel, BertModel):
    """The encoder, with a pooler on the first token."""

    config_class = ErnieKnowledgeConfig
    names = NAMES
    stack_class = KnowledgeTransformer
    layer_inputs = ("entities",)

    def __init__(self, config: EncoderConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config, add_pooling_layer)
        assert isinstance(config, ErnieKnowledgeConfig)
        self.entity_embeddings = EntityEmbeddings(config.num_entities, config.vector_size(), config.entity_hidden_size)
        self.names_of_entities: list[str] = []
        self.finish()

    def layers_of(self, config: EncoderConfig) -> list[PackedLayer]:
        assert isinstance(config, ErnieKnowledgeConfig)
        types = config.types()
        fused = [number for number, name in enumerate(types) if name != "sim"]
        return [
            self.layer_of(config) if name == "sim" else _knowledge_layer(config, name, last=number == fused[-1])
            for number, name in enumerate(types)
        ]

    def run_layers(
        self,
        x: Tensor,
        batch: PackedBatch,
        hidden_states: list[Tensor] | None,
        *,
        entities: Tensor | AlignedEntities | None = None,
    ) -> Tensor:
        if entities is None:
            ids = torch.full((batch.tokens,), -1, device=x.device, dtype=torch.int64)
            entities = AlignedEntities.of(ids, batch.cu_seqlens, batch.max_seqlen)
        elif isinstance(entities, Tensor):
            entities = AlignedEntities.of(batch.pack(entities), batch.cu_seqlens, batch.max_seqlen)
        vectors = self.entity_embeddings(entities.ids, self.embeddings.word.weight.dtype)
        where = (batch.cu_seqlens, batch.max_seqlen)
        states: Tensor = self.encoder(x, *where, entities=vectors, aligned=entities, hidden_states=hidden_states)
        return states


def _knowledge_layer(config: ErnieKnowledgeConfig, kind: str, *, last: bool) -> KnowledgeLayer:
    return KnowledgeLayer(
        config.hidden_size,
        config.num_attention_heads,
        config.intermediate_size,
        entity_width=config.entity_hidden_size,
        entity_heads=config.entity_num_attention_heads,
        entity_attention=kind == "norm",
        last=last,
        activation=config.hidden_act,
        dropout=config.hidden_dropout_prob,
        attention_dropout=config.attention_probs_dropout_prob,
        eps=config.layer_norm_eps,
        recompute=config.recompute,
        keep_activation=config.keep_activation,
    )


# ---- heads -----------------------------------------------------------------------------------------------------------


class ErnieKnowledgeHead(KnowledgeModel, BertHead):
    """A model around the encoder."""

    config_class, names, untied_names = ErnieKnowledgeConfig, NAMES, UNTIED_NAMES
    encoder_class = ErnieKnowledgeModel


class ErnieKnowledgeForMaskedLM(ErnieKnowledgeHead, BertForMaskedLM):
    """Predicts masked tokens."""


class ErnieKnowledgeForSequenceClassification(ErnieKnowledgeHead, BertForSequenceClassification):
    """Labels sequences: relations between two marked entities, or, with several labels each, the types of one."""


class ErnieKnowledgeForTokenClassification(ErnieKnowledgeHead, BertForTokenClassification):
    """Labels tokens."""


class ErnieKnowledgeForQuestionAnswering(ErnieKnowledgeHead, BertForQuestionAnswering):
    """Finds the span that answers a question."""


class ErnieKnowledgeForMultipleChoice(ErnieKnowledgeHead, BertForMultipleChoice):
    """Chooses between continuations."""


class EntityTargets(NamedTuple):
    """What the denoising entity auto-encoder predicts: the entity of some tokens, among candidates."""

    positions: Tensor  # int64 [n]: the tokens' numbers in the packed batch
    labels: Tensor  # int64 [n]: the numbers of their entities among the candidates
    candidates: Tensor  # int64 [K]: rows of the table; the null entity is one more candidate

    @staticmethod
    def of(entity_labels: Tensor) -> EntityTargets:
        """The original entity of each packed token, -100 for none: the candidates are those that occur. On a GPU
        this synchronizes."""
        positions = (entity_labels >= 0).nonzero().squeeze(1)
        candidates, labels = entity_labels.index_select(0, positions).unique(return_inverse=True)
        return EntityTargets(positions, labels, candidates)

    def to(self, device: torch.device | str, non_blocking: bool = True) -> EntityTargets:
        return EntityTargets(*(tensor.to(device, non_blocking=non_blocking) for tensor in self))

    def pin_memory(self) -> EntityTargets:
        return EntityTargets(*(tensor.pin_memory() for tensor in self))


class EntityHead(nn.Module):
    """Dense layer, activation and LayerNorm, from a token to a vector that is compared with those of entities."""

    def __init__(self, width: int, vector_size: int, *, activation: str, eps: float) -> None:
        super().__init__()
        self.activation = activation
        self.dense = nn.Linear(width, vector_size)
        self.norm = nn.LayerNorm(vector_size, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        return masked_lm_transform(self.dense, self.activation, self.norm, x)

    def loss(self, x: Tensor, table: EntityEmbeddings, targets: EntityTargets, reduction: str = "mean") -> Tensor:
        """The cross entropy of the tokens' entities; x is ``[T, C]``."""
        candidates = functional.pad(table.vectors(targets.candidates), (0, 0, 1, 0))  # the null entity first
        hidden = self(x.index_select(0, targets.positions))
        loss = ops.linear_cross_entropy(hidden, candidates.to(hidden), targets.labels + 1, reduction=reduction)
        assert isinstance(loss, Tensor)
        return loss


@dataclass
class KnowledgePreTrainingOutput(ModelOutput):
    loss: Tensor | None = None
    prediction_logits: Tensor | None = None
    seq_relationship_logits: Tensor | None = None
    entity_loss: Tensor | None = None  # the last part of the loss
    hidden_states: States = None
    attentions: States = None


class ErnieKnowledgeForPreTraining(ErnieKnowledgeHead, BertForPreTraining):
    """Predicts masked tokens, whether the second sentence follows the first, and the entities of tokens."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        assert isinstance(config, ErnieKnowledgeConfig)
        options: dict[str, Any] = {"activation": config.hidden_act, "eps": config.layer_norm_eps}
        self.entity_head = EntityHead(config.hidden_size, config.vector_size(), **options)
        self.finish()

    @classmethod
    def from_bert(cls, directory: str | Path, **changes: Any) -> ErnieKnowledgeForPreTraining:
        """A model whose token stream has the parameters of a BERT, as the paper begins; the others are drawn.

        Args:
            directory: The checkpoint, as in ``BertForPreTraining.from_pretrained``.
            changes: Fields of the configuration, such as ``entity_hidden_size`` and ``layer_types``.
        """
        bert = BertForPreTraining.from_pretrained(directory)
        fields = {field.name: getattr(bert.config, field.name) for field in dataclasses.fields(bert.config)}
        model = cls(ErnieKnowledgeConfig(**{**fields, "extra": {}, **changes}))
        model.load_state_dict(bert.state_dict(), strict=False)
        return model

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        entities: Tensor | AlignedEntities | None = None,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        entity_labels: Tensor | EntityTargets | None = None,
        positions: Tensor | None = None,
        max_predictions: int | None = None,
        output_logits: bool = False,
        **layout: Unpack[Layout],
    ) -> KnowledgePreTrainingOutput:
        """The sum of the losses if there are labels for all three.

        Args:
            entities: The entities that the model reads, some of them replaced or left out.
            entity_labels: The original ones in the shape of ``input_ids``, -100 where a token has none.
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids)
        encoded = self.encoder.encode(*inputs, entities=entities, **layout)
        loss, logits = Predicted(labels, positions, max_predictions, output_logits).run(self.lm_head, encoded)
        relationship = self.next_sentence(self.encoder.pool(encoded))
        entity_loss = None if entity_labels is None else self.entity_loss(encoded, entity_labels)
        if loss is not None and next_sentence_label is not None and entity_loss is not None:
            loss = loss + token_loss(relationship, next_sentence_label.flatten()) + entity_loss
        else:
            loss = None
        return KnowledgePreTrainingOutput(loss, logits, relationship, entity_loss, **encoded.returned())

    def entity_loss(self, encoded: Encoded, labels: Tensor | EntityTargets, reduction: str = "mean") -> Tensor:
        targets = EntityTargets.of(encoded.batch.pack(labels)) if isinstance(labels, Tensor) else labels
        return self.entity_head.loss(encoded.x, self.knowledge.entity_embeddings, targets, reduction)


class KnowledgePretraining(NextSentence):
    """The losses of a ``data.knowledge.KnowledgeBatch``."""

    terms = ("masked_lm", "next_sentence", "entities")

    def counts(self, batch: Any) -> tuple[int, ...]:
        return (*super().counts(batch), len(batch.entity_targets.labels))

    def forward(self, batch: Any) -> tuple[Tensor, ...]:
        model: ErnieKnowledgeForPreTraining = self.model
        layout: dict[str, Any] = {"cu_seqlens": batch.cu_seqlens, "max_seqlen": batch.max_seqlen, **LAST_STATES}
        encoded = model.encoder.encode(batch.input_ids, None, batch.token_type_ids, entities=batch.entities, **layout)
        logits = model.sentence_logits(model.encoder.pool(encoded)).float()
        sentences = functional.cross_entropy(logits, batch.sentence_labels, reduction="sum", ignore_index=IGNORED)
        return self.masked_lm(encoded, batch), sentences, model.entity_loss(encoded, batch.entity_targets, "sum")


FAMILY = Family(
    "ERNIE (Tsinghua)",
    ErnieKnowledgeConfig,
    {
        Head.NONE: ErnieKnowledgeModel,
        Head.MASKED_LM: ErnieKnowledgeForMaskedLM,
        Head.SEQUENCE_CLASSIFICATION: ErnieKnowledgeForSequenceClassification,
        Head.TOKEN_CLASSIFICATION: ErnieKnowledgeForTokenClassification,
        Head.QUESTION_ANSWERING: ErnieKnowledgeForQuestionAnswering,
        Head.MULTIPLE_CHOICE: ErnieKnowledgeForMultipleChoice,
        Head.PRETRAINING: ErnieKnowledgeForPreTraining,
    },
    pretraining=KnowledgePretraining,  # on mentions of entities, not on plain texts: there are no ``sequences``
    tokenizer="wordpiece",
)
