"""Answers to questions as spans of tokens, found on the device: four numbers for each sequence instead of two for each
token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fasttfm.inference.formats import Format

SPAN_COLUMNS = 4


@dataclass(frozen=True)
class AnswerSpans:
    """How the answer in a pair of texts, a question and its context, is found. A context's tokens have segment 1.

    Args:
        max_answer: The maximum number of tokens of an answer.
        after: The number of special tokens after the context, which have segment 1, too.
        segments: Whether the model reads the segments.
    """

    max_answer: int = 30
    after: int = 1
    segments: bool = True

    @classmethod
    def of(cls, form: Format | None, max_answer: int = 30) -> AnswerSpans:
        """For pairs in a format."""
        return cls(max_answer) if form is None else cls(max_answer, len(form.last), form.segments)

    def __post_init__(self) -> None:
        if self.max_answer < 1:
            raise ValueError(f"Session: answers: max_answer: expected at least 1, got {self.max_answer}")

    def found(self, logits: Tensor, segments: Tensor | None, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """fp32 [sequences, 4]: the sum of both logits of the sequence's first token, the score of "no answer"; the
        largest sum of the start logit of a span's first token and the end logit of its last; and the positions of
        these two tokens in their sequence. Without a context this sum is -inf and the positions are -1. Of equal sums
        the shortest span counts, then the first. Does not synchronize with the GPU.

        Args:
            logits: fp32 [T, 2], the start and end logits of each token.
            segments: [T]; None if all are 0.
        """
        first, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff()
        columns = torch.arange(max_seqlen, device=logits.device)
        rows = (first[:, None] + columns).clamp(max=len(logits) - 1)
        inside = columns < (lengths - self.after)[:, None]
        inside = inside & (segments[rows] == 1) if segments is not None else torch.zeros_like(inside)
        start, end = logits[rows].where(inside[:, :, None], -torch.inf).unbind(-1)
        longest = min(self.max_answer, max_seqlen)
        ends = functional.pad(end, (0, longest - 1), value=-torch.inf).unfold(1, longest, 1)  # [sequences, S, longest]
        sums = (start[:, :, None] + ends).transpose(1, 2).flatten(1)  # of a span of d + 1 tokens at d * S + its start
        score, index = sums.max(1)  # the first of equal ones
        begin, known = index % max_seqlen, score > -torch.inf
        places = torch.stack([begin, begin + index // max_seqlen], 1).where(known[:, None], -1)
        none = logits[first.clamp(max=len(logits) - 1)].sum(1)
        return torch.cat([none[:, None], score[:, None], places.float()], 1)
