"""Losses of a few logits per sequence or token, in plain torch: fusing them would save no time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")


def classification_loss(logits: Tensor, labels: Tensor, problem_type: str | None = None) -> Tensor:
    """The loss of sequence labels: ``logits`` [sequences, labels].

    ``problem_type`` is one of ``PROBLEMS``. By default it follows from the number and dtype of labels, as in
    transformers: one label is a regression; several are classes if they are integers, and multi-label otherwise.
    """
    if problem_type is None:
        integers = labels.dtype in (torch.int64, torch.int32)
        problem_type = PROBLEMS[0] if logits.shape[-1] == 1 else PROBLEMS[1] if integers else PROBLEMS[2]
    if problem_type == "regression":
        return functional.mse_loss(logits.float(), _targets(logits, labels))
    if problem_type == "single_label_classification":
        return token_loss(logits, labels.flatten())
    if problem_type == "multi_label_classification":
        return functional.binary_cross_entropy_with_logits(logits.float(), labels.float())
    raise ValueError(f"classification_loss: problem_type: expected one of {', '.join(PROBLEMS)}, got {problem_type!r}")


def _targets(logits: Tensor, labels: Tensor) -> Tensor:
    """The labels of a regression in the logits' shape; one label per sequence may have any shape."""
    if labels.shape != logits.shape and (logits.shape[-1] > 1 or labels.numel() != logits.numel()):
        expected, got = (f"shape {tuple(tensor.shape)}" for tensor in (logits, labels))
        raise ValueError(f"classification_loss: labels: expected {expected} for a regression, got {got}")
    return labels.float().reshape(logits.shape)


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of token labels: ``logits`` [T, labels] and ``labels`` [T], where -100 is ignored; 0 if all are."""
    if labels.is_floating_point():
        raise TypeError(f"labels: expected the numbers of classes as integers, got a tensor of {labels.dtype}")
    total = functional.cross_entropy(logits.float(), labels.long(), reduction="sum")
    return total / (labels != -100).sum().clamp(min=1)


def span_loss(start_logits: Tensor, end_logits: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """The loss of spans: logits [sequences, S] of first and last tokens, positions [sequences]. Positions outside [0,
    S) and those of padding, whose logits are the dtype's lowest number, are ignored."""

    def loss(logits: Tensor, positions: Tensor) -> Tensor:
        positions = positions.flatten().long()
        inside = (positions >= 0) & (positions < logits.shape[1])
        of_labels = logits.gather(1, positions.where(inside, 0)[:, None])[:, 0]
        inside &= of_labels != torch.finfo(logits.dtype).min
        return token_loss(logits, positions.where(inside, -100))

    return (loss(start_logits, starts) + loss(end_logits, ends)) / 2
