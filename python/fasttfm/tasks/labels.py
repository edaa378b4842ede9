"""Tasks with labels: for texts, pairs of texts and words, and the choice between several endings."""

from __future__ import annotations

import csv
import io
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fasttfm.data.choice_files import read_choices
from fasttfm.data.lines import DataError
from fasttfm.data.task_files import ChoiceExample, TagExample, TextExample, read_conll, read_texts
from fasttfm.models.family import Head
from fasttfm.tasks.example_fields import PAIR_NAMES, TEXT_NAMES, field, unusable
from fasttfm.tasks.inputs import Feature, TaskBatch
from fasttfm.tasks.metrics import Scores, label_scores, most_common, tag_scores, value_scores
from fasttfm.tasks.results import ChoiceResult, LabelResult, TagResult, ValueResult
from fasttfm.tasks.task import Language, Predictions, Task, in_known_order

IGNORED = -100


# ---- texts and pairs -------------------------------------------------------------------------------------------------


class ClassifyTask(Task):
    """A label for each text, or for each pair of texts (GLUE).

    Args:
        both_orders: Whether a causal model reads a pair in both orders and adds the states of both, for symmetric tasks
            such as the similarity of two sentences (GPT-1).
    """

    name = "classify"
    about = "a label for each text"
    file_format = "tsv, csv, jsonl or parquet with a text"
    line_format = "the text"
    json_fields = "text, label"
    read_file: ClassVar[Any] = staticmethod(read_texts)
    head = Head.SEQUENCE_CLASSIFICATION
    main_score = "accuracy"
    options: ClassVar[tuple[str, ...]] = ("both_orders",)
    kept: ClassVar[tuple[str, ...]] = options
    target_dtype: ClassVar[torch.dtype] = torch.int64

    def __init__(
        self, language: Language, train: Sequence[Any] | None, *, both_orders: bool = False, **options: Any
    ) -> None:
        if both_orders and not language.family.task_tokens:
            got = f"{language.family.title}, which reads both texts at once"
            raise ValueError(f"both_orders: expected with a GPT, got {got}")
        self.both_orders = both_orders
        super().__init__(language, train, **options)

    @classmethod
    def for_values(cls) -> type[Task]:
        return ValueTask

    def labels_of(self, train: Sequence[Any], known: Sequence[str]) -> list[str]:
        labels = {_labelled(number, example) for number, example in enumerate(train, 1)}
        if (value := _fraction(labels)) is not None:
            got = f"{len(labels)} numbers such as {value!r}"
            raise DataError(f"labels: expected names of classes, got {got}; --values (values=True) is for regression")
        if len(labels) == 1:
            only = f"all {len(train)} training examples have the label {next(iter(labels))!r}"
            warnings.warn(f"{only}: the model can predict no other", stacklevel=2)
        return in_known_order(labels, known)

    def check_labels(self, examples: Sequence[Any], source: str) -> None:
        counts = Counter(example.label for example in examples if example.label is not None)
        if unknown := sorted(label for label in counts if label not in self.labels):
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            got = f"{unknown[0]!r}{more} in {sum(counts[label] for label in unknown)} of {len(examples)} examples"
            raise DataError(f"{source}: expected labels of the training examples ({some(self.labels)}), got {got}")

    def configuration(self) -> dict[str, Any]:
        return {"num_labels": len(self.labels), "problem_type": "single_label_classification", **self.auxiliary_field()}

    @property
    def has_auxiliary(self) -> bool:
        return hasattr(self.language.family.config, "auxiliary_loss_weight")  # GPT-1's; later models have none

    def example(self, value: Any) -> Any:
        if isinstance(value, TextExample):
            return value
        if isinstance(value, str):
            return TextExample(value, None, None)
        label = None
        if isinstance(value, Mapping):
            label = value.get("label")
            texts = [field(value, names) for names in (TEXT_NAMES, PAIR_NAMES)]
        else:
            texts = list(value) if isinstance(value, Sequence) and len(value) == 2 else [None, None]
        if not isinstance(texts[0], str) or not isinstance(texts[1], str | None):
            raise unusable(self.name, "a text or two texts", value)
        return TextExample(texts[0], texts[1], None if label is None else str(label))

    def example_of_line(self, line: str) -> Any:
        return self.example(line)

    def features(self, examples: Sequence[Any]) -> list[Feature]:
        encode, form = self.language.tokenizer.encode_batch, self.language.format
        firsts = encode([example.first for example in examples])
        seconds = iter(encode([example.second for example in examples if example.second is not None]))
        features = []
        for index, (example, text) in enumerate(zip(examples, firsts, strict=True)):
            texts = [text] if example.second is None else [text, next(seconds)]
            sequences = [form.one(*texts) if len(texts) == 1 else form.two(*texts)]
            if self.both_orders:
                sequences.append(form.one(*texts) if len(texts) == 1 else form.two(*reversed(texts)))
            features.append(Feature(index, sequences, self._target(example)))
        return features

    def losses(self, model: Any, batch: TaskBatch) -> tuple[Tensor, ...]:
        return self.terms_of(model(**batch.inputs(), **batch.targets, **self._orders()))

    def logits(self, model: Any, batch: TaskBatch) -> Tensor:
        logits: Tensor = model(**batch.inputs(), **self._orders()).logits
        return logits

    @property
    def on_session(self) -> bool:
        overridden = (type(self).batch, type(self).logits) != (Task.batch, ClassifyTask.logits)
        return not overridden and not self.both_orders

    def _orders(self) -> dict[str, int]:
        return {"num_orders": 2} if self.both_orders else {}

    def description(self) -> dict[str, Any]:
        return {**super().description(), **({"both_orders": True} if self.both_orders else {})}

    def _target(self, example: Any) -> float | None:
        """The label's number; None for labels that the training examples do not have."""
        return self.labels.index(example.label) if example.label in self.labels else None

    def targets(self, batch: TaskBatch) -> dict[str, Tensor]:
        targets = {
            "labels": torch.tensor(
                [feature.target for feature in batch.features], dtype=self.target_dtype, device="cpu"
            )
        }
        if self.has_auxiliary and self.auxiliary:
            targets["lm_labels"] = batch.input_ids
        return targets

    def read(self, batch: TaskBatch, logits: Tensor) -> list[Any]:
        return list(logits.float().cpu().numpy())

    def results(self, examples: Sequence[Any], features: Sequence[Feature], read: Sequence[Any]) -> list[Any]:
        results = []
        for logits in read:
            values = probabilities(logits)
            best = int(logits.argmax())
            named = dict(zip(self.labels, values, strict=True))
            results.append(LabelResult(self.labels[best], values[best], named))
        return results

    def prediction(self, result: Any) -> Any:
        return result.label

    def inputs(self, example: Any) -> dict[str, Any]:
        return {"text": example.first, **({} if example.second is None else {"text_pair": example.second})}

    def gold(self, example: Any) -> Any:
        return example.label

    def without_text(self, example: Any) -> Any:
        return replace(example, first="", second=None)

    def scores(self, examples: Sequence[Any], predictions: Predictions) -> Scores:
        return label_scores([example.label for example in examples], predictions)

    def majority(self, train: Sequence[Any], examples: Sequence[Any]) -> Predictions:
        return [most_common(example.label for example in train)] * len(examples)

    def files(self, examples: Sequence[Any], predictions: Predictions) -> dict[str, str]:
        return {"predictions.tsv": table(("index", "prediction"), enumerate(predictions), "\t")}


