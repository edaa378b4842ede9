"""``load``: opens a model that was fine-tuned for a task, for predictions."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fasttfm._progress import progress
from fasttfm.data.lines import DataError
from fasttfm.data.tokenizer import Tokenizer
from fasttfm.data.tokenizer_files import load_tokenizer
from fasttfm.inference.opening import checkpoint_of, family_of, open_model
from fasttfm.models.checkpoint_files import CONFIG, CheckpointError
from fasttfm.models.families import longest_input
from fasttfm.models.family import Family, Head
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.tasks.finetuning import check_text_options, format_of, label_names
from fasttfm.tasks.gpt_inputs import TASK_TOKENS
from fasttfm.tasks.images import image_language
from fasttfm.tasks.inputs import Feature, Format
from fasttfm.tasks.labels import ValueTask, some
from fasttfm.tasks.pretraining_heads import PRETRAINED_TASKS, check_pretrained_task, pretrained_task
from fasttfm.tasks.registry import TASKS
from fasttfm.tasks.results import Result
from fasttfm.tasks.running import FeatureRunner
from fasttfm.tasks.task import TASK_KEY, Language, Task
from fasttfm.train.distributed import device_named
from fasttfm.train.settings import at_least

PRECISIONS = ("float32", "bfloat16")
_WITH_LABELS = (Head.SEQUENCE_CLASSIFICATION, Head.TOKEN_CLASSIFICATION, Head.IMAGE_CLASSIFICATION)
_MAX_GRAPHS = 128  # CUDA graphs of a predictor
_WINDOW = 2048  # how many examples are sorted by length together


@dataclass
class Counts:
    """Statistics of what a predictor has read."""

    examples: int = 0
    empty: int = 0  # examples without tokens
    truncated: int = 0  # examples
    left_out: int = 0  # tokens of the truncated examples
    words: int = 0  # tag: words without tokens, which got the most frequent tag

    def note(self, max_length: int) -> str:
        """A message about truncated and empty examples; empty if there are none."""
        parts = []
        if self.truncated:
            cut = f"{self.truncated:,} of {self.examples:,} examples do not fit into {max_length} tokens"
            parts.append(f"{cut} and are truncated: {self.left_out:,} tokens are ignored")
        if self.empty:
            parts.append(f"{self.empty:,} of {self.examples:,} examples have no tokens")
        if self.words:
            parts.append(f"{self.words:,} words have no tokens and get the most frequent tag")
        return "; ".join(parts)


class Predictor:
    """A model, on its device, and the task that it was trained for. Calling it with examples returns their results.

    An example is a text, or a tuple of two (classify, pair); a sentence or a list of its words (tag); a tuple of
    question and context (qa); a tuple of context and endings (choice); an image as an array, a tensor or its path
    (image); a dictionary of these; or an element of what ``tasks.read_examples`` returns. ``counts`` has statistics of
    what was read.

    Args:
        tokens_per_batch: The maximum number of tokens in a batch; a longer example is a batch by itself.
        precision: ``"float32"`` or ``"bfloat16"``.
    """

    def __init__(
        self, model: PretrainedModel, task: Task, *, tokens_per_batch: int = 8192, precision: str = "float32"
    ) -> None:
        at_least("tokens_per_batch", tokens_per_batch, 1)
        if precision not in PRECISIONS:
            raise ValueError(f"precision: expected {' or '.join(PRECISIONS)}, got {precision!r}")
        self.model, self.task = model.eval(), task
        self.tokens_per_batch, self.precision = tokens_per_batch, precision
        self.counts = Counts()
        self._runner = FeatureRunner(model, task, tokens=tokens_per_batch, precision=precision, max_graphs=_MAX_GRAPHS)

    def __call__(self, examples: Any) -> Any:
        """The results of a list of examples, or the result of a single one. Warns if examples were truncated."""
        single = self.task.is_example(examples)
        self.counts = Counts()
        count = len(examples) if hasattr(examples, "__len__") and not single else None
        source = self.stream([examples] if single else examples)
        results = [result for _, result in progress(source, count, "example")]
        if note := self.counts.note(self.max_length):
            warnings.warn(note, stacklevel=2)
        return results[0] if single else results

    def __repr__(self) -> str:
        first = next(self.model.parameters())
        where = f"{self.precision} on {first.device}"
        return f"Predictor({self.task.name}, {type(self.model).__name__}, {where})"

    @property
    def max_length(self) -> int:
        """The maximum number of tokens in a sequence."""
        return self.task.language.format.max_length

    def stream(self, examples: Iterable[Any]) -> Iterator[tuple[Any, Result]]:
        """Yields each example with its result, in order. Examples are read lazily, a bounded number ahead."""
        source = (self.task.example(value) for value in examples)
        while window := list(itertools.islice(source, _WINDOW)):
            yield from zip(window, self._results(window), strict=True)

    def _results(self, examples: Sequence[Any]) -> list[Any]:
        """Sequences of similar length are computed together."""
        features = self.task.features(examples)
        self._count(examples, features)
        read = self._runner.read(features)
        results = self.task.results(examples, features, read)
        self.counts.words += sum(result.probabilities.count(None) for result in results if hasattr(result, "tags"))
        return results

    def _count(self, examples: Sequence[Any], features: Sequence[Feature]) -> None:
        form = self.task.language.format
        around = len(form.first) + len(form.last)
        for feature in features:
            if not all(sequence.ids for sequence in feature.sequences):
                where = self.counts.examples + feature.example + 1
                raise DataError(f"example {where}: expected a text with tokens, got none")
        self.counts.examples += len(examples)
        self.counts.empty += sum(feature.tokens <= around for feature in features)
        cut: dict[int, int] = {}
        for feature in features:
            cut[feature.example] = cut.get(feature.example, 0) + feature.cut
        self.counts.truncated += sum(count > 0 for count in cut.values())
        self.counts.left_out += sum(cut.values())


def load(
    directory: str | Path,
    *,
    task: str | None = None,
    adapter: str | Path | None = None,
    tokenizer: str | Path | None = None,
    max_length: int | None = None,
    device: str | torch.device | None = None,
    precision: str | None = None,
    tokens_per_batch: int = 8192,
    **options: Any,
) -> Predictor:
    """Opens the model of a directory that ``fasttfm finetune``, ``fasttfm pretrain`` or transformers wrote, to be
    called with examples.

    A fine-tuned checkpoint of fasttfm states task, labels, maximum length and threshold. A pre-trained model with the
    head of its pre-training predicts with that head. For other checkpoints the task follows from the architecture, with
    a warning.

    Args:
        task: One of ``PRETRAINED_TASKS``, for a checkpoint that has the head of its pre-training but does not name it.
        adapter: A LoRA adapter that is added to the weights, and whose head replaces the model's: a folder of its
            directory, another directory or a hub id.
        tokenizer: The directory or file of the tokenizer, if it is not in ``directory``.
        max_length: The maximum number of tokens in a sequence, instead of the checkpoint's.
        device: By default a GPU if there is one.
        precision: By default ``"bfloat16"`` on a GPU and ``"float32"`` on a CPU.
        options: Arguments of the task instead of the checkpoint's, such as ``threshold`` of ``QuestionTask``.
    """
    path = checkpoint_of(directory)
    family = family_of(path)
    config: Any = family.config.from_pretrained(path)
    kind, stated = _task_of(path, config, family) if task is None else (_pretrained(task, family), {})
    for name in options:
        if name not in kind.kept:
            expected = f"an option of the task {kind.name} ({', '.join(kind.kept) or 'it has none'})"
            raise ValueError(f"{name}: expected {expected}")
    if kind.reads == "images":
        check_text_options(kind, tokenizer, max_length)
        language: Language = image_language(path, family, config)
    else:
        text_tokenizer = load_tokenizer(path if tokenizer is None else tokenizer)
        length = stated.get("max_length") if max_length is None else max_length
        language = Language(text_tokenizer, family, _format(family, config, text_tokenizer, length, kind))
    known = _labels(config) if kind.head in _WITH_LABELS and not issubclass(kind, ValueTask) else []
    kept = {name: stated[name] for name in kind.kept if stated.get(name) is not None}
    if max_length is not None:  # the windows of questions follow from the new length
        kept = {name: value for name, value in kept.items() if name not in ("stride", "max_question")}
    made = kind(language, None, known=known, **kept | options)
    where = device if isinstance(device, torch.device) else device_named(device)
    model = open_model(path, kind.head, trained=True, adapter=adapter, dtype=torch.float32).to(where)
    made.adjust(model)
    default = "bfloat16" if where.type == "cuda" else "float32"
    return Predictor(model, made, tokens_per_batch=tokens_per_batch, precision=precision or default)


def _pretrained(name: str, family: Family) -> type[Task]:
    kind = PRETRAINED_TASKS.get(name)
    if kind is None:
        raise ValueError(f"task: expected one of {', '.join(PRETRAINED_TASKS)}, got {name!r}")
    check_pretrained_task(kind, family)
    return kind


def _task_of(path: Path, config: Any, family: Family) -> tuple[type[Task], dict[str, Any]]:
    """The class of the task, and what the checkpoint states about it. If it states nothing, the architecture determines
    the class."""
    stated = config.extra.get(TASK_KEY)
    if stated is None:
        return _inferred(path, config, family), {}
    named = TASKS.get(str(stated.get("task"))) if isinstance(stated, dict) else None
    task = named.for_values() if named is not None and stated.get("values") else named
    if task is None:
        expected = f"an object with a task of {', '.join(TASKS)}"
        raise CheckpointError(f"{path / CONFIG}: {TASK_KEY}: expected {expected}, got {stated!r:.80}")
    return task, stated


def _inferred(path: Path, config: Any, family: Family) -> type[Task]:
    architecture = next(iter(config.extra.get("architectures") or ["a model without a head"]))
    head = next((head for head, model in family.models.items() if model.__name__ == architecture), None)
    if (pretrained := pretrained_task(family, architecture, path)) is not None:
        return pretrained
    named = next((task for task in TASKS.values() if task.head is head), None)
    if named is None:
        expected = "a model that was trained for a task (fasttfm finetune)"
        raise CheckpointError(f"{path}: expected {expected}, got {architecture}{_other_commands(head)}")
    if config.problem_type == "multi_label_classification":
        raise CheckpointError(f"{path / CONFIG}: problem_type: expected one label for each text, got several")
    values = named.for_values()
    numbers = values is not None and (config.problem_type == "regression" or config.num_labels == 1)
    about = "numbers" if numbers else f"the labels {some(_labels(config))}"
    about = f" with {about}" if head in _WITH_LABELS else ""
    warnings.warn(f"{path} does not state its task: {architecture} is taken for {named.name}{about}", stacklevel=4)
    return values if values is not None and numbers else named


def _other_commands(head: Head | None) -> str:
    """The commands that predict with a language model's head."""
    if head is Head.MASKED_LM:
        return ", which fasttfm fill-mask and fasttfm score run"
    return ", which fasttfm generate and fasttfm score run" if head is Head.CAUSAL_LM else ""


def _labels(config: Any) -> list[str]:
    return label_names(config) or [f"LABEL_{number}" for number in range(config.num_labels)]


def _format(family: Family, config: Any, tokenizer: Tokenizer, length: int | None, kind: type[Task]) -> Format:
    """The format of fine-tuning; plain text for a causal model without task tokens."""
    longest = longest_input(config)
    length = min(longest, max(kind.max_length, 512)) if length is None else length
    plain = family.task_tokens and tokenizer.backend.token_to_id(TASK_TOKENS[0]) is None
    form = Format([], [], [], length, segments=False) if plain else format_of(family, config, tokenizer, length)
    least = length - form.room + 2
    if not least <= length <= longest:
        raise ValueError(f"max_length: expected {least} to the model's {longest} positions, got {length}")
    return form
