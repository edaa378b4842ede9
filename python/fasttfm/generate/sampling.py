"""``Sampling``: how tokens are drawn from a model's logits."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_COLDEST = 1e-30  # lower temperatures take the most likely token, too: fp32 could not hold the quotients
_MOST_KEPT = 2**31 - 1  # tokens of top_k: no vocabulary has more
_SEEDS = range(-(2**63), 2**63)


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
            ("temperature", _is_within(self.temperature, 0, math.inf), "a number above 0"),
            ("top_k", self.top_k is None or is_count(self.top_k, 1), "None or a number of tokens, at least 1"),
            ("top_p", self.top_p in (None, 1) or _is_within(self.top_p, 0, 1), "None or a probability in (0, 1]"),
        ):
            if not fits:
                raise ValueError(f"generate: {name}: expected {expected}, got {getattr(self, name)!r}")

    def row(self, seed: int | None = None) -> tuple[int, float, int, float]:
        """Seed, temperature (0: the most likely token), top_k (0: all) and top_p of one sequence, as
        ``ops.sample_tokens`` takes them. By default the seed is drawn."""
        if not self.do_sample:
            return 0, 0.0, 0, 1.0
        if seed is None:
            device = "cpu" if self.generator is None else self.generator.device
            seed = int(torch.randint(-(2**63), 2**63 - 1, (), generator=self.generator, device=device))
        if not isinstance(seed, numbers.Integral) or seed not in _SEEDS:
            raise ValueError(f"generate: seed: expected a whole number from -2^63 to 2^63 - 1, got {seed!r}")
        temperature = 0.0 if self.temperature < _COLDEST else float(self.temperature)
        top_p = 1.0 if self.top_p is None else float(self.top_p)
        return int(seed), temperature, min(self.top_k or 0, _MOST_KEPT), top_p


def is_count(value: Any, least: float) -> bool:
    """Whether a value is a whole number that is not below ``least``."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= least


def _is_within(value: Any, low: float, high: float) -> bool:
    return isinstance(value, numbers.Real) and low < float(value) < high


def check_logits(logits: Tensor) -> None:
    """Raises if a logit is NaN. Not checked on a GPU, with which that would synchronize."""
    if logits.device.type == "cpu" and bool(logits.isnan().any()):
        raise ValueError("generate: logits: expected numbers, got NaN (a parameter of the model may not be finite)")


def check_new_tokens(value: Any) -> None:
    if not is_count(value, 0):
        raise ValueError(f"generate: max_new_tokens: expected at least 0, got {value!r}")


def end_tokens(config: Any, eos_token_id: int | Sequence[int] | Tensor | np.ndarray | None) -> list[int]:
    """The tokens that end a sequence: those that are given, or else the configuration's."""
    eos_token_id = config.eos_token_id if eos_token_id is None else eos_token_id
    if eos_token_id is None:
        return []
    ids: Any = eos_token_id.tolist() if isinstance(eos_token_id, (Tensor, np.ndarray)) else eos_token_id
    ends = [ids] if isinstance(ids, numbers.Integral) else list(ids)
    if not all(isinstance(end, numbers.Integral) for end in ends):
        raise ValueError(f"generate: eos_token_id: expected one token or several, got {eos_token_id!r:.80}")
    return [int(end) for end in ends]
