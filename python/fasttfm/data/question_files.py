"""``read_questions``: questions whose answers are spans of a text.

SQuAD 1.1 and 2.0, KorQuAD 1.0, KLUE-MRC     {"data": [{"paragraphs": [{"context": ..., "qas": [...]}]}]}
CoQA                                         {"data": [{"story": ..., "questions": [...], "answers": [...]}]}, or rows
                                             with story, questions and answers, as on the hub
TriviaQA                                     {"Data": [{"Question": ..., "Answer": ..., "EntityPages": [...]}]}
rows (``tables``)                            question, context, answers {"text": [...], "answer_start": [...]}
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fasttfm.data.lines import data_error, read_lines
from fasttfm.data.tables import Row, Table, is_dataset, open_table, read_json
from fasttfm.data.task_files import Answer, QuestionExample

_TURNS = 2  # how many earlier turns of a conversation are appended to a question
_EVIDENCE_WORDS = 800  # of a TriviaQA document, as in its authors' conversion to SQuAD's format
_ROWS = (".jsonl", ".jsonl.gz", ".parquet")
_EXPECTED = (
    "JSON of questions in the format of SQuAD, CoQA or TriviaQA, or a .jsonl or .parquet file with the columns "
    "question, context and answers"
)
# CoQA's sources by the names of the domains that its evaluation reports.
_DOMAINS = {
    "mctest": "children's stories",
    "gutenberg": "literature",
    "race": "mid-high school",
    "cnn": "news",
    "wikipedia": "wikipedia",
    "reddit": "reddit",
    "science": "science",
}


Turns = Callable[[Sequence[str], Sequence[str], int], str]  # questions, answers and number of a turn -> its question


def latest_first(questions: Sequence[str], answers: Sequence[str], turn: int) -> str:
    """A question, and the previous two turns, the latest first."""
    parts = [questions[turn]]
    for earlier in range(turn - 1, max(-1, turn - 1 - _TURNS), -1):
        parts += [questions[earlier], answers[earlier]]
    return " ".join(parts)


def read_questions(path: str | Path, turns: Turns = latest_first) -> list[QuestionExample]:
    """Reads the questions of a file in one of the formats above.

    CoQA: ``turns`` makes the question of a turn, by default with the previous turns appended, the latest first. Its
    answer is the free-form answer if that is in the story, or else the marked span; a question without a span has no
    answer. Its references are the free-form answers; if there are several, the lists that leave out one of them each,
    as in CoQA's evaluation. Its domain is the story's. TriviaQA: the context is the beginning of a document below
    ``evidence`` in the parent of the file's folder. Its answers are the positions of its aliases in the context, its
    references all aliases. Questions without such a
    position or document are skipped and counted in a warning; those that a verified file rejects are skipped.
    """
    path = Path(path)
    if path.name.endswith(_ROWS) or is_dataset(path):
        examples = list(_questions_of_rows(path, turns))
    else:
        root = read_json(path, _EXPECTED)
        if isinstance(root, dict) and "Data" in root:
            examples = _triviaqa(path, root)
        elif isinstance(root, dict) and any(
            "story" in entry for entry in root.get("data") or () if isinstance(entry, dict)
        ):
            examples = list(_coqa(path, root, turns))
        else:
            examples = list(_squad(path, root))
    if not examples:
        raise data_error(path, "questions", "none")
    return examples


# ---- SQuAD -----------------------------------------------------------------------------------------------------------


def _squad(path: Path, root: Any) -> Iterator[QuestionExample]:
    for i, article in enumerate(_field(path, "the file", root, "data", list)):
        for j, paragraph in enumerate(_field(path, f"data[{i}]", article, "paragraphs", list)):
            where = f"data[{i}].paragraphs[{j}]"
            context = _field(path, where, paragraph, "context", str)
            for number, asked in enumerate(_field(path, where, paragraph, "qas", list)):
                yield _question(path, f"{where}.qas[{number}]", asked, context)


def _question(path: Path, where: str, asked: Any, context: str) -> QuestionExample:
    question = _field(path, where, asked, "question", str)
    answers = []
    for number, answer in enumerate(_field(path, where, asked, "answers", list) if "answers" in asked else ()):
        inside = f"{where}.answers[{number}]"
        text, start = _field(path, inside, answer, "text", str), _field(path, inside, answer, "answer_start", int)
        answers.append(_answer(f"{path}, {inside}", context, text, start))
    impossible = bool(asked.get("is_impossible", False))
    id = str(asked.get("id", asked.get("guid", where)))
    return QuestionExample(id, question, context, [] if impossible else answers, impossible)


def _answer(where: str, context: str, text: str, start: int) -> Answer:
    if start >= 0 and text[:1].strip():  # on the hub, KLUE's answers lack their leading space
        start += len(context[start:]) - len(context[start:].lstrip())
    if start < 0 or context[start : start + len(text)] != text:
        got = f"{context[max(0, start) : max(0, start) + len(text)]!r}"
        raise data_error(where, f"{text!r} at character {start} of the context", got)
    return Answer(text, start)


def _field(path: Path, where: str, value: Any, name: str, kind: type) -> Any:
    """``value[name]``. Raises DataError if it does not exist or is not of this type."""
    names = {str: "text", list: "list", int: "number", dict: "object"}
    if not isinstance(value, dict):
        raise data_error(f"{path}, {where}", f"an object with {name!r}", type(value).__name__)
    if not isinstance(value.get(name), kind):
        got = f"{value[name]!r:.60}" if name in value else ", ".join(map(repr, value)) or "an empty object"
        raise data_error(f"{path}, {where}", f"a {names[kind]} {name!r}", got)
    return value[name]


def _questions_of_rows(path: Path, turns: Turns) -> Iterator[QuestionExample]:
    """Reads rows in the hub's format: ``answers`` has lists of the answers' texts and of their starts."""
    table = open_table(path)
    for number, row in table.rows():
        if "story" in row:
            yield from _coqa_turns(path, f"{table.unit} {number}", _coqa_row(table, number, row), turns)
            continue
        context, question = table.text(number, row, "context"), table.text(number, row, "question")
        lists = row.get("answers")
        if lists is not None and not (isinstance(lists, dict) and {"text", "answer_start"} <= set(lists)):
            raise table.error(number, "answers with lists 'text' and 'answer_start'", f"{lists!r:.60}")
        pairs = [] if lists is None else list(zip(lists["text"], lists["answer_start"], strict=False))
        where = f"{path}, {table.unit} {number}"
        impossible = bool(row.get("is_impossible", lists is not None and not pairs))  # KLUE's have plausible answers
        answers = [] if impossible else [_answer(where, context, text, start) for text, start in pairs]
        yield QuestionExample(str(row.get("id", row.get("guid", number))), question, context, answers, impossible)


def _coqa_row(table: Table, number: int, row: Row) -> dict[str, Any]:
    """Converts a row of the hub's data set to the format of CoQA's file."""
    questions, answers = row.get("questions"), row.get("answers")
    names = ("input_text", "answer_start", "answer_end")
    lists = [answers.get(name) for name in names] if isinstance(answers, dict) else [None]
    if not all(isinstance(column, list) for column in (questions, *lists)):
        raise table.error(number, f"lists of 'questions' and of their answers' {', '.join(names)}", f"{answers!r:.60}")
    keys = ("input_text", "span_start", "span_end")
    return {
        "id": row.get("id", number),
        "source": row.get("source"),
        "story": row["story"],
        "questions": [{"input_text": question} for question in questions or ()],
        "answers": [dict(zip(keys, values, strict=True)) for values in zip(*lists, strict=False)],
    }


# ---- CoQA ------------------------------------------------------------------------------------------------------------


def _coqa(path: Path, root: Any, turns: Turns) -> Iterator[QuestionExample]:
    for i, data in enumerate(_field(path, "the file", root, "data", list)):
        yield from _coqa_turns(path, f"data[{i}]", data, turns)


def _coqa_turns(path: Path, where: str, data: Any, turns: Turns) -> Iterator[QuestionExample]:
    story = _field(path, where, data, "story", str)
    questions, answers = (_field(path, where, data, name, list) for name in ("questions", "answers"))
    if len(questions) != len(answers):
        raise data_error(f"{path}, {where}", f"{len(questions)} answers, as there are questions", f"{len(answers)}")
    others: Any = data.get("additional_answers") or {}
    source = str(data.get("source") or "")
    domain = _DOMAINS.get(source, source)
    asked_texts, answer_texts = (
        [_field(path, f"{where}.{name}[{turn}]", one, "input_text", str) for turn, one in enumerate(several)]
        for name, several in (("questions", questions), ("answers", answers))
    )
    for turn, asked in enumerate(questions):
        turn_answers = [answers[turn], *(other[turn] for other in others.values() if turn < len(other))]
        spans = [_coqa_span(path, f"{where}.answers[{turn}]", story, answer) for answer in turn_answers]
        known = [span for span in spans if span is not None]
        texts = [answer["input_text"].strip() for answer in turn_answers]
        texts = ["" if text.lower() == "unknown" else text for text in texts]
        several = [[*texts[:one], *texts[one + 1 :]] for one in range(len(texts))]
        id = f"{data.get('id', where)}-{asked.get('turn_id', turn + 1)}"
        references = several if len(texts) > 1 else [texts]
        yield QuestionExample(id, turns(asked_texts, answer_texts, turn), story, known, not known, references, domain)


def _coqa_span(path: Path, where: str, story: str, answer: Any) -> Answer | None:
    text = _field(path, where, answer, "input_text", str).strip()
    start, end = (_field(path, where, answer, name, int) for name in ("span_start", "span_end"))
    if start < 0 or end > len(story):  # "unknown"
        return None
    at = story.lower().find(text.lower(), start, end) if text else -1
    if at >= 0:
        return Answer(story[at : at + len(text)], at)
    span = story[start:end]
    return Answer(span.strip(), start + len(span) - len(span.lstrip())) if span.strip() else None


# ---- TriviaQA --------------------------------------------------------------------------------------------------------


def _triviaqa(path: Path, root: Any) -> list[QuestionExample]:
    examples, without = [], 0
    verified = bool(root.get("VerifiedEval"))
    for i, entry in enumerate(_field(path, "the file", root, "Data", list)):
        where = f"Data[{i}]"
        if verified and isinstance(entry, dict) and not entry.get("QuestionPartOfVerifiedEval"):
            continue
        question = _field(path, where, entry, "Question", str)
        answer = entry.get("Answer")
        aliases = [] if answer is None else _aliases(path, where, answer)
        for name, document in _evidence(path, entry, verified and root.get("Domain") == "Web"):
            context = _beginning(document)
            matches = {at: alias for alias in aliases for at in [context.lower().find(alias.lower())] if at >= 0}
            answers = [Answer(context[at : at + len(alias)], at) for at, alias in sorted(matches.items())]
            if answers or answer is None:
                id = f"{entry.get('QuestionId', i)}--{name}"
                examples.append(QuestionExample(id, question, context, answers, False, [aliases] if aliases else []))
                break
        else:
            without += 1
    if without:
        warnings.warn(
            f"{path}: {without} questions whose answer is in none of their documents are left out", stacklevel=3
        )
    return examples


def _aliases(path: Path, where: str, answer: Any) -> list[str]:
    value = _field(path, f"{where}.Answer", answer, "Value", str)
    lists = (answer.get(name) or [] for name in ("Aliases", "HumanAnswers", "NormalizedAliases"))
    return list(dict.fromkeys(filter(None, [value, *(alias for names in lists for alias in names)])))


def _evidence(path: Path, entry: Any, verified: bool) -> Iterator[tuple[str, Path]]:
    """The existing documents of a question; with ``verified`` only those that were checked."""
    folder = path.parent.parent / "evidence"
    for kind, pages in (("wikipedia", entry.get("EntityPages")), ("web", entry.get("SearchResults"))):
        for page in pages or []:
            document = folder / kind / str(page.get("Filename"))
            if document.is_file() and (not verified or page.get("DocPartOfVerifiedEval")):
                yield str(page.get("Filename")), document
    if not folder.is_dir():
        raise data_error(folder, "the folder of TriviaQA's documents", "none")


def _beginning(document: Path) -> str:
    words: list[str] = []
    for _, line in read_lines(document):
        words += line.split()
        if len(words) >= _EVIDENCE_WORDS:
            break
    return " ".join(words[:_EVIDENCE_WORDS])