class PairTask(ClassifyTask):
    """A label for each pair of texts."""

    name = "pair"
    about = "a label for each pair of texts"
    file_format = "the same with two texts, as in GLUE"
    line_format = "two texts, a tab between"
    json_fields = "text, text_pair, label"

    @classmethod
    def for_values(cls) -> type[Task]:
        return PairValueTask

    def example_of_line(self, line: str) -> Any:
        return self.example(_two_texts(line))


class ValueTask(ClassifyTask):
    """A number for each text or pair of texts, such as how similar two sentences are."""

    main_score = "pearson"
    target_dtype = torch.float32

    def labels_of(self, train: Sequence[Any], known: Sequence[str]) -> list[str]:
        for number, example in enumerate(train, 1):
            _number(_labelled(number, example), f"training example {number}")
        return []

    def check_labels(self, examples: Sequence[Any], source: str) -> None:
        for number, example in enumerate(examples, 1):
            if example.label is not None:
                _number(example.label, f"{source}, example {number}")

    def description(self) -> dict[str, Any]:
        return {**super().description(), "values": True}

    def configuration(self) -> dict[str, Any]:
        return {"num_labels": 1, "problem_type": "regression", **self.auxiliary_field()}

    def _target(self, example: Any) -> float | None:
        return None if example.label is None else _number(example.label)

    def read(self, batch: TaskBatch, logits: Tensor) -> list[Any]:
        return [float(value) for value in logits.squeeze(-1).float().cpu()]

    def results(self, examples: Sequence[Any], features: Sequence[Feature], read: Sequence[Any]) -> list[Any]:
        return [ValueResult(value) for value in read]

    def prediction(self, result: Any) -> Any:
        return result.value

    def gold(self, example: Any) -> Any:
        return None if example.label is None else _number(example.label)

    def scores(self, examples: Sequence[Any], predictions: Predictions) -> Scores:
        return value_scores([_number(example.label) for example in examples], predictions)

    def majority(self, train: Sequence[Any], examples: Sequence[Any]) -> Predictions:
        return [sum(_number(example.label) for example in train) / len(train)] * len(examples)


