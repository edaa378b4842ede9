"""``TASKS``: all tasks by name. This is the only list of tasks."""

from __future__ import annotations

from fasttfm.tasks.commonsense import CommonsenseTask
from fasttfm.tasks.images import ImageTask
from fasttfm.tasks.knowledge import EntityTypingTask, RelationTask
from fasttfm.tasks.labels import ChoiceTask, ClassifyTask, PairTask, TagTask
from fasttfm.tasks.questions import QuestionTask
from fasttfm.tasks.similarity import SimilarityTask
from fasttfm.tasks.task import Task

_TASKS: tuple[type[Task], ...] = (
    *(ClassifyTask, PairTask, TagTask, QuestionTask, ChoiceTask),
    *(EntityTypingTask, RelationTask, CommonsenseTask),
    *(SimilarityTask, ImageTask),
)
TASKS: dict[str, type[Task]] = {task.name: task for task in _TASKS}
