"""Training: optimizers, schedules, the loop, checkpoints, logs, distributed training; pre-training from text files."""

from fasttfm.train.gradient_cache import cached_loss
from fasttfm.train.loop import NonFiniteError, Objective, StepResult, Trainer
from fasttfm.train.muon import Muon
from fasttfm.train.optimizers import Lamb, make_optimizer, parameter_groups
from fasttfm.train.schedule import Schedule
from fasttfm.train.settings import OptimizerSettings, ScheduleSettings, StepSettings

__all__ = [
    "Lamb",
    "Muon",
    "NonFiniteError",
    "Objective",
    "OptimizerSettings",
    "Schedule",
    "ScheduleSettings",
    "StepResult",
    "StepSettings",
    "Trainer",
    "cached_loss",
    "make_optimizer",
    "parameter_groups",
]
