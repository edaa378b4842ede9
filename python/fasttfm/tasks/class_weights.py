"""Weights of classes in the loss, for data in which some are rare."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from fasttfm.data.lines import DataError, data_error
from fasttfm.tasks.inputs import Feature
from fasttfm.tasks.task import Task

IGNORED = -100  # the label of tokens without one


def balanced_weights(task: Task, features: Sequence[Feature]) -> list[float]:
    """A weight for each label, inversely proportional to its frequency: ``total / (labels * count)``. All labels then
    have the same total weight, and the mean weight of the examples is 1."""
    _check(task)
    labels = task.label_numbers(features)
    counts = torch.bincount(labels[labels != IGNORED], minlength=len(task.labels))
    return (counts.sum() / (len(task.labels) * counts.clamp(min=1))).tolist()


def read_weights(task: Task, path: Path) -> list[float]:
    """The weights of a JSON file, ``{"label": weight}``, in the order of the task's labels."""
    _check(task)
    try:
        weights = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise DataError(f'{path}: expected JSON, {{"label": weight}}: {error}') from None
    if not isinstance(weights, Mapping) or set(weights) != set(task.labels):
        got = (", ".join(map(str, weights)) or "none") if isinstance(weights, Mapping) else type(weights).__name__
        raise data_error(path, f"a weight for each of the labels {', '.join(task.labels)}", got)
    for label, weight in weights.items():
        if not isinstance(weight, (int, float)) or isinstance(weight, bool) or not 0 <= weight < float("inf"):
            raise data_error(path, f"a number from 0 on as the weight of {label}", repr(weight))
    return [float(weights[label]) for label in task.labels]


def _check(task: Task) -> None:
    if not task.labels or task.configuration().get("problem_type") == "multi_label_classification":
        raise ValueError(f"class_weights: expected a task with one label for each text or word, got {task.name}")
    if task.has_auxiliary and task.auxiliary:
        raise ValueError("class_weights: expected an auxiliary weight of 0 (--auxiliary 0) with GPT-1")


def weighted_sum(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """The sum over labels of their weight times their cross entropy, in fp32."""
    return functional.cross_entropy(logits.float(), labels, weights, ignore_index=IGNORED, reduction="sum")


def weight_of(labels: Tensor, weights: Tensor) -> float:
    """The sum of the labels' weights, by which their ``weighted_sum`` is divided."""
    return float(weights[labels[labels != IGNORED]].sum())
