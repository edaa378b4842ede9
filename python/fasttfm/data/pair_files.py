"""Reader of pairs and triplets of texts, for training and evaluating text vectors."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasttfm.data.lines import data_error
from fasttfm.data.tables import Table, open_table

# The names of columns in data sets of pairs.
_FIRST = ("anchor", "query", "question", "sentence1", "question1")
_SECOND = ("positive", "answer", "document", "passage", "sentence2", "question2")
_SCORE = ("score", "similarity", "label")


@dataclass(frozen=True)
class SimilarityExample:
    """Two texts that belong together, optionally with hard negatives of the first; or two texts and their similarity.

    Args:
        label: Larger for texts that are more similar.
        teacher: A teacher's scores of the second text and of each negative, for the first.
    """

    first: str
    second: str
    negatives: tuple[str, ...] = ()
    label: float | None = None
    teacher: tuple[float, ...] | None = None


def read_similarity(path: str | Path) -> list[SimilarityExample]:
    """Reads a file in any of the formats of ``tables.py``.

    The columns are ``anchor`` and ``positive`` (or ``query`` and ``document``, ``sentence1`` and ``sentence2``, ...),
    and optionally ``negative``, or ``negative_1``, ``negative_2`` and so on, or the similarity ``score``, a number.
    With negatives, ``positive_score`` and ``negative_score`` (``negative_1_score``, ...) are a teacher's scores.
    """
    table = open_table(Path(path))
    first, second, score = (
        next((name for name in names if name in table.columns), None) for names in (_FIRST, _SECOND, _SCORE)
    )
    negatives = [name for name in table.columns if re.fullmatch(r"negative(_\d+)?", name)]
    taught = [f"{name}_score" for name in ("positive", *negatives)]
    has_teacher = taught[0] in table.columns
    missing = [name for name in taught if name not in table.columns] if has_teacher else []
    if missing or (has_teacher and not negatives):
        expected = "a column of scores for each negative, next to 'positive_score'"
        raise data_error(table.path, expected, ", ".join(map(repr, table.columns)), line=table.header_line)
    if first is None or second is None:
        expected = "the columns 'anchor' and 'positive', and perhaps 'negative' or 'score'"
        raise data_error(table.path, expected, ", ".join(map(repr, table.columns)), line=table.header_line)
    examples = []
    for number, row in table.rows():
        others = tuple(table.text(number, row, name) for name in negatives if row.get(name))
        label = None if score is None else _score(table, number, row.get(score))
        texts = table.text(number, row, first), table.text(number, row, second)
        teacher = None
        if has_teacher:
            used = (taught[0], *(f"{name}_score" for name in negatives if row.get(name)))
            teacher = tuple(_score(table, number, row.get(name)) for name in used)
        examples.append(SimilarityExample(*texts, others, label, teacher))
    if not examples:
        raise data_error(table.path, "examples after the header line", "none")
    return examples


def _score(table: Table, number: int, cell: Any) -> float:
    try:
        value = float(cell)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise table.error(number, "a number as the score of a pair", repr(cell))
    return value
