"""Times variants of a training step that take turns in one process, so that they meet the chip at the same clocks."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping

import torch

ROUNDS, STEPS = 3, 6


def medians(steps: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Milliseconds of a step of each, by the events between steps; the first of a turn does not count."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _, (name, step) in itertools.product(range(ROUNDS), steps.items()):
        step()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
        marks[0].record()
        for mark in marks[1:]:
            step()
            mark.record()
        torch.cuda.synchronize()
        times[name] += [before.elapsed_time(after) for before, after in itertools.pairwise(marks)]
    return {name: statistics.median(found) for name, found in times.items()}
