"""Distillation runs: a student is trained on a corpus (DistilBERT, TinyBERT's first stage) or on the examples of a task
(TinyBERT's second stage)."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fasttfm._atomic_files import atomic_write, written_together
from fasttfm.data.lines import DataError
from fasttfm.data.tokenizer import Tokenizer
from fasttfm.data.tokenizer_files import load_tokenizer
from fasttfm.inference.opening import base_of, checkpoint_of, with_trained_head
from fasttfm.models import (
    AlbertConfig,
    BertConfig,
    CamembertConfig,
    CheckpointError,
    DistilBertConfig,
    DistilBertForMaskedLM,
    ElectraConfig,
    RobertaConfig,
    XLMRobertaConfig,
)
from fasttfm.models.families import longest_input
from fasttfm.models.gpt import GPTConfig
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.tasks.distillation_recipes import (
    Recipe,
    TinyBertRecipe,
    check_temperature,
    soft_binary_cross_entropy,
    soft_cross_entropy,
    squared_error,
)
from fasttfm.tasks.finetuning import FinetuneSettings, label_names, prepare, shuffled_steps, trainer_of
from fasttfm.tasks.inputs import checksum
from fasttfm.tasks.task import Task
from fasttfm.train import Objective, StepResult, Trainer
from fasttfm.train.checkpoints import Checkpoints
from fasttfm.train.loop import check_finite
from fasttfm.train.run_directory import RunError
from fasttfm.train.settings import at_least
from fasttfm.train.step_checkpoints import StepCheckpoints

_LAYER = re.compile(r"encoder\.layers\.(\d+)\.")
_ROBERTAS = (RobertaConfig, XLMRobertaConfig, CamembertConfig)
_BERT_SIZES = (AlbertConfig, BertConfig, ElectraConfig, *_ROBERTAS)  # fields have BERT's names
PROJECTIONS = "projections.safetensors"  # TinyBERT's, in the student's directory

OnResults = Callable[[list[StepResult]], Any]


# ---- students --------------------------------------------------------------------------------------------------------


def distilbert_student(teacher: PretrainedModel, layers: int | None = None) -> PretrainedModel:
    """A student that starts with the teacher's embeddings, its head and ``layers`` of its layers, evenly spaced from
    the first on: every second one by default. The student of a BERT is a DistilBERT; that of a RoBERTa or one like
    it, an ELECTRA generator or a GPT has the teacher's class."""
    depth = len(base_of(teacher).encoder.order)
    count = max(1, depth // 2) if layers is None else layers
    if not 1 <= count <= depth:
        raise ValueError(f"layers: expected 1 to the teacher's {depth}, got {count}")
    chosen = [index * depth // count for index in range(count)]
    if isinstance(teacher.config, (*_ROBERTAS, ElectraConfig, GPTConfig)):
        return with_layers(teacher, chosen)
    return DistilBertForMaskedLM.from_teacher(teacher, chosen)  # type: ignore[arg-type]


def with_layers(teacher: PretrainedModel, layers: Sequence[int]) -> PretrainedModel:
    """A copy of the teacher with only these of its layers."""
    depth: Any = "n_layer" if isinstance(teacher.config, GPTConfig) else "num_hidden_layers"
    student = type(teacher)(replace(teacher.config, **{depth: len(layers)}, extra={}))
    numbers = {theirs: ours for ours, theirs in enumerate(layers)}
    state = {}
    for name, tensor in teacher.state_dict().items():
        layer = _LAYER.search(name)
        if layer is None:
            state[name] = tensor
        elif int(layer[1]) in numbers:
            state[f"{name[: layer.start(1)]}{numbers[int(layer[1])]}{name[layer.end(1) :]}"] = tensor
    student.load_state_dict(state, strict=not teacher.tied())
    return student.to(next(teacher.parameters()).dtype)


def tinybert_student(
    teacher: PretrainedModel,
    layers: int | None = None,
    width: int | None = None,
    intermediate: int | None = None,
    *,
    head: bool = False,
) -> PretrainedModel:
    """A randomly initialized model of the teacher's kind with other sizes, by default half of the teacher's, and as
    many attention heads; with ``head`` it also has the teacher's kind of head."""
    config, stack = teacher.config, base_of(teacher).encoder.in_order()
    names = _size_names(config)
    if names is None:
        expected = "a BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA, ALBERT, DistilBERT or GPT"
        raise ValueError(f"tinybert: teacher: expected {expected}, got {config.model_type!r}")
    heads = stack[0].heads
    width = stack[0].width // 2 if width is None else width
    if width < 1 or width % heads:
        raise ValueError(f"width: expected a multiple of the teacher's {heads} attention heads, got {width}")
    inner = 4 * width if intermediate is None else intermediate
    depth = max(1, getattr(config, names[0]) // 2) if layers is None else layers
    sizes: dict[str, Any] = dict(zip(names, (depth, width, inner), strict=False))
    if len(names) < 3 and inner != 4 * width:
        raise ValueError(f"intermediate: expected {4 * width}, four times the width, as in every GPT-1, got {inner}")
    if hasattr(config, "embedding_size"):
        sizes["embedding_size"] = min(config.embedding_size, width)
    cls = type(teacher if head else base_of(teacher))
    options = {"add_pooling_layer": False} if "add_pooling_layer" in inspect.signature(cls).parameters else {}
    return cls(replace(config, **sizes, extra={}), **options)


def _size_names(config: Any) -> tuple[str, ...] | None:
    """The names of depth, width and inner width in a configuration; GPT-1's has no inner width."""
    if isinstance(config, GPTConfig):
        return ("n_layer", "n_embd", "n_inner") if hasattr(config, "n_inner") else ("n_layer", "n_embd")
    if type(config) is DistilBertConfig:
        return ("n_layers", "dim", "hidden_dim")
    return ("num_hidden_layers", "hidden_size", "intermediate_size") if type(config) in _BERT_SIZES else None


def save_student(recipe: Recipe, tokenizer: Tokenizer, directory: Path) -> None:
    """Saves the student in transformers' format, and TinyBERT's projections in the same directory."""
    check_finite(recipe.student)
    config = recipe.student.config
    projections = getattr(recipe, "projections", None)
    with written_together():
        recipe.student.save_pretrained(directory)
        tokenizer.save(directory, model_max_length=longest_input(config), config=config)
        if projections is not None and len(projections):
            with atomic_write(directory / PROJECTIONS) as partial:
                save_file({name: value.cpu() for name, value in projections.state_dict().items()}, partial)


# ---- on a corpus -----------------------------------------------------------------------------------------------------


class CorpusRun:
    """Trains a recipe on a stream of batches.

    Args:
        recipe: Student and teacher, on the device where they are to run.
        batches: Packed batches with masked tokens, for ``steps`` steps or more.
        settings: ``epochs`` and all rates but the first are ignored.
    """

    def __init__(self, recipe: Any, batches: Iterable[Any], settings: FinetuneSettings, steps: int) -> None:
        at_least("steps", steps, 1)
        self.recipe, self.batches, self.settings, self.steps = recipe, batches, settings, steps
        self.trainer = _trainer(recipe, settings, steps)

    def run(self, on_results: OnResults, checkpoints: StepCheckpoints | None = None) -> None:
        """Trains; ``checkpoints`` saves and continues the training."""
        torch.manual_seed(self.settings.seed)
        if checkpoints is not None:
            checkpoints.train(self.trainer, self._groups(), self.steps, on_results)
        else:
            for group in islice(self._groups(), self.steps):
                on_results(self.trainer.step(group))
        on_results(self.trainer.finish())

    def _groups(self) -> Iterator[list[Any]]:
        batches = iter(self.batches)
        while group := list(islice(batches, self.settings.accumulation)):
            yield group
        raise DataError(f"distill: expected batches for {self.steps} steps, got {self.trainer.completed}")

    def evaluate(self, batches: Iterable[Any]) -> dict[str, float]:
        """The terms' means over batches that were not trained on."""
        return self.trainer.evaluate(batches)


def _trainer(recipe: Any, settings: FinetuneSettings, steps: int) -> Trainer:
    objective = Objective.of(recipe)
    optimizer = replace(settings.optimizer, learning_rate=settings.rates.rate, weight_decay=settings.rates.weight_decay)
    return trainer_of(recipe, objective, recipe, replace(settings, optimizer=optimizer), steps)


# ---- on a task -------------------------------------------------------------------------------------------------------


class PredictionRecipe(Recipe):
    """The distance between the student's and a fine-tuned teacher's logits of a task: by the ``problem_type`` of the
    student, squared errors of values, or cross entropies with the teacher's probabilities."""

    def __init__(
        self, student: PretrainedModel, teacher: PretrainedModel, task: Task, *, temperature: float = 1.0
    ) -> None:
        super().__init__(student, teacher, ("predictions",))
        check_temperature(temperature)
        self.task, self.temperature = task, temperature
        self.distance = _DISTANCES.get(getattr(student.config, "problem_type", None) or "", soft_cross_entropy)

    def counts(self, batch: Any) -> tuple[float, ...]:
        return (self.task.rows(batch),)

    def forward(self, batch: Any) -> tuple[Tensor, ...]:
        with torch.no_grad():
            target = self.task.logits(self.teacher, batch)
        return (self.distance(self.task.logits(self.student, batch), target, self.temperature),)


class JointRecipe(Recipe):
    """TinyBERT's distances of the layers and of the predictions for a task in one loss.

    Args:
        layers: The recipe of the layers.
        predictions: The recipe of the predictions, with the same student and teacher.
    """

    def __init__(self, layers: TinyBertRecipe, predictions: PredictionRecipe) -> None:
        super().__init__(layers.student, layers.teacher, (*layers.terms, *predictions.terms))
        self.layers, self.last = layers, predictions

    def counts(self, batch: Any) -> tuple[float, ...]:
        return *self.layers.counts(batch), *self.last.counts(batch)

    def forward(self, batch: Any) -> tuple[Tensor, ...]:
        return *self.layers(batch), *self.last(batch)


_DISTANCES = {"regression": squared_error, "multi_label_classification": soft_binary_cross_entropy}


def prepare_task(
    name: str, teacher: str | Path, student: str | Path, train: Sequence[Any], **options: Any
) -> tuple[PretrainedModel, PretrainedModel, Task, dict[str, Tensor] | None]:
    """Opens teacher, student, their task, and the projections that the student's first stage has saved.

    Args:
        name: One of ``TASKS``.
        teacher: The directory of a model that was fine-tuned on the task.
        student: The directory that the first stage wrote.
        options: Options of ``finetuning.prepare``.

    Raises:
        CheckpointError: The teacher has no trained head for the task and its labels.
    """
    tokenizers = [load_tokenizer(directory) for directory in (teacher, student)]
    if tokenizers[0].fingerprint != tokenizers[1].fingerprint:
        raise DataError(f"{student}: expected the tokenizer of its teacher, {teacher}; got another")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # with_trained_head raises an error instead
        fine_tuned, task = prepare(name, teacher, train, **options)
    with_trained_head(fine_tuned, teacher, f"{name} and the labels of these examples; fasttfm finetune trains one")
    labels = label_names(fine_tuned.config)
    student_model, _ = prepare(name, student, train, labels=labels, **options)
    return fine_tuned, student_model, task, read_projections(checkpoint_of(student))


def read_projections(directory: Path) -> dict[str, Tensor] | None:
    """TinyBERT's projections that ``save_student`` wrote, None if there are none."""
    path = directory / PROJECTIONS
    try:
        return load_file(path) if path.is_file() else None
    except SafetensorError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


class TaskPart:
    """A part of ``TaskRun``: a recipe and its steps."""

    def __init__(self, name: str, recipe: Any, task: Task, groups: list[Any], settings: FinetuneSettings) -> None:
        self.name, self.recipe, self.task, self.settings = name, recipe, task, settings
        self._groups = groups
        self.steps = len(groups)

    def run(self, on_results: OnResults, checkpoints: StepCheckpoints | None = None) -> None:
        """Trains; ``checkpoints`` saves and continues the training."""
        torch.manual_seed(self.settings.seed)
        trainer = _trainer(self.recipe, self.settings, self.steps)
        groups = ([self.task.batch(features) for features in group] for group in self._groups)
        if checkpoints is not None:
            checkpoints.train(trainer, groups, self.steps, on_results)
        else:
            for batches in groups:
                on_results(trainer.step(batches))
        on_results(trainer.finish())
        self.recipe.eval()


class TaskRun:
    """TinyBERT's second stage. Its ``parts`` are to be run in order: the student learns the layers of a teacher that
    was fine-tuned on the task, then its predictions; with ``joint`` both at once, in one part.

    Args:
        recipe: Student and teacher, both with the task's head, on the device where they are to run.
        settings: ``epochs`` applies to the first part.
        prediction_epochs: The number of epochs of the second part; not used with ``joint``.
        temperature: The temperature of the predictions.

    Attributes:
        checksum: A checksum of the training examples.
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
        joint: bool = False,
    ) -> None:
        at_least("prediction_epochs", prediction_epochs, 0)
        self.recipe = recipe
        features = task.features(train)
        self.checksum = checksum(features)

        def steps(first: int, epochs: int) -> list[Any]:
            orders = range(first, first + epochs)
            return [step for epoch in orders for step in shuffled_steps(features, settings, epoch)]

        prediction = PredictionRecipe(recipe.student, recipe.teacher, task, temperature=temperature)
        if joint:
            both = JointRecipe(recipe, prediction)
            self.parts = [TaskPart("joint", both, task, steps(0, settings.epochs), settings)]
            return
        parts = [
            TaskPart("layers", recipe, task, steps(0, settings.epochs), settings),
            TaskPart("predictions", prediction, task, steps(settings.epochs, prediction_epochs), settings),
        ]
        self.parts = [part for part in parts if part.steps]

    def checkpoints(
        self, output: Path, facts: Mapping[str, Any], write: Callable[[Path], Any], *, resume: bool
    ) -> list[tuple[TaskPart, StepCheckpoints]]:
        """The parts that are to be run, and their checkpoints in a directory of each part's name. To resume, these are
        the parts from the newest one with a checkpoint on; the projections are then those of the part before it.

        Args:
            facts, write: Those of ``StepCheckpoints``; ``write`` calls ``save_student``.
        """
        names = [part.name for part in self.parts]
        begun = 0
        if resume:
            started = [number for number, name in enumerate(names) if Checkpoints(output / name).steps()]
            if not started:
                raise RunError(f"{output}: expected a checkpoint of {' or '.join(names)} to resume from, got none")
            begun = started[-1]
        if begun:
            newest = Checkpoints(output / names[begun]).newest()
            projections = None if newest is None else read_projections(newest)
            if projections is not None:
                self.recipe.projections.load_state_dict(projections)
        facts = {**facts, "examples": self.checksum}
        return [
            (part, StepCheckpoints(output / part.name, facts, write, resume=resume and number == begun))
            for number, part in enumerate(self.parts)
            if number >= begun
        ]
