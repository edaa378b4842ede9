"""The fine-tuning recipes of papers: epochs, examples per batch and learning rate of each task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from fasttfm.models.family import Family
from fasttfm.tasks.task import Task


class FinetuningRecipe(NamedTuple):
    """The numbers of a paper, whose name is empty for tasks that it does not have. ``rate`` is the learning rate of a
    model with a width of 768."""

    paper: str
    epochs: int
    batch_size: int
    rate: float


_BERT = "BERT (Devlin et al., 2018)"
UNANSWERABLE = "qa with unanswerable questions"  # SQuAD 2.0
_GPT = "GPT (Radford et al., 2018)"
_OTHER = FinetuningRecipe("", 3, 32, 5e-5)
# Sections 4.1 to 4.4: GLUE and SQuAD 1.1, whose numbers other tasks with text have too, SQuAD 2.0, and SWAG.
BERT_RECIPES = {
    "": FinetuningRecipe(_BERT, 3, 32, 5e-5),
    UNANSWERABLE: FinetuningRecipe(_BERT, 2, 48, 5e-5),
    "choice": FinetuningRecipe(_BERT, 3, 16, 2e-5),
}
# Section 4.1.
GPT_RECIPES = {"": FinetuningRecipe(_GPT, 3, 32, 6.25e-5)}


def recipe_of(family: Family, task: type[Task] | Task, train: Sequence[Any]) -> FinetuningRecipe:
    """The recipe for a model of the family, a task, and its training examples."""
    if task.reads != "text":
        return _OTHER
    recipes = GPT_RECIPES if family.causal else BERT_RECIPES
    name = task.name
    if name == "qa" and any(example.impossible for example in train):
        name = UNANSWERABLE
    return recipes.get(name, recipes[""])
