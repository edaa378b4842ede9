"""Questions whose answer is a span of a context (SQuAD 1.1), or that have no answer there (2.0)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm.data.lines import DataError
from fasttfm.data.question_files import read_questions
from fasttfm.data.task_files import Answer as RightAnswer
from fasttfm.data.task_files import QuestionExample
from fasttfm.models.family import Head
from fasttfm.nn import PackedBatch
from fasttfm.tasks.answers import Found, Offsets, Window, Windows, best_of_windows, span_of_characters
from fasttfm.tasks.given import unusable
from fasttfm.tasks.inputs import Feature, TaskBatch
from fasttfm.tasks.metrics import ANSWER_RULES, AnswerRules, Gold, Scores, answer_scores, best_threshold, most_common
from fasttfm.tasks.results import AnswerResult
from fasttfm.tasks.task import Language, Predictions, Task
from fasttfm.train.settings import at_least, one_of

_HANGUL = re.compile("[가-힣]")


class SpanTarget(NamedTuple):
    """A feature's window, and the position of the answer in it; (0, 0) if it does not contain the answer."""

    window: Window
    offsets: Offsets  # of the whole context's tokens
    start: int
    end: int

    def __repr__(self) -> str:  # the feature's sequence has the window's tokens
        return f"SpanTarget({self.start}, {self.end})"


