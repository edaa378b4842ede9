"""Examples of tasks, and the readers of labelled texts and tagged words.

Each reader returns the file's examples in their order. A file in an unknown format raises ``DataError`` with its name,
the line, what was expected and what was found. ``question_files`` and ``choice_files`` have the other readers.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fasttfm.data.lines import data_error, read_lines
from fasttfm.data.tables import Delimited, Table, open_table


@dataclass(frozen=True)
class TextExample:
    """A text or a pair of texts, and its label in the file."""

    first: str
    second: str | None
    label: str | None  # None in test sets


@dataclass(frozen=True)
class TagExample:
    words: list[str]
    tags: list[str]  # one per word


@dataclass(frozen=True)
class Answer:
    text: str
    start: int  # its first character in the context


@dataclass(frozen=True)
class QuestionExample:
    id: str
    question: str
    context: str
    answers: list[Answer]  # several if people answered differently; none if the context has no answer
    impossible: bool
    # Free-form answers for scores: a prediction's score is its best score in each list, averaged over the lists. If
    # empty, predictions are compared with ``answers``.
    references: list[list[str]] = field(default_factory=list)
    domain: str = ""  # where the context comes from, in files that say so (CoQA)


@dataclass(frozen=True)
class ChoiceExample:
    context: str
    start: str  # the start of the sentence that the endings complete; may be empty
    endings: list[str]
    label: int | None  # None in test sets


class Columns(NamedTuple):
    """The columns of a file, by name or by number, counted from 1; None for columns with a known name.

    Args:
        header: Whether the first line of a CSV or TSV file has the names of the columns.
    """

    text: str | None = None
    pair: str | None = None
    label: str | None = None
    header: bool = True


BY_NAME = Columns()

# ---- texts -----------------------------------------------------------------------------------------------------------

# Known names of columns, in lower case: GLUE's, SNLI's and other common ones.
_PAIRS = (
    ("sentence1", "sentence2"),  # MNLI, RTE, WNLI, STS-B, SNLI, KLUE-STS
    ("question1", "question2"),  # QQP
    ("question", "sentence"),  # QNLI
    ("#1 string", "#2 string"),  # MRPC
    ("premise", "hypothesis"),  # KLUE-NLI, SNLI of the hub
    ("text_a", "text_b"),
    ("text1", "text2"),
    ("query", "document"),  # as read_similarity reads them
    ("query", "passage"),
    ("anchor", "positive"),
)
_TEXTS = ("sentence", "text", "title", "document", "review", "content", "question", "comment", "body", "utterance")
_LABELS = (
    *("label", "gold_label", "labels", "score", "is_duplicate", "quality", "class", "category", "target", "sentiment"),
    *("intent", "coarse_label", "rating", "stars", "similarity"),
)


def read_texts(
    path: str | Path,
    columns: Columns = BY_NAME,
    *,
    skip_broken: bool = False,
) -> list[TextExample]:
    """Reads texts or pairs of texts with labels from any file that ``tables`` reads, and from CoLA's without a header.

    Lines of QQP's training set with a wrong number of columns, and SNLI's examples without an agreed label (``-``), are
    skipped and counted in a warning.

    Args:
        path: The file.
        columns: Which columns to read; by default those with a known name.
        skip_broken: Whether to skip lines whose number of columns differs from the header's.
    """
    table = _text_table(Path(path), columns)
    first, second, label = text_columns(table, columns)
    is_qqp = {"question1", "question2", "is_duplicate"} <= set(table.columns)
    if isinstance(table, Delimited):
        table.skip_broken = skip_broken or is_qqp
    examples, undecided = [], 0
    for number, row in table.rows():
        value = None if label is None else _label(table, number, table.value(row, label))
        if value == "-" and label == "gold_label":
            undecided += 1
            continue
        pair = None if second is None else table.text(number, row, second)
        examples.append(TextExample(table.text(number, row, first), pair, value))
    if not examples:
        raise data_error(table.path, "examples after the header line", "none")
    if isinstance(table, Delimited) and table.broken and not skip_broken:
        what = f"{table.broken} lines that do not have {len(table.columns)} columns"
        warnings.warn(f"{table.path}: {what} are left out", stacklevel=2)
    if undecided:
        warnings.warn(f"{table.path}: {undecided} examples without an agreed label are left out", stacklevel=2)
    return examples


def describe_columns(path: Path, columns: Columns) -> str:
    """A description of the columns that ``read_texts`` reads."""
    first, second, label = text_columns(_text_table(path, columns), columns)
    texts = f"texts in {first!r}" if second is None else f"texts in {first!r} and {second!r}"
    return texts if label is None else f"{texts}, labels in {label!r}"


def _text_table(path: Path, columns: Columns) -> Table:
    """Opens the table. CoLA's columns, which have no header, get the names source, label, mark and sentence."""
    table = open_table(path, header=columns.header)
    header = table.columns
    is_cola = len(header) == 4 and header[1] in ("0", "1") and header[2] in ("", "*")
    if columns.header and is_cola and isinstance(table, Delimited):
        table = open_table(path, header=False)
        table.columns = ["source", "label", "mark", "sentence"]
    return table


class TextColumns(NamedTuple):
    first: str
    second: str | None
    label: str | None


