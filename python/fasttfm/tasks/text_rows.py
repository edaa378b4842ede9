"""The texts of a corpus as rows that are cheap to skip: lines of .jsonl files are parsed later, by who needs them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fasttfm.data.lines import SURROGATE, data_error, json_value, read_lines
from fasttfm.data.texts import files_of, read_documents

_JSON = (".jsonl", ".jsonl.gz")


class JsonLine(NamedTuple):
    """A line of a .jsonl file."""

    path: str
    number: int
    line: str


def text_rows(sources: Sequence[str], split: str, column: str) -> Iterator[str | JsonLine]:
    """The texts of files, directories and patterns, in order.

    Args:
        split: What is a text of .txt files: ``"line"``, ``"document"`` (between blank lines) or ``"file"``.
        column: That of the text in files with columns.
    """
    for source in sources:
        for path in files_of(source) or []:
            if path.name.endswith(_JSON):
                yield from (JsonLine(str(path), *line) for line in read_lines(path) if line[1].strip())
            elif split == "document" or not path.name.endswith((".txt", ".txt.gz")):
                yield from read_documents(path, column=column)
            elif split == "line":
                yield from (line for _, line in read_lines(path))
            else:
                yield "\n".join(line for _, line in read_lines(path))


def texts_of_rows(rows: Iterable[str | JsonLine], column: str) -> Iterator[str]:
    """The texts of ``text_rows``."""
    return (row if isinstance(row, str) else _parsed(row, column) for row in rows)


def _parsed(row: JsonLine, column: str) -> str:
    path = Path(row.path)
    text = value = json_value(path, row.number, row.line)
    for name in [column] if isinstance(value, dict) and column in value else column.split("."):
        text = text.get(name) if isinstance(text, dict) else None
    if not isinstance(text, str):
        raise data_error(path, f"a text in {column!r}", f"{row.line:.60}", line=row.number)
    if SURROGATE.search(text):  # "\\ud800" is valid JSON, but not a character
        raise data_error(path, "UTF-8 text", "half of a surrogate pair", line=row.number)
    return text
