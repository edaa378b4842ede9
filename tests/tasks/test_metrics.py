"""Scores of labels, values and tags against results computed by hand."""

from __future__ import annotations

import math
import sys

import pytest

from fasttfm.tasks.metrics import entities, label_scores, most_common, tag_scores, value_scores


def test_scores_of_labels() -> None:
    scores = label_scores(["a", "a", "a", "b"], ["a", "a", "b", "b"])
    assert scores["accuracy"] == 0.75
    assert scores["f1"] == pytest.approx((4 / 5 + 2 / 3) / 2)
    assert scores["matthews"] == pytest.approx((2 * 1 - 0 * 1) / math.sqrt(2 * 3 * 1 * 2))
    assert label_scores(["a", "b"], ["a", "a"])["matthews"] == 0.0


def test_scores_of_values() -> None:
    assert value_scores([1, 2, 3], [2, 4, 6]) == {"pearson": pytest.approx(1), "spearman": pytest.approx(1)}
    scores = value_scores([1, 2, 3], [1, 3, 2])
    assert scores == {"pearson": pytest.approx(0.5), "spearman": pytest.approx(0.5)}
    assert value_scores([1, 2, 3], [5, 5, 5]) == {"pearson": 0.0, "spearman": 0.0}


def test_without_scikit_learn_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match=r"pip install 'fasttfm\[tasks\]'"):
        label_scores(["a"], ["a"])


def test_the_most_common_value_is_the_first_of_several() -> None:
    assert most_common(["b", "a", "a", "b"]) == "b"


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("O B-PER I-PER O", {("PER", 1, 3)}),
        ("B-PER B-PER I-LOC", {("PER", 0, 1), ("PER", 1, 2), ("LOC", 2, 3)}),
        ("I-PER I-PER O I-LOC", {("PER", 0, 2), ("LOC", 3, 4)}),  # IOB1
        ("S-PER B-LOC E-LOC I-LOC", {("PER", 0, 1), ("LOC", 1, 3), ("LOC", 3, 4)}),  # IOBES
        ("O O", set()),
        ("", set()),
    ],
)
def test_entities(tags: str, expected: set[tuple[str, int, int]]) -> None:
    assert entities(tags.split()) == expected


def test_entities_are_scored_as_a_whole() -> None:
    gold = [["B-PER", "I-PER", "O", "B-LOC"], ["B-LOC"]]
    predicted = [["B-PER", "O", "O", "B-LOC"], ["B-LOC"]]
    scores = tag_scores(gold, predicted)
    assert scores == pytest.approx({"accuracy": 4 / 5, "precision": 2 / 3, "recall": 2 / 3, "f1": 2 / 3})
    assert tag_scores(gold, [["O"] * 4, ["O"]])["f1"] == 0.0


def test_tags_that_mark_no_entities_have_an_accuracy_only() -> None:
    assert tag_scores([["NOUN", "VERB"]], [["NOUN", "NOUN"]]) == {"accuracy": 0.5}
