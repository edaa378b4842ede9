"""``read_documents`` reads documents from files, folders, patterns, data sets and iterables; shipped texts."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fasttfm.data.lines import data_error, read_lines
from fasttfm.data.tables import Parquet, open_table

SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz", ".parquet")
# Suffixes of files that are read if they are named, and from folders without files of SUFFIXES.
_MARKUP, _TABLES = (".md", ".rst"), (".csv", ".csv.gz", ".tsv", ".tsv.gz")
OTHER_SUFFIXES = (*_MARKUP, *_TABLES)
_HERE = Path(__file__).parent
LANGUAGES = {"english": _HERE / "corpus", "korean": _HERE / "languages" / "korean"}  # of the shipped texts
_SAMPLES = {**LANGUAGES, "english": _HERE / "corpus" / "tasks"}  # of the shipped labelled data sets
# Lines of Markdown and reStructuredText that do not belong to a paragraph: headings, items, quotes, tables, directives.
_OWN_LINE = re.compile(r"\s{4,}|\s*(?:#|[-*+] |\d+[.)] |>|\||\.\. |:\w|([-=~^\"'`*+#])\1{2,}\s*$)")


def read_documents(source: Any, *, column: str = "text") -> Iterator[str]:
    """Yields the documents of ``source``, which is streamed.

    Args:
        source: A file, a folder (every file in and below it whose name ends in one of ``SUFFIXES``, or else in one of
            ``OTHER_SUFFIXES``; or a data set that ``datasets`` has saved), a pattern such as ``"books/*.txt"``, or a
            list of these. ``.txt``: documents are separated by blank lines; ``.md``, ``.rst``:
            a file is a document; ``.jsonl``, ``.parquet``, ``.csv``, ``.tsv``: each row has one; ``.gz`` may follow.
            Otherwise a ``datasets`` data set, or any other iterable of texts.
        column: The column of files and data sets that has the text.
    """
    files = files_of(source)
    if files is not None:
        for path in files:
            yield from _read_file(path, column)
        return
    if hasattr(source, "column_names"):
        if column not in source.column_names:
            raise data_error("data set", f"a column {column!r}", f"columns {', '.join(map(repr, source.column_names))}")
        source = (row[column] for row in source)
    for number, text in enumerate(source):
        if not isinstance(text, str):
            raise TypeError(f"read_documents: source[{number}]: expected a text, got {type(text).__name__}")
        yield text


def files_of(source: Any) -> list[Path] | None:
    """The files of ``source``, in the order in which they are read; None if it is neither a path nor a list of
    paths."""
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


def shipped_corpus(language: str = "english") -> Path:
    """The folder of the shipped texts of a language, ``"english"`` (about three million characters) or ``"korean"``
    (half a million); their READMEs name the sources."""
    if language not in LANGUAGES:
        raise ValueError(f"shipped_corpus: language: expected one of {', '.join(LANGUAGES)}, got {language!r}")
    return LANGUAGES[language]


def shipped_task(name: str, language: str = "english") -> dict[str, Path]:
    """The files ``"train"`` and ``"dev"`` of the small labelled data set that is shipped for a task, in English or, for
    some tasks, in Korean."""
    files = sorted(_samples(language).glob("*-train.*"))
    known = {path.name.partition("-train.")[0]: path for path in files}
    if name not in known:
        which = "" if language == "english" else f" in {language.title()}"
        raise ValueError(f"shipped_task: name: expected one of {', '.join(known)}{which}, got {name!r}")
    return {"train": known[name], "dev": known[name].with_name(known[name].name.replace("-train.", "-dev."))}


def shipped_graph(language: str = "english") -> Path:
    """The edge file of the small graph that is shipped for the questions of the sample ``"commonsense"``."""
    return _samples(language) / "commonsense-graph.tsv"


def _samples(language: str) -> Path:
    if language not in _SAMPLES:
        raise ValueError(f"language: expected one of {', '.join(_SAMPLES)}, got {language!r}")
    return _SAMPLES[language]


def shipped_knowledge(name: str) -> Path:
    """A file of the small shipped knowledge graph: ``"triples"``, or ``"mentions"`` of its entities in texts
    (``data.knowledge``)."""
    names = {"triples": "triples.tsv", "mentions": "mentions.jsonlines.gz"}
    if name not in names:
        raise ValueError(f"shipped_knowledge: name: expected one of {', '.join(names)}, got {name!r}")
    return _HERE / "corpus" / "knowledge" / names[name]


# ---- paths -----------------------------------------------------------------------------------------------------------


def _files_of_path(source: str | Path) -> list[Path]:
    path = Path(source)
    try:
        if path.is_dir():
            return _files_of_folder(path)
        if path.exists():
            return [path]
    except OSError as error:  # for example a long text, which is not a valid path
        raise data_error(f"{source!s:.60}", "a path", error.strerror or str(error)) from None
    paths = sorted(Path(name) for name in glob.glob(str(source), recursive=True))
    files = [path for path in paths if path.is_file()]
    if not files:
        hint = "; to pass texts, use an iterator, for example iter(texts)" if len(str(source)) > 60 else ""
        hint = "; fasttfm pretrain --stream reads addresses" if "://" in str(source) else hint
        raise data_error(f"{source!s:.200}", "a file, a folder or a pattern that matches one", "nothing there" + hint)
    return files


def _files_of_folder(folder: Path) -> list[Path]:
    paths = sorted(folder.rglob("*"))
    saved = [path.parent for path in paths if path.name == "state.json"]  # splits that ``datasets`` has saved
    if saved:
        return saved
    for suffixes in (SUFFIXES, OTHER_SUFFIXES):
        files = [path for path in paths if path.name.endswith(suffixes) and path.is_file()]
        if files:
            return files
    raise data_error(folder, f"files that end in {', '.join((*SUFFIXES, *OTHER_SUFFIXES))}", "none")


# ---- files -----------------------------------------------------------------------------------------------------------


def _read_file(path: Path, column: str) -> Iterator[str]:
    if path.name.endswith((".txt", ".txt.gz")):
        return _read_text(path)
    if path.name.endswith(_MARKUP):
        return _read_markup(path)
    if path.name.endswith((".jsonl", ".jsonl.gz", ".parquet", *_TABLES)) or path.is_dir():
        return _read_column(path, column)
    raise data_error(path, f"a name that ends in {', '.join((*SUFFIXES, *OTHER_SUFFIXES))}", repr(path.name))


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


def _read_markup(path: Path) -> Iterator[str]:
    """The whole file as one document, with the lines of each paragraph joined."""
    lines: list[str] = []
    joins = False
    for _, line in read_lines(path):
        starts_line = bool(_OWN_LINE.match(line))
        if line.strip() and joins and not starts_line:
            lines[-1] += f" {line.strip()}"
        elif line.strip():
            lines.append(line.rstrip())
        joins = bool(line.strip()) and not line.lstrip().startswith("#")
    if lines:
        yield "\n".join(lines)


def _read_column(path: Path, column: str) -> Iterator[str]:
    if path.stat().st_size == 0 and path.suffix != ".parquet":
        return
    table = open_table(path)
    if isinstance(table, Parquet) and column in table.columns:
        rows = table.batches([column])
    else:
        rows = table.rows()
        if column not in table.columns and not path.name.endswith((".jsonl", ".jsonl.gz")):
            raise data_error(path, f"a column {column!r}", f"columns {', '.join(map(repr, table.columns))}")
    for number, row in rows:
        yield table.text(number, row, column)
