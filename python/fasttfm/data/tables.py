"""``Table``: rows with named columns from CSV, TSV, JSON and parquet files and from folders of ``datasets``.

    .tsv                    columns separated by tabs; nothing is quoted
    .csv                    columns separated by commas, or by semicolons if the first line has no comma; quoted
    .jsonl, .json           one object per line; a list of objects
    .parquet                needs pyarrow; class labels have the names that the ``datasets`` library stored with them
    a folder                one split that ``datasets`` has saved to disk (state.json and .arrow files; needs pyarrow)

All but parquet and folders may be compressed (.gz). The format of files with other suffixes is guessed from their first
line.
"""

from __future__ import annotations

import csv
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fasttfm import _extras
from fasttfm.data.lines import SURROGATE, DataError, data_error, read_json_lines, read_lines

Row = Mapping[str, Any]
_LONGEST_FIELD = 2**31 - 1  # characters; the csv module's own limit of 131,072 is for all of the process
SUFFIXES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")


def open_table(path: Path, *, header: bool = True) -> Table:
    """The table of a file or folder.

    Args:
        path: A file or folder in one of the formats above.
        header: Whether the first line of a CSV or TSV file has the names of the columns; otherwise they are 1, 2, ...
    """
    if path.is_dir():
        return ArrowFolder(path)
    suffix = path.name.removesuffix(".gz").rpartition(".")[2]
    if suffix == "parquet":
        return Parquet(path)
    first = next((line for _, line in read_lines(path) if line.strip()), None)
    if first is None:
        raise data_error(path, "a header line and examples" if header else "examples", "an empty file")
    if "\0" in first:
        raise data_error(path, f"text, or a name that ends in {', '.join(SUFFIXES)}", "a binary file")
    if suffix not in ("csv", "tsv", "jsonl", "json"):
        suffix = "jsonl" if first.lstrip().startswith("{") else "tsv" if "\t" in first else "csv"
    if suffix == "json" and not first.lstrip().startswith("["):
        suffix = "jsonl"
    if suffix in ("csv", "tsv"):
        delimiter = "\t" if suffix == "tsv" else ";" if ";" in first and "," not in first else ","
        return Delimited(path, delimiter, header=header)
    return JsonLines(path) if suffix == "jsonl" else JsonList(path)


class Table(ABC):
    """A file of rows. ``rows`` can be iterated repeatedly, and streams the file."""

    unit = "line"  # the meaning of row numbers: "line" or "row"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: list[str] = []
        self.header_line: int | None = None
        self.class_names: dict[str, Sequence[str]] = {}  # of integer columns

    @abstractmethod
    def rows(self) -> Iterator[tuple[int, Row]]:
        """Yields the number and the values of each row."""

    def error(self, number: int, expected: str, got: str) -> DataError:
        if self.unit == "line":
            return data_error(self.path, expected, got, line=number)
        return data_error(f"{self.path}, row {number}", expected, got)

    def value(self, row: Row, column: str) -> Any:
        """A value of a row; ``a.b`` is field b of object a. Class labels are returned by name, -1 as None."""
        value: Any = row.get(column)
        if column not in row and "." in column:
            value = row
            for name in column.split("."):
                value = value.get(name) if isinstance(value, Mapping) else None
        if column in self.class_names and isinstance(value, int):
            names = self.class_names[column]
            return names[value] if 0 <= value < len(names) else None
        return value

    def text(self, number: int, row: Row, column: str) -> str:
        """A value of a row. Raises DataError if it is not a text."""
        value = self.value(row, column)
        if not isinstance(value, str):
            got = ", ".join(map(repr, row)) if value is None and column not in row else f"{value!r:.60}"
            raise self.error(number, f"a text in {column!r}", got)
        if SURROGATE.search(value):  # "\\ud800" is valid JSON, but not a character
            raise self.error(number, "UTF-8 text", "half of a surrogate pair")
        return value


class Delimited(Table):
    """A CSV or TSV file. Lines with another number of columns raise DataError, or are counted with ``skip_broken``."""

    def __init__(self, path: Path, delimiter: str, *, header: bool) -> None:
        super().__init__(path)
        self.delimiter, self.header = delimiter, header
        self.skip_broken, self.broken = False, 0
        self.header_line, self.columns = next(self._split())
        if not header:
            self.columns = [str(number) for number in range(1, len(self.columns) + 1)]
        self._repeated = {name for name in self.columns if self.columns.count(name) > 1}

    def value(self, row: Row, column: str) -> Any:
        if column in self._repeated:
            got = f"{self.columns.count(column)} of that name"
            raise data_error(self.path, f"one column {column!r}", got, line=self.header_line)
        return super().value(row, column)

    def rows(self) -> Iterator[tuple[int, Row]]:
        lines = self._split()
        if self.header:
            next(lines)
        width, self.broken = len(self.columns), 0
        for number, values in lines:
            if len(values) == width:
                yield number, dict(zip(self.columns, values, strict=True))
            elif self.skip_broken:
                self.broken += 1
            else:
                raise self.error(number, f"{width} columns", f"{len(values)}")

    def _split(self) -> Iterator[tuple[int, list[str]]]:
        if self.delimiter == "\t":
            for number, line in read_lines(self.path):
                if line.strip():
                    yield number, line.split("\t")
            return
        csv.field_size_limit(_LONGEST_FIELD)
        reader = csv.reader((line + "\n" for _, line in read_lines(self.path)), delimiter=self.delimiter, strict=True)
        complete = 0  # the last line of a complete row
        try:
            for values in reader:
                complete = reader.line_num
                if values:
                    yield reader.line_num, values
        except csv.Error as error:
            if str(error) == "unexpected end of data":
                expected = 'a closing " for each opening one'
                raise data_error(self.path, expected, "the end of the file", line=complete + 1) from None
            raise data_error(self.path, "a csv file", str(error), line=reader.line_num) from None


