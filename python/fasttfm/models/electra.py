"""ELECTRA (Clark et al., 2020): BERT's encoder, pre-trained to detect which tokens a small generator has replaced.

    generator         loss_G = masked-LM loss; a token is sampled for every masked one
    discriminator     loss_D = binary cross entropy over all tokens: was this one replaced by another?
    loss              loss_G + 50 loss_D

Both share the embeddings. Tables may be narrower than the model, followed by a linear layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from fasttfm import ops
from fasttfm.models.bert import (
    BASE_NAMES,
    BertConfig,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertHead,
    BertModel,
    EncoderConfig,
    word_embeddings,
)
from fasttfm.models.checkpoint_files import CheckpointError
from fasttfm.models.checkpoint_names import Names, rule
from fasttfm.models.directories import PARTS, checkpoint_directory
from fasttfm.models.family import Family, Head
from fasttfm.models.kagnet import GRAPH_NAMES, GraphChoice, GraphFields
from fasttfm.models.objectives import ReplacedTokenDetection
from fasttfm.models.outputs import LMOutput, ModelOutput
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.models.roberta import ClassificationHead
from fasttfm.models.text_model import LAST_STATES, Encoded, Layout
from fasttfm.nn import Embeddings, MaskedLMHead, PackedBatch
from fasttfm.nn.lm_heads import IGNORED, Sampled
from fasttfm.nn.parts import linear_activation
from fasttfm.nn.plain import is_watched

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass
class ElectraConfig(BertConfig):
    model_type: ClassVar[str] = "electra"
    sizes: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": {
            "num_hidden_layers": 2,
            "hidden_size": 128,
            "num_attention_heads": 2,
            "intermediate_size": 512,
            "generator_size": 0.5,
        },
        "small": {},
        "base": {
            "embedding_size": 768,
            "hidden_size": 768,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "generator_size": 1 / 3,
        },
        "large": {**BertConfig.sizes["large"], "embedding_size": 1024},
    }
    required: ClassVar[dict[str, tuple[Any, ...]]] = {
        **BertConfig.required,
        "summary_type": ("first",),
        "summary_use_proj": (True,),
        "summary_activation": ("gelu",),
    }

    embedding_size: int = 128
    hidden_size: int = 256
    num_attention_heads: int = 4
    intermediate_size: int = 1024
    summary_last_dropout: float = 0.1
    generator_size: float = 0.25  # of ElectraForJointPreTraining's generator: its widths, as a share of these
    discriminator_weight: float = 50.0  # of its loss

    def generator(self) -> ElectraConfig:
        """The generator's configuration: as deep, less wide, with the same embeddings."""
        return replace(
            self,
            hidden_size=round(self.hidden_size * self.generator_size),
            num_attention_heads=max(1, round(self.num_attention_heads * self.generator_size)),
            intermediate_size=round(self.intermediate_size * self.generator_size),
            extra=dict(self.extra),
        )


NAMES = Names(
    prefix="electra",
    base=(*BASE_NAMES[:-1], rule("embeddings.projection", "embeddings_project")),  # there is no pooler
    heads=(
        rule("lm_head.dense", "generator_predictions.dense"),
        rule("lm_head.norm", "generator_predictions.LayerNorm"),
        rule("lm_head.decoder", "generator_lm_head"),
        rule("discriminator_head", "discriminator_predictions"),
        rule("summary", "sequence_summary.summary"),
        rule("classifier", "classifier"),
        *GRAPH_NAMES,
        rule("qa_outputs", "qa_outputs"),
    ),
    ignored=(r"electra\.embeddings\.position_ids",),
)


# ---- the encoder -----------------------------------------------------------------------------------------------------


class ElectraModel(BertModel):
    """The encoder; called as ``BertModel`` is."""

    config_class = ElectraConfig
    names = NAMES

    def __init__(self, config: ElectraConfig) -> None:
        super().__init__(config, add_pooling_layer=False)

    def embeddings_of(self, config: EncoderConfig) -> Embeddings:
        assert isinstance(config, ElectraConfig)
        width = config.hidden_size
        return word_embeddings(config, config.embedding_size, None if config.embedding_size == width else width)


# ---- heads -----------------------------------------------------------------------------------------------------------


class ElectraHead(BertHead):
    """A model around the encoder."""

    config_class, names, untied_names = ElectraConfig, NAMES, NAMES

    def encoder_of(self, config: EncoderConfig, pooler: bool) -> BertModel:
        assert isinstance(config, ElectraConfig)
        return ElectraModel(config)

    def lm_head_of(self, config: EncoderConfig) -> MaskedLMHead:
        assert isinstance(config, ElectraConfig)
        sizes = (config.hidden_size, config.vocab_size)
        return MaskedLMHead(*sizes, embedding_width=config.embedding_size, eps=config.layer_norm_eps)


