"""Tasks with labels: of texts and of pairs of texts, of words, and of the right one of several endings."""

from __future__ import annotations

import csv
import io
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fasttfm.data.choice_files import read_choices
from fasttfm.data.task_files import read_conll, read_texts
from fasttfm.data.texts import DataError
from fasttfm.models.family import Head
from fasttfm.tasks.inputs import Feature, TaskBatch
from fasttfm.tasks.metrics import Scores, label_scores, most_common, tag_scores, value_scores
from fasttfm.tasks.task import Language, Predictions, Task, in_known_order

IGNORED = -100


# ---- texts and pairs -------------------------------------------------------------------------------------------------


class ClassifyTask(Task):
    """A label for each text, or for each pair of texts (GLUE).

    Args:
        both_orders: In causal models, whether a pair is read in both orders, and the states of both are added: for
            tasks without an order, such as the similarity of two sentences (GPT-1).
    """

    name = "classify"
    about = "a label for each text"
    file_format = "tsv, csv, jsonl or parquet with a text"
    read_file = staticmethod(read_texts)
    head = Head.SEQUENCE_CLASSIFICATION
    main_score = "accuracy"
    options = ("both_orders",)

    def __init__(
        self, language: Language, train: Sequence[Any] | None, *, both_orders: bool = False, **options: Any
    ) -> None:
        if both_orders and not language.family.causal:
            got = f"{language.family.title}, which reads both texts at once"
            raise ValueError(f"both_orders: expected with a GPT, got {got}")
        self.both_orders = both_orders
        super().__init__(language, train, **options)

    @classmethod
    def for_values(cls) -> type[Task]:
        return ValueTask

    def labels_of(self, train: Sequence[Any], known: Sequence[str]) -> list[str]:
        labels = {_labelled(example) for example in train}
        if (value := _fraction(labels)) is not None:
            got = f"{len(labels)} numbers such as {value!r}"
            raise DataError(f"labels: expected names of classes, got {got}; --values (values=True) estimates numbers")
        return in_known_order(labels, known)

    def check_labels(self, examples: Sequence[Any], source: str) -> None:
        counts = Counter(example.label for example in examples if example.label is not None)
        if unknown := sorted(label for label in counts if label not in self.labels):
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            got = f"{unknown[0]!r}{more} in {sum(counts[label] for label in unknown)} of {len(examples)} examples"
            raise DataError(f"{source}: expected labels of the training examples ({some(self.labels)}), got {got}")

    def configuration(self) -> dict[str, Any]:
        return {"num_labels": len(self.labels), "problem_type": "single_label_classification", **self._words()}

    def _words(self) -> dict[str, Any]:
        """GPT-1 has an auxiliary causal LM loss in addition to that of the label; the later models do not."""
        known = hasattr(self.language.family.config, "auxiliary_loss_weight")
        return {"auxiliary_loss_weight": self.auxiliary} if known else {}

    def features(self, examples: Sequence[Any]) -> list[Feature]:
        encode, form = self.language.tokenizer.encode, self.language.format
        found = []
        for index, example in enumerate(examples):
            texts = [encode(text) for text in (example.first, example.second) if text is not None]
            sequences = [form.one(*texts) if len(texts) == 1 else form.two(*texts)]
            if self.both_orders:
                sequences.append(form.one(*texts) if len(texts) == 1 else form.two(*reversed(texts)))
            found.append(Feature(index, sequences, self._target(example)))
        return found

    def loss(self, model: Any, batch: TaskBatch) -> Tensor:
        loss: Tensor = model(**batch.inputs(), **batch.targets, **self._orders()).loss
        return loss

    def logits(self, model: Any, batch: TaskBatch) -> Tensor:
        logits: Tensor = model(**batch.inputs(), **self._orders()).logits
        return logits

    def _orders(self) -> dict[str, int]:
        return {"num_orders": 2} if self.both_orders else {}

    def description(self) -> dict[str, Any]:
        return {**super().description(), **({"both_orders": True} if self.both_orders else {})}

    def _target(self, example: Any) -> float | None:
        """The label's number; none for labels that nothing was learnt about."""
        return self.labels.index(example.label) if example.label in self.labels else None

    def targets(self, batch: TaskBatch) -> dict[str, Tensor]:
        targets = {"labels": torch.tensor([feature.target for feature in batch.features])}
        if self._words() and self.auxiliary:
            targets["lm_labels"] = batch.input_ids
        return targets

    def read(self, batch: TaskBatch, logits: Tensor) -> list[Any]:
        return [int(best) for best in logits.argmax(-1).cpu()]

    def predictions(self, examples: Sequence[Any], features: Sequence[Feature], read: Sequence[Any]) -> Predictions:
        return [self.labels[best] for best in read]

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
    file_format = "the same with two texts, as GLUE's"

    @classmethod
    def for_values(cls) -> type[Task]:
        return PairValueTask


