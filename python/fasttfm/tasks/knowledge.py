"""Tasks about entities in texts: the relation between two of them, and the types of one (ERNIE of Tsinghua).

Special tokens mark the spans, as in the paper: ``[HD] Ahab [HD] sails the [TL] Pequod [TL]``, or ``[ENT] Ahab [ENT]
sails the Pequod``; the first token of the sequence is classified. Models that read entities also get the entities of
the spans and of other mentions that are in their table. Other encoders read only the marked text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fasttfm.data.knowledge import (
    AlignedTokens,
    RelationExample,
    Span,
    TypingExample,
    align,
    read_relations,
    read_types,
    relation_of,
    typing_of,
)
from fasttfm.data.lines import DataError
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.nn import AlignedEntities
from fasttfm.tasks.example_fields import unusable
from fasttfm.tasks.inputs import Feature, TaskBatch
from fasttfm.tasks.labels import ClassifyTask
from fasttfm.tasks.metrics import Scores, most_common, type_scores
from fasttfm.tasks.results import TypesResult
from fasttfm.tasks.task import Language, Predictions, Task, in_known_order


class MarkedSpan(NamedTuple):
    span: Span
    mark: str


@dataclass
class EntityFeature(Feature):
    entities: list[int] = field(default_factory=list)  # for each token a row of the model's table, or -1


class MarkedTask(ClassifyTask):
    """Classifies texts with marked spans."""

    distills = False
    marks: ClassVar[tuple[str, ...]]
    line_format = "none"

    def __init__(self, language: Language, train: Sequence[Any] | None, **options: Any) -> None:
        super().__init__(language, train, **options)
        if language.family.causal:
            raise ValueError(f"{self.name}: expected an encoder, got {language.family.title}")
        _add_tokens(language, self.marks)
        self.entities: dict[str, int] = {}

    @classmethod
    def for_values(cls) -> type[Task] | None:  # type: ignore[override]
        return None

    def adjust(self, model: PretrainedModel) -> None:
        """Also reads the names of the model's entities."""
        super().adjust(model)
        names: list[str] = getattr(model, "entity_names", [])
        self.entities = {name: number for number, name in enumerate(names)}

    def marked(self, example: Any) -> list[MarkedSpan]:
        raise NotImplementedError

    def example(self, value: Any) -> Any:
        if isinstance(value, RelationExample | TypingExample):
            return value
        if not isinstance(value, Mapping):
            raise unusable(self.name, "an object with a text and its marked spans", value)
        return self.parsed(value)

    def parsed(self, row: Mapping[str, Any]) -> Any:
        """The example of a line of a file."""
        raise NotImplementedError

    def inputs(self, example: Any) -> dict[str, Any]:
        spans = {name: value._asdict() for name, value in vars(example).items() if isinstance(value, Span)}
        return {"text": example.text, **spans}

    def without_text(self, example: Any) -> Any:
        return replace(example, text="", entities=[])

    def features(self, examples: Sequence[Any]) -> list[Feature]:
        features: list[Feature] = []
        form, tokenizer = self.language.format, self.language.tokenizer
        room = form.max_length - len(form.first) - len(form.last)
        for index, example in enumerate(examples):
            marked = self.marked(example)
            others = [span for span in example.entities if all(_are_disjoint(span, mark.span) for mark in marked)]
            spans = sorted(self._named(example.text, span) for span in (*others, *(mark.span for mark in marked)))
            ids, entities = self._with_marks(align(tokenizer, example.text, spans, self.entities), marked)
            start = self._start(ids, room)
            tokens = form.one(ids[start : start + room])._replace(cut=max(0, len(ids) - room))
            entity_ids = [*[-1] * len(form.first), *entities[start : start + room], *[-1] * len(form.last)]
            features.append(EntityFeature(index, [tokens], self._target(example), entity_ids))
        return features

    def _named(self, text: str, span: Span) -> Span:
        """The span; without a stated entity, that of the same name."""
        name = text[span.start : span.end]
        return span if span.entity is not None or name not in self.entities else span._replace(entity=name)

    def _with_marks(self, text: AlignedTokens, marked: Sequence[MarkedSpan]) -> tuple[list[int], list[int]]:
        """The ids and entities, with marks inserted around the spans."""
        ids, entities = list(text.ids), list(text.entities)
        for span, mark in sorted(marked, reverse=True):  # from the end, so that earlier positions stay valid
            inside = [
                position for position, (start, end) in enumerate(text.offsets) if start < span.end and end > span.start
            ]
            first = inside[0] if inside else sum(end <= span.start for _, end in text.offsets)
            last = inside[-1] + 1 if inside else first
            for position in (last, first):
                ids.insert(position, self._id(mark))
                entities.insert(position, -1)
        return ids, entities

    def _id(self, mark: str) -> int:
        id: int = self.language.tokenizer.backend.token_to_id(mark)
        return id

    def _start(self, ids: list[int], room: int) -> int:
        """The start of the part of a text that is read, chosen so that all marks are in it if they fit."""
        marks = {self._id(mark) for mark in self.marks}
        positions = [position for position, id in enumerate(ids) if id in marks]
        return min(positions[0], max(0, positions[-1] + 1 - room))

    def batch(self, features: Sequence[Feature]) -> TaskBatch:
        batch = super().batch(features)
        if hasattr(self.language.family.config, "num_entities"):
            ids = [entity for feature in features for entity in getattr(feature, "entities", [])]
            batch.others["entities"] = AlignedEntities.of(
                torch.tensor(ids, dtype=torch.int64, device="cpu"), batch.cu_seqlens, batch.max_seqlen
            )
        return batch


