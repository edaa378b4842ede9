"""The input format of a model family: the ids of one or two texts with special tokens around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fasttfm.data.lines import DataError
from fasttfm.data.tokenizer import Tokenizer
from fasttfm.models.families import family_of_type
from fasttfm.models.family import Family


class Tokens(NamedTuple):
    """A sequence as a model reads it."""

    ids: list[int]
    segments: list[int]  # of every token; may be empty if all are 0
    cut: int = 0  # how many tokens of the texts were truncated
    adapter: int = -1  # the index of its LoRA adapter, -1 for none


def segments_of(sequences: Sequence[Tokens]) -> list[list[int]] | None:
    """The segments of sequences; None if all are 0."""
    if not any(tokens.segments and tokens.segments[-1] for tokens in sequences):
        return None
    return [tokens.segments or [0] * len(tokens.ids) for tokens in sequences]


@dataclass(frozen=True)
class Format:
    """The sequence format of one text or two: ``first`` text ``last``, or ``first`` text ``between`` text ``last``.

    BERT's is ``[CLS] a [SEP] b [SEP]``, RoBERTa's ``<s> a </s></s> b </s>``; GPT-1's uses three additional tokens
    (start, delimiter and extract).
    """

    first: Sequence[int]
    between: Sequence[int]
    last: Sequence[int]
    max_length: int
    segments: bool = True  # whether the second text has segment 1
    last_segment: int | None = None  # that of the last token, if it has one of its own

    def one(self, text: Sequence[int]) -> Tokens:
        """A single text, truncated if it is too long."""
        room = max(0, self.max_length - len(self.first) - len(self.last))
        ids = [*self.first, *text[:room], *self.last]
        return self.finished(ids, [0] * len(ids))._replace(cut=max(0, len(text) - room))

    def two(self, text: Sequence[int], other: Sequence[int]) -> Tokens:
        """Two texts; while they are too long together, the longer one loses its last token."""
        kept = min(len(text), max(self.room - len(other), self.room // 2, 0))
        cut = max(0, len(text) + len(other) - max(0, self.room))
        text, other = text[:kept], other[: max(0, self.room - kept)]
        return self.joined(text, other)._replace(cut=cut)

    def joined(self, text: Sequence[int], other: Sequence[int]) -> Tokens:
        """Two texts that fit."""
        ids = [*self.first, *text, *self.between]
        segments = [0] * len(ids) + [int(self.segments)] * (len(other) + len(self.last))
        return self.finished([*ids, *other, *self.last], segments)

    def finished(self, ids: list[int], segments: list[int]) -> Tokens:
        """A sequence whose last token has the segment that it has in this format."""
        if self.last_segment is not None and segments:
            segments[-1] = self.last_segment
        return Tokens(ids, segments)

    @property
    def room(self) -> int:
        """The maximum number of tokens of two texts."""
        return self.max_length - len(self.first) - len(self.between) - len(self.last)


def encoder_format(family: Family, config: Any, tokenizer: Tokenizer, max_length: int) -> Format:
    """The format of one text or two that a family of encoders is pre-trained with. Separators and segments are those of
    the tokenizer, if it has any."""
    if family.template:
        before, after = tokenizer.around()
        return Format(before, after, after, max_length, segments=False)
    first, last = tokenizer.special.cls, tokenizer.special.sep
    if first is None or last is None:
        expected = f"[CLS] and [SEP], or <s> and </s>, which {family.title} reads"
        raise DataError(f"tokenizer: expected {expected}, got {tokenizer.special}")
    if family.last_token:
        return Format([], [last], [last, first], max_length, last_segment=2)
    between = [last] * (tokenizer.separators or family.separators)
    return Format([first], between, [last], max_length, config.type_vocab_size > 1 and tokenizer.has_segments)


def text_format(config: Any, tokenizer: Tokenizer, max_length: int) -> Format:
    """The format of plain text for a model with this configuration; causal models use no special tokens."""
    family = family_of_type(config.model_type)
    assert family is not None
    if family.task_tokens:
        return Format([], [], [], max_length, segments=False)
    return encoder_format(family, config, tokenizer, max_length)
