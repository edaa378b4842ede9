"""Files of examples to predict, which may have no labels, and files of predictions."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from fasttfm._atomic_files import atomic_write
from fasttfm.data.lines import SURROGATE, DataError, data_error, read_lines
from fasttfm.data.tables import Parquet
from fasttfm.data.task_files import TagExample
from fasttfm.tasks.parquet_files import ParquetWriter
from fasttfm.tasks.task import Task

FORMATS = ("csv", "jsonl")
STDIN = "-"
_LINES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz")  # files that are read line by line


# ---- in --------------------------------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """Examples, read lazily, and their number if it is known."""

    examples: Iterator[Any]
    total: int | None


def read_inputs(task: Task, source: str, columns: Any = None) -> Inputs:
    """The examples of a file or of stdin (``-``).

    Lines of text (``.txt``, stdin) are examples whose texts are separated by tabs. Lines that are JSON objects
    (``.jsonl``, also in stdin) have the fields that ``task.example`` reads. Both are streamed. Other files are read as
    a whole by the task's ``read_file``, with ``columns`` if they are given.
    """
    if source == STDIN:
        return Inputs(_of_lines(task, "stdin", _stdin(), None), None)
    path = Path(source)
    is_json = path.name.endswith((".jsonl", ".jsonl.gz"))
    if columns is None and path.name.endswith(_LINES) and (not is_json or _is_known(task, path)):
        total = sum(1 for _, line in read_lines(path) if not is_json or line.strip())
        return Inputs(_of_lines(task, source, read_lines(path), is_json), total)
    if columns is not None:
        examples = task.read_file(path, columns)
    else:
        examples = _words(path) if task.name == "tag" and _columns(path) == 1 else task.read_file(path)
    return Inputs(iter(examples), len(examples))


class Line(NamedTuple):
    """A line of a file, which is parsed where the model is."""

    number: int
    text: str


def example_rows(source: str, task_of: Callable[[], Task], columns: Any = None) -> Iterator[Any]:
    """The examples of a file as rows that ``examples_of_rows`` reads: lines of ``.txt`` and ``.jsonl`` files, objects
    of ``.parquet`` files. Other files, and files with named columns, are read as a whole by the task.

    Args:
        task_of: Opens the task, if it is needed.
    """
    path = Path(source)
    if columns is None and path.name.endswith(_LINES):
        is_json = path.name.endswith((".jsonl", ".jsonl.gz"))
        return (Line(*line) for line in read_lines(path) if not is_json or line[1].strip())
    if columns is None and path.suffix == ".parquet":
        table = Parquet(path)
        return ({name: table.value(row, name) for name in table.columns} for _, row in table.rows())
    return read_inputs(task_of(), source, columns).examples


def examples_of_rows(task: Task, source: str, rows: Iterable[Any]) -> Iterator[Any]:
    """The examples of ``example_rows``."""
    rows = iter(rows)
    first = next(rows, None)
    if first is None:
        return iter(())
    rows = itertools.chain([first], rows)
    return _of_lines(task, source, rows, source.endswith((".jsonl", ".jsonl.gz"))) if isinstance(first, Line) else rows


def _is_known(task: Task, path: Path) -> bool:
    """Whether the first object has the fields that ``task.example`` reads."""
    first = next((line for _, line in read_lines(path) if line.strip()), "")
    try:
        row = _object(first)
    except DataError:
        return True  # reading it line by line reports the line
    try:
        task.example(row)
    except DataError:
        return False
    return True


def _of_lines(task: Task, source: str, lines: Iterable[tuple[int, str]], is_json: bool | None) -> Iterator[Any]:
    """The examples of lines. If ``is_json`` is None, the first line that is not blank determines it."""
    for number, line in lines:
        if is_json is None and line.strip():
            is_json = line.lstrip().startswith("{")
        if is_json and not line.strip():
            continue
        try:
            yield task.example(_object(line)) if is_json else task.example_of_line(line)
        except DataError as error:
            raise DataError(f"{source}, line {number}: {error}") from None


def _object(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"expected a JSON object, got {line:.60} ({error})") from None
    if not isinstance(value, dict):
        raise DataError(f"expected a JSON object, got {line:.60}")
    if SURROGATE.search(json.dumps(value, ensure_ascii=False)):  # "\\ud800" is valid JSON, but not a character
        raise DataError("expected UTF-8 text, got half of a surrogate pair")
    return value


def _columns(path: Path) -> int:
    return next((len(line.split()) for _, line in read_lines(path) if line.strip()), 0)


def _words(path: Path) -> list[TagExample]:
    """The sentences of a file with one word per line and no tags, separated by blank lines."""
    sentences: list[list[str]] = [[]]
    for number, line in read_lines(path):
        words = line.split()
        if len(words) > 1:
            raise data_error(path, "one word, as in the previous lines", f"{line[:60]!r}", line=number)
        if words:
            sentences[-1] += words
        elif sentences[-1]:
            sentences.append([])
    return [TagExample(words, []) for words in sentences if words]


def read_texts(source: str) -> Iterator[Any]:
    """The texts of a file or of stdin (``-``), one per line, or the objects of a .jsonl file."""
    is_json = source.endswith((".jsonl", ".jsonl.gz"))
    if source != STDIN and not source.endswith(_LINES):
        raise data_error(source, f"a name that ends in {', '.join(_LINES)}, or - for stdin", repr(Path(source).name))
    lines = _stdin() if source == STDIN else read_lines(Path(source))
    for number, line in lines:
        if not is_json:
            yield line
        elif line.strip():
            try:
                yield _object(line)
            except DataError as error:
                raise DataError(f"{source}, line {number}: {error}") from None


def _stdin() -> Iterator[tuple[int, str]]:
    for number, line in enumerate(sys.stdin, 1):
        try:
            line.encode()
        except UnicodeEncodeError:
            raise data_error("stdin", "UTF-8 text", "other bytes", line=number) from None
        yield number, line.rstrip("\r\n")


# ---- out -------------------------------------------------------------------------------------------------------------


class Writer:
    """Writes records one by one: as one JSON object per line, or as a table with a header.

    Args:
        format: One of ``FORMATS``.
        table: Returns the rows of a record in a table.
    """

    def __init__(self, file: TextIO, format: str, table: Callable[[dict[str, Any]], list[dict[str, Any]]]) -> None:
        self.file, self.format, self.table = file, format, table
        self._rows: Any = None
        self._records = 0

    def write(self, record: dict[str, Any]) -> None:
        self._records += 1
        if self.format == "jsonl":
            self.file.write(json.dumps(record, ensure_ascii=False) + "\n")
            return
        rows = self.table(record)
        if {"word", "token"} & set(rows[0] if rows else ()):  # several rows for each example
            rows = [{"sentence": self._records, **row} for row in rows]
        if self._rows is None and rows:
            self._rows = csv.DictWriter(self.file, list(rows[0]), lineterminator="\n")
            self._rows.writeheader()
        for row in rows:
            if extra := set(row) - set(self._rows.fieldnames):
                expected = f"the columns of the first example ({', '.join(self._rows.fieldnames)})"
                got = f"also {', '.join(sorted(extra))}; jsonl allows any fields"
                raise DataError(f"example {self._records}: expected {expected}, got {got}")
            self._rows.writerow(row)

    def close(self) -> None:
        """Ends the file, which needs nothing more in these formats."""


def write_predictions(path: Path, task: Task, results: Iterable[tuple[Any, Any]], first_row: int) -> int:
    """Writes a part file of examples with their results, in the format of its name. Returns their number.

    Args:
        first_row: The number of the first example, from which on ``.parquet`` files have a column ``row``.
    """
    count = 0
    if path.suffix == ".parquet":
        with ParquetWriter(path) as file:
            for example, result in results:
                for row in task.table(task.record(example, result)):
                    file.write({"row": first_row + count, **row})
                count += 1
        return count
    with path.open("w", encoding="utf-8", newline="") as text:
        writer = Writer(text, path.suffix[1:], task.table)
        for example, result in results:
            writer.write(task.record(example, result))
            count += 1
        writer.close()
    return count


@contextlib.contextmanager
def opened(output: Path | None) -> Iterator[TextIO]:
    """stdout, or a file that appears only when it is complete."""
    if output is None:
        yield sys.stdout
        return
    with atomic_write(output) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        yield file
