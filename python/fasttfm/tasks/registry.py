"""``TASKS``: all tasks by name. This is the only list of tasks."""

from __future__ import annotations

from typing import Any

from fasttfm.tasks.commonsense import CommonsenseTask
from fasttfm.tasks.images import ImageTask
from fasttfm.tasks.knowledge import EntityTypingTask, RelationTask
from fasttfm.tasks.labels import ChoiceTask, ClassifyTask, PairTask, TagTask
from fasttfm.tasks.questions import QuestionTask
from fasttfm.tasks.similarity import SimilarityTask
from fasttfm.tasks.splade import SpladeTask
from fasttfm.tasks.task import Task
from fasttfm.tasks.token_vectors import TokenVectorsTask

_TASKS: tuple[type[Task], ...] = (
    *(ClassifyTask, PairTask, TagTask, QuestionTask, ChoiceTask),
    *(EntityTypingTask, RelationTask, CommonsenseTask),
    *(SimilarityTask, ImageTask),
)
TASKS: dict[str, type[Task]] = {task.name: task for task in _TASKS}
_VECTORS: dict[str, type[Task]] = {"mean": SimilarityTask, "splade": SpladeTask, "tokens": TokenVectorsTask}


def variant(kind: type[Task], options: dict[str, Any]) -> type[Task]:
    """The kind of task that the options of its constructor ask for. Removes those that only choose it, or are None."""
    if kind is not SimilarityTask:
        return kind
    vectors, weights = options.pop("vectors", "mean"), options.pop("flops_weight", None)
    if vectors not in _VECTORS:
        raise ValueError(f"vectors: expected {', '.join(_VECTORS)}, got {vectors!r}")
    if weights is not None and vectors != "splade":
        raise ValueError(f"flops_weight: expected with splade vectors, got {vectors}")
    if weights is not None:
        options["flops_weight"] = weights
    return _VECTORS[vectors]
