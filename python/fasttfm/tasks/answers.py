"""Answers as spans of a context (SQuAD): windows over long contexts, and the best span of a question's windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fasttfm.tasks.inputs import Format, Tokens

Offsets = Sequence[tuple[int, int]]  # the first character of each token, and the one after its last


@dataclass(frozen=True)
class Windows:
    """The windows into which a long context is split.

    Windows start ``stride`` tokens apart, so that most tokens are in more than one window. A question is truncated to
    its first ``max_question`` tokens.
    """

    format: Format
    stride: int = 128
    max_question: int = 64

    def __post_init__(self) -> None:
        room = self.format.room - self.max_question
        if not 1 <= self.stride <= room:
            expected = f"1 to {room}, the tokens that max_length {self.format.max_length} leaves for a context"
            raise ValueError(f"windows: stride: expected {expected}, got {self.stride}")

    def split(self, question: Sequence[int], context: Sequence[int]) -> list[Window]:
        cut = max(0, len(question) - self.max_question)
        question = question[: self.max_question]
        room = self.format.room - len(question)
        windows = []
        for start in range(0, max(1, len(context)), self.stride):
            part = context[start : start + room]
            first = len(self.format.first) + len(question) + len(self.format.between)
            tokens = self.format.joined(question, part)._replace(cut=cut)
            windows.append(Window(tokens, first, start, len(part)))
            if start + room >= len(context):
                break
        return windows


class Window(NamedTuple):
    """A question and a part of its context: ``size`` tokens from token ``start`` on, at ``first`` in the sequence."""

    tokens: Tokens
    first: int
    start: int
    size: int

    def span_at(self, first: int, last: int, score: float) -> Span | None:
        """The span from one position in the sequence to another; None for positions below 0."""
        shift = self.start - self.first
        return None if first < 0 else Span(first + shift, last + shift, score)

    def positions_of(self, span: tuple[int, int] | None) -> tuple[int, int]:
        """The position of a span (first and last token of the context) in the sequence; the first token, twice, if
        there is no span or it is not entirely in the window."""
        if span is None or span[0] < self.start or span[1] >= self.start + self.size:
            return (0, 0)
        return (span[0] - self.start + self.first, span[1] - self.start + self.first)


def span_of_characters(offsets: Offsets, first: int, end: int) -> tuple[int, int] | None:
    """The first and the last token that overlap the characters [first, end); None if no token does."""
    inside = [index for index, (begin, stop) in enumerate(offsets) if begin < end and stop > first]
    return (inside[0], inside[-1]) if inside else None


class Span(NamedTuple):
    """First and last token of the context, and the sum of their logits."""

    start: int
    end: int
    score: float


class WindowAnswer(NamedTuple):
    """The best span of a question or of one of its windows, and the score of "no answer"."""

    span: Span | None  # None if no context has tokens
    none: float

    @property
    def no_answer(self) -> float:
        """The score of "no answer" minus that of the best answer."""
        return float("inf") if self.span is None else self.none - self.span.score


def best_span(window: Window, start: np.ndarray, end: np.ndarray, max_answer: int) -> Span | None:
    """The span of at most ``max_answer`` tokens of the window's context with the largest sum of the ``start`` logit of
    its first token and the ``end`` logit of its last."""
    inside = slice(window.first, window.first + window.size)
    start, end = start[inside], end[inside]
    best = None
    for distance in range(min(max_answer, window.size)):  # from the first token to the last
        scores = start[: window.size - distance] + end[distance:]
        index = int(scores.argmax())
        if best is None or scores[index] > best.score:
            best = Span(window.start + index, window.start + index + distance, float(scores[index]))
    return best


def window_answer(window: Window, start: np.ndarray, end: np.ndarray, max_answer: int) -> WindowAnswer:
    """What a window's logits say."""
    return WindowAnswer(best_span(window, start, end, max_answer), float(start[0] + end[0]))


def best_of_windows(windows: Sequence[WindowAnswer]) -> WindowAnswer:
    """What all windows of a question say. The score of "no answer" is the minimum over the windows, because windows
    that do not contain the answer rightly have a high one."""
    spans = [window.span for window in windows if window.span is not None]
    return WindowAnswer(max(spans, key=lambda span: span.score, default=None), min(window.none for window in windows))
