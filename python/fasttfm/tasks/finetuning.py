"""Fine-tuning: trains a model on the examples of a task, and predicts with it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fasttfm._atomic_files import written_together
from fasttfm.data.lines import DataError
from fasttfm.data.tokenizer import Tokenizer
from fasttfm.data.tokenizer_files import load_tokenizer
from fasttfm.inference.batches import prefetch
from fasttfm.inference.formats import encoder_format
from fasttfm.inference.opening import checked, checkpoint_of, family_of, model_class
from fasttfm.models.families import longest_input
from fasttfm.models.family import Family
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.tasks.class_weights import balanced_weights, weight_of, weighted_sum
from fasttfm.tasks.gpt_inputs import TASK_TOKENS, grow_vocabulary, with_task_tokens
from fasttfm.tasks.images import image_language
from fasttfm.tasks.inputs import Feature, Format, TaskBatch, by_budget, by_count, keep_arrays, truncation
from fasttfm.tasks.labels import some
from fasttfm.tasks.rates import Rates
from fasttfm.tasks.registry import TASKS, variant
from fasttfm.tasks.running import FeatureRunner
from fasttfm.tasks.task import Language, Predictions, Task
from fasttfm.train import (
    Objective,
    OptimizerSettings,
    Schedule,
    ScheduleSettings,
    StepResult,
    StepSettings,
    Trainer,
    make_optimizer,
)
from fasttfm.train.distributed import World, share_out
from fasttfm.train.loop import check_finite
from fasttfm.train.settings import at_least, one_of, random_seed

# ---- a model and its task --------------------------------------------------------------------------------------------


def prepare(
    name: str,
    directory: str | Path,
    train: Sequence[Any],
    *,
    tokenizer: str | Path | None = None,
    max_length: int | None = None,
    values: bool = False,
    labels: Sequence[str] | None = None,
    new_head: bool = False,
    **options: Any,
) -> tuple[PretrainedModel, Task]:
    """Opens a checkpoint with a head for the task, in fp32, and the task that the ``train`` examples define.

    Args:
        name: One of ``TASKS``.
        directory: The model's directory, in transformers' format.
        tokenizer: The directory or file of the tokenizer, if it is not in ``directory``.
        max_length: The maximum number of tokens in a sequence; the task's ``max_length`` by default.
        values: Whether the labels of texts are numbers, for regression.
        labels: The order of the labels; by default the checkpoint's if it has the same labels, or else alphabetical.
        new_head: Whether to initialize the head randomly even if the checkpoint has one for these labels. A head for
            other labels or for another task is always replaced, with a warning.
        options: Options of the task, such as ``stride`` of ``QuestionTask``.
    """
    directory = checkpoint_of(directory)
    family = family_of(directory)
    kind: type[Task] | None = TASKS[name].for_values() if values else TASKS[name]
    if kind is None:
        able = " and ".join(task.name for task in TASKS.values() if task.for_values() is not None)
        raise ValueError(f"values: expected with the tasks {able}, got {name}")
    kind = variant(kind, options)
    if kind.reads == "images":
        check_text_options(kind, tokenizer, max_length)
        model_cls = model_class(family, kind.head, name)
        config: Any = model_cls.config_class.from_pretrained(directory)
        language: Language = image_language(directory, family, config)
    else:
        if family.tokenizer is None:
            raise ValueError(f"{name}: expected a model that reads text, got {family.title}, which has no tokenizer")
        model_cls = model_class(family, kind.head, name)
        config = model_cls.config_class.from_pretrained(directory)
        language = text_language(directory, family, config, kind, tokenizer=tokenizer, max_length=max_length)
    known = label_names(config) if labels is None else labels
    task = kind(language, train, known=known, **options)
    reason = "a new head is requested" if new_head else unusable_head(config, model_cls, task)
    changes = task.configuration()
    model = checked(model_cls.from_pretrained(directory, dtype=torch.float32, new_head=reason, **changes), directory)
    if kind.reads == "text":
        grow_vocabulary(model, language.tokenizer.vocab_size)
        if model.config.pad_token_id is None:
            model.config.pad_token_id = language.tokenizer.special.pad
    task.adjust(model)
    return model, task


def text_language(
    directory: Path,
    family: Family,
    config: Any,
    kind: type[Task],
    *,
    tokenizer: str | Path | None,
    max_length: int | None,
) -> Language:
    """The tokenizer and the input format of a checkpoint's model; arguments are those of ``prepare``."""
    text_tokenizer = load_tokenizer(directory if tokenizer is None else tokenizer)
    if family.task_tokens:
        text_tokenizer = with_task_tokens(text_tokenizer)
    elif text_tokenizer.vocab_size > config.vocab_size:
        got = f"a tokenizer with {text_tokenizer.vocab_size}"
        raise DataError(f"{directory}: expected no more tokens than the model's {config.vocab_size}, got {got}")
    longest = longest_input(config)
    length = min(longest, kind.max_length) if max_length is None else max_length
    if length > longest:
        raise ValueError(f"max_length: expected no more than the model's {longest} positions, got {length}")
    form = format_of(family, config, text_tokenizer, length)
    if form.room < 2:
        least = length - form.room + 2
        raise ValueError(
            f"max_length: expected at least {least} tokens, for two texts and the special tokens, got {length}"
        )
    return Language(text_tokenizer, family, form)


