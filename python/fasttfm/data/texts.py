"""``read_documents``: files, folders, patterns, data sets and plain iterables as documents; and what texts we ship."""

from __future__ import annotations

import glob
import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz", ".parquet")
_HERE = Path(__file__).parent
# A sentence begins on a new line, and after . ! or ? (and closing quotation marks) if something follows that can begin
# one; not after an initial or a title.
_TITLES = "".join(rf"(?<!\b{title}\.)" for title in ("[A-Z]", "Mr", "Mrs", "Ms", "Dr", "St", "Gen", "Col", "Messrs"))
_CLOSING, _OPENING = "[\"')\\]\u201d\u2019]*", "[\"'(\\[\u201c\u2018]*"
_SURROGATE = re.compile("[\\ud800-\\udfff]")
_SENTENCE_START = re.compile(rf"\n\s*(?=\S)|(?<=[.!?]){_TITLES}{_CLOSING}\s+(?={_OPENING}[A-Z0-9])")


class DataError(ValueError):
    """A file or a text that cannot be used: which one, where in it, what was expected and what came."""


def data_error(where: str | Path, expected: str, got: str, *, line: int | None = None) -> DataError:
    place = f"{where}" if line is None else f"{where}, line {line}"
    return DataError(f"{place}: expected {expected}, got {got}")


def read_documents(source: Any) -> Iterator[str]:
    """The documents of ``source``, one after the other; nothing is held in memory.

    Args:
        source: A file, a folder (every file in and below it whose name ends in one of ``SUFFIXES``), a pattern such as
            ``"books/*.txt"``, or a list of these. ``.txt``: documents are separated by blank lines; ``.jsonl``: one
            object a line, its ``"text"``; ``.parquet``: the column ``text``; the first two also with ``.gz``. Otherwise
            a ``datasets`` data set with a column ``text``, or any other iterable of texts.
    """
    files = files_of(source)
    if files is not None:
        for path in files:
            yield from _read_file(path)
        return
    if hasattr(source, "column_names"):
        if "text" not in source.column_names:
            raise data_error("data set", "a column 'text'", f"columns {', '.join(map(repr, source.column_names))}")
        source = (row["text"] for row in source)
    for number, text in enumerate(source):
        if not isinstance(text, str):
            raise TypeError(f"read_documents: source[{number}]: expected a text, got {type(text).__name__}")
        yield text


def files_of(source: Any) -> list[Path] | None:
    """The files that ``source`` names, in the order they are read; None where it is no path and no list of paths."""
    if isinstance(source, (str, Path)):
        return _files_of_path(source)
    if isinstance(source, (list, tuple)):
        for item in source:
            if not isinstance(item, (str, Path)):
                raise TypeError(f"read_documents: source: expected a list of paths, got one of {type(item).__name__}")
        return [path for item in source for path in _files_of_path(item)]
    if not isinstance(source, Iterable):
        raise TypeError(f"read_documents: source: expected a path or an iterable of texts, got {type(source).__name__}")
    return None


def shipped_corpus() -> Path:
    """The folder of the texts that come with fasttfm: public domain, about three million characters (its README)."""
    return _HERE / "corpus"


def shipped_task(name: str) -> dict[str, Path]:
    """The files ``"train"`` and ``"dev"`` of the small labelled set that comes with fasttfm for a task."""
    files = sorted((_HERE / "corpus" / "tasks").glob("*-train.*"))
    known = {path.name.partition("-train.")[0]: path for path in files}
    if name not in known:
        raise ValueError(f"shipped_task: name: expected one of {', '.join(known)}, got {name!r}")
    return {"train": known[name], "dev": known[name].with_name(known[name].name.replace("-train.", "-dev."))}


def shipped_knowledge(name: str) -> Path:
    """A file of the small knowledge graph that comes with fasttfm: ``"triples"``, or ``"mentions"`` of its entities in
    texts (``data.knowledge``)."""
    names = {"triples": "triples.tsv", "mentions": "mentions.jsonlines.gz"}
    if name not in names:
        raise ValueError(f"shipped_knowledge: name: expected one of {', '.join(names)}, got {name!r}")
    return _HERE / "corpus" / "knowledge" / names[name]