class ElectraForMaskedLM(ElectraHead, BertForMaskedLM):
    """The generator: predicts masked tokens."""


class ElectraForTokenClassification(ElectraHead, BertForTokenClassification):
    """Labels tokens."""


class ElectraForQuestionAnswering(ElectraHead, BertForQuestionAnswering):
    """Finds the span that answers a question."""


class ElectraForSequenceClassification(ElectraHead, BertForSequenceClassification):
    """Labels sequences by a head of two layers on the first token."""

    def head_of(self, config: EncoderConfig) -> nn.Module:
        return ClassificationHead(config.hidden_size, config.num_labels, functional.gelu)

    def classify(self, encoded: Encoded) -> Tensor:
        logits: Tensor = self.classifier(encoded.first_tokens(), self.dropout)
        return logits


class ElectraForMultipleChoice(ElectraHead, BertForMultipleChoice):
    """Chooses between continuations."""

    def __init__(self, config: ElectraConfig) -> None:
        super().__init__(config)
        self.summary = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.summary_last_dropout)
        self.finish()

    def summarise(self, encoded: Encoded) -> Tensor:
        summary: Tensor = self.dropout(functional.gelu(self.summary(encoded.first_tokens())))
        return summary


class DiscriminatorHead(nn.Module):
    """Two layers, to one logit for each token."""

    def __init__(self, width: int, activation: str) -> None:
        super().__init__()
        self.activation = activation
        self.dense = nn.Linear(width, width)
        self.dense_prediction = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = linear_activation(self.dense, self.activation, x)
        logits: Tensor = self.dense_prediction(hidden)
        return logits.squeeze(-1)


class ElectraForPreTraining(ElectraHead):
    """The discriminator: tells replaced tokens (label 1) from original ones (label 0)."""

    def __init__(self, config: ElectraConfig) -> None:
        super().__init__(config, pooler=False)
        self.discriminator_head = DiscriminatorHead(config.hidden_size, config.hidden_act)
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
    ) -> LMOutput:
        encoded = self.encoder.encode(input_ids, attention_mask, token_type_ids, position_ids, **layout)
        logits = self.discriminator_head(encoded.x)
        loss = None if labels is None else ops.replaced_token_loss(logits, encoded.batch.pack(labels))
        return LMOutput(loss, encoded.batch.unpack(logits), **encoded.returned())


# ---- pre-training of both --------------------------------------------------------------------------------------------

_SHARED = ("word.weight", "position.weight", "segment.weight", "norm.weight", "norm.bias")


@dataclass
class ElectraJointOutput(ModelOutput):
    """Losses, and what the discriminator read; in the layout of the call."""

    loss: Tensor | None = None
    generator_loss: Tensor | None = None
    discriminator_loss: Tensor | None = None
    logits: Tensor | None = None  # the discriminator's
    sampled_ids: Tensor | None = None  # the input with the generator's samples at masked positions
    replaced: Tensor | None = None  # bool: where that differs from the original token


