"""The heads of pre-trained models as tasks: next sentence, sentence order, replaced tokens. They predict, and do not
train: ``fasttfm pretrain`` has trained them.

    next-sentence    BERT     does the second text follow the first? IsNext or NotNext
    sentence-order   ALBERT   are two consecutive texts in their order? in_order or swapped
    replaced-tokens  ELECTRA  which tokens of a text were replaced? a probability for each token
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from fasttfm.data.lines import DataError
from fasttfm.data.task_files import BY_NAME, Columns, read_texts
from fasttfm.models.checkpoint_files import read_json
from fasttfm.models.families import objectives_of
from fasttfm.models.family import Family, Head
from fasttfm.models.objectives import MaskedLMWithSentences, NextSentence, ReplacedTokenDetection, SentenceOrder
from fasttfm.tasks.example_fields import PAIR_NAMES, TEXT_NAMES, field, unusable
from fasttfm.tasks.inputs import Feature, TaskBatch
from fasttfm.tasks.labels import PairTask
from fasttfm.tasks.metrics import Scores
from fasttfm.tasks.results import ReplacedResult
from fasttfm.tasks.task import Language, Predictions, Task
from fasttfm.train.run_directory import SETTINGS

# ---- two sentences ---------------------------------------------------------------------------------------------------


class SentencePairTask(PairTask):
    """The head that reads the pooled state of two texts. Its labels are fixed: label 0 is that of consecutive texts."""

    classes: ClassVar[tuple[str, str]]
    head = Head.PRETRAINING
    max_length = 512
    options = ()
    kept = ()

    def __init__(self, language: Language, train: Sequence[Any] | None, **options: Any) -> None:
        super().__init__(language, train, **{**options, "known": self.classes})

    def labels_of(self, train: Sequence[Any], known: Sequence[str]) -> list[str]:
        raise _no_training(self.name)

    def example(self, value: Any) -> Any:
        example = super().example(value)
        if example.second is None:
            raise unusable(self.name, "two texts", value)
        return example

    def logits(self, model: Any, batch: TaskBatch) -> Tensor:
        inputs = batch.inputs()
        encoded = model.encoder.encode(inputs.pop("input_ids"), None, inputs.pop("token_type_ids", None), **inputs)
        logits: Tensor = model.sentence_logits(model.encoder.pool(encoded))
        return logits


class NextSentenceTask(SentencePairTask):
    """BERT's next sentence prediction."""

    name = "next-sentence"
    about = "does the second text follow the first?"
    classes = ("IsNext", "NotNext")


class SentenceOrderTask(SentencePairTask):
    """ALBERT's sentence order prediction."""

    name = "sentence-order"
    about = "are two consecutive texts in their order?"
    classes = ("in_order", "swapped")


# ---- replaced tokens -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplacedExample:
    """A text, which of its tokens were replaced, and the original text; None if this is not known."""

    text: str
    replaced: list[bool] | None
    original: str | None = None
    # The ids of the text and the characters of its tokens, if a generator has replaced some: the tokenizer might divide
    # the text into others.
    ids: list[int] | None = None
    spans: list[tuple[int, int]] | None = None


