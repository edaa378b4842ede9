"""``Family``: the description of a model family for the rest of the package. Each model file defines its ``FAMILY``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from fasttfm.models.config import ModelConfig
from fasttfm.models.objectives import Pretraining
from fasttfm.models.pretrained import PretrainedModel


class Head(Enum):
    """The head of a model. The value describes what it computes."""

    NONE = "hidden states"
    PRETRAINING = "pre-training"
    MASKED_LM = "masked tokens"
    CAUSAL_LM = "next tokens"
    REPLACED_TOKENS = "replaced tokens"
    SEQUENCE_CLASSIFICATION = "labels of sequences"
    TOKEN_CLASSIFICATION = "labels of tokens"
    QUESTION_ANSWERING = "spans that answer"
    MULTIPLE_CHOICE = "the choice of an ending"
    GRAPH_CHOICE = "the choice of an answer with a graph"
    IMAGE_CLASSIFICATION = "labels of images"
    MASKED_IMAGE = "masked patches of images"


@dataclass(frozen=True)
class Family:
    """A model family. Fields are None if a family does not support something; commands that need it do not offer the
    family.

    Args:
        title: Its name in texts.
        config: Its configuration class, whose ``model_type`` is in checkpoints.
        models: Its model classes by their heads; tasks that need another head reject the family.
        command: Its name on the command line; ``model_type`` by default.
        pretraining: The losses that it is pre-trained on, over ``models[Head.PRETRAINING]``.
        sequences: The sequences that it is pre-trained on, a kind of ``data.SequenceFormat``.
        tokenizer: The kind of ``data.train_tokenizer``; None if it reads no text.
        separators: The number of separators between two texts, if the tokenizer does not add them itself.
        last_token: Whether the token of which classifiers read the state ends a sequence, with a segment of its own.
        template: Whether the special tokens around a text are those that its tokenizer adds, if any.
        positions: The configuration's field with the maximum length of sequences.
        unused_positions: Rows of the position table that no sequence uses.
        patching: The module of ``fasttfm.patching`` that patches transformers' models of the family.
        benchmark: The head of the model whose training step ``benchmarks/training_step.py`` measures.
    """

    title: str
    config: type[ModelConfig]
    models: Mapping[Head, type[PretrainedModel]]
    command: str = ""
    pretraining: type[Pretraining] | None = None
    sequences: str | None = None
    tokenizer: str | None = None
    separators: int = 1
    last_token: bool = False
    template: bool = False
    positions: str = "max_position_embeddings"
    unused_positions: int = 0
    patching: str | None = None
    benchmark: Head | None = None

    @property
    def default_size(self) -> str:
        """The size that ``fasttfm pretrain`` trains by default: the configuration's first, which is the smallest."""
        return next(iter(self.config.sizes))

    @property
    def name(self) -> str:
        return self.command or self.config.model_type

    @property
    def sizes(self) -> tuple[str, ...]:
        return tuple(self.config.sizes)

    @property
    def causal(self) -> bool:
        """Whether attention is causal."""
        return Head.CAUSAL_LM in self.models

    @property
    def task_tokens(self) -> bool:
        """Whether it is fine-tuned as GPT-1 is: a start, a delimiter and an extract token around and between texts."""
        return self.causal and not self.template

    @property
    def trains_on_text(self) -> bool:
        """Whether ``fasttfm pretrain`` can train it."""
        return None not in (self.pretraining, self.sequences, self.tokenizer)