class JsonLines(Table):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.header_line, first = next(self.rows())
        self.columns = list(first)

    def rows(self) -> Iterator[tuple[int, Row]]:
        for number, line, row in read_json_lines(self.path):
            if not isinstance(row, dict):
                raise self.error(number, "a JSON object", f"{line:.60}")
            yield number, row


class JsonList(Table):
    """A list of objects, read as a whole."""

    unit = "row"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._rows = read_json(path)
        self.columns = list(next(self.rows())[1]) if self._rows else []
        if not self._rows:
            raise data_error(path, "a list of objects", "an empty list")

    def rows(self) -> Iterator[tuple[int, Row]]:
        for number, row in enumerate(self._rows, 1):
            if not isinstance(row, dict):
                raise self.error(number, "a JSON object", f"{row!r:.60}")
            yield number, row


def read_json(path: Path, expected: str = "JSON") -> Any:
    """The value of a JSON file; ``expected`` describes its format in error messages."""
    lines = [line for _, line in read_lines(path)]
    try:
        return json.loads("\n".join(lines))
    except json.JSONDecodeError as error:
        start = max(0, error.colno - 30)
        got = repr(lines[error.lineno - 1][start : start + 60]) if lines else "an empty file"
        raise data_error(path, expected, f"{got} ({error.msg}, column {error.colno})", line=error.lineno) from None
    except RecursionError as error:
        raise data_error(path, "JSON", str(error)) from None


# ---- pyarrow ---------------------------------------------------------------------------------------------------------


def pyarrow_for(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise _extras.missing(f"{path}: reading parquet and arrow files", "pyarrow", "files") from None
    return pyarrow


class Parquet(Table):
    unit = "row"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._pyarrow = pyarrow_for(path)
        try:
            schema = self._pyarrow.parquet.read_schema(path)
        except (self._pyarrow.ArrowException, OSError) as error:
            raise data_error(path, "a parquet file", str(error)) from None
        self.columns = list(schema.names)
        stored = (schema.metadata or {}).get(b"huggingface", b"{}")
        self.class_names = _class_names(json.loads(stored).get("info", {}).get("features", {}))

    def rows(self) -> Iterator[tuple[int, Row]]:
        yield from self.batches(None)

    def batches(self, columns: Sequence[str] | None) -> Iterator[tuple[int, Row]]:
        """Yields the rows with only these columns."""
        number = 0
        try:
            with self._pyarrow.parquet.ParquetFile(self.path) as file:
                for batch in file.iter_batches(batch_size=1024, columns=columns):
                    for row in batch.to_pylist():
                        number += 1
                        yield number, row
        except (self._pyarrow.ArrowException, OSError) as error:
            raise data_error(self.path, "a parquet file", str(error)) from None


class ArrowFolder(Table):
    """A split that ``Dataset.save_to_disk`` has written: ``state.json`` lists the arrow files, ``dataset_info.json``
    the classes."""

    unit = "row"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        if not is_dataset(path):
            raise data_error(path, "a file, or a folder that `datasets` has saved (with state.json)", "another folder")
        pyarrow = self._pyarrow = pyarrow_for(path)
        state = read_json(path / "state.json")
        if state.get("_indices_files"):
            raise data_error(path, "a data set without an index file (flatten_indices())", "one with")
        self._files = [path / file["filename"] for file in state.get("_data_files", [])]
        info = path / "dataset_info.json"
        self.class_names = _class_names(read_json(info).get("features", {})) if info.is_file() else {}
        try:
            with pyarrow.memory_map(str(self._files[0])) as source:
                self.columns = list(pyarrow.ipc.open_stream(source).schema.names)
        except (IndexError, pyarrow.ArrowException, OSError) as error:
            raise data_error(path, "the arrow files that state.json names", str(error)) from None

    def rows(self) -> Iterator[tuple[int, Row]]:
        number = 0
        for path in self._files:
            try:
                with self._pyarrow.memory_map(str(path)) as source:
                    for batch in self._pyarrow.ipc.open_stream(source):
                        for row in batch.to_pylist():
                            number += 1
                            yield number, row
            except (self._pyarrow.ArrowException, OSError) as error:
                raise data_error(path, "an arrow file", str(error)) from None


def is_dataset(path: Path) -> bool:
    """Whether a folder is a split that ``datasets`` has saved."""
    return (path / "state.json").is_file()


def _class_names(features: Any) -> dict[str, Sequence[str]]:
    columns = features if isinstance(features, dict) else {}
    return {
        name: feature["names"]
        for name, feature in columns.items()
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and "names" in feature
    }
