"""``read_prompts``: the questions of prompts, from files of examples and from data sets as they are delivered.

any task          .jsonl   {"input": "a text", "output": "its answer" or [right answers], "choices": [...]}
classify          a table with texts and labels, as ``fasttfm finetune`` reads it (GLUE: SST-2's train.tsv, dev.tsv)
choice            the files of ``choice_files`` (SWAG, HellaSwag, StoryCloze, RACE, ...)
last-word         LAMBADA: .txt with a passage in each line, or rows with a text
summary           rows with article and highlights (CNN/DailyMail), document and summary (XSum), text or dialogue and
                  summary; a .story file, or a folder of them
translate         two files with a sentence in each line (.sgm: in each segment), .tsv with two columns, or rows with
                  the object translation {"en": ..., "fr": ...} (WMT)
reading           the files of ``question_files`` (SQuAD, CoQA, TriviaQA, ...)
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from fasttfm.data import choice_files, question_files, task_files
from fasttfm.data.lines import data_error, read_json_lines, read_lines
from fasttfm.data.tables import Delimited, is_dataset, open_table

NO_ANSWER = "unknown"  # the answer of questions that have none
_SUMMARIES = (("article", "highlights"), ("document", "summary"), ("dialogue", "summary"), ("text", "summary"))
_SEGMENT = re.compile(r"<seg\b[^>]*>(.*?)</seg>", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class Question:
    """A question with its right answers."""

    input: str
    outputs: list[str]  # the right answers; prompts show the first
    choices: list[str] = field(default_factory=list)  # the possible answers; empty if there is no such list
    # Lists of right answers: an answer's score is its best score in each list, averaged over the lists. If empty, the
    # only list is ``outputs``.
    references: list[list[str]] = field(default_factory=list)
    domain: str = ""  # where the text comes from, in files that say so (CoQA)


def read_prompts(
    paths: Sequence[str | Path], kind: str, *, labels: Mapping[str, str] | None = None, direction: str | None = None
) -> list[Question]:
    """Reads the questions of a file in one of the formats above.

    Args:
        paths: The file or folder; for ``"translate"`` also two files, whose lines are translations of each other.
        kind: One of ``KINDS``.
        labels: classify: the words for the labels of the file, which then are the choices.
        direction: translate: the names of the fields in a translation, such as ``"en-fr"``; by default their order in
            the file.
    """
    files = [Path(path) for path in paths]
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    for name, value, takers in (("labels", labels, ("classify",)), ("direction", direction, ("translate",))):
        if value is not None and kind not in takers:
            raise ValueError(f"{name}: expected with {' or '.join(takers)}, got {kind}")
    if len(files) > 1 and (kind != "translate" or len(files) > 2):
        raise ValueError(f"files: expected one, or two to translate, got {len(files)}")
    if len(files) == 1 and _is_plain(files[0]):
        questions = list(_plain(files[0]))
        if labels:
            questions = [_with_labels(question, labels, str(files[0])) for question in questions]
    else:
        questions = list(KINDS[kind](files, {"classify": labels, "translate": direction}.get(kind)))
    if not questions:
        raise data_error(files[0], "examples", "none")
    return questions


# ---- objects with input and output -----------------------------------------------------------------------------------


def _is_plain(path: Path) -> bool:
    """Whether a file has objects with ``input``; a .jsonl file without any known field is read as such too."""
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        return False
    first: Any = next((row for _, _, row in read_json_lines(path)), {})
    known = {*chain(*_SUMMARIES), "translation", "question", "story", "text", "sentence", "label", "ctx", "sent1"}
    return not isinstance(first, dict) or "input" in first or not known & set(first)


def _plain(path: Path) -> Iterator[Question]:
    for number, line, row in read_json_lines(path):
        row = row if isinstance(row, dict) else {}
        stated: Any = row.get("output")
        outputs: Any = [stated] if isinstance(stated, str) else stated
        choices: Any = row.get("choices", [])
        lists = isinstance(outputs, list) and outputs and isinstance(choices, list)
        if not lists or not all(isinstance(text, str) for text in [row.get("input"), *outputs, *choices]):
            expected = 'an object with the texts "input" and "output", and perhaps a list "choices"'
            raise data_error(path, expected, f"{line:.60}", line=number)
        if choices and outputs[0] not in choices:
            raise data_error(path, '"output" among "choices"', f"{outputs[0]:.60}", line=number)
        yield Question(row["input"], outputs, choices)


# ---- labels and choices ----------------------------------------------------------------------------------------------


def _labelled(files: Sequence[Path], labels: Any) -> Iterator[Question]:
    (path,) = files
    for number, example in enumerate(task_files.read_texts(path), 1):
        where = f"{path}, example {number}"
        if example.label is None:
            raise data_error(where, "a label", "none")
        text = example.first if example.second is None else f"{example.first}\n{example.second}"
        question = Question(text.strip(), [example.label])
        yield _with_labels(question, labels, where) if labels else question


def _with_labels(question: Question, labels: Mapping[str, str], where: str) -> Question:
    """The question with words for its labels, which may have them already."""
    words = {word: word for word in labels.values()} | dict(labels)
    for label in question.outputs:
        if label not in words:
            raise data_error(where, f"a label of {', '.join(labels)}", repr(label))
    return Question(question.input, [words[label] for label in question.outputs], list(labels.values()))


def _choices(files: Sequence[Path], _: Any) -> Iterator[Question]:
    (path,) = files
    for number, example in enumerate(choice_files.read_choices(path), 1):
        if example.label is None:
            raise data_error(f"{path}, example {number}", "a label", "none")
        text = " ".join(filter(None, (example.context, example.start)))
        yield Question(text, [example.endings[example.label]], example.endings)


# ---- LAMBADA ---------------------------------------------------------------------------------------------------------


def _last_words(files: Sequence[Path], _: Any) -> Iterator[Question]:
    (path,) = files
    for where, text in _passages(path):
        before, _, word = text.rstrip().rpartition(" ")
        if not before.strip():
            raise data_error(where, "a passage of two words or more", f"{text!r:.60}")
        yield Question(before.rstrip(), [word])


def _passages(path: Path) -> Iterator[tuple[str, str]]:
    if path.name.endswith((".txt", ".txt.gz")):
        yield from ((f"{path}, line {number}", line) for number, line in read_lines(path) if line.strip())
        return
    table = open_table(path)
    for number, row in table.rows():
        yield f"{path}, {table.unit} {number}", table.text(number, row, "text")


# ---- summaries -------------------------------------------------------------------------------------------------------


def _summaries(files: Sequence[Path], _: Any) -> Iterator[Question]:
    (path,) = files
    if path.suffix == ".story" or (path.is_dir() and not is_dataset(path)):
        stories = sorted(path.rglob("*.story")) if path.is_dir() else [path]
        yield from map(_story, stories)
        return
    table = open_table(path)
    named = next((names for names in _SUMMARIES if set(names) <= set(table.columns)), None)
    if named is None:
        expected = " or ".join(f"{first!r} and {second!r}" for first, second in _SUMMARIES)
        got = ", ".join(map(repr, table.columns))
        raise data_error(path, f"the columns {expected}", f"{got:.200}", line=table.header_line)
    for number, row in table.rows():
        text, summary = (table.text(number, row, name).strip() for name in named)
        yield Question(text, [summary])


def _story(path: Path) -> Question:
    """An article of CNN/DailyMail: its text, and then its highlights, each after a line @highlight."""
    text, *highlights = "\n".join(line for _, line in read_lines(path)).split("@highlight")
    if not highlights:
        raise data_error(path, "an article with lines @highlight", "none of them")
    return Question(text.strip(), ["\n".join(line.strip() for line in highlights)])


# ---- translations ----------------------------------------------------------------------------------------------------


def _translations(files: Sequence[Path], direction: Any) -> Iterator[Question]:
    if len(files) == 2:
        yield from _parallel(*files)
        return
    (path,) = files
    table = open_table(path)
    if "translation" in table.columns:
        yield from _of_objects(path, direction)
        return
    if not isinstance(table, Delimited) or len(table.columns) != 2:
        expected = "two files, two columns, or rows with the object 'translation'"
        raise data_error(path, expected, ", ".join(map(repr, table.columns))[:200])
    table = open_table(path, header=False)
    for number, row in table.rows():
        text, other = (table.text(number, row, name) for name in table.columns)
        yield Question(text, [other])


def _of_objects(path: Path, direction: str | None) -> Iterator[Question]:
    table = open_table(path)
    for number, row in table.rows():
        pair = row["translation"]
        names = list(pair) if direction is None and isinstance(pair, dict) else str(direction).split("-")
        if not isinstance(pair, dict) or len(names) != 2 or not all(isinstance(pair.get(name), str) for name in names):
            expected = "texts in two languages" if direction is None else f"the texts of {direction}"
            raise table.error(number, f"an object 'translation' with {expected}", f"{pair!r:.60}")
        yield Question(pair[names[0]], [pair[names[1]]])


def _parallel(first: Path, second: Path) -> Iterator[Question]:
    texts, others = _sentences(first), _sentences(second)
    if len(texts) != len(others):
        raise data_error(second, f"{len(texts)} sentences, as {first.name} has", f"{len(others)}")
    yield from (Question(text, [other]) for text, other in zip(texts, others, strict=True))


def _sentences(path: Path) -> list[str]:
    lines = [line for _, line in read_lines(path)]
    if path.name.removesuffix(".gz").endswith((".sgm", ".sgml")):
        return [html.unescape(segment).strip() for segment in _SEGMENT.findall("\n".join(lines))]
    return [line.strip() for line in lines]


# ---- questions about a text ------------------------------------------------------------------------------------------


def _readings(files: Sequence[Path], _: Any) -> Iterator[Question]:
    """The input is the text and the question, in conversations after all previous turns (GPT-2)."""
    (path,) = files
    for example in question_files.read_questions(path, _all_turns):
        lists = example.references or [[answer.text for answer in example.answers]]
        references = [[text or NO_ANSWER for text in texts] or [NO_ANSWER] for texts in lists]
        outputs = list(dict.fromkeys([*references[-1], *chain(*references)]))
        several = references if len(references) > 1 else []
        yield Question(f"{example.context.strip()}\n\nQ: {example.question}", outputs, [], several, example.domain)


def _all_turns(questions: Sequence[str], answers: Sequence[str], turn: int) -> str:
    before = [f"{question}\nA: {answer}\nQ: " for question, answer in zip(questions[:turn], answers, strict=False)]
    return "".join([*before, questions[turn]])


KINDS: dict[str, Callable[[Sequence[Path], Any], Iterator[Question]]] = {
    "classify": _labelled,
    "choice": _choices,
    "last-word": _last_words,
    "summary": _summaries,
    "translate": _translations,
    "reading": _readings,
}
