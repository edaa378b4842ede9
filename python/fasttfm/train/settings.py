"""What a training run is made of, as dataclasses: the command line fills them, checkpoints keep them."""

from __future__ import annotations

from dataclasses import dataclass

OPTIMIZERS = ("adamw", "lamb")
SCHEDULES = ("linear", "cosine", "constant")
PRECISIONS = ("float32", "bfloat16")


@dataclass(frozen=True)
class OptimizerSettings:
    """How parameters are changed. Biases and LayerNorms do not decay."""

    name: str = "adamw"
    learning_rate: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-6
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        one_of("optimizer", self.name, OPTIMIZERS)
        at_least("learning_rate", self.learning_rate, 0)
        at_least("weight_decay", self.weight_decay, 0)
        at_least("epsilon", self.epsilon, 0)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas: expected two numbers in [0, 1), got {self.betas}")


@dataclass(frozen=True)
class ScheduleSettings:
    """The learning rate's way: up over ``warmup`` steps, then down to ``final`` of it at the end of ``steps``."""

    steps: int
    warmup: int = 0
    kind: str = "linear"
    final: float = 0.0

    def __post_init__(self) -> None:
        one_of("schedule", self.kind, SCHEDULES)
        at_least("steps", self.steps, 1)
        if not 0 <= self.warmup <= self.steps:
            raise ValueError(f"warmup: expected a number of steps from 0 to all {self.steps}, got {self.warmup}")
        if not 0 <= self.final <= 1:
            raise ValueError(f"final: expected a share of the learning rate in [0, 1], got {self.final}")


@dataclass(frozen=True)
class StepSettings:
    """How one step is computed."""

    clip: float | None = 1.0  # the gradient's largest norm
    precision: str = "float32"  # of the products; parameters and optimizer keep float32
    compile: bool = False  # the forward, with torch.compile
    cuda_graph: bool = False  # the whole step: batches must have fixed shapes
    bad_steps: int = 5  # so many steps in a row without a finite loss and gradient end the run

    def __post_init__(self) -> None:
        one_of("precision", self.precision, PRECISIONS)
        at_least("bad_steps", self.bad_steps, 1)
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip: expected a number above 0 or None, got {self.clip}")


def one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}")


def at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise ValueError(f"{name}: expected a number from {least} on, got {value}")