def text_columns(table: Table, columns: Columns) -> TextColumns:
    """The columns of a table that are read: the given ones, or those with a known name. Without a header, two columns
    are text and label, and three the texts of a pair and its label."""
    if isinstance(table, Delimited) and not columns.header and not any(columns[:3]):
        return _columns_by_number(table)
    names = {name.lower(): name for name in reversed(table.columns)}
    text, pair, label = (None if column is None else _column(table, column) for column in columns[:3])
    if text is None:
        pairs = [(names[a], names[b]) for a, b in _PAIRS if a in names and b in names]
        single = [names[name] for name in _TEXTS if name in names and names[name] != pair]
        if pairs and pair in (None, pairs[0][1]):
            text, pair = pairs[0]
        elif single:
            text = single[0]
        else:
            known = "; ".join([*(f"{a!r} and {b!r}" for a, b in _PAIRS), *map(repr, _TEXTS)])
            others = "--text-column names another, --no-header says that this line is an example"
            expected = f"a header with the columns {known} ({others})"
            got = ", ".join(map(repr, table.columns))
            raise data_error(table.path, expected, f"{got:.200}", line=table.header_line)
    if label is None:
        label = next((names[known] for known in _LABELS if known in names and names[known] not in (text, pair)), None)
    return TextColumns(text, pair, label)


def _columns_by_number(table: Table) -> TextColumns:
    if len(table.columns) > 3:
        expected = "up to three columns without a header: a text, the second text of a pair, a label"
        got = f"{len(table.columns)}; --text-column and --label-column give the numbers"
        raise data_error(table.path, expected, got, line=table.header_line)
    first, *others = table.columns
    return TextColumns(first, others[0] if len(others) == 2 else None, others[-1] if others else None)


def _column(table: Table, column: str) -> str:
    names = table.columns
    if column in names or ("." in column and column.partition(".")[0] in names):
        return column
    if column.isdecimal() and 1 <= int(column) <= len(names):
        return names[int(column) - 1]
    got = ", ".join(map(repr, names))
    raise data_error(table.path, f"a column {column!r}", f"{got:.200}", line=table.header_line)


def _label(table: Table, number: int, value: Any) -> str | None:
    """A label as a text. KLUE-STS has an object with several labels, of which ``label`` is used."""
    if isinstance(value, dict):
        value = value.get("label")
    if value is None or (isinstance(value, (str, int, float)) and value == value):  # NaN is not itself
        return None if value is None or value == "" else str(value)
    raise table.error(number, "a text or a number as label", f"{value!r:.60}")


# ---- words -----------------------------------------------------------------------------------------------------------

_CONLLU = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")
# Comment lines of CoNLL-U and KLUE. A word may be "#" or "##", too.
_COMMENT = re.compile(r"# ?(?:\S+ ?=|newdoc\b|newpar\b)|## ?klue-|## [^\t]* : ")


def read_conll(path: str | Path, columns: Columns = BY_NAME) -> list[TagExample]:
    """Reads sentences from a file with one word per line, the word in the first column and its tag in the last, and
    blank lines between sentences: CoNLL-2000 and 2003, CoNLL-U (form and universal part of speech), and KLUE-NER (one
    syllable per line).

    Args:
        path: The file; columns are separated by tabs or by spaces. ``-DOCSTART-`` lines and CoNLL-U's comments, ranges
            of words and empty nodes are skipped.
        columns: ``text`` and ``label`` are the columns of words and tags, by number, or by name in CoNLL-U.
    """
    path = Path(path)
    rows = list(_word_rows(path))
    width = next((len(row) for _, row in rows if row), 0)
    if width == 0:
        raise data_error(path, "words with tags, one per line", "none")
    is_conllu = width == len(_CONLLU) and next(row for _, row in rows if row)[0].partition("-")[0] == "1"
    names = _CONLLU if is_conllu else ()
    word = _word_column(path, columns.text or ("form" if is_conllu else "1"), names, width)
    tag = _word_column(path, columns.label or ("upos" if is_conllu else str(width)), names, width)
    examples: list[TagExample] = []
    words: list[str] = []
    tags: list[str] = []
    for number, row in [*rows, (0, [])]:
        if not row:
            if words:
                examples.append(TagExample(words, tags))
                words, tags = [], []
            continue
        if len(row) != width or width < 2:
            expected = "a word and a tag" if width < 2 else f"{width} columns, as in the previous lines"
            raise data_error(path, expected, f"{' '.join(row)[:60]!r}", line=number)
        if row[word].strip() and not (is_conllu and not row[0].isdigit()):
            words.append(row[word])
            tags.append(row[tag])
    if not examples:
        raise data_error(path, "words with tags, one per line", "none")
    return examples


def _word_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yields the number and the columns of each line; no columns for a line between sentences."""
    for number, line in read_lines(path):
        if line.startswith("-DOCSTART-") or not line.strip():
            yield number, []
        elif not _COMMENT.match(line):
            yield number, line.split("\t") if "\t" in line else line.split()


def _word_column(path: Path, column: str, names: Sequence[str], width: int) -> int:
    if column in names:
        return names.index(column)
    if column.isdecimal() and 1 <= int(column) <= width:
        return int(column) - 1
    got = ", ".join(names) if names else f"{width} columns"
    raise data_error(path, f"a column {column!r}", got)
