"""Reader of pairs and triplets of texts, for training and evaluating text vectors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasttfm.data.lines import data_error
from fasttfm.data.tables import Table, open_table

# The names of columns in data sets of pairs.
_FIRST = ("anchor", "query", "question", "sentence1", "question1")
_SECOND = ("positive", "answer", "document", "passage", "sentence2", "question2")
_NEGATIVE = ("negative",)
_SCORE = ("score", "similarity", "label")


@dataclass(frozen=True)
class SimilarityExample:
    """Two texts that belong together, optionally with a hard negative of the first; or two texts and their
    similarity."""

    first: str
    second: str
    negative: str | None = None
    label: float | None = None  # larger for texts that are more similar


def read_similarity(path: str | Path) -> list[SimilarityExample]:
    """Reads a file in any of the formats of ``tables.py``.

    The columns are ``anchor`` and ``positive`` (or ``query`` and ``document``, ``sentence1`` and ``sentence2``, ...),
    and optionally ``negative``, or the similarity ``score``, a number.
    """
    table = open_table(Path(path))
    first, second, negative, score = (
        next((name for name in names if name in table.columns), None) for names in (_FIRST, _SECOND, _NEGATIVE, _SCORE)
    )
    if first is None or second is None:
        expected = "the columns 'anchor' and 'positive', and perhaps 'negative' or 'score'"
        raise data_error(table.path, expected, ", ".join(map(repr, table.columns)), line=table.header_line)
    examples = []
    for number, row in table.rows():
        third = None if negative is None or not row.get(negative) else table.text(number, row, negative)
        label = None if score is None else _score(table, number, row.get(score))
        texts = table.text(number, row, first), table.text(number, row, second)
        examples.append(SimilarityExample(*texts, third, label))
    if not examples:
        raise data_error(table.path, "examples after the header line", "none")
    return examples


def _score(table: Table, number: int, given: Any) -> float:
    try:
        value = float(given)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise table.error(number, "a number as the score of a pair", repr(given))
    return value
