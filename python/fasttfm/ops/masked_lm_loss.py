"""``masked_lm_loss``: the loss of a masked language model, on the rows that are predicted and no others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttfm.kernels.common import philox
from fasttfm.kernels.vocabulary.cross_entropy import Loss
from fasttfm.ops import linear, vocabulary
from fasttfm.ops.core import checks
from fasttfm.ops.core.backends import requested
from fasttfm.ops.core.library import is_plain
from fasttfm.ops.linear_cross_entropy import OP as LINEAR_CROSS_ENTROPY
from fasttfm.ops.linear_cross_entropy import Call, CountedLoss, vocabulary_loss

NAME = "masked_lm_loss"


def masked_lm_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    positions: Tensor | None = None,
    max_predictions: int | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    total: Tensor | float | None = None,
    counts: bool = False,
    sample: bool = False,
    temperature: float = 1.0,
    seed: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | CountedLoss:
    """Cross entropy of ``rows weight^T + bias``, where the rows are those of ``hidden`` that have something to predict.

    Args:
        hidden: ``[..., C]``, dense or packed, fp32, bf16 or fp16 (fp64 on the reference backend).
        weight: ``[V, C]`` in hidden's type; the word embedding's table, where the two are tied.
        bias: ``[V]`` in hidden's type, or None.
        labels: int64 or int32; with ``positions`` one for each of them, else in hidden's leading shape.
        positions: The predicted rows' numbers in ``hidden`` seen as ``[T, C]``, int64 or int32, of any shape and order.
            It avoids a synchronization with the GPU. For a fixed number of them, pad with any row and the label
            ``ignore_index``.
        max_predictions: Without ``positions``, the most rows that can have a label other than ``ignore_index``: they
            are found without a wait. If there are more, the call raises on the CPU, and on a GPU the loss is NaN. With
            neither, the call synchronizes with the GPU for their number; while a CUDA graph is captured all rows are
            computed.
        reduction: "mean" over the labels that count, "sum", or "none" for a loss in the labels' shape.
        label_smoothing: The share of the target that is spread evenly over the vocabulary, as in torch.
        z_loss: Weight of the squared logarithm of the softmax's denominator.
        ignore_index: A label that does not count.
        total: The divisor of a mean, instead of the number of labels that count: a number, or a tensor of one element,
            which is not read on the host. For batches in parts: the sum of the parts' losses is the whole's mean.
        counts: Whether to return a ``CountedLoss`` with the numbers of predictions and of correct ones.
        sample: Whether to return a ``CountedLoss`` with a word drawn from ``softmax(logits / temperature)`` for each
            prediction, as ELECTRA's generator does.
        temperature: The temperature of the samples; above 0.
        seed: int64 ``[1]``; by default drawn from torch's generator. The same seed draws the same numbers, for the
            first, the second, ... of the predicted rows.
        backend: Requests one backend; by default the first that supports the call runs it.

    Returns:
        The loss in fp32 (fp64 for fp64), 0 where no label counts. Under autocast everything is cast to its type first,
        as around ``torch.nn.Linear``.

    Raises:
        ValueError: For a label outside the vocabulary or a position outside ``hidden``. On the CPU this call raises. On
            a GPU the loss is NaN, and a later call or ``fasttfm.ops.check_errors()`` raises.
    """
    hidden, weight, bias = linear.autocast(hidden, weight, bias)
    vocabulary.check_matrices(NAME, hidden, weight, bias)
    _check_rows(hidden, labels, positions, max_predictions)
    vocabulary.check_loss(NAME, reduction, label_smoothing, z_loss, ignore_index, total, like=hidden)
    _check_samples(hidden, sample, temperature, seed)
    OP.table.check_name(backend)
    if not sample:
        seed = None
    elif seed is None:
        seed = philox.draw_seed(hidden.device)
    loss = Loss(ignore_index, float(label_smoothing), float(z_loss), float(temperature), counts)
    call = Call(NAME, loss, reduction, requested(backend), counted_first=positions is None and max_predictions is None)
    matrices = (hidden, weight, bias)
    if positions is None:
        result = _found_loss(*matrices, labels.flatten(), call, max_predictions, seed=seed, total=total)
    else:
        chosen = positions.flatten()
        result = vocabulary_loss(*matrices, labels.flatten(), call, positions=chosen, seed=seed, total=total)
    loss_value = result.loss.reshape(labels.shape) if reduction == "none" else result.loss
    if not counts and not sample:
        return loss_value
    samples = None if result.samples is None else result.samples.reshape(labels.shape)
    return CountedLoss(loss_value, result.predictions, result.correct, samples)


def _found_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    call: Call,
    most: int | None,
    **options: Any,
) -> CountedLoss:
    """The loss of the rows that ``labels`` [T] name, losses and samples in their shape."""
    ignore_index = call.loss.ignore_index
    chosen, near, missed = _predicted(labels, ignore_index, most)
    result = vocabulary_loss(hidden, weight, bias, near, call, positions=chosen, **options)
    loss, samples = result.loss, result.samples
    # Places that are filled up add nothing to the row they name.
    if call.reduction == "none":
        loss = torch.zeros(len(labels), dtype=loss.dtype, device=loss.device).index_add(0, chosen, loss)
    if samples is not None:
        above = torch.zeros_like(labels, dtype=torch.int64).index_add(0, chosen, samples - ignore_index)
        samples = above + ignore_index
    if missed is not None:
        loss = torch.where(missed, torch.nan, loss)
    return CountedLoss(loss, result.predictions, result.correct, samples)


def _predicted(labels: Tensor, ignore_index: int, most: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The rows whose labels count, and those labels, in ascending order and filled up to ``most`` with the last row and
    ignore_index; and whether there were more."""
    size = len(labels) if most is None else min(most, len(labels))
    counted = labels != ignore_index
    chosen = torch.nonzero_static(counted, size=size, fill_value=max(0, len(labels) - 1)).squeeze(1)
    count = counted.sum()
    if most is not None and labels.is_cpu and is_plain((labels,)) and int(count) > size:
        raise checks.bad_value(NAME, "max_predictions", f"at least the {int(count)} labels that count", most)
    present = torch.arange(size, device=labels.device) < count
    near = torch.where(present, labels[chosen], ignore_index)
    return chosen, near, None if most is None else count > size


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check_rows(hidden: Tensor, labels: Any, positions: Any, max_predictions: Any) -> None:
    if positions is None:
        vocabulary.check_indices(NAME, "labels", labels, hidden.shape[:-1], like=hidden)
    else:
        vocabulary.check_indices(NAME, "positions", positions, None, like=hidden)
        vocabulary.check_indices(NAME, "labels", labels, positions.shape, like=hidden)
    if max_predictions is None:
        return
    if isinstance(max_predictions, bool) or not isinstance(max_predictions, (int, torch.SymInt)):
        raise checks.bad_type(NAME, "max_predictions", "an integer or None", type(max_predictions).__name__)
    if max_predictions < 0:
        raise checks.bad_value(NAME, "max_predictions", "no negative number", max_predictions)
    if positions is not None:
        raise checks.bad_value(NAME, "max_predictions", "None with positions", max_predictions)


def _check_samples(hidden: Tensor, sample: Any, temperature: Any, seed: Any) -> None:
    if not isinstance(sample, bool):
        raise checks.bad_type(NAME, "sample", "True or False", type(sample).__name__)
    checks.check_number(NAME, "temperature", temperature, low=0.0, high=float("inf"), low_open=True)
    checks.check_seed(NAME, seed, like=hidden)


OP = LINEAR_CROSS_ENTROPY.sharing(NAME)
