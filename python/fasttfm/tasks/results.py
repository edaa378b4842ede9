"""The results of a predictor (``tasks.load``, ``fasttfm predict``) for an example."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LabelResult:
    """The label of a text or of a pair of texts."""

    label: str
    probability: float
    probabilities: dict[str, float]  # of every label


@dataclass(frozen=True)
class ValueResult:
    """The predicted number for a text or a pair of texts."""

    value: float


@dataclass(frozen=True)
class TagResult:
    """The tags of a sentence's words."""

    tags: list[str]
    probabilities: list[float | None]  # None for words without tokens, which get the most frequent tag


@dataclass(frozen=True)
class AnswerResult:
    """The span of a context that answers a question; empty, without start and end, if no answer is predicted."""

    answer: str
    start: int | None  # its first character in the context
    end: int | None  # the one after its last
    score: float  # the sum of the logits of the best span's first and last token
    no_answer: float  # the score of "no answer" minus this score


@dataclass(frozen=True)
class ChoiceResult:
    """The chosen ending."""

    choice: int  # its index
    ending: str
    probabilities: list[float]  # of every ending


@dataclass(frozen=True)
class TypesResult:
    """The labels of an example that may have several."""

    labels: list[str]  # those with a probability above one half
    probabilities: dict[str, float]  # of every label


@dataclass(frozen=True)
class ReplacedResult:
    """The tokens of a text, and which of them a discriminator finds replaced."""

    tokens: list[str]  # as they are in the text
    starts: list[int]  # the character of the text where each token starts
    probabilities: list[float]  # of each token to be a replacement
    replaced: list[bool]  # which of them are above one half


Result = LabelResult | ValueResult | TagResult | AnswerResult | ChoiceResult | TypesResult | ReplacedResult