class ElectraForJointPreTraining(PretrainedModel):
    """Generator and discriminator, trained together. What embeddings hold is one set of tensors.

    A checkpoint is two, in the folders ``generator`` and ``discriminator``: transformers opens either.
    """

    config_class = ElectraConfig

    def __init__(self, config: ElectraConfig, generator_config: ElectraConfig | None = None) -> None:
        super().__init__(config)
        smaller = config.generator() if generator_config is None else generator_config
        for name in ("vocab_size", "embedding_size", "max_position_embeddings", "type_vocab_size"):
            expected, got = getattr(config, name), getattr(smaller, name)
            if got != expected:
                raise ValueError(
                    f"ElectraForJointPreTraining: generator_config.{name}: expected the discriminator's {expected}, "
                    f"got {got}"
                )
        self.discriminator = ElectraForPreTraining(config)
        self.generator = ElectraForMaskedLM(smaller)
        self.tie_weights()

    def tied(self) -> dict[str, str]:
        inside = "electra.embeddings"
        shared = {f"generator.{inside}.{name}": f"discriminator.{inside}.{name}" for name in _SHARED}
        within = self.generator.tied()
        words = {f"generator.{name}": shared[f"generator.{source}"] for name, source in within.items()}
        return {**shared, **words}

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        labels: Tensor,
        positions: Tensor | None = None,
        max_predictions: int | None = None,
        lengths: Sequence[int] | Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> ElectraJointOutput:
        """Both losses.

        Args:
            input_ids: Token ids, some of them masked.
            labels: The original token for each masked one, -100 for the others; with ``positions`` one for each of
                them. ``positions`` and ``max_predictions`` are those of ``nn.MaskedLMHead.loss``.
        """
        for name in ("generator", "discriminator"):
            if is_watched(self.get_submodule(name)):
                expected = "a module without hooks (its parts are called, not itself)"
                raise ValueError(f"ElectraForJointPreTraining: {name}: expected {expected}, got one with hooks")
        batch = PackedBatch.of(input_ids, attention_mask, lengths=lengths, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
        ids = batch.pack(input_ids)
        segments = None if token_type_ids is None else batch.pack(token_type_ids.expand_as(input_ids))
        token_positions = self.discriminator.encoder.positions(input_ids, ids, position_ids, batch)
        packed: dict[str, Any] = {"cu_seqlens": batch.cu_seqlens, "max_seqlen": batch.max_seqlen, **LAST_STATES}

        encoded = self.generator.encoder.encode(ids, None, segments, token_positions, **packed)
        words = batch.pack(labels) if positions is None else labels
        sampled = self.generator.lm_head.sample(encoded.x, words, positions=positions, max_predictions=max_predictions)
        sampled_ids, replaced = put_back(ids, sampled)

        encoded = self.discriminator.encoder.encode(sampled_ids, None, segments, token_positions, **packed)
        logits = self.discriminator.discriminator_head(encoded.x)
        discriminator_loss = ops.replaced_token_loss(logits, replaced)
        loss = sampled.loss + self.config.discriminator_weight * discriminator_loss
        unpacked = (batch.unpack(tensor) for tensor in (logits, sampled_ids, replaced))
        return ElectraJointOutput(loss, sampled.loss, discriminator_loss, *unpacked)

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **changes: Any,
    ) -> ElectraForJointPreTraining:
        """Reads both folders. Their embeddings are equal, or it is an error; ``changes`` are those of both."""
        path = checkpoint_directory(directory)
        discriminator = ElectraForPreTraining.from_pretrained(path / "discriminator", **changes)
        generator = ElectraForMaskedLM.from_pretrained(path / "generator", **changes)
        with torch.device("meta"):
            model = cls(discriminator.config, generator.config)
        model.discriminator, model.generator = discriminator, generator
        for name, source in model.tied().items():
            if not torch.equal(model.get_parameter(name), model.get_parameter(source)):
                raise CheckpointError(f"{path}: {name}: expected the values of {source}, which is shared")
        model.tie_weights()
        return model.to(device=device, dtype=dtype).eval()

    def save_pretrained(self, directory: str | Path, **options: Any) -> None:
        """Writes both folders."""
        for name in ("generator", "discriminator"):
            getattr(self, name).save_pretrained(Path(directory) / name, **options)

    def save_config(self, directory: str | Path) -> None:
        """Writes the configurations of both folders."""
        for name in PARTS:
            getattr(self, name).save_config(Path(directory) / name)


def put_back(ids: Tensor, sampled: Sampled) -> tuple[Tensor, Tensor]:
    """The token ids [T] with samples at masked positions, and which of them differ from the originals.

    A position of a filler may coincide with a real one, so changes are added, with 0 for fillers.
    """
    counted = sampled.labels != IGNORED
    changes = torch.where(counted, sampled.words - ids.index_select(0, sampled.positions), 0)
    differs = (counted & (sampled.words != sampled.labels)).to(ids.dtype)
    replaced = torch.zeros_like(ids).index_add(0, sampled.positions, differs)
    return ids.index_add(0, sampled.positions, changes.to(ids.dtype)), replaced.bool()


@dataclass
class ElectraKagNetConfig(GraphFields, ElectraConfig):
    """The configuration of ``ElectraKagNet``: the encoder's and the graph's."""


class ElectraKagNet(GraphChoice, ElectraForMultipleChoice):  # type: ignore[misc]  # its forward takes a graph
    """Chooses between answers with the paths of a graph of concepts."""

    config_class = ElectraKagNetConfig


FAMILY = Family(
    "ELECTRA",
    ElectraConfig,
    {
        Head.NONE: ElectraModel,
        Head.MASKED_LM: ElectraForMaskedLM,
        Head.SEQUENCE_CLASSIFICATION: ElectraForSequenceClassification,
        Head.TOKEN_CLASSIFICATION: ElectraForTokenClassification,
        Head.QUESTION_ANSWERING: ElectraForQuestionAnswering,
        Head.MULTIPLE_CHOICE: ElectraForMultipleChoice,
        Head.GRAPH_CHOICE: ElectraKagNet,
        Head.PRETRAINING: ElectraForJointPreTraining,
        Head.REPLACED_TOKENS: ElectraForPreTraining,
    },
    pretraining=ReplacedTokenDetection,
    sequences="electra",
    tokenizer="wordpiece",
    patching="electra",
    benchmark=Head.REPLACED_TOKENS,
)
