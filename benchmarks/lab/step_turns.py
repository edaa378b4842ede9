"""Times variants of a training step that take turns in one process, so that they meet the chip at the same clocks."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping

import torch

ROUNDS, STEPS = 3, 6


def times(step: Callable[[], object], count: int) -> list[float]:
    """Milliseconds of ``count`` steps in a row, by the events between them."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in itertools.pairwise(marks)]


def medians(steps: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Milliseconds of a step of each; the first of a turn does not count."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _, (name, step) in itertools.product(range(ROUNDS), steps.items()):
        step()
        found[name] += times(step, STEPS)
    return {name: statistics.median(own) for name, own in found.items()}