def check_text_options(kind: type[Task], tokenizer: Any, max_length: int | None) -> None:
    """Raises ValueError for options that apply only to tasks with text."""
    for name, value in (("tokenizer", tokenizer), ("max_length", max_length)):
        if value is not None:
            raise ValueError(f"{name}: expected with a task that reads text, got {value} with {kind.name}")


def unusable_head(config: Any, model_cls: type[PretrainedModel], task: Task) -> str | None:
    """Why the head of a checkpoint with this configuration does not fit the task, as a clause; None if it may fit."""
    trained_for = config.extra.get("architectures") or [model_cls.__name__]
    if model_cls.__name__ not in trained_for:
        return f"its head is that of {trained_for[0]}"
    labels = task.configuration().get("num_labels", config.num_labels)
    if config.num_labels != labels:
        return f"its head has {config.num_labels} labels, the task {labels}"
    known = label_names(config)
    numbers = [str(number) for number in range(labels)]
    named = bool(known) and known != [f"LABEL_{number}" for number in numbers]
    if task.labels and task.labels != (known if named else numbers):
        theirs = some(known) if named else f"the numbers 0 to {labels - 1}"
        return f"the labels of its head are {theirs}, those of the task {some(task.labels)}"
    return None


def label_names(config: Any) -> list[str]:
    """The labels that a configuration names, in the order of their numbers."""
    names = config.extra.get("id2label") or {}
    return [str(names[key]) for key in sorted(names, key=int)]


def format_of(family: Family, config: Any, tokenizer: Tokenizer, max_length: int) -> Format:
    """The family's input format of one text or two."""
    if family.task_tokens:
        start, delimiter, extract = (tokenizer.backend.token_to_id(token) for token in TASK_TOKENS)
        return Format([start], [delimiter], [extract], max_length, segments=False)
    return encoder_format(family, config, tokenizer, max_length)


# ---- training --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FinetuneSettings:
    """The settings of fine-tuning."""

    rates: Rates = field(default_factory=lambda: Rates(5e-5))
    epochs: int = 3
    batch_size: int = 32  # examples per batch; windows of long contexts and pieces of long sentences count as examples
    tokens_per_batch: int | None = None  # instead of batch_size: the maximum number of tokens in a batch
    accumulation: int = 1  # batches per step
    warmup: float = 0.1  # the fraction of steps in which the rates increase linearly; then they decrease linearly
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    step: StepSettings = field(default_factory=StepSettings)
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("epochs", 0), ("batch_size", 1), ("accumulation", 1)):
            at_least(name, getattr(self, name), least)
        if self.tokens_per_batch is not None:
            at_least("tokens_per_batch", self.tokens_per_batch, 1)
        random_seed(self.seed)
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"warmup: expected a fraction of all steps in [0, 1], got {self.warmup}")


