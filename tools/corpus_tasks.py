"""The small labelled data sets of make_corpus.py: six tasks, whose labels and answers are derived from the texts by
rules.

Every fifth address and chapter is for the dev sets, the others are for the training sets.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import corpus_questions as questions
import numpy as np

Documents = dict[str, list[str]]
WORD = re.compile(r"\w+(?:[-'’]\w+)*|[^\w\s]")  # noqa: RUF001


class Passage(NamedTuple):
    text: str
    year: int  # 1851 for the book
    following: str  # the next sentence


class Part(NamedTuple):
    """The examples of a training or a dev set, shuffled."""

    name: str
    addresses: list[Passage]
    book: list[Passage]
    random: np.random.Generator


def make(addresses: Documents, chapters: Documents) -> dict[str, str]:
    """File names and contents."""
    files: dict[str, str] = {}
    for seed, name in enumerate(("train", "dev")):
        random = np.random.Generator(np.random.Philox(key=seed))
        part = Part(name, *(_passages(texts, name == "dev", random) for texts in (addresses, chapters)), random)
        size = {"train": 1.0, "dev": 0.25}[name]
        for task, suffix, function in _TASKS:
            files[f"{task}-{name}.{suffix}"] = function(part, size)
    return files


def _passages(documents: Documents, dev: bool, random: np.random.Generator) -> list[Passage]:
    passages = []
    for number, (name, lines) in enumerate(documents.items()):
        if (number % 5 == 0) is dev:
            year = int(name[:4]) if "_" in name else 1851
            passages += [Passage(*lines[i : i + 1], year, lines[i + 1]) for i in range(1, len(lines) - 1)]
    plain = [passage for passage in passages if 50 <= len(passage.text) <= 180 and 40 <= len(passage.following) <= 180]
    unique = list(
        {passage.text: passage for passage in plain if passage.text.isprintable() and '"' not in passage.text}.values()
    )
    return [unique[i] for i in random.permutation(len(unique))]


# ---- classify: when a passage was spoken (GLUE's tsv with one sentence) ----------------------------------------------

_ERAS = {"1801-1870": range(1801, 1871), "1901-1950": range(1901, 1951), "1991-2021": range(1991, 2022)}


def _classify(part: Part, size: float) -> str:
    rows = []
    for era, years in _ERAS.items():
        era_passages = [passage for passage in part.addresses if passage.year in years]
        rows += [(f"{passage.text} {passage.following}", era) for passage in era_passages[: round(130 * size)]]
    return _tsv(("sentence", "label"), part.random.permutation(rows).tolist())


# ---- pair: which of two passages was spoken first (GLUE's tsv with two sentences) ------------------------------------


def _pair(part: Part, size: float) -> str:
    old = [passage.text for passage in part.addresses if passage.year < 1870]
    new = [passage.text for passage in part.addresses if passage.year > 1960]
    rows = []
    for number in range(round(320 * size)):
        first, second = old[-1 - number], new[-1 - number]  # others than those of classify
        swapped = number % 2 == 1
        rows.append((second, first, "later") if swapped else (first, second, "earlier"))
    rows = part.random.permutation(rows).tolist()
    return _tsv(("index", "sentence1", "sentence2", "label"), [(str(i), *row) for i, row in enumerate(rows)])


# ---- tag: persons, places and bodies of state (CoNLL) ----------------------------------------------------------------

_NAMES = {"PER": questions.PERSONS, "LOC": questions.PLACES, "ORG": questions.BODIES}
_ENTITY = {
    kind: re.compile(r"\b(?:" + "|".join(sorted(map(re.escape, names), key=len, reverse=True)) + r")\b")
    for kind, names in _NAMES.items()
}


def _tag(part: Part, size: float) -> str:
    lines = []
    mixed = [passage for pair in zip(part.addresses, part.book, strict=False) for passage in pair]
    with_names = [passage.text for passage in mixed if any(rule.search(passage.text) for rule in _ENTITY.values())]
    for text in with_names[: round(240 * size)]:
        entities = [(m.start(), m.end(), kind) for kind, rule in _ENTITY.items() for m in rule.finditer(text)]
        for word in WORD.finditer(text):
            tag = "O"
            for start, end, kind in entities:
                if start <= word.start() < end:
                    tag = f"{'B' if word.start() == start else 'I'}-{kind}"
            lines.append(f"{word.group()} {tag}")
        lines.append("")
    return "\n".join(lines)


# ---- qa: the span that answers, if there is one (SQuAD 2.0's json) ---------------------------------------------------


def _qa(part: Part, size: float) -> str:
    kinds: dict[str, list[tuple[str, str]]] = {}
    mixed = [passage.text for pair in zip(part.addresses, part.book, strict=False) for passage in pair]
    for text in [*mixed, *(passage.text for passage in part.addresses[len(part.book) :])]:
        spans = {kind: list(rule.finditer(text)) for kind, rule in questions.ANSWERS.items()}
        (kind, match), *others = sorted(spans.items(), key=lambda item: -len(item[1]))
        if len(match) == 1 and not any(spans for _, spans in others):
            kinds.setdefault(kind, []).append((text, match[0].group()))
    paragraphs = []
    if part.name == "train":
        paragraphs += [_paragraph(" ".join(text.split()), asked) for text, asked in questions.BY_HAND.items()]
    for kind, wordings in questions.WORDINGS.items():
        other = [wording for name, wordings in questions.WORDINGS.items() if name != kind for wording in wordings]
        for number, (text, answer) in enumerate(kinds[kind][: round(90 * size)]):
            asked = [(wordings[number % len(wordings)], answer)]
            if number % 3 == 2:
                asked.append((other[int(part.random.integers(len(other)))], None))
            paragraphs.append(_paragraph(text, asked))
    order = part.random.permutation(len(paragraphs)).tolist()
    number = 0
    for paragraph in (paragraphs[i] for i in order):
        for question in paragraph["qas"]:
            question["id"] = f"{part.name}-{number:04d}"
            number += 1
    data = [{"title": "State of the Union, Moby-Dick", "paragraphs": [paragraphs[i] for i in order]}]
    return json.dumps({"version": "v2.0", "data": data}, indent=0, ensure_ascii=False) + "\n"


def _paragraph(context: str, asked: Iterable[tuple[str, str | None]]) -> dict[str, Any]:
    rows = []
    for question, answer in asked:
        assert answer is None or answer in context, (answer, context)
        answers = [] if answer is None else [{"text": answer, "answer_start": context.index(answer)}]
        rows.append({"id": "", "question": question, "is_impossible": answer is None, "answers": answers})
    return {"context": context, "qas": rows}


# ---- choice: which of four sentences follows (SWAG's csv) ------------------------------------------------------------


def _choice(part: Part, size: float) -> str:
    """The correct sentence is from the same address, the three others are from the book."""
    columns = ["", "video-id", "fold-ind", "startphrase", "sent1", "sent2", "gold-source"]
    columns += [*(f"ending{i}" for i in range(4)), "label"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for number in range(round(120 * size)):
        addresses, other = part.addresses, part.book
        label = int(part.random.integers(4))
        endings = [other[len(other) - 1 - 3 * number - i].following for i in range(3)]
        endings.insert(label, addresses[number].following)
        start = addresses[number].text
        writer.writerow([number, part.name, number, start, start, "", "gold", *endings, label])
    return text.getvalue()


# ---- similarity: two excerpts of one passage (pairs) -----------------------------------------------------------------


def _similarity(part: Part, size: float) -> str:
    rows = []
    mixed = [passage for pair in zip(part.addresses, part.book, strict=False) for passage in pair]
    for passage in mixed[: round(400 * size)]:
        words = f"{passage.text} {passage.following}".split()
        rows.append((" ".join(words[: len(words) * 3 // 5]), " ".join(words[len(words) * 2 // 5 :])))
    return _tsv(("anchor", "positive"), rows)


# ---- files -----------------------------------------------------------------------------------------------------------


def _tsv(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    return "".join("\t".join(row) + "\n" for row in (header, *rows))


_TASKS: tuple[tuple[str, str, Callable[[Part, float], str]], ...] = (
    ("classify", "tsv", _classify),
    ("pair", "tsv", _pair),
    ("tag", "conll", _tag),
    ("qa", "json", _qa),
    ("choice", "csv", _choice),
    ("similarity", "tsv", _similarity),
)
