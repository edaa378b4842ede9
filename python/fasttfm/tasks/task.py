"""``Task``: the interface of a kind of task, from its examples to its scores."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fasttfm.data.lines import DataError
from fasttfm.data.tokenizer import Tokenizer
from fasttfm.inference.network import Output
from fasttfm.inference.opening import TASK_KEY
from fasttfm.inference.spans import AnswerSpans
from fasttfm.models.families import longest_input
from fasttfm.models.family import Family, Head
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.tasks.inputs import Feature, Format, TaskBatch, collate
from fasttfm.tasks.metrics import Scores
from fasttfm.tasks.results import Result
from fasttfm.train.settings import at_least

Predictions = list[Any]  # one for each example, in their order


@dataclass(frozen=True)
class Language:
    """A model's input: its tokenizer, its family and the format of its sequences."""

    tokenizer: Tokenizer
    family: Family
    format: Format

    def save(self, directory: Path, config: Any) -> None:
        """Writes the tokenizer into a model's directory, with the model's maximum length."""
        self.tokenizer.save(directory, model_max_length=longest_input(config), config=config)


class Task(ABC):
    """A kind of task: the format of its examples, the head of its models, its predictions and scores.

    Args:
        language: The model's input.
        train: The training examples, which define the labels; None for a model that is already trained.
        known: The labels of the trained model, in its order.
        auxiliary: The weight of the causal LM loss of the examples, for models with such a loss (``has_auxiliary``);
            0.5 by default.
    """

    name: ClassVar[str]
    about: ClassVar[str]  # a short description, for help texts
    file_format: ClassVar[str]  # the format of files of examples
    read_file: ClassVar[Any]  # a function that returns the examples of a file
    reads: ClassVar[str] = "text"  # or "images"
    line_format: ClassVar[str] = "none"  # the format of an example in a line of text, for predictions
    json_fields: ClassVar[str] = "none"  # the fields of an example in a line of .jsonl, for predictions
    head: ClassVar[Head]
    session_output: ClassVar[Output] = Output.LOGITS  # what a session computes (``on_session``)
    max_length: ClassVar[int] = 128  # the default maximum number of tokens, if the model has as many positions
    options: ClassVar[tuple[str, ...]] = ()  # arguments of the constructor that only this task has
    kept: ClassVar[tuple[str, ...]] = ()  # arguments of the constructor that a checkpoint stores
    main_score: ClassVar[str]  # the score that selects the best epoch
    processes: int = 1  # which train together; ``FineTuning`` sets it
    distills: ClassVar[bool] = True  # whether a student can learn from a teacher's logits

    def __init__(
        self,
        language: Language,
        train: Sequence[Any] | None,
        *,
        known: Sequence[str] = (),
        auxiliary: float | None = None,
    ) -> None:
        if train is not None and not train:
            raise DataError(f"{self.name}: expected training examples, got none")
        self.language = language
        if auxiliary is not None:
            at_least("auxiliary", auxiliary, 0)
            if not self.has_auxiliary:
                expected = "a GPT-1, or a GPT with choice (others have no auxiliary loss)"
                raise ValueError(f"auxiliary: expected {expected}, got {language.family.title} with {self.name}")
        self.auxiliary = 0.5 if auxiliary is None else auxiliary
        self.labels = list(known) if train is None else self.labels_of(train, known)

    @property
    def has_auxiliary(self) -> bool:
        """Whether fine-tuning adds the causal LM loss of the examples, as for GPT-1."""
        return False

    def auxiliary_field(self) -> dict[str, Any]:
        """The field of the model's configuration for ``auxiliary``, if the model has such a loss."""
        return {"auxiliary_loss_weight": self.auxiliary} if self.has_auxiliary else {}

    @classmethod
    def for_values(cls) -> type[Task] | None:
        """The regression variant of the task; None if there is none."""
        return None

    def labels_of(self, train: Sequence[Any], known: Sequence[str]) -> list[str]:
        """The names of the labels in the order of their numbers; empty for a task without labels."""
        return []

    def check_labels(self, examples: Sequence[Any], source: str) -> None:
        """Raises DataError if ``examples`` have labels that the training examples lack, which no model can predict.
        ``source`` names them in the message."""
        return

    def configuration(self) -> dict[str, Any]:
        """The fields of the model's configuration that the task sets."""
        return {}

    # ---- examples in -------------------------------------------------------------------------------------------------

    def example(self, value: Any) -> Any:
        """Converts what a caller passes to an example: texts, a dictionary (a line of a .jsonl file) or an example.
        Raises DataError for anything else."""
        raise self._no_predictions()

    def example_of_line(self, line: str) -> Any:
        """The example of a line of plain text, whose texts are separated by tabs."""
        return self.example(tuple(line.split("\t")) if "\t" in line else line)

    def is_example(self, value: Any) -> bool:
        """Whether what a caller passes is one example, and not several."""
        return isinstance(value, (str, tuple, Mapping))

    @abstractmethod
    def features(self, examples: Sequence[Any]) -> list[Feature]:
        """The features of these examples, which are the model's inputs."""

    def remark(self, features: Sequence[Feature]) -> str | None:
        """A sentence about these features that a user should read before the training; None if there is none."""
        return None

    @abstractmethod
    def targets(self, batch: TaskBatch) -> dict[str, Tensor]:
        """The arguments with which the model computes its loss; every feature of the batch has a target."""

    def batch(self, features: Sequence[Feature]) -> TaskBatch:
        """A packed batch; with targets if all its features have one."""
        batch = collate(features, segments=self.language.format.segments)
        if all(feature.target is not None for feature in features):
            batch.targets = self.targets(batch)
            batch.count = self.count(batch)
        return batch

    def label_numbers(self, features: Sequence[Feature]) -> Tensor:
        """The numbers of all labels of features that have targets."""
        return self.batch(features).targets["labels"]

    def count(self, batch: TaskBatch) -> float:
        """The number of elements over which the loss of a batch with targets is a mean."""
        return len(batch.features)

    @property
    def terms(self) -> tuple[str, ...]:
        """The names of ``losses``. With an auxiliary loss they are GPT-1's L2 of the labels and L1 of the tokens, whose
        weighted sum is its L3."""
        return (f"L2_{self.name}", "L1_causal_lm") if self.has_auxiliary and self.auxiliary else (self.name,)

    @property
    def weights(self) -> tuple[float, ...]:
        return (1.0, self.auxiliary)[: len(self.terms)]

    def losses(self, model: Any, batch: TaskBatch) -> tuple[Tensor, ...]:
        """The terms of the loss of a batch with targets."""
        return self.terms_of(model(**batch.inputs(), **batch.targets))

    def terms_of(self, output: Any) -> tuple[Tensor, ...]:
        """The losses in a model's output."""
        losses: tuple[Tensor, ...] = (output.loss,)
        if getattr(output, "mc_loss", None) is not None:
            losses = output.mc_loss, output.loss
        elif getattr(output, "lm_loss", None) is not None:
            losses = output.classification_loss, output.lm_loss
        return losses[: len(self.terms)]

    def loss(self, model: Any, batch: TaskBatch) -> Tensor:
        """The weighted sum of ``losses``."""
        first, *others = self.losses(model, batch)
        return sum((weight * loss for weight, loss in zip(self.weights[1:], others, strict=True)), first)

    # ---- answers out -------------------------------------------------------------------------------------------------

    def logits(self, model: Any, batch: TaskBatch) -> Tensor:
        """The model's logits, one row for every feature: [features, classes] in most tasks."""
        logits: Tensor = model(**batch.inputs()).logits
        return logits

    @property
    def on_session(self) -> bool:
        """Whether an ``inference.Session`` computes what ``read_rows`` takes."""
        return False

    @property
    def answers_of_session(self) -> AnswerSpans | None:
        """How the session finds spans, if the task reads those."""
        return None

    def session_segments(self, batch: TaskBatch) -> Tensor | None:
        """The segments that the session reads."""
        return batch.token_type_ids

    def read_rows(self, batch: TaskBatch, rows: np.ndarray) -> list[Any]:
        """What ``read`` returns, from the rows of the session's ``session_output``: by default the head's logits, one
        for each sequence or token."""
        return self.read(batch, self.logits_of_rows(batch, torch.from_numpy(rows)))

    def logits_of_rows(self, batch: TaskBatch, rows: Tensor) -> Tensor:
        """Computes ``logits`` from the head's logits ``rows``, one for each sequence or token."""
        return rows

    def rows(self, batch: TaskBatch) -> int:
        """The number of rows of ``logits``."""
        return len(batch.features)

    @abstractmethod
    def read(self, batch: TaskBatch, logits: Tensor) -> list[Any]:
        """Each feature's part of the logits, on the CPU, in the form that ``results`` takes."""

    def results(self, examples: Sequence[Any], features: Sequence[Feature], read: Sequence[Any]) -> list[Any]:
        """The result of each example, from what ``read`` returned for its features."""
        raise self._no_predictions()

    def prediction(self, result: Any) -> Any:
        """The part of a result that is scored."""
        raise self._no_predictions()

    def predictions(self, examples: Sequence[Any], features: Sequence[Feature], read: Sequence[Any]) -> Predictions:
        """The prediction for each example, from what ``read`` returned for its features."""
        return [self.prediction(result) for result in self.results(examples, features, read)]

    @abstractmethod
    def scores(self, examples: Sequence[Any], predictions: Predictions) -> Scores:
        """The scores of predictions."""

    def domain_scores(self, examples: Sequence[Any], predictions: Predictions) -> dict[str, Scores]:
        """The scores of the examples of each domain; empty unless the file tells several."""
        return {}

    def labelled(self, examples: Sequence[Any]) -> bool:
        """Whether examples can be scored."""
        return all(example.label is not None for example in examples)

    @abstractmethod
    def majority(self, train: Sequence[Any], examples: Sequence[Any]) -> Predictions:
        """The majority baseline: predicts the most frequent answer of ``train`` for every example."""

    def inputs(self, example: Any) -> dict[str, Any]:
        """An example's texts, by name."""
        raise self._no_predictions()

    def gold(self, example: Any) -> Any:
        """The right answer; None if it is not known."""
        raise self._no_predictions()

    def record(self, example: Any, result: Result) -> dict[str, Any]:
        """An example with its result, as an object of a .jsonl file."""
        gold = self.gold(example)
        return {**self.inputs(example), **asdict(result), **({} if gold is None else {"gold": gold})}

    def table(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        """A record as rows of a .csv file: one for most tasks."""
        row: dict[str, Any] = {}
        for name, value in record.items():
            if isinstance(value, dict):
                prefix = "probability" if name == "probabilities" else name
                row |= {f"{prefix}_{key}": field for key, field in value.items()}
            else:
                row[name] = json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value
        return [row]

    def without_text(self, example: Any) -> Any:
        """The part of an example that ``scores`` needs."""
        raise self._no_predictions()

    @abstractmethod
    def files(self, examples: Sequence[Any], predictions: Predictions) -> dict[str, str]:
        """The predictions as files: names and contents."""

    def _no_predictions(self) -> DataError:
        return DataError(f"{self.name}: expected a task with predictions; fasttfm embed computes vectors")

    def adjust(self, model: PretrainedModel) -> None:
        """Writes the labels, where transformers reads them, and ``description`` into the model's configuration."""
        model.config.extra[TASK_KEY] = self.description()
        if self.labels:
            model.config.extra["id2label"] = {str(number): label for number, label in enumerate(self.labels)}
            model.config.extra["label2id"] = {label: number for number, label in enumerate(self.labels)}

    def save(self, directory: Path, config: Any) -> None:
        """Writes further files that a saved model with this configuration needs into its directory."""
        return

    def description(self) -> dict[str, Any]:
        """The settings that a checkpoint stores under ``TASK_KEY``: ``task`` and ``values`` identify the class,
        ``max_length`` is the maximum number of tokens, and ``kept`` lists further arguments of the constructor."""
        length = self.language.format.max_length
        return {"task": self.name, "max_length": length, "values": False, "threshold": None}


def in_known_order(labels: set[str], known: Sequence[str]) -> list[str]:
    """The labels in the order of the trained model if it has the same labels, else sorted."""
    return list(known) if set(known) == labels and len(known) == len(labels) else sorted(labels)
