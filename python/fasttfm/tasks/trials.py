"""Several trainings of the same task: a grid of learning rates, and random restarts."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Trial:
    """A training with its own learning rate or seed."""

    rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"rate-{self.rate:g}-seed-{self.seed}"


def plan(rates: Sequence[float], seed: int, restarts: int = 1) -> list[Trial]:
    """Every learning rate with every seed from ``seed`` to ``seed + restarts - 1``."""
    if restarts < 1:
        raise ValueError(f"restarts: expected a number from 1 on, got {restarts}")
    if len(set(rates)) < len(rates):
        raise ValueError(f"search: expected different learning rates, got {', '.join(f'{rate:g}' for rate in rates)}")
    return [Trial(rate, trial_seed) for rate, trial_seed in itertools.product(rates, range(seed, seed + restarts))]


def best(scores: Sequence[float]) -> int:
    """The index of the best score, the first of several; NaN is worse than all others."""
    return max(range(len(scores)), key=lambda index: (not math.isnan(scores[index]), scores[index], -index))


def spread(scores: Sequence[float]) -> dict[str, float]:
    """Mean, standard deviation (of a sample), minimum and maximum."""
    return {
        "mean": statistics.fmean(scores),
        "standard_deviation": statistics.stdev(scores) if len(scores) > 1 else 0.0,
        "min": min(scores),
        "max": max(scores),
    }
