"""Questions whose answer is a span of a context (SQuAD 1.1), or that have no answer there (2.0)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fasttfm.data.lines import DataError
from fasttfm.data.question_files import read_questions
from fasttfm.data.task_files import Answer as RightAnswer
from fasttfm.data.task_files import QuestionExample
from fasttfm.inference.network import Output
from fasttfm.inference.spans import AnswerSpans
from fasttfm.models.family import Head
from fasttfm.nn import PackedBatch
from fasttfm.tasks.answers import (
    Offsets,
    Window,
    WindowAnswer,
    Windows,
    best_of_windows,
    span_of_characters,
    window_answer,
)
from fasttfm.tasks.example_fields import unusable
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
    session_output = Output.SPANS

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

    def example(self, value: Any) -> Any:
        if isinstance(value, QuestionExample):
            return value
        id, answers, impossible = "", [], False
        if isinstance(value, Mapping):
            id, impossible = str(value.get("id", "")), bool(value.get("is_impossible", False))
            answers = [] if impossible else _answers(value.get("answers"))
            value = (value.get("question"), value.get("context"))
        if not isinstance(value, Sequence) or len(value) != 2 or not all(isinstance(text, str) for text in value):
            raise unusable(self.name, "a question and its context", value)
        return QuestionExample(id, value[0], value[1], answers, impossible)

    def features(self, examples: Sequence[Any]) -> list[Feature]:
        tokenizer = self.language.tokenizer
        features = []
        for index, example in enumerate(examples):
            ids, offsets = tokenizer.encode_with_offsets(example.context)
            span = None
            if example.answers:
                answer = example.answers[0]
                span = span_of_characters(offsets, answer.start, answer.start + len(answer.text))
            for window in self.windows.split(tokenizer.encode(example.question), ids):
                target = SpanTarget(window, offsets, *window.positions_of(span))
                features.append(Feature(index, [window.tokens], target))
        return features

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
        rows = torch.stack([output.start_logits, output.end_logits], -1)  # [T, 2]
        packed = PackedBatch(batch.cu_seqlens, batch.max_seqlen, batch.tokens)
        padded = packed.per_sequence(rows, fill=torch.finfo(rows.dtype).min / 2)
        return padded.permute(2, 0, 1).flatten(0, 1)

    @property
    def on_session(self) -> bool:
        return True

    def rows(self, batch: TaskBatch) -> int:
        return 2 * len(batch.features)

    def read(self, batch: TaskBatch, logits: Tensor) -> list[Any]:
        """What each feature's window says."""
        starts, ends = logits.float().cpu().numpy().reshape(2, len(batch.features), -1)
        return [
            window_answer(feature.target.window, start, end, self.max_answer)
            for feature, start, end in zip(batch.features, starts, ends, strict=True)
        ]

    def read_rows(self, batch: TaskBatch, rows: np.ndarray) -> list[Any]:
        return [
            WindowAnswer(feature.target.window.span_at(int(first), int(last), score), none)
            for feature, (none, score, first, last) in zip(batch.features, rows.tolist(), strict=True)
        ]

    @property
    def answers_of_session(self) -> AnswerSpans:
        return AnswerSpans.of(self.language.format, self.max_answer)

    def session_segments(self, batch: TaskBatch) -> Tensor:
        """1 from the first token of each context on, for every model."""
        if self.language.format.segments and batch.token_type_ids is not None:
            return batch.token_type_ids
        segments = torch.zeros_like(batch.input_ids)
        starts = batch.cu_seqlens.tolist()
        for feature, start, end in zip(batch.features, starts, starts[1:], strict=False):
            segments[start + feature.target.window.first : end] = 1
        return segments

    def predictions(self, examples: Sequence[Any], features: Sequence[Feature], read: Sequence[Any]) -> Predictions:
        """The ``Answer`` of each example."""
        windows: list[list[tuple[SpanTarget, WindowAnswer]]] = [[] for _ in examples]
        for feature, window in zip(features, read, strict=True):
            windows[feature.example].append((feature.target, window))
        answers = []
        for example, parts in zip(examples, windows, strict=True):
            target, _ = parts[0]
            best = best_of_windows([window for _, window in parts])
            answers.append(Answer.of(best, target.offsets, example.context))
        return answers

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
        domains: dict[str, Scores] = {}
        for domain, chosen in sorted(indices.items()):
            some = ([every[index] for index in chosen] for every in (examples, predictions))
            scores = self.scores(*some)
            domains[domain] = {"questions": len(chosen), "exact": scores["exact"], "f1": scores["f1"]}
        return domains

    def description(self) -> dict[str, Any]:
        windows = {"stride": self.windows.stride, "max_question": self.windows.max_question}
        settings = {"max_answer": self.max_answer, "answer_score": self.answer_score, "threshold": self.threshold}
        return {**super().description(), **windows, **settings}

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
    def of(best: WindowAnswer, offsets: Offsets, context: str) -> Answer:
        if best.span is None:
            return Answer("", 0.0)
        first, end = offsets[best.span.start][0], offsets[best.span.end][1]
        text = context[first:end].strip()
        return Answer(text, best.no_answer, context.index(text, first), best.span.score)


def _answers(answers: Any) -> list[RightAnswer]:
    """Right answers in the format of SQuAD's files, of its data set on the hub, or as texts."""
    if answers is None:
        return []
    if isinstance(answers, Mapping):
        answers = answers.get("text")
    if isinstance(answers, str):
        answers = [answers]
    texts: list[Any] = [answer.get("text") if isinstance(answer, Mapping) else answer for answer in answers or ()]
    if not all(isinstance(text, str) for text in texts):
        raise DataError(f"answers: expected texts, got {answers!r:.60}")
    return [RightAnswer(text, 0) for text in texts]


def _texts(example: Any) -> list[str]:
    return [answer.text for answer in example.answers]


def _right(example: Any) -> Gold:
    """What a prediction is compared with."""
    return example.references or _texts(example)