def _are_disjoint(one: Span, other: Span) -> bool:
    return one.end <= other.start or other.end <= one.start


def _add_tokens(language: Language, names: Sequence[str]) -> None:
    """Adds the marks to the vocabulary, unless it has them. ``prepare`` adds rows for them to the model."""
    from tokenizers import AddedToken

    tokenizer = language.tokenizer
    tokenizer.backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer.vocab_size = tokenizer.backend.get_vocab_size()


class RelationTask(MarkedTask):
    """The relation between two marked spans."""

    name = "relation"
    about = "the relation of two entities"
    file_format = "JSONL with text, head, tail and label"
    json_fields = "text, head, tail, label"
    read_file = staticmethod(read_relations)
    marks = ("[HD]", "[TL]")

    def parsed(self, row: Mapping[str, Any]) -> Any:
        return relation_of(Path(self.name), None, row)

    def marked(self, example: Any) -> list[MarkedSpan]:
        return [MarkedSpan(example.head, "[HD]"), MarkedSpan(example.tail, "[TL]")]


class EntityTypingTask(MarkedTask):
    """The types of a marked span (multi-label)."""

    name = "entity-typing"
    about = "the types of an entity"
    file_format = "JSONL with text, mention and labels"
    json_fields = "text, mention, labels"
    read_file = staticmethod(read_types)
    marks = ("[ENT]",)
    main_score = "micro_f1"

    def parsed(self, row: Mapping[str, Any]) -> Any:
        return typing_of(Path(self.name), None, row)

    def marked(self, example: Any) -> list[MarkedSpan]:
        return [MarkedSpan(example.mention, "[ENT]")]

    def labels_of(self, train: Sequence[Any], known: Sequence[str]) -> list[str]:
        if any(example.label is None for example in train):
            raise DataError("expected labels for every training example, got one without")
        return in_known_order({label for example in train for label in example.label}, known)

    def check_labels(self, examples: Sequence[Any], source: str) -> None:
        """Accepts all types: one that no training example has cannot be predicted and counts as missed."""

    def configuration(self) -> dict[str, Any]:
        return {"num_labels": len(self.labels), "problem_type": "multi_label_classification"}

    def _target(self, example: Any) -> Any:
        return None if example.label is None else [float(label in example.label) for label in self.labels]

    def targets(self, batch: TaskBatch) -> dict[str, Tensor]:
        return {
            "labels": torch.tensor([feature.target for feature in batch.features], dtype=torch.float32, device="cpu")
        }

    def results(self, examples: Sequence[Any], features: Sequence[Feature], read: Sequence[Any]) -> list[Any]:
        results = []
        for logits in read:
            probabilities = torch.from_numpy(logits).sigmoid().tolist()
            labels = sorted(label for label, logit in zip(self.labels, logits, strict=True) if logit > 0)
            results.append(TypesResult(labels, dict(zip(self.labels, probabilities, strict=True))))
        return results

    def prediction(self, result: Any) -> Any:
        return tuple(result.labels)

    def gold(self, example: Any) -> Any:
        return None if example.label is None else list(example.label)

    def scores(self, examples: Sequence[Any], predictions: Predictions) -> Scores:
        return type_scores([example.label for example in examples], predictions)

    def majority(self, train: Sequence[Any], examples: Sequence[Any]) -> Predictions:
        return [most_common(example.label for example in train)] * len(examples)

    def files(self, examples: Sequence[Any], predictions: Predictions) -> dict[str, str]:
        rows = ({"index": index, "labels": list(labels)} for index, labels in enumerate(predictions))
        return {"predictions.jsonl": "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)}