class ValueTask(ClassifyTask):
    """A number for each text or pair of texts, such as how similar two sentences are."""

    main_score = "pearson"

    def labels_of(self, train: Sequence[Any], known: Sequence[str]) -> list[str]:
        return []

    def check_labels(self, examples: Sequence[Any], source: str) -> None:
        for example in examples:
            self._target(example)

    def description(self) -> dict[str, Any]:
        return {**super().description(), "values": True}

    def configuration(self) -> dict[str, Any]:
        return {"num_labels": 1, "problem_type": "regression", **self._words()}

    def _target(self, example: Any) -> float | None:
        return None if example.label is None else _number(example.label)

    def read(self, batch: TaskBatch, logits: Tensor) -> list[Any]:
        return [float(value) for value in logits.squeeze(-1).float().cpu()]

    def predictions(self, examples: Sequence[Any], features: Sequence[Feature], read: Sequence[Any]) -> Predictions:
        return list(read)

    def scores(self, examples: Sequence[Any], predictions: Predictions) -> Scores:
        return value_scores([_number(example.label) for example in examples], predictions)

    def majority(self, train: Sequence[Any], examples: Sequence[Any]) -> Predictions:
        return [sum(_number(example.label) for example in train) / len(train)] * len(examples)


class PairValueTask(ValueTask):
    """A number for each pair of texts."""

    name = PairTask.name
    about = PairTask.about
    file_format = PairTask.file_format


def _labelled(example: Any) -> str:
    if example.label is None:
        raise DataError("expected a label for every example to learn from, got one without")
    return str(example.label)


def _fraction(labels: Iterable[str]) -> str | None:
    """A label that is no whole number, if all are numbers."""
    try:
        return next((label for label in sorted(labels, key=float) if float(label) % 1), None)
    except ValueError:
        return None


def _number(label: str) -> float:
    try:
        return float(label)
    except ValueError:
        raise DataError(f"label: expected a number, got {label!r}") from None


# ---- words -----------------------------------------------------------------------------------------------------------


class TagTask(Task):
    """A tag for each word of a sentence (CoNLL). A word is tagged by its first token; a sentence that is too long is
    tagged in pieces."""

    name = "tag"
    about = "a tag for each word"
    file_format = "CoNLL's columns: a word and its tag a line"
    read_file = staticmethod(read_conll)
    head = Head.TOKEN_CLASSIFICATION
    main_score = "f1"

    def __init__(
        self, language: Language, train: Sequence[Any] | None, *, common: str | None = None, **options: Any
    ) -> None:
        super().__init__(language, train, **options)
        tags = (tag for example in train or () for tag in example.tags)
        self.common: str | None = common if train is None else most_common(tags)  # the tag of words without a token

    def labels_of(self, train: Sequence[Any], known: Sequence[str]) -> list[str]:
        return in_known_order({tag for example in train for tag in example.tags}, known)

    def check_labels(self, examples: Sequence[Any], source: str) -> None:
        """Rare tags are often missing from the training examples, so only a note is made."""
        counts = Counter(tag for example in examples for tag in example.tags if tag not in self.labels)
        if counts:
            words = sum(len(example.words) for example in examples)
            what = f"{counts.total()} of {words} words have tags that the training examples lack"
            warnings.warn(f"{source}: {what} ({some(sorted(counts))}): none of them can be predicted", stacklevel=2)

    def configuration(self) -> dict[str, Any]:
        return {"num_labels": len(self.labels)}

    def description(self) -> dict[str, Any]:
        return {**super().description(), "common": self.common}

    def features(self, examples: Sequence[Any]) -> list[Feature]:
        form = self.language.format
        room = form.max_length - len(form.first) - len(form.last)
        found = []
        for index, example in enumerate(examples):
            ids, firsts = self._tokens(example.words)
            for start in range(0, max(1, len(ids)), room):
                tokens = form.one(ids[start : start + room])
                shift = len(form.first) - start
                places = {place + shift: word for place, word in firsts.items() if start <= place < start + room}
                found.append(Feature(index, [tokens], TagTarget(places, example.tags)))
        return found

    def _tokens(self, words: Sequence[str]) -> tuple[list[int], dict[int, int]]:
        """A sentence's ids, and the words by the numbers of their first tokens."""
        ids, offsets = self.language.tokenizer.encode_with_offsets(" ".join(words))
        owners = [number for number, word in enumerate(words) for _ in range(len(word) + 1)]  # of each character
        firsts: dict[int, int] = {}
        seen: set[int] = set()
        for place, (_, end) in enumerate(offsets):
            word = owners[max(0, end - 1)]  # a token may begin with the space in front of its word
            if word not in seen:
                seen.add(word)
                firsts[place] = word
        return ids, firsts

    def targets(self, batch: TaskBatch) -> dict[str, Tensor]:
        labels = torch.full((batch.tokens,), IGNORED)
        numbers = {label: number for number, label in enumerate(self.labels)}
        for feature, begin in zip(batch.features, batch.cu_seqlens.tolist(), strict=False):
            for place, word in feature.target.places.items():
                labels[begin + place] = numbers.get(feature.target.tags[word], IGNORED)
        return {"labels": labels}

    def count(self, batch: TaskBatch) -> float:
        return int((batch.targets["labels"] != IGNORED).sum())

    def rows(self, batch: TaskBatch) -> int:
        return batch.tokens

    def read(self, batch: TaskBatch, logits: Tensor) -> list[Any]:
        best = logits.argmax(-1).cpu()
        pieces = best.tensor_split(batch.cu_seqlens[1:-1].cpu().long())
        return [
            {word: int(piece[place]) for place, word in feature.target.places.items()}
            for feature, piece in zip(batch.features, pieces, strict=True)
        ]

    def predictions(self, examples: Sequence[Any], features: Sequence[Feature], read: Sequence[Any]) -> Predictions:
        found = [[self.common] * len(example.words) for example in examples]  # for words without a token
        for feature, tags in zip(features, read, strict=True):
            for word, best in tags.items():
                found[feature.example][word] = self.labels[best]
        return found

    def scores(self, examples: Sequence[Any], predictions: Predictions) -> Scores:
        return tag_scores([example.tags for example in examples], predictions)

    def labelled(self, examples: Sequence[Any]) -> bool:
        return True

    def majority(self, train: Sequence[Any], examples: Sequence[Any]) -> Predictions:
        return [[self.common] * len(example.words) for example in examples]

    def files(self, examples: Sequence[Any], predictions: Predictions) -> dict[str, str]:
        """Words with their tags, and what they were taken for."""
        sentences = [
            "\n".join(" ".join(row) for row in zip(example.words, example.tags, tags, strict=True))
            for example, tags in zip(examples, predictions, strict=True)
        ]
        return {"predictions.conll": "\n\n".join(sentences) + "\n"}