class PairValueTask(ValueTask):
    """A number for each pair of texts."""

    name = PairTask.name
    about = PairTask.about
    file_format = PairTask.file_format
    line_format = PairTask.line_format
    json_fields = PairTask.json_fields

    def example_of_line(self, line: str) -> Any:
        return self.example(_two_texts(line))


def _two_texts(line: str) -> tuple[str, ...]:
    texts = tuple(line.split("\t"))
    if len(texts) != 2:
        raise DataError(f"expected two texts with a tab between them, got {line:.60}")
    return texts


def _labelled(number: int, example: Any) -> str:
    if example.label is None:
        raise DataError(f"training example {number}: expected a label, got none")
    return str(example.label)


def _fraction(labels: Iterable[str]) -> str | None:
    """A label that is not an integer, if all labels are numbers; otherwise None."""
    try:
        return next((label for label in sorted(labels, key=float) if float(label) % 1), None)
    except ValueError:
        return None


def _number(label: str, where: str = "label") -> float:
    try:
        return float(label)
    except ValueError:
        raise DataError(f"{where}: expected a number as label, got {label!r}") from None


# ---- words -----------------------------------------------------------------------------------------------------------


class TagTask(Task):
    """A tag for each word of a sentence (CoNLL). A word is tagged by its first token; a sentence that is too long is
    tagged in pieces."""

    name = "tag"
    about = "a tag for each word"
    file_format = "CoNLL: one word and its tag per line"
    line_format = "the words, spaces between"
    json_fields = "words (or text), tags"
    read_file = staticmethod(read_conll)
    head = Head.TOKEN_CLASSIFICATION
    kept = ("common",)
    main_score = "f1"

    def __init__(
        self, language: Language, train: Sequence[Any] | None, *, common: str | None = None, **options: Any
    ) -> None:
        super().__init__(language, train, **options)
        if train is not None:
            common = most_common(tag for example in train for tag in example.tags)
        elif common is None:
            common = "O" if "O" in self.labels else self.labels[0]
        self.common = common  # the tag of words without a token

    def labels_of(self, train: Sequence[Any], known: Sequence[str]) -> list[str]:
        return in_known_order({tag for example in train for tag in example.tags}, known)

    def check_labels(self, examples: Sequence[Any], source: str) -> None:
        """Warns about tags that the training examples do not have: rare tags often are missing there."""
        counts = Counter(tag for example in examples for tag in example.tags if tag not in self.labels)
        if counts:
            words = sum(len(example.words) for example in examples)
            what = f"{counts.total()} of {words} words have tags that the training examples lack"
            warnings.warn(f"{source}: {what} ({some(sorted(counts))}): none of them can be predicted", stacklevel=2)

    def configuration(self) -> dict[str, Any]:
        return {"num_labels": len(self.labels)}

    def description(self) -> dict[str, Any]:
        return {**super().description(), "common": self.common}

    def example(self, value: Any) -> Any:
        """A text is split at white space."""
        if isinstance(value, TagExample):
            return value
        tags: Any = ()
        if isinstance(value, Mapping):
            tags = field(value, ("tags", "labels")) or ()
            value = field(value, ("words", "tokens", *TEXT_NAMES))
        words = value.split() if isinstance(value, str) else value
        if not isinstance(words, Sequence) or not all(isinstance(word, str) for word in words):
            raise unusable(self.name, "a sentence or a list of its words", value)
        if tags and len(tags) != len(words):
            raise DataError(f"tags: expected one for each of {len(words)} words, got {len(tags)}")
        return TagExample(list(words), [str(tag) for tag in tags])

    def example_of_line(self, line: str) -> Any:
        return self.example(line)

    def features(self, examples: Sequence[Any]) -> list[Feature]:
        form = self.language.format
        room = form.max_length - len(form.first) - len(form.last)
        features = []
        for index, example in enumerate(examples):
            ids, firsts = self._tokens(example.words)
            for start in range(0, max(1, len(ids)), room):
                tokens = form.one(ids[start : start + room])
                shift = len(form.first) - start
                positions = {
                    position + shift: word for position, word in firsts.items() if start <= position < start + room
                }
                features.append(Feature(index, [tokens], TagTarget(positions, example.tags)))
        return features

    def _tokens(self, words: Sequence[str]) -> tuple[list[int], dict[int, int]]:
        """The ids of a sentence, and the word that starts at each token that starts one."""
        ids, offsets = self.language.tokenizer.encode_with_offsets(" ".join(words))
        owners = [number for number, word in enumerate(words) for _ in range(len(word) + 1)]  # each character's word
        firsts: dict[int, int] = {}
        seen: set[int] = set()
        for position, (_, end) in enumerate(offsets):
            word = owners[max(0, end - 1)]  # a token may start with the space before its word
            if word not in seen:
                seen.add(word)
                firsts[position] = word
        return ids, firsts

    def targets(self, batch: TaskBatch) -> dict[str, Tensor]:
        labels = torch.full((batch.tokens,), IGNORED, dtype=torch.int64, device="cpu")
        numbers = {label: number for number, label in enumerate(self.labels)}
        for feature, begin in zip(batch.features, batch.cu_seqlens.tolist(), strict=False):
            for position, word in feature.target.positions.items() if feature.target.tags else ():
                labels[begin + position] = numbers.get(feature.target.tags[word], IGNORED)
        return {"labels": labels}

    def count(self, batch: TaskBatch) -> float:
        return int((batch.targets["labels"] != IGNORED).sum())

    def rows(self, batch: TaskBatch) -> int:
        return batch.tokens

    @property
    def on_session(self) -> bool:
        return True

    def read(self, batch: TaskBatch, logits: Tensor) -> list[Any]:
        """The number and the probability of each word's best tag."""
        largest, best = logits.float().softmax(-1).max(-1)
        starts = batch.cu_seqlens[:-1].tolist()
        numbers, values = best.tolist(), largest.tolist()
        return [
            {
                word: (numbers[start + position], values[start + position])
                for position, word in feature.target.positions.items()
            }
            for feature, start in zip(batch.features, starts, strict=True)
        ]

    def results(self, examples: Sequence[Any], features: Sequence[Feature], read: Sequence[Any]) -> list[Any]:
        results = [TagResult([self.common] * len(example.words), [None] * len(example.words)) for example in examples]
        for feature, tags in zip(features, read, strict=True):
            result = results[feature.example]
            for word, (best, probability) in tags.items():
                result.tags[word], result.probabilities[word] = self.labels[best], probability
        return results

    def prediction(self, result: Any) -> Any:
        return result.tags

    def inputs(self, example: Any) -> dict[str, Any]:
        return {"words": example.words}

    def gold(self, example: Any) -> Any:
        return example.tags or None

    def table(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        """A row for each word."""
        columns = {"words": "word", "tags": "tag", "probabilities": "probability", "gold": "gold"}
        names = {name: column for name, column in columns.items() if name in record}
        return [
            dict(zip(names.values(), row, strict=True)) for row in zip(*(record[name] for name in names), strict=True)
        ]

    def without_text(self, example: Any) -> Any:
        return replace(example, words=[])

    def scores(self, examples: Sequence[Any], predictions: Predictions) -> Scores:
        return tag_scores([example.tags for example in examples], predictions)

    def labelled(self, examples: Sequence[Any]) -> bool:
        return any(example.tags for example in examples)

    def majority(self, train: Sequence[Any], examples: Sequence[Any]) -> Predictions:
        return [[self.common] * len(example.words) for example in examples]

    def files(self, examples: Sequence[Any], predictions: Predictions) -> dict[str, str]:
        """Words with their tags and their predicted tags."""
        sentences = [
            "\n".join(" ".join(row) for row in zip(*columns, strict=True))
            for example, tags in zip(examples, predictions, strict=True)
            if (columns := [column for column in (example.words, example.tags, tags) if column])
        ]
        return {"predictions.conll": "\n\n".join(sentences) + "\n"}


class TagTarget:
    """The positions of the words' first tokens, and the words' tags."""

    def __init__(self, positions: dict[int, int], tags: Sequence[str]) -> None:
        self.positions, self.tags = positions, tags


# ---- endings ---------------------------------------------------------------------------------------------------------


class ChoiceTask(Task):
    """Chooses one of several endings (SWAG). Each ending follows the context in its own sequence."""

    name = "choice"
    about = "the correct one of several endings"
    file_format = "SWAG, RACE, StoryCloze, CommonsenseQA"
    line_format = "context and endings, tabs between"
    json_fields = "context, endings, label"
    read_file = staticmethod(read_choices)
    head = Head.MULTIPLE_CHOICE
    main_score = "accuracy"

    def __init__(self, language: Language, train: Sequence[Any] | None, **options: Any) -> None:
        super().__init__(language, train, **options)
        self.choices = (
            None if train is None else len(train[0].endings)
        )  # after training, any number of endings is allowed

    def example(self, value: Any) -> Any:
        if isinstance(value, ChoiceExample):
            return value
        start, label = "", None
        if isinstance(value, Mapping):
            start, label = value.get("start", ""), value.get("label")
            value = (field(value, ("context", *TEXT_NAMES)), field(value, ("endings", "choices")))
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) < 2:
            raise unusable(self.name, "a context and its endings", value)
        context, *endings = value
        if len(endings) == 1 and isinstance(endings[0], Sequence) and not isinstance(endings[0], str):
            endings = list(endings[0])
        if len(endings) < 2 or not all(isinstance(text, str) for text in (context, start, *endings)):
            raise unusable(self.name, "a context and two endings or more", value)
        if label is not None and label not in range(len(endings)):
            raise DataError(f"label: expected the number of an ending, 0 to {len(endings) - 1}, got {label!r}")
        return ChoiceExample(context, start, endings, label)

    def features(self, examples: Sequence[Any]) -> list[Feature]:
        encode, form = self.language.tokenizer.encode, self.language.format
        features = []
        for index, example in enumerate(examples):
            if self.choices is not None and len(example.endings) != self.choices:
                expected = f"{self.choices} endings, as the first example has"
                raise DataError(f"example {index + 1}: expected {expected}, got {len(example.endings)}")
            context = encode(example.context)
            sequences = [form.two(context, encode(f"{example.start} {ending}".strip())) for ending in example.endings]
            features.append(Feature(index, sequences, example.label))
        return features

    def targets(self, batch: TaskBatch) -> dict[str, Tensor]:
        labels = torch.tensor([feature.target for feature in batch.features], dtype=torch.int64, device="cpu")
        return {"mc_labels" if self.language.family.causal else "labels": labels}

    @property
    def has_auxiliary(self) -> bool:
        return self.language.family.causal

    def _called(self, model: Any, batch: TaskBatch, targets: dict[str, Tensor], choices: int | None) -> Any:
        """Calls the model. With ``labels``, causal models do not compute the logits of every token."""
        words = {"labels": batch.input_ids} if self.language.family.causal else {}
        return model(**batch.inputs(), **targets, **words, num_choices=choices)

    def losses(self, model: Any, batch: TaskBatch) -> tuple[Tensor, ...]:
        return self.terms_of(self._called(model, batch, batch.targets, self.choices))

    def logits(self, model: Any, batch: TaskBatch) -> Tensor:
        """[features, endings], padded with -inf."""
        counts = [len(feature.sequences) for feature in batch.features]
        same = len(set(counts)) == 1
        output = self._called(model, batch, {}, counts[0] if same else 1)
        logits: Tensor = output.mc_logits if self.language.family.causal else output.logits
        if same:
            return logits
        rows = logits.flatten().split(counts)
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-torch.inf)

    def read(self, batch: TaskBatch, logits: Tensor) -> list[Any]:
        rows = logits.float().cpu().numpy()
        return [row[: len(feature.sequences)] for feature, row in zip(batch.features, rows, strict=True)]

    def results(self, examples: Sequence[Any], features: Sequence[Feature], read: Sequence[Any]) -> list[Any]:
        results = []
        for example, logits in zip(examples, read, strict=True):
            best = int(logits.argmax())
            results.append(ChoiceResult(best, example.endings[best], probabilities(logits)))
        return results

    def prediction(self, result: Any) -> Any:
        return result.choice

    def inputs(self, example: Any) -> dict[str, Any]:
        start = {"start": example.start} if example.start else {}
        return {"context": example.context, **start, "endings": example.endings}

    def gold(self, example: Any) -> Any:
        return example.label

    def without_text(self, example: Any) -> Any:
        return replace(example, context="", start="", endings=[])

    def scores(self, examples: Sequence[Any], predictions: Predictions) -> Scores:
        right = [example.label == prediction for example, prediction in zip(examples, predictions, strict=True)]
        return {"accuracy": sum(right) / max(1, len(right))}

    def majority(self, train: Sequence[Any], examples: Sequence[Any]) -> Predictions:
        return [most_common(example.label for example in train)] * len(examples)

    def files(self, examples: Sequence[Any], predictions: Predictions) -> dict[str, str]:
        return {"predictions.csv": table(("", "label"), enumerate(predictions), ",")}


# ---- parts -----------------------------------------------------------------------------------------------------------


def probabilities(logits: np.ndarray) -> list[float]:
    """Softmax."""
    powers = np.exp(logits - logits.max())
    probabilities: list[float] = (powers / powers.sum()).tolist()
    return probabilities


def some(names: Sequence[str], most: int = 5) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], delimiter: str) -> str:
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()