def sentence_starts(text: str) -> list[int]:
    """The offsets of the sentences of a text after the first: on a new line, or after the end of another sentence."""
    return [match.end() for match in _SENTENCE_START.finditer(text)]


# ---- paths -----------------------------------------------------------------------------------------------------------


def _files_of_path(source: str | Path) -> list[Path]:
    path = Path(source)
    try:
        if path.is_dir():
            return _files_of_folder(path)
        if path.exists():
            return [path]
    except OSError as error:  # for example a text of a thousand words, which no path can be
        raise data_error(f"{source!s:.60}", "a path", error.strerror or str(error)) from None
    found = sorted(Path(name) for name in glob.glob(str(source), recursive=True))
    files = [path for path in found if path.is_file()]
    if not files:
        hint = "; texts themselves are given as an iterator, for example iter(texts)" if len(str(source)) > 60 else ""
        raise data_error(f"{source!s:.200}", "a file, a folder or a pattern that matches one", "nothing there" + hint)
    return files


def _files_of_folder(folder: Path) -> list[Path]:
    files = [path for path in sorted(folder.rglob("*")) if path.name.endswith(SUFFIXES) and path.is_file()]
    if not files:
        raise data_error(folder, f"files that end in {', '.join(SUFFIXES)}", "none")
    return files


# ---- files -----------------------------------------------------------------------------------------------------------


def _read_file(path: Path) -> Iterator[str]:
    if path.name.endswith((".txt", ".txt.gz")):
        return _read_text(path)
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return _read_json_documents(path)
    if path.name.endswith(".parquet"):
        return _read_parquet(path)
    raise data_error(path, f"a name that ends in {', '.join(SUFFIXES)}", repr(path.name))


def _read_text(path: Path) -> Iterator[str]:
    document: list[str] = []
    for _, line in read_lines(path):
        if line.strip():
            document.append(line)
        elif document:
            yield "\n".join(document)
            document = []
    if document:
        yield "\n".join(document)


def read_json_lines(path: Path) -> Iterator[tuple[int, str, Any]]:
    """Number, text and value of each line that is not blank."""
    for number, line in read_lines(path):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise data_error(path, "a JSON object", f"{line:.60} ({error})", line=number) from None
        yield number, line, value


def _read_json_documents(path: Path) -> Iterator[str]:
    for number, line, row in read_json_lines(path):
        text = row.get("text") if isinstance(row, dict) else None
        if not isinstance(text, str):
            got = f"an object with {', '.join(map(repr, row))}" if isinstance(row, dict) else f"{line:.60}"
            raise data_error(path, "an object with a string 'text'", got, line=number)
        if _SURROGATE.search(text):  # "\\ud800" is JSON, but no character
            raise data_error(path, "UTF-8 text", "half of a surrogate pair", line=number)
        yield text


def _read_parquet(path: Path) -> Iterator[str]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ImportError(f"{path}: .parquet files need pyarrow: pip install pyarrow") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if "text" not in names:
                raise data_error(path, "a column 'text'", f"columns {', '.join(map(repr, names))}")
            row = 0
            for batch in file.iter_batches(batch_size=1024, columns=["text"]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    if not isinstance(text, str):
                        raise data_error(path, "a string in every row of 'text'", f"{text!r:.60} in row {row}")
                    yield text
    except (pyarrow.ArrowException, OSError) as error:
        raise data_error(path, "a parquet file", str(error)) from None


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Number (from 1) and text of every line of a UTF-8 file, compressed or not, without the line's end."""
    try:
        with _open(path) as file:
            for number, line in enumerate(file, 1):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    got = f"byte 0x{line[error.start]:02x} as number {error.start + 1} of the line"
                    raise data_error(path, "UTF-8 text", got, line=number) from None
                yield number, text.rstrip("\r\n")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise data_error(path, "a whole gzip file", str(error)) from None
    except OSError as error:
        raise data_error(path, "a readable file", error.strerror or str(error)) from None


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]
