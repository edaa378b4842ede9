"""``Sampling``: selects the next token from a model's logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled; if ``do_sample`` is false the most likely one is taken.

    ``temperature`` divides the logits; then only the ``top_k`` most likely tokens are kept, and of these the smallest
    set of the most likely ones whose total probability reaches ``top_p``.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    generator: torch.Generator | None = None  # on the logits' device; torch's by default

    def __post_init__(self) -> None:
        for name, fits, expected in (
            ("temperature", 0 < self.temperature < math.inf, "a number above 0"),
            ("top_k", self.top_k is None or self.top_k >= 1, "None or a number of tokens, at least 1"),
            ("top_p", self.top_p is None or 0 < self.top_p <= 1, "None or a probability in (0, 1]"),
        ):
            if not fits:
                raise ValueError(f"generate: {name}: expected {expected}, got {getattr(self, name)}")

    def choose(self, logits: Tensor) -> Tensor:
        """A token for each row: int64 [B] for ``logits`` [B, V]."""
        if not self.do_sample:
            return logits.argmax(-1)
        probabilities = self.filter(logits.float()).softmax(-1)
        return torch.multinomial(probabilities, 1, generator=self.generator).squeeze(-1)

    def filter(self, logits: Tensor) -> Tensor:
        """Logits at this temperature, -inf for excluded tokens."""
        logits = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        if self.top_p is not None and self.top_p < 1:
            ordered, words = logits.sort(descending=True, stable=True)
            probabilities = ordered.softmax(-1)
            likelier = probabilities.cumsum(-1) - probabilities  # total probability of the tokens before
            ruled_out = likelier >= self.top_p  # never the first: nothing is in front of it
            logits = ordered.masked_fill(ruled_out, float("-inf")).gather(-1, words.argsort(-1))
        return logits
