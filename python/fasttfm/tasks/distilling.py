"""Distillation runs: students of a teacher, on a corpus (DistilBERT, TinyBERT's first stage) or on a task's examples
(TinyBERT's second)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from fasttfm.data.texts import DataError
from fasttfm.data.tokenizer import load_tokenizer
from fasttfm.models import BertModel, DistilBertForMaskedLM
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.tasks.distillation import Recipe, TinyBertRecipe, soft_cross_entropy
from fasttfm.tasks.finetuning import FinetuneSettings, label_names, prepare, shuffled_steps, trainer_of
from fasttfm.tasks.task import Task
from fasttfm.train import Objective, StepResult, Trainer

PROJECTIONS = "projections.safetensors"  # TinyBERT's, beside the student's own files

OnResults = Callable[[list[StepResult]], Any]


# ---- students --------------------------------------------------------------------------------------------------------


def distilbert_student(teacher: PretrainedModel, layers: Sequence[int] | None = None) -> PretrainedModel:
    """A DistilBERT that begins with the teacher's embeddings and some of its layers, every second one by default."""
    return DistilBertForMaskedLM.from_teacher(teacher, layers)  # type: ignore[arg-type]


def tinybert_student(teacher: PretrainedModel, layers: int, width: int, intermediate: int) -> PretrainedModel:
    """A BERT of other sizes with as many attention heads as the teacher, drawn anew."""
    config = teacher.config
    if config.model_type != "bert":
        raise ValueError(f"tinybert: teacher: expected a BERT, got {config.model_type!r}")
    heads = config.num_attention_heads
    if width % (8 * heads):
        raise ValueError(f"tinybert: width: expected a multiple of 8 times the teacher's {heads} heads, got {width}")
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": intermediate}
    return BertModel(replace(config, **sizes, extra={}), add_pooling_layer=False)


# ---- on a corpus -----------------------------------------------------------------------------------------------------


class CorpusRun:
    """A recipe over a stream of batches.

    Args:
        recipe: Student and teacher, on the device where they are to run.
        batches: Packed batches with masked words; those of ``steps`` steps or more.
        settings: Epochs are not looked at; nor are rates but the first.
    """

    def __init__(self, recipe: Any, batches: Iterable[Any], settings: FinetuneSettings, steps: int) -> None:
        self.recipe, self.batches, self.settings, self.steps = recipe, batches, settings, steps
        self.trainer = _trainer(recipe, settings, steps)

    def run(self, on_results: OnResults) -> None:
        torch.manual_seed(self.settings.seed)
        batches = iter(self.batches)
        for _ in range(self.steps):
            group = list(islice(batches, self.settings.accumulation))
            if not group:
                raise DataError(f"distill: expected batches for {self.steps} steps, got {self.trainer.completed}")
            on_results(self.trainer.step(group))
        on_results(self.trainer.flush())

    def evaluate(self, batches: Iterable[Any]) -> dict[str, float]:
        """The terms' means over batches that were not trained on."""
        return self.trainer.evaluate(batches)


def _trainer(recipe: Any, settings: FinetuneSettings, steps: int) -> Trainer:
    objective = Objective(recipe.terms, recipe.counts, lambda module, batch: module(batch))
    optimizer = replace(settings.optimizer, learning_rate=settings.rates.rate, weight_decay=settings.rates.weight_decay)
    return trainer_of(recipe, objective, recipe, replace(settings, optimizer=optimizer), steps)


# ---- on a task -------------------------------------------------------------------------------------------------------


class PredictionRecipe(Recipe):
    """What a fine-tuned teacher predicts: soft cross entropy of a task's logits."""

    terms = ("predictions",)

    def __init__(
        self, student: PretrainedModel, teacher: PretrainedModel, task: Task, *, temperature: float = 1.0
    ) -> None:
        super().__init__(student, teacher)
        self.task, self.temperature = task, temperature

    def counts(self, batch: Any) -> tuple[float, ...]:
        return (self.task.rows(batch),)

    def forward(self, batch: Any) -> tuple[Tensor, ...]:
        with torch.no_grad():
            target = self.task.logits(self.teacher, batch)
        return (soft_cross_entropy(self.task.logits(self.student, batch), target, self.temperature),)


def prepare_task(
    name: str, teacher: str | Path, student: str | Path, train: Sequence[Any], **options: Any
) -> tuple[PretrainedModel, PretrainedModel, Task, dict[str, Tensor] | None]:
    """Teacher, student, their task, and the projections that the student's first stage left.

    Args:
        name: One of ``finetuning.TASKS``.
        teacher: The directory of a model that was fine-tuned on the task.
        student: The directory that the first stage wrote.
        options: Those of ``finetuning.prepare``.
    """
    words = [load_tokenizer(directory) for directory in (teacher, student)]
    if words[0].fingerprint != words[1].fingerprint:
        raise DataError(f"{student}: expected the tokenizer of its teacher, {teacher}; got another")
    fine_tuned, task = prepare(name, teacher, train, **options)
    labels = label_names(fine_tuned.config)
    pupil, _ = prepare(name, student, train, labels=labels, **options)
    path = Path(student) / PROJECTIONS
    return fine_tuned, pupil, task, load_file(path) if path.is_file() else None


class TaskRun:
    """TinyBERT's second stage: first the layers of a teacher that was fine-tuned on the task, then its predictions.

    Args:
        recipe: Student and teacher, both with the task's head, on the device where they are to run.
        settings: ``epochs`` of the first part.
        prediction_epochs: Of the second part.
    """

    def __init__(
        self,
        recipe: TinyBertRecipe,
        task: Task,
        train: Sequence[Any],
        settings: FinetuneSettings,
        *,
        prediction_epochs: int = 3,
        temperature: float = 1.0,
    ) -> None:
        features = task.features(train)

        def steps(first: int, epochs: int) -> list[Any]:
            orders = range(first, first + epochs)
            return [step for epoch in orders for step in shuffled_steps(features, settings, epoch)]

        prediction = PredictionRecipe(recipe.student, recipe.teacher, task, temperature=temperature)
        self.task, self.settings = task, settings
        self.parts: list[tuple[Any, list[Any]]] = [
            (recipe, steps(0, settings.epochs)),
            (prediction, steps(settings.epochs, prediction_epochs)),
        ]

    def run(self, on_part: Callable[[Any, int], OnResults]) -> None:
        """Trains. ``on_part`` is called with a part's recipe and number of steps, and says who takes its results."""
        torch.manual_seed(self.settings.seed)
        for recipe, steps in self.parts:
            if not steps:
                continue
            on_results = on_part(recipe, len(steps))
            trainer = _trainer(recipe, self.settings, len(steps))
            for step in steps:
                on_results(trainer.step([self.task.batch(features) for features in step]))
            on_results(trainer.flush())
            recipe.eval()