class ReplacedTokensTask(Task):
    """ELECTRA's discriminator: the probability of each token of a text to be a replacement. A text that is too long is
    read in pieces."""

    name = "replaced-tokens"
    about = "which tokens of a text were replaced?"
    file_format = "tsv, csv, jsonl or parquet with a text"
    line_format = "the text, or text, tab, original text"
    json_fields = "text, original"
    head = Head.REPLACED_TOKENS
    max_length = 512
    main_score = "f1"
    distills = False

    def labels_of(self, train: Sequence[Any], known: Sequence[str]) -> list[str]:
        raise _no_training(self.name)

    def read_file(self, path: Any, columns: Columns = BY_NAME) -> list[ReplacedExample]:
        """The texts of a table; a second text is the original."""
        return [self._compared(pair.first, pair.second) for pair in read_texts(path, columns)]

    def example(self, value: Any) -> Any:
        if isinstance(value, ReplacedExample):
            return value
        text, original = value, None
        if isinstance(value, Mapping):
            text, original = field(value, TEXT_NAMES), field(value, ("original", *PAIR_NAMES))
        elif isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2:
            text, original = value
        if not isinstance(text, str) or not isinstance(original, str | None):
            raise unusable(self.name, "a text, and perhaps its original", value)
        return self._compared(text, original)

    def _compared(self, text: str, original: str | None) -> ReplacedExample:
        """The tokens that differ from those at the same position of the original are replaced."""
        if original is None:
            return ReplacedExample(text, None)
        ids, others = (self.language.tokenizer.encode(side) for side in (text, original))
        if len(ids) != len(others):
            expected = f"an original of {len(ids)} tokens, as its text has"
            raise DataError(f"{self.name}: expected {expected}, got {len(others)}: {original!r:.60}")
        return ReplacedExample(text, [id != other for id, other in zip(ids, others, strict=True)], original)

    def features(self, examples: Sequence[Any]) -> list[Feature]:
        form = self.language.format
        room = form.max_length - len(form.first) - len(form.last)
        features = []
        for index, example in enumerate(examples):
            ids = self.language.tokenizer.encode(example.text) if example.ids is None else example.ids
            for start in range(0, max(1, len(ids)), room):
                features.append(Feature(index, [form.one(ids[start : start + room])]))
        return features

    def targets(self, batch: TaskBatch) -> dict[str, Tensor]:
        raise _no_training(self.name)

    def rows(self, batch: TaskBatch) -> int:
        return batch.tokens

    def read(self, batch: TaskBatch, logits: Tensor) -> list[Any]:
        """The probabilities of each feature's tokens, without special tokens."""
        form = self.language.format
        values: np.ndarray = logits.float().sigmoid().cpu().numpy()
        bounds = batch.cu_seqlens.tolist()
        return [
            values[begin + len(form.first) : end - len(form.last)].tolist() for begin, end in itertools.pairwise(bounds)
        ]

    def results(self, examples: Sequence[Any], features: Sequence[Feature], read: Sequence[Any]) -> list[Any]:
        probabilities: list[list[float]] = [[] for _ in examples]
        for feature, values in zip(features, read, strict=True):
            probabilities[feature.example] += values
        results = []
        for example, values in zip(examples, probabilities, strict=True):
            spans = example.spans or self.language.tokenizer.encode_with_offsets(example.text)[1]
            tokens = [example.text[begin:end] for begin, end in spans]
            starts = [begin for begin, _ in spans]
            results.append(ReplacedResult(tokens, starts, values, [value > 0.5 for value in values]))
        return results

    def prediction(self, result: Any) -> Any:
        return result.replaced

    def inputs(self, example: Any) -> dict[str, Any]:
        return {"text": example.text, **({} if example.original is None else {"original": example.original})}

    def gold(self, example: Any) -> Any:
        return example.replaced

    def labelled(self, examples: Sequence[Any]) -> bool:
        return all(example.replaced is not None for example in examples)

    def table(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        """A row for each token."""
        columns = {"tokens": "token", "starts": "start", "probabilities": "probability", "replaced": "replaced"}
        names = {name: column for name, column in {**columns, "gold": "gold"}.items() if name in record}
        return [
            dict(zip(names.values(), row, strict=True)) for row in zip(*(record[name] for name in names), strict=True)
        ]

    def without_text(self, example: Any) -> Any:
        return replace(example, text="", original=None, ids=None, spans=None)

    def scores(self, examples: Sequence[Any], predictions: Predictions) -> Scores:
        """Accuracy over all tokens; precision, recall and F1 of the replaced ones."""
        pairs = [
            pair
            for example, prediction in zip(examples, predictions, strict=True)
            for pair in zip(example.replaced, prediction, strict=True)
        ]
        right = sum(gold and predicted for gold, predicted in pairs)
        replaced, marked = (sum(pair[side] for pair in pairs) for side in (0, 1))
        return {
            "accuracy": sum(gold == predicted for gold, predicted in pairs) / max(1, len(pairs)),
            "precision": right / max(1, marked),
            "recall": right / max(1, replaced),
            "f1": 2 * right / max(1, replaced + marked),
        }

    def majority(self, train: Sequence[Any], examples: Sequence[Any]) -> Predictions:
        return [[False] * len(example.replaced) for example in examples]

    def files(self, examples: Sequence[Any], predictions: Predictions) -> dict[str, str]:
        raise _no_training(self.name)


def _no_training(name: str) -> DataError:
    return DataError(f"{name}: expected a pre-trained model; fasttfm pretrain trains this head")


# ---- the tasks of models ---------------------------------------------------------------------------------------------

_TASKS: tuple[type[Task], ...] = (NextSentenceTask, SentenceOrderTask, ReplacedTokensTask)
PRETRAINED_TASKS: dict[str, type[Task]] = {task.name: task for task in _TASKS}
_BY_OBJECTIVE: dict[type, type[Task]] = {
    NextSentence: NextSentenceTask,
    SentenceOrder: SentenceOrderTask,
    ReplacedTokenDetection: ReplacedTokensTask,
}


def pretrained_task(family: Family, architecture: str, checkpoint: Path) -> type[Task] | None:
    """The task of the pre-training head of a checkpoint with this architecture; None for other checkpoints. BERT and
    ALBERT can be trained on next sentences and on sentence order: the settings of the checkpoint's run say which."""
    objective = family.pretraining
    settings = checkpoint.parent / SETTINGS
    if settings.is_file():
        stated = read_json(settings).get("settings")
        name = stated.get("objective") if isinstance(stated, dict) else None
        objective = objectives_of(family)[name].module if name in objectives_of(family) else objective
    kind = None if objective is None else _BY_OBJECTIVE.get(objective)
    matches = kind is not None and kind.head in family.models and family.models[kind.head].__name__ == architecture
    return kind if matches else None


def check_pretrained_task(kind: type[Task], family: Family) -> None:
    """Raises ValueError if models of the family have no head for the task."""
    if issubclass(kind, SentencePairTask):
        able = family.pretraining is not None and issubclass(family.pretraining, MaskedLMWithSentences)
    else:
        able = kind.head in family.models
    if not able:
        other = None if family.pretraining is None else _BY_OBJECTIVE.get(family.pretraining)
        got = f"{family.title}, which has {f'{other.name}' if other else 'none of these heads'}"
        raise ValueError(f"task: expected a model with a head for {kind.name}, got {got}")
