"""Reader of pairs and triplets of texts that belong together, for training and judging text vectors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from fasttfm.data.texts import data_error, read_lines

# The names of columns, as datasets of pairs have them.
_FIRST = ("anchor", "query", "question", "sentence1", "question1")
_SECOND = ("positive", "answer", "document", "passage", "sentence2", "question2")
_NEGATIVE = ("negative",)
_SCORE = ("score", "similarity", "label")


@dataclass(frozen=True)
class SimilarityExample:
    """Two texts that belong together, perhaps a third that does not belong to the first; or two texts and how similar
    they are."""

    first: str
    second: str
    negative: str | None = None
    label: float | None = None  # larger for texts that are more similar


def read_similarity(path: str | Path) -> list[SimilarityExample]:
    """Examples of a tsv file with a header line, in which nothing is quoted.

    The columns are ``anchor`` and ``positive`` (or ``query`` and ``document``, ``sentence1`` and ``sentence2``, ...),
    and perhaps ``negative``, or a number, ``score``, how similar the two are.
    """
    path = Path(path)
    rows = ((number, line.split("\t")) for number, line in read_lines(path) if line.strip())
    number, header = next(rows, (0, []))
    if not header:
        raise data_error(path, "a header line and examples", "an empty file")
    first, second, negative, score = (
        next((header.index(name) for name in names if name in header), None)
        for names in (_FIRST, _SECOND, _NEGATIVE, _SCORE)
    )
    if first is None or second is None:
        expected = "a header with the columns 'anchor' and 'positive', and perhaps 'negative' or 'score'"
        raise data_error(path, expected, ", ".join(map(repr, header)), line=number)
    examples = []
    for number, row in rows:
        if len(row) != len(header):
            raise data_error(path, f"{len(header)} columns", f"{len(row)}", line=number)
        third = None if negative is None else row[negative] or None
        label = None if score is None else _score(path, number, row[score])
        examples.append(SimilarityExample(row[first], row[second], third, label))
    if not examples:
        raise data_error(path, "examples after the header line", "none")
    return examples


def _score(path: Path, line: int, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise data_error(path, "a number as the score of a pair", repr(text), line=line)
    return value