class FineTuning:
    """Trains a model, on its device, on the examples of a task.

    ``steps`` is the total number of steps. The seed determines the order of the examples in each epoch. ``truncation``
    says how many examples were truncated, or is None.

    Args:
        class_weights: The weight of each label in the loss, by its number, or "balanced" (``balanced_weights``); by
            default all weights are equal.
        world: The processes, each of which computes its part of every batch; by default only this one.
    """

    def __init__(
        self,
        model: PretrainedModel,
        task: Task,
        train: Sequence[Any],
        settings: FinetuneSettings,
        *,
        class_weights: Sequence[float] | str | None = None,
        world: World | None = None,
    ) -> None:
        at_least("epochs", settings.epochs, 1)
        self.model, self.task, self.settings = model, task, settings
        self.world = world or World(next(model.parameters()).device)
        task.processes = self.world.size
        self.features = task.features(train)
        self.truncation = truncation(self.features, task.language.format.max_length)
        if isinstance(class_weights, str):
            one_of("class_weights", class_weights, ("balanced",))
            class_weights = balanced_weights(task, self.features)
        self.class_weights = None if class_weights is None else list(class_weights)
        self._weights = (
            None if class_weights is None else torch.tensor(class_weights, dtype=torch.float32, device="cpu")
        )
        self._device_weights = None if self._weights is None else self._weights.to(self.world.device)
        self._plain = type(task).batch is Task.batch
        if self._plain:
            keep_arrays(self.features)
        self._epochs = [list(shuffled_steps(self.features, settings, epoch)) for epoch in range(settings.epochs)]
        self.steps = sum(map(len, self._epochs))

    @functools.cached_property
    def trainer(self) -> Trainer:
        """The training loop, created on first use, with the parameters that require gradients at that time."""
        return trainer_of(
            share_out(self.model, self.world),
            Objective(self.task.terms, self._counts, self._sums, weights=self.task.weights),
            self.settings.rates.groups(self.model),
            self.settings,
            max(1, self.steps),
            world=self.world,
        )

    def run(
        self,
        on_results: Callable[[list[StepResult]], Any],
        on_epoch: Callable[[int], Any] = lambda number: None,
        on_step: Callable[[], Any] = lambda: None,
    ) -> None:
        """Trains from the first step that is not completed.

        Args:
            on_results: Called with the results of steps as they become available.
            on_epoch: Called after each epoch with its number, counted from 1; it may evaluate the model. If it returns
                True, the training ends.
            on_step: Called after each step that is not the last of its epoch.
        """
        if self.steps == 0:
            return
        if self.trainer.completed == 0:
            torch.manual_seed(self.settings.seed + self.world.rank)
        first = 0
        for number, groups in enumerate(self._epochs, start=1):
            completed, first = self.trainer.completed - first, first + len(groups)
            if completed >= len(groups):
                continue
            left = len(groups) - completed
            for batches in self._batches(groups[completed:]):
                on_results(self.trainer.step(batches))
                left -= 1
                if left:
                    on_step()
            on_results(self.trainer.flush())
            self.model.eval()
            if on_epoch(number):
                break
        on_results(self.trainer.finish())

    def _batches(self, steps: Sequence[list[list[Feature]]]) -> Iterator[list[TaskBatch]]:
        """The batches of each step. Those of plain tokens are made between steps: that takes less time than a thread's
        turns with the interpreter."""
        if self._plain:
            return ([self._batch(group) for group in groups] for groups in steps)
        return prefetch(steps, self._pinned_batches)

    def _pinned_batches(self, groups: list[list[Feature]]) -> list[TaskBatch]:
        batches = [self._batch(group) for group in groups]
        return [batch.pin_memory() for batch in batches] if self.world.device.type == "cuda" else batches

    def _batch(self, group: list[Feature]) -> TaskBatch:
        """This process's part of a batch. If there are fewer features than processes, the others compute one feature
        with weight 0."""
        features = group[self.world.rank :: self.world.size]
        batch = self.task.batch(features or group[:1])
        if not features:
            batch.count = 0.0
        return batch

    def _counts(self, batch: TaskBatch) -> tuple[float, ...]:
        """The divisors of a step's losses."""
        if self._weights is None or batch.count == 0:
            return (batch.count,) * len(self.task.terms)
        return (weight_of(batch.targets["labels"], self._weights),)

    def _sums(self, module: Any, batch: TaskBatch) -> tuple[Tensor, ...]:
        if self._device_weights is None:
            return tuple(loss * batch.count for loss in self.task.losses(module, batch))
        logits, labels = self.task.logits(module, batch), batch.targets["labels"]
        return (weighted_sum(logits, labels, self._device_weights) * bool(batch.count),)


def trainer_of(
    module: nn.Module,
    objective: Objective,
    groups: Iterable[dict[str, Any]] | nn.Module,
    settings: FinetuneSettings,
    steps: int,
    *,
    world: World | None = None,
) -> Trainer:
    """A training loop of ``steps`` steps."""
    optimizer = make_optimizer(groups, settings.optimizer)
    schedule = Schedule(optimizer, ScheduleSettings(steps, warmup=round(settings.warmup * steps)))
    return Trainer(module, objective, optimizer, schedule, settings.step, world=world)


def shuffled_steps(
    features: Sequence[Feature], settings: FinetuneSettings, epoch: int
) -> Iterator[list[list[Feature]]]:
    """Yields the batches of each step of an epoch, in a random order that seed and epoch determine."""
    generator = torch.Generator("cpu").manual_seed((settings.seed * 1_000_003 + epoch) % 2**64)
    order = torch.randperm(len(features), generator=generator, device="cpu").tolist()
    step: list[list[Feature]] = []
    shuffled, tokens = (features[index] for index in order), settings.tokens_per_batch
    for group in by_count(shuffled, settings.batch_size) if tokens is None else by_budget(shuffled, tokens):
        step.append(group)
        if len(step) == settings.accumulation:
            yield step
            step = []
    if step:
        yield step


def save(model: PretrainedModel, task: Task, directory: str | Path) -> None:
    """Writes a checkpoint that transformers can open, with the tokenizer (or the image preprocessing) and the task's
    settings. The configuration has the maximum length of sequences (``TASK_KEY``)."""
    check_finite(model)
    task.adjust(model)
    with written_together():
        model.save_pretrained(directory)
        task.language.save(Path(directory), model.config)
        task.save(Path(directory), model.config)


@torch.no_grad()
def predict(
    model: PretrainedModel,
    task: Task,
    examples: Sequence[Any],
    *,
    tokens: int | None = None,
    precision: str = "float32",
    features: Sequence[Feature] | None = None,
) -> Predictions:
    """The model's prediction for each example.

    Args:
        tokens: The maximum number of tokens in a batch; that of ``FeatureRunner`` by default.
        precision: "float32" or "bfloat16"; "fp8" is only for training and means bf16 here.
        features: ``task.features(examples)``, if they are already computed.
    """
    features = task.features(examples) if features is None else features
    read = FeatureRunner(model, task, tokens=tokens, precision=precision).read(features)
    return task.predictions(examples, features, read)
