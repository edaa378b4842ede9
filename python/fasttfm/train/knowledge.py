"""``pretrain_knowledge``: ERNIE's pre-training on texts with aligned entities, in one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fasttfm.data.knowledge import MentionExample
from fasttfm.data.knowledge_batches import KnowledgeStream
from fasttfm.data.tokenizer import Tokenizer
from fasttfm.models.ernie_knowledge import ErnieKnowledgeForPreTraining, KnowledgePretraining
from fasttfm.train.loop import Objective, StepResult, Trainer, check_finite
from fasttfm.train.optimizers import make_optimizer
from fasttfm.train.schedule import Schedule
from fasttfm.train.settings import OptimizerSettings, ScheduleSettings, StepSettings, at_least, random_seed
from fasttfm.train.step_checkpoints import StepCheckpoints

_EVALUATED = 4  # batches of the validation set


@dataclass(frozen=True)
class KnowledgeSettings:
    schedule: ScheduleSettings
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    step: StepSettings = field(default_factory=StepSettings)
    tokens_per_step: int = 2048
    accumulation: int = 1
    max_length: int = 128
    held_out: float = 0.05  # the fraction of the texts in the validation set
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens_per_step", "accumulation", "max_length"):
            at_least(name, getattr(self, name), 1)
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out: expected the validation set's fraction, between 0 and 1, got {self.held_out}")
        random_seed(self.seed)


def pretrain_knowledge(
    model: ErnieKnowledgeForPreTraining,
    tokenizer: Tokenizer,
    examples: Sequence[MentionExample],
    settings: KnowledgeSettings,
    *,
    on_results: Callable[[list[StepResult]], Any] = lambda results: None,
    checkpoints: StepCheckpoints | None = None,
) -> dict[str, float]:
    """Trains the model, on its device, and returns the validation losses.

    Args:
        model: The model with its entities (``set_entities``).
        tokenizer: The model's tokenizer.
        examples: Texts with aligned mentions.
        settings: The settings of the training.
        on_results: Called with the results of steps as they become available.
        checkpoints: Where the training is saved, and continued; by default it is not.
    """
    order = torch.randperm(
        len(examples), generator=torch.Generator("cpu").manual_seed(settings.seed), device="cpu"
    ).tolist()
    held_out = max(2, round(settings.held_out * len(examples)))
    known = {name: number for number, name in enumerate(model.entity_names)}

    def stream(numbers: list[int]) -> KnowledgeStream:
        return KnowledgeStream(
            [examples[number] for number in numbers],
            tokenizer,
            known,
            max_length=settings.max_length,
            tokens_per_batch=max(settings.max_length, settings.tokens_per_step // settings.accumulation),
            seed=settings.seed,
        )

    training, validation = stream(order[held_out:]), stream(order[:held_out])
    module = KnowledgePretraining(model)
    objective = Objective.of(module)
    optimizer = make_optimizer(module, settings.optimizer)
    trainer = Trainer(module, objective, optimizer, Schedule(optimizer, settings.schedule), settings.step)
    torch.manual_seed(settings.seed)
    batches = iter(training)
    groups = (list(itertools.islice(batches, settings.accumulation)) for _ in itertools.count())
    steps = settings.schedule.steps
    if checkpoints is not None:
        checkpoints.train(trainer, groups, steps, on_results)
    else:
        for group in itertools.islice(groups, steps):
            on_results(trainer.step(group))
    on_results(trainer.finish())
    check_finite(model)
    losses = trainer.evaluate(itertools.islice(validation, _EVALUATED))
    model.eval()
    return losses
