"""Model outputs with transformers' attributes, by name, by index or as a tuple; what was not requested is None."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor


@dataclass
class ModelOutput:
    """Attributes that are not None can also be read by index, in order, or as from a dictionary, as in transformers.
    Iteration is over their values."""

    def __init_subclass__(cls) -> None:
        # Distributed wrappers and torch.export look for the tensors inside.
        pytree.register_pytree_node(
            cls,
            lambda output: ([getattr(output, name) for name in output._names()], None),
            lambda values, _: cls(*values),
            serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        )

    @classmethod
    def _names(cls) -> tuple[str, ...]:
        return cls.__match_args__  # the fields, in a form that torch.compile can read

    def to_tuple(self) -> tuple[Any, ...]:
        values = (getattr(self, name) for name in self._names())
        return tuple(value for value in values if value is not None)

    def keys(self) -> list[str]:
        return [name for name in self._names() if getattr(self, name) is not None]

    def values(self) -> list[Any]:
        return [getattr(self, name) for name in self.keys()]

    def items(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in self.keys()]

    def get(self, key: str, default: Any = None) -> Any:
        return getattr(self, key) if key in self else default

    def __contains__(self, key: object) -> bool:
        """Whether there is an attribute of this name that is not None, as in transformers."""
        return key in self.keys()

    def __getitem__(self, key: int | slice | str) -> Any:
        return getattr(self, key) if isinstance(key, str) else self.to_tuple()[key]

    def __len__(self) -> int:
        return len(self.to_tuple())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.to_tuple())


States = tuple[Tensor, ...] | None  # the embeddings' output and every layer's


@dataclass
class BaseModelOutput(ModelOutput):
    last_hidden_state: Tensor
    pooler_output: Tensor | None = None
    hidden_states: States = None
    attentions: States = None


@dataclass
class LMOutput(ModelOutput):
    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: States = None
    attentions: States = None


@dataclass
class DoubleHeadsOutput(ModelOutput):
    """Outputs of the causal LM and of the choice between continuations."""

    loss: Tensor | None = None
    mc_loss: Tensor | None = None
    logits: Tensor | None = None
    mc_logits: Tensor | None = None
    hidden_states: States = None
    attentions: States = None


@dataclass
class PreTrainingOutput(ModelOutput):
    loss: Tensor | None = None
    prediction_logits: Tensor | None = None
    seq_relationship_logits: Tensor | None = None
    hidden_states: States = None
    attentions: States = None


@dataclass
class ClassifierOutput(ModelOutput):
    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: States = None
    attentions: States = None


@dataclass
class AuxiliaryClassifierOutput(ClassifierOutput):
    """GPT-1's losses, whose weighted sum is ``loss``."""

    classification_loss: Tensor | None = None
    lm_loss: Tensor | None = None


@dataclass
class MaskedImageOutput(ModelOutput):
    """The pixels of images, with those of masked patches reconstructed."""

    loss: Tensor | None = None
    reconstruction: Tensor | None = None
    hidden_states: States = None
    attentions: States = None


@dataclass
class GraphChoiceOutput(ModelOutput):
    """Scores of answers, and the weights of the paths and pairs of concepts of their graphs (``nn.GraphBatch``)."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    path_weights: Tensor | None = None
    pair_weights: Tensor | None = None
    hidden_states: States = None
    attentions: States = None


@dataclass
class QuestionAnsweringOutput(ModelOutput):
    """Logits of a span's first and last token."""

    loss: Tensor | None = None
    start_logits: Tensor | None = None
    end_logits: Tensor | None = None
    hidden_states: States = None
    attentions: States = None

    def no_answer_scores(self) -> Tensor:
        """The score of "no answer" (SQuAD 2.0), to be compared with the spans' scores: the sum of both logits of the
        first token. For padded calls."""
        assert self.start_logits is not None
        assert self.end_logits is not None
        return self.start_logits[:, 0] + self.end_logits[:, 0]
