"""The learning rate over a run."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from fasttfm.train.settings import ScheduleSettings


def factor(settings: ScheduleSettings, step: int) -> float:
    """The factor of the learning rate in ``step``, counted from 0: a linear warmup, in which the first step's factor is
    above 0, then a decay that reaches ``settings.final`` at the end of the run; with ``wsd`` the rate is constant in
    between."""
    if step < settings.warmup:
        return (step + 1) / settings.warmup
    if settings.kind == "constant":
        return 1.0
    begin = settings.warmup
    if settings.kind == "wsd":
        decay = settings.steps // 5 if settings.decay is None else settings.decay
        begin = max(begin, settings.steps - decay)
        if step < begin:
            return 1.0
    way = min(1.0, (step - begin) / max(1, settings.steps - begin))
    share = (1 + math.cos(math.pi * way)) / 2 if settings.kind == "cosine" else 1 - way
    return settings.final + (1 - settings.final) * share


class Schedule:
    """Sets the learning rates of an optimizer: the rate of each parameter group times the factor of the step.

    The rate of a group is its ``initial_lr``, as with the schedulers of torch: its first ``lr``, which is part of the
    optimizer's state, so that a state that was saved during warmup can be loaded before the schedule is made.
    """

    def __init__(self, optimizer: Optimizer, settings: ScheduleSettings) -> None:
        self.optimizer = optimizer
        self.settings = settings
        self.rates = [_as_fp32(group.setdefault("initial_lr", float(group["lr"]))) for group in optimizer.param_groups]

    def set(self, step: int) -> float:
        """Prepares ``step``; returns the largest learning rate."""
        multiple = factor(self.settings, step)
        rates = [_as_fp32(rate * multiple) for rate in self.rates]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):  # which a CUDA graph reads
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        return max(rates)


def _as_fp32(rate: Any) -> float:
    """The rate rounded to fp32, as it is in a tensor on the device: steps with and without a CUDA graph use the
    same."""
    return float(np.float32(float(rate)))
