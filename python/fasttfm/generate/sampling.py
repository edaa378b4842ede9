"""``Sampling``: how tokens are drawn from a model's logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled; if ``do_sample`` is false the most likely token is taken.

    ``temperature`` divides the logits; then only the ``top_k`` most likely tokens are kept, and of these the smallest
    set of the most likely ones whose total probability reaches ``top_p``.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    generator: torch.Generator | None = None  # draws the seeds of sequences; torch's default generator if None

    def __post_init__(self) -> None:
        for name, fits, expected in (
            ("temperature", 0 < self.temperature < math.inf, "a number above 0"),
            ("top_k", self.top_k is None or self.top_k >= 1, "None or a number of tokens, at least 1"),
            ("top_p", self.top_p is None or 0 < self.top_p <= 1, "None or a probability in (0, 1]"),
        ):
            if not fits:
                raise ValueError(f"generate: {name}: expected {expected}, got {getattr(self, name)}")

    def row(self, seed: int | None = None) -> tuple[int, float, int, float]:
        """Seed, temperature (0: the most likely token), top_k (0: all) and top_p of one sequence, as
        ``ops.sample_tokens`` takes them. By default the seed is drawn."""
        if not self.do_sample:
            return 0, 0.0, 0, 1.0
        if seed is None:
            device = "cpu" if self.generator is None else self.generator.device
            seed = int(torch.randint(-(2**63), 2**63 - 1, (), generator=self.generator, device=device))
        return seed, self.temperature, self.top_k or 0, 1.0 if self.top_p is None else self.top_p