class TagTarget:
    """The positions of the words' first tokens, and the words' tags."""

    def __init__(self, places: dict[int, int], tags: Sequence[str]) -> None:
        self.places, self.tags = places, tags


# ---- endings ---------------------------------------------------------------------------------------------------------


class ChoiceTask(Task):
    """The right one of several endings (SWAG): each follows the context in a sequence of its own."""

    name = "choice"
    about = "the right one of some endings"
    file_format = "SWAG, RACE, StoryCloze, CommonsenseQA"
    read_file = staticmethod(read_choices)
    head = Head.MULTIPLE_CHOICE
    main_score = "accuracy"

    def __init__(self, language: Language, train: Sequence[Any] | None, **options: Any) -> None:
        super().__init__(language, train, **options)
        self.choices = None if train is None else len(train[0].endings)  # a trained model chooses between any number

    def features(self, examples: Sequence[Any]) -> list[Feature]:
        encode, form = self.language.tokenizer.encode, self.language.format
        found = []
        for index, example in enumerate(examples):
            if self.choices is not None and len(example.endings) != self.choices:
                expected = f"{self.choices} endings, as the first example has"
                raise DataError(f"example {index + 1}: expected {expected}, got {len(example.endings)}")
            context = encode(example.context)
            sequences = [form.two(context, encode(f"{example.start} {ending}".strip())) for ending in example.endings]
            found.append(Feature(index, sequences, example.label))
        return found

    def targets(self, batch: TaskBatch) -> dict[str, Tensor]:
        labels = torch.tensor([feature.target for feature in batch.features])
        return {"mc_labels" if self.language.family.causal else "labels": labels}

    def _called(self, model: Any, batch: TaskBatch, targets: dict[str, Tensor], choices: int | None) -> Any:
        """With labels of the causal LM loss, causal models do not compute every token's logits."""
        words = {"labels": batch.input_ids} if self.language.family.causal else {}
        return model(**batch.inputs(), **targets, **words, num_choices=choices)

    def loss(self, model: Any, batch: TaskBatch) -> Tensor:
        output = self._called(model, batch, batch.targets, self.choices)
        loss: Tensor = output.mc_loss + self.auxiliary * output.loss if self.language.family.causal else output.loss
        return loss

    def logits(self, model: Any, batch: TaskBatch) -> Tensor:
        """[features, endings]; -inf after the last ending of features with fewer."""
        counts = [len(feature.sequences) for feature in batch.features]
        same = len(set(counts)) == 1
        output = self._called(model, batch, {}, counts[0] if same else 1)
        logits: Tensor = output.mc_logits if self.language.family.causal else output.logits
        if same:
            return logits
        rows = logits.flatten().split(counts)
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-torch.inf)

    def read(self, batch: TaskBatch, logits: Tensor) -> list[Any]:
        return [int(best) for best in logits.argmax(-1).cpu()]

    def predictions(self, examples: Sequence[Any], features: Sequence[Feature], read: Sequence[Any]) -> Predictions:
        return list(read)

    def scores(self, examples: Sequence[Any], predictions: Predictions) -> Scores:
        right = [example.label == found for example, found in zip(examples, predictions, strict=True)]
        return {"accuracy": sum(right) / max(1, len(right))}

    def majority(self, train: Sequence[Any], examples: Sequence[Any]) -> Predictions:
        return [most_common(example.label for example in train)] * len(examples)

    def files(self, examples: Sequence[Any], predictions: Predictions) -> dict[str, str]:
        return {"predictions.csv": table(("", "label"), enumerate(predictions), ",")}


def some(names: Sequence[str], most: int = 5) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], delimiter: str) -> str:
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()
