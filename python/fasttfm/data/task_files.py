"""Readers of labelled files: GLUE's tsv, CoNLL's columns, SQuAD's json and SWAG's csv.

Each returns the file's examples in their order. A file that is not of the format raises ``DataError`` with its name,
the place in it, what was expected and what came.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasttfm.data.texts import data_error, read_lines


@dataclass(frozen=True)
class TextExample:
    """A text or a pair of texts, and its label as the file has it."""

    first: str
    second: str | None
    label: str | None  # None in test sets


@dataclass(frozen=True)
class TagExample:
    words: list[str]
    tags: list[str]  # one a word


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


@dataclass(frozen=True)
class ChoiceExample:
    context: str
    start: str  # of the sentence that the endings end; may be empty
    endings: list[str]
    label: int | None  # None in test sets


# ---- GLUE ------------------------------------------------------------------------------------------------------------

# First text, second text, label, as the header lines of GLUE's tasks name them.
_GLUE = (
    ("sentence1", "sentence2", ("label", "gold_label", "score")),  # MNLI, RTE, WNLI, STS-B
    ("question1", "question2", ("is_duplicate", "label")),  # QQP
    ("question", "sentence", ("label",)),  # QNLI
    ("#1 String", "#2 String", ("Quality", "label")),  # MRPC
    ("sentence", None, ("label",)),  # SST-2
)


def read_glue(path: str | Path, *, skip_broken: bool = False) -> list[TextExample]:
    """Examples of a tsv file with a header line as GLUE's tasks have it, or CoLA's without.

    Args:
        path: The file; nothing in it is quoted.
        skip_broken: Leaves lines out that have another number of columns than the header (QQP's have some).
    """
    path = Path(path)
    rows = ((number, line.split("\t")) for number, line in read_lines(path) if line.strip())
    try:
        number, header = next(rows)
    except StopIteration:
        raise data_error(path, "a header line and examples", "an empty file") from None
    if len(header) == 4 and header[1] in ("0", "1") and header[2] in ("", "*"):  # CoLA: source, label, mark, sentence
        columns: tuple[int, int | None, int | None] = (3, None, 1)
        examples = [TextExample(header[3], None, header[1])]
    else:
        columns = _glue_columns(path, number, header)
        examples = []
    first, second, label = columns
    for number, row in rows:
        if len(row) == len(header):
            pair = None if second is None else row[second]
            examples.append(TextExample(row[first], pair, None if label is None else row[label]))
        elif not skip_broken:
            raise data_error(path, f"{len(header)} columns", f"{len(row)}", line=number)
    if not examples:
        raise data_error(path, "examples after the header line", "none")
    return examples


def _glue_columns(path: Path, number: int, header: list[str]) -> tuple[int, int | None, int | None]:
    for first, second, labels in _GLUE:
        if first in header and (second is None or second in header):
            label = next((header.index(name) for name in labels if name in header), None)
            return header.index(first), None if second is None else header.index(second), label
    known = "; ".join(f"{first!r}" + ("" if second is None else f" and {second!r}") for first, second, _ in _GLUE)
    raise data_error(path, f"a header with the columns {known}", f"{chr(9).join(header):.80}", line=number)


# ---- CoNLL -----------------------------------------------------------------------------------------------------------


def read_conll(path: str | Path, *, column: int = -1) -> list[TagExample]:
    """Sentences of a file with one word a line, the word first and its tag last, a blank line between sentences.

    Args:
        path: The file; columns are divided by tabulators or by spaces. ``-DOCSTART-`` lines are left out.
        column: Which one has the tag: the last by default.
    """
    path = Path(path)
    examples: list[TagExample] = []
    words: list[str] = []
    tags: list[str] = []
    width: int | None = None
    for number, line in read_lines(path):
        if not line.strip() or line.startswith("-DOCSTART-"):
            if words:
                examples.append(TagExample(words, tags))
                words, tags = [], []
            continue
        row = line.split("\t") if "\t" in line else line.split()
        width = len(row) if width is None else width
        if len(row) != width or len(row) < 2:
            expected = "a word and a tag" if width < 2 else f"{width} columns, as in the lines before"
            raise data_error(path, expected, f"{line[:60]!r}", line=number)
        if not -width <= column < width:
            raise data_error(path, f"a column {column}", f"{width} columns", line=number)
        words.append(row[0])
        tags.append(row[column])
    if words:
        examples.append(TagExample(words, tags))
    if not examples:
        raise data_error(path, "words with tags, one a line", "none")
    return examples


# ---- SQuAD -----------------------------------------------------------------------------------------------------------


def read_squad(path: str | Path) -> list[QuestionExample]:
    """Questions of a SQuAD 1.1 or 2.0 file."""
    path = Path(path)
    text = "\n".join(line for _, line in read_lines(path))
    try:
        root = json.loads(text)
    except json.JSONDecodeError as error:
        raise data_error(path, "JSON", error.msg, line=error.lineno) from None
    except RecursionError as error:
        raise data_error(path, "JSON", str(error)) from None
    examples = []
    for place, paragraph in _squad_paragraphs(path, root):
        context = _field(path, place, paragraph, "context", str)
        for number, asked in enumerate(_field(path, place, paragraph, "qas", list)):
            examples.append(_question(path, f"{place}.qas[{number}]", asked, context))
    if not examples:
        raise data_error(path, "questions", "none")
    return examples


def _squad_paragraphs(path: Path, root: Any) -> Iterator[tuple[str, Any]]:
    for i, article in enumerate(_field(path, "the file", root, "data", list)):
        for j, paragraph in enumerate(_field(path, f"data[{i}]", article, "paragraphs", list)):
            yield f"data[{i}].paragraphs[{j}]", paragraph


def _question(path: Path, place: str, asked: Any, context: str) -> QuestionExample:
    question = _field(path, place, asked, "question", str)
    answers = []
    for number, answer in enumerate(_field(path, place, asked, "answers", list) if "answers" in asked else ()):
        inside = f"{place}.answers[{number}]"
        text, start = _field(path, inside, answer, "text", str), _field(path, inside, answer, "answer_start", int)
        if start < 0 or context[start : start + len(text)] != text:
            got = f"{context[max(0, start) : max(0, start) + len(text)]!r}"
            raise data_error(f"{path}, {inside}", f"{text!r} at character {start} of the context", got)
        answers.append(Answer(text, start))
    impossible = bool(asked.get("is_impossible", False))
    if impossible:
        answers = []
    id = str(asked.get("id", place))
    return QuestionExample(id, question, context, answers, impossible)


def _field(path: Path, place: str, value: Any, name: str, kind: type) -> Any:
    """``value[name]``, which has to be there and of its kind."""
    names = {str: "text", list: "list", int: "number"}
    if not isinstance(value, dict):
        raise data_error(f"{path}, {place}", f"an object with {name!r}", type(value).__name__)
    if not isinstance(value.get(name), kind):
        got = f"{value[name]!r:.60}" if name in value else ", ".join(map(repr, value)) or "an empty object"
        raise data_error(f"{path}, {place}", f"a {names[kind]} {name!r}", got)
    return value[name]


# ---- SWAG ------------------------------------------------------------------------------------------------------------


def read_swag(path: str | Path) -> list[ChoiceExample]:
    """Examples of a csv file with the columns sent1, sent2, ending0 and so on, and label (not in test sets)."""
    path = Path(path)
    lines = (line + "\n" for _, line in read_lines(path))
    reader = csv.reader(lines, strict=True)
    examples = []
    try:
        header = next(reader, None)
        if header is None:
            raise data_error(path, "a header line and examples", "an empty file")
        endings = [name for name in header if name.startswith("ending")]
        missing = [name for name in ("sent1", "sent2") if name not in header]
        if missing or len(endings) < 2:
            expected = "a header with 'sent1', 'sent2', 'ending0', 'ending1', ..."
            raise data_error(path, expected, ", ".join(map(repr, header)), line=1)
        for row in reader:
            if len(row) != len(header):
                raise data_error(path, f"{len(header)} columns", f"{len(row)}", line=reader.line_num)
            examples.append(_choice(path, reader.line_num, dict(zip(header, row, strict=True)), endings))
    except csv.Error as error:
        raise data_error(path, "a csv file", str(error), line=reader.line_num) from None
    if not examples:
        raise data_error(path, "examples after the header line", "none")
    return examples


def _choice(path: Path, line: int, row: dict[str, str], endings: list[str]) -> ChoiceExample:
    label = row.get("label")
    known = [str(number) for number in range(len(endings))]
    if label is not None and label not in known:
        raise data_error(path, f"a label of {', '.join(known)}", repr(label), line=line)
    chosen = None if label is None else int(label)
    return ChoiceExample(row["sent1"], row["sent2"], [row[name] for name in endings], chosen)
