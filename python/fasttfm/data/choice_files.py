"""``read_choices``: reads examples with several endings or answers, of which one is right.

SWAG            csv: sent1, sent2, ending0, ending1, ..., label
StoryCloze      csv: InputSentence1 to 4, RandomFifthSentenceQuiz1 and 2, AnswerRightEnding; or the hub's names
                (input_sentence_1 to 4, sentence_quiz1 and 2, answer_right_ending)
HellaSwag       rows: ctx, endings, label
RACE            a file or a folder of files with one object: article, questions, options, answers; or, as on the hub,
                rows of one question each (article, question, options, answer)
CommonsenseQA   rows: question with a stem and choices, answerKey; or the format of the hub
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fasttfm.data.commonsense import commonsense_rows
from fasttfm.data.lines import DataError, data_error
from fasttfm.data.tables import Table, is_dataset, open_table, read_json
from fasttfm.data.task_files import ChoiceExample

_LETTERS = "ABCDEFGHIJ"


def read_choices(path: str | Path) -> list[ChoiceExample]:
    """The examples of a file, or of RACE's folders, in one of the formats above."""
    path = Path(path)
    if path.is_dir() and not is_dataset(path):
        files = sorted(file for file in path.rglob("*.txt") if file.is_file())
        if not files:
            raise data_error(path, "RACE's files, which end in .txt", "none")
        return [example for file in files for example in _race(file, read_json(file), None)]
    if path.suffix == ".txt":
        return list(_race(path, read_json(path), None))
    examples = list(_rows(open_table(path)))
    if not examples:
        raise data_error(path, "examples after the header line", "none")
    return examples


def _rows(table: Table) -> Iterator[ChoiceExample]:
    names = set(table.columns)
    endings = [name for name in table.columns if name.startswith("ending") and name != "endings"]
    if {"sent1", "sent2"} <= names and len(endings) > 1:
        yield from _swag(table, endings)
    elif "RandomFifthSentenceQuiz1" in names:
        yield from _story_cloze(table, "InputSentence", "RandomFifthSentenceQuiz", "AnswerRightEnding")
    elif "sentence_quiz1" in names:
        yield from _story_cloze(table, "input_sentence_", "sentence_quiz", "answer_right_ending")
    elif {"ctx", "endings"} <= names:
        for number, row in table.rows():
            ending_texts = _texts(table, number, row, "endings")
            yield ChoiceExample(
                table.text(number, row, "ctx"), "", ending_texts, _number(table, number, row, "label", ending_texts)
            )
    elif {"article", "options"} <= names:
        for number, row in table.rows():
            yield from _race(table.path, dict(row), (table, number))
    elif "question" in names:
        for question in commonsense_rows(table):
            yield ChoiceExample(question.context, question.start, question.endings, question.label)
    else:
        expected = "a header with 'sent1', 'sent2', 'ending0', 'ending1', ... or another form of choices"
        raise data_error(table.path, expected, ", ".join(map(repr, table.columns)), line=table.header_line)


def _swag(table: Table, endings: list[str]) -> Iterator[ChoiceExample]:
    for number, row in table.rows():
        texts = [table.text(number, row, name) for name in endings]
        first, second = (table.text(number, row, name) for name in ("sent1", "sent2"))
        yield ChoiceExample(first, second, texts, _number(table, number, row, "label", texts))


def _number(table: Table, number: int, row: Mapping[str, Any], column: str, endings: list[str]) -> int | None:
    label = row.get(column)
    if label is None or label in ("", -1):
        return None
    known = [str(index) for index in range(len(endings))]
    if str(label) not in known:
        raise table.error(number, f"a label of {', '.join(known)}", repr(label))
    return int(label)


def _texts(table: Table, number: int, row: Mapping[str, Any], column: str) -> list[str]:
    texts = row.get(column)
    if not isinstance(texts, list) or len(texts) < 2 or not all(isinstance(text, str) for text in texts):
        raise table.error(number, f"a list of two texts or more {column!r}", f"{texts!r:.60}")
    return texts


def _story_cloze(table: Table, sentence: str, quiz: str, answer: str) -> Iterator[ChoiceExample]:
    """Labels are 1 and 2."""
    for number, row in table.rows():
        story = " ".join(table.text(number, row, f"{sentence}{index}") for index in range(1, 5))
        endings = [table.text(number, row, f"{quiz}{index}") for index in (1, 2)]
        label = row.get(answer)
        if label not in (None, "", "1", "2", 1, 2):
            raise table.error(number, f"an {answer} of 1, 2", repr(label))
        yield ChoiceExample(story, "", endings, int(label) - 1 if label else None)


def _race(path: Path, passage: Any, place: tuple[Table, int] | None) -> Iterator[ChoiceExample]:
    """The questions of one passage; a row of the hub's data set has one question."""

    def error(expected: str, got: Any) -> DataError:
        return data_error(path, expected, f"{got!r:.80}") if place is None else place[0].error(place[1], expected, got)

    if not isinstance(passage, dict) or not isinstance(passage.get("article"), str):
        raise error("an object with a text 'article', as in RACE", str(passage))
    single = "question" in passage
    questions = [passage["question"]] if single else passage.get("questions")
    options = [passage.get("options")] if single else passage.get("options")
    answers = [passage.get("answer")] if single else passage.get("answers", [None] * len(questions or []))
    lists = (questions, options, answers)
    if not all(isinstance(values, list) for values in lists) or len({len(values) for values in lists}) > 1:  # type: ignore[arg-type]
        raise error("as many 'options' and 'answers' as 'questions'", str(list(passage)))
    for question, choices, answer in zip(*lists, strict=True):  # type: ignore[arg-type]
        if not isinstance(choices, list) or len(choices) < 2:
            raise error("two options or more", str(choices))
        letters = _LETTERS[: len(choices)]
        if answer and answer not in letters:
            raise error(f"an answer of {', '.join(letters)}", str(answer))
        yield ChoiceExample(passage["article"], question, choices, letters.index(answer) if answer else None)
