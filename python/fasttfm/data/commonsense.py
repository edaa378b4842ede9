"""Reader of CommonsenseQA's rows: a question, its choices and the key of the right one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasttfm.data.lines import data_error
from fasttfm.data.tables import Row, Table, open_table
from fasttfm.data.task_files import ChoiceExample


@dataclass(frozen=True)
class CommonsenseExample(ChoiceExample):
    """A question (``context``) with its choices (``endings``)."""

    id: str = ""
    keys: tuple[str, ...] = ()  # of the choices, such as A to E

    def key(self, choice: int) -> str:
        return self.keys[choice]


def read_commonsense(path: str | Path) -> list[CommonsenseExample]:
    """Reads questions from a file of JSON lines or another table.

    Each row has the format of CommonsenseQA (``question`` with ``stem`` and a list of ``choices``) or of its data set
    on the Hugging Face hub (``question`` a text, ``choices`` with the lists ``label`` and ``text``). Rows with no or an
    empty ``answerKey``, as in test sets, have no label.
    """
    path = Path(path)
    examples = list(commonsense_rows(open_table(path)))
    if not examples:
        raise data_error(path, "questions", "none")
    return examples


def commonsense_rows(table: Table) -> Iterator[CommonsenseExample]:
    for number, row in table.rows():
        parts = _parts(row)
        if parts is None:
            expected = "an object with 'question' and 'choices' in CommonsenseQA's format"
            raise table.error(number, expected, f"{json.dumps(row, default=str):.60}")
        question, choices = parts
        if len(choices) < 2:
            raise table.error(number, "two choices or more", str(len(choices)))
        keys = tuple(choices)
        key = row.get("answerKey") or None
        if key is not None and key not in keys:
            raise table.error(number, f"an answerKey of {', '.join(keys)}", repr(key))
        label = None if key is None else keys.index(key)
        yield CommonsenseExample(question, "", list(choices.values()), label, str(row.get("id", number)), keys)


def _parts(row: Row) -> tuple[str, dict[str, str]] | None:
    """The question and its choices by their keys; None if the object has another format."""
    question = row.get("question")
    if isinstance(question, dict):
        stem, listed = question.get("stem"), question.get("choices")
        rows = listed if isinstance(listed, list) else []
        pairs: list[Any] = [(choice.get("label"), choice.get("text")) for choice in rows if isinstance(choice, dict)]
        whole = len(pairs) == len(rows)
    else:
        stem, listed = question, row.get("choices")
        keys, texts = (listed.get(name) if isinstance(listed, dict) else None for name in ("label", "text"))
        if not isinstance(keys, list) or not isinstance(texts, list):
            return None
        pairs, whole = list(zip(keys, texts, strict=False)), len(keys) == len(texts)
    texts_only = all(isinstance(part, str) for pair in pairs for part in pair)
    if not isinstance(stem, str) or not whole or not texts_only or len(dict(pairs)) != len(pairs):
        return None
    return stem, dict(pairs)