class QuestionTask(Task):
    """The span that answers a question.

    Args:
        stride: The number of tokens between the starts of two windows over a long context.
        max_question: The maximum number of tokens of a question; longer ones are truncated.
        max_answer: The maximum number of tokens of an answer.
        answer_score: How answers are compared, "squad" (words) or "korquad" (characters); by default as KorQuAD does if
            most questions have Hangul.
        threshold: A question is answered if the score of "no answer" exceeds that of its best span by at most this
            much. ``tune`` sets it; by default every question is answered, as in SQuAD 1.1.
    """

    name = "qa"
    about = "the span that answers"
    file_format = "SQuAD 1.1 or 2.0, CoQA, TriviaQA"
    line_format = "question, tab, context"
    json_fields = "question, context, id, answers"
    read_file = staticmethod(read_questions)
    head = Head.QUESTION_ANSWERING
    max_length = 384
    options = ("stride", "max_question", "max_answer", "answer_score")
    kept = (*options, "threshold")
    main_score = "f1"

    def __init__(
        self,
        language: Language,
        train: Sequence[Any] | None,
        *,
        stride: int | None = None,
        max_question: int | None = None,
        max_answer: int = 30,
        answer_score: str | None = None,
        threshold: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(language, train, **options)
        form = language.format
        max_question = min(64, form.room // 4) if max_question is None else max_question
        for name, value in (("max_question", max_question), ("max_answer", max_answer)):
            at_least(name, value, 1)
        room = form.room - max_question
        if room < 1:
            raise ValueError(
                f"max_question: expected 1 to {form.room - 1} of {form.max_length} tokens, got {max_question}"
            )
        self.windows = Windows(form, min(128, max(1, room // 2)) if stride is None else stride, max_question)
        self.max_answer = max_answer
        if answer_score is not None:
            one_of("answer_score", answer_score, tuple(ANSWER_RULES))
        self.answer_score = answer_score
        self.threshold = threshold

    def example(self, given: Any) -> Any:
        if isinstance(given, QuestionExample):
            return given
        id, answers, impossible = "", [], False
        if isinstance(given, Mapping):
            id, impossible = str(given.get("id", "")), bool(given.get("is_impossible", False))
            answers = [] if impossible else _answers(given.get("answers"))
            given = (given.get("question"), given.get("context"))
        if not isinstance(given, Sequence) or len(given) != 2 or not all(isinstance(each, str) for each in given):
            raise unusable(self.name, "a question and its context", given)
        return QuestionExample(id, given[0], given[1], answers, impossible)

    def features(self, examples: Sequence[Any]) -> list[Feature]:
        tokenizer = self.language.tokenizer
        found = []
        for index, example in enumerate(examples):
            ids, offsets = tokenizer.encode_with_offsets(example.context)
            span = None
            if example.answers:
                answer = example.answers[0]
                span = span_of_characters(offsets, answer.start, answer.start + len(answer.text))
            for window in self.windows.split(tokenizer.encode(example.question), ids):
                target = SpanTarget(window, offsets, *window.positions_of(span))
                found.append(Feature(index, [window.tokens], target))
        return found

    def targets(self, batch: TaskBatch) -> dict[str, Tensor]:
        return {
            "start_positions": torch.tensor(
                [feature.target.start for feature in batch.features], dtype=torch.int64, device="cpu"
            ),
            "end_positions": torch.tensor(
                [feature.target.end for feature in batch.features], dtype=torch.int64, device="cpu"
            ),
        }

    def logits(self, model: Any, batch: TaskBatch) -> Tensor:
        """[2 * features, longest]: the start logits of all features, then the end logits."""
        output = model(**batch.inputs())
        return self.logits_of_rows(batch, torch.stack([output.start_logits, output.end_logits], -1))

    @property
    def on_session(self) -> bool:
        return True

    def logits_of_rows(self, batch: TaskBatch, rows: Tensor) -> Tensor:
        """``rows`` [T, 2] are the start and end logits of each token."""
        packed = PackedBatch(batch.cu_seqlens, batch.max_seqlen, batch.tokens)
        padded = packed.per_sequence(rows, fill=torch.finfo(rows.dtype).min / 2)
        return padded.permute(2, 0, 1).flatten(0, 1)

    def rows(self, batch: TaskBatch) -> int:
        return 2 * len(batch.features)

    def read(self, batch: TaskBatch, logits: Tensor) -> list[Any]:
        starts, ends = logits.float().cpu().numpy().reshape(2, len(batch.features), -1)
        return list(zip(starts, ends, strict=True))

    def predictions(self, examples: Sequence[Any], features: Sequence[Feature], read: Sequence[Any]) -> Predictions:
        """The ``Answer`` of each example."""
        windows: list[list[tuple[SpanTarget, Any]]] = [[] for _ in examples]
        for feature, logits in zip(features, read, strict=True):
            windows[feature.example].append((feature.target, logits))
        found = []
        for example, parts in zip(examples, windows, strict=True):
            targets, logits = zip(*parts, strict=True)
            best = best_of_windows([target.window for target in targets], logits, self.max_answer)
            found.append(Answer.of(best, targets[0].offsets, example.context))
        return found

    def results(self, examples: Sequence[Any], features: Sequence[Feature], read: Sequence[Any]) -> list[Any]:
        return [self._result(answer) for answer in self.predictions(examples, features, read)]

    def _result(self, answer: Answer) -> AnswerResult:
        if answer.no_answer > self._limit or not answer.text:
            return AnswerResult("", None, None, answer.score, answer.no_answer)
        return AnswerResult(answer.text, answer.start, answer.start + len(answer.text), answer.score, answer.no_answer)

    def prediction(self, result: Any) -> Any:
        return Answer(result.answer, result.no_answer)

    def inputs(self, example: Any) -> dict[str, Any]:
        return {"id": example.id, "question": example.question}

    def gold(self, example: Any) -> Any:
        known = example.impossible or example.answers
        return _texts(example) if known else None

    def without_text(self, example: Any) -> Any:
        return replace(example, question="", context="")

    @property
    def _limit(self) -> float:
        return float("inf") if self.threshold is None else self.threshold

    def answers(self, examples: Sequence[Any], predictions: Predictions) -> dict[str, str]:
        """The predicted answers by the questions' ids, empty for "no answer"."""
        return {example.id: text for example, text in zip(examples, self._texts(predictions), strict=True)}

    def _texts(self, predictions: Predictions) -> list[str]:
        return ["" if answer.no_answer > self._limit else answer.text for answer in predictions]

    def tune(self, examples: Sequence[Any], predictions: Predictions) -> None:
        """Sets the threshold that maximizes the F1 of these answers, if some of the questions have no answer."""
        if all(example.answers for example in examples):
            return
        gold = {number: _right(example) for number, example in enumerate(examples)}
        texts = {number: answer.text for number, answer in enumerate(predictions)}
        scores = {number: answer.no_answer for number, answer in enumerate(predictions)}
        self.threshold = best_threshold(gold, texts, scores, self.rules(examples))

    def scores(self, examples: Sequence[Any], predictions: Predictions) -> Scores:
        """The scores. Questions are identified by their numbers, because ids may be missing or repeated."""
        gold = {number: _right(example) for number, example in enumerate(examples)}
        return answer_scores(gold, dict(enumerate(self._texts(predictions))), self.rules(examples))

    def rules(self, examples: Sequence[Any]) -> AnswerRules:
        """How the answers to these questions are compared."""
        korean = sum(_HANGUL.search(example.question) is not None for example in examples)
        return ANSWER_RULES[self.answer_score or ("korquad" if 2 * korean > len(examples) else "squad")]

    def domain_scores(self, examples: Sequence[Any], predictions: Predictions) -> dict[str, Scores]:
        """Exact match and F1 of every domain, as CoQA's evaluation reports them, with its number of questions."""
        indices: dict[str, list[int]] = {}
        for index, example in enumerate(examples):
            indices.setdefault(example.domain or "other", []).append(index)
        if len(indices) < 2:
            return {}
        found: dict[str, Scores] = {}
        for domain, chosen in sorted(indices.items()):
            some = ([every[index] for index in chosen] for every in (examples, predictions))
            scores = self.scores(*some)
            found[domain] = {"questions": len(chosen), "exact": scores["exact"], "f1": scores["f1"]}
        return found

    def description(self) -> dict[str, Any]:
        windows = {"stride": self.windows.stride, "max_question": self.windows.max_question}
        own = {"max_answer": self.max_answer, "answer_score": self.answer_score, "threshold": self.threshold}
        return {**super().description(), **windows, **own}

    def labelled(self, examples: Sequence[Any]) -> bool:
        return any(example.answers for example in examples)

    def majority(self, train: Sequence[Any], examples: Sequence[Any]) -> Predictions:
        answer = most_common(example.answers[0].text if example.answers else "" for example in train)
        return [Answer(answer, float("-inf"))] * len(examples)

    def files(self, examples: Sequence[Any], predictions: Predictions) -> dict[str, str]:
        """SQuAD's files: the answer of each question, and the score of "no answer" minus that of its answer."""
        odds = {example.id: answer.no_answer for example, answer in zip(examples, predictions, strict=True)}
        return {
            "predictions.json": json.dumps(self.answers(examples, predictions), indent=1, ensure_ascii=False) + "\n",
            "no_answer_scores.json": json.dumps(odds, indent=1) + "\n",
        }


class Answer(NamedTuple):
    """A question's best span, and the score of "no answer" minus that span's score."""

    text: str
    no_answer: float
    start: int = 0  # its first character in the context
    score: float = 0.0  # of the span

    @staticmethod
    def of(found: Found, offsets: Offsets, context: str) -> Answer:
        if found.span is None:
            return Answer("", 0.0)
        first, end = offsets[found.span.start][0], offsets[found.span.end][1]
        text = context[first:end].strip()
        return Answer(text, found.no_answer, context.index(text, first), found.span.score)


def _answers(given: Any) -> list[RightAnswer]:
    """Right answers in the format of SQuAD's files, of its data set on the hub, or as texts."""
    if given is None:
        return []
    if isinstance(given, Mapping):
        given = given.get("text")
    if isinstance(given, str):
        given = [given]
    texts: list[Any] = [each.get("text") if isinstance(each, Mapping) else each for each in given or ()]
    if not all(isinstance(text, str) for text in texts):
        raise DataError(f"answers: expected texts, got {given!r:.60}")
    return [RightAnswer(text, 0) for text in texts]


def _texts(example: Any) -> list[str]:
    return [answer.text for answer in example.answers]


def _right(example: Any) -> Gold:
    """What a prediction is compared with."""
    return example.references or _texts(example)
