"""Cross entropy over a vocabulary, in plain torch: the specification that every loss on logits follows.

For a row of logits x [V] with label y, s = label_smoothing, z = z_loss and lse = log(sum over v of exp(x_v)):

    loss = lse - (1 - s) * x_y - s / V * (sum over v of x_v) + z * lse^2
    dloss/dx_v = exp(x_v - lse) * (1 + 2 * z * lse) - s / V - (1 - s) * [v = y]

A row whose label is ignore_index has loss 0 and gradient 0. A row whose label is no token id has loss NaN and gradient
0; on the CPU the op raises an error instead. Arithmetic is fp32 (fp64 for fp64 logits).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fasttfm.kernels.common import philox
from fasttfm.kernels.common.linear import accumulate

SAMPLING_COUNTER = 0xFFFFFFFF  # the fourth word of a draw's counter, which dropout never uses


class Loss(NamedTuple):
    """The terms of a row's loss, and the other outputs of the same pass over the vocabulary."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    temperature: float = 1.0  # of the samples
    count_correct: bool = False
    scale: float = 1.0  # of the product that gives the logits; there is no bias if it is not 1
    block_bytes: int = 0  # the maximum size of a block of logits; 0 for the backend's default


class LossRows(NamedTuple):
    """The rows of hidden [..., C] at ``positions`` [N], or all N of them, and their labels."""

    hidden: Tensor
    weight: Tensor  # [V, C]
    bias: Tensor | None  # [V]
    labels: Tensor  # [N]
    positions: Tensor | None = None
    coefficients: Tensor | None = None  # [N]: gradients are those of the sum of these times losses; 1 by default
    seed: Tensor | None = None  # int64 [1]: tokens are sampled where it is given


def row_losses(logits: Tensor, labels: Tensor, loss: Loss) -> Tensor:
    """The loss of every row: [N] for logits [N, V] and labels [N]. Autograd can differentiate it."""
    x = accumulate(logits)
    counted, known, index = _looked_up(x, labels, loss)
    lse = torch.logsumexp(x, dim=-1)
    losses = lse - (1 - loss.label_smoothing) * x.gather(1, index)[:, 0]
    if loss.label_smoothing:
        losses = losses - loss.label_smoothing / x.shape[1] * x.sum(dim=-1)
    if loss.z_loss:
        losses = losses + loss.z_loss * lse.square()
    return torch.where(counted, torch.where(known, losses, torch.nan), 0.0)


def row_gradients(logits: Tensor, labels: Tensor, loss: Loss) -> Tensor:
    """The gradient of every row's loss with respect to its logits: [N, V] in fp32 (fp64)."""
    x = accumulate(logits)
    counted, known, index = _looked_up(x, labels, loss)
    lse = torch.logsumexp(x, dim=-1, keepdim=True)
    gradients = torch.exp(x - lse) * (1 + 2 * loss.z_loss * lse) - loss.label_smoothing / x.shape[1]
    gradients.scatter_add_(1, index, torch.full_like(lse, loss.label_smoothing - 1))
    return torch.where((counted & known)[:, None], gradients, 0.0)


def correct_rows(logits: Tensor, labels: Tensor, loss: Loss) -> Tensor:
    """Whether the label has the largest logit and, among equal ones, the lowest index: bool [N]. Rows with a NaN are
    False."""
    x = accumulate(logits)
    counted, known, index = _looked_up(x, labels, loss)
    at_label = x.gather(1, index)
    lower = torch.arange(x.shape[1], device=x.device) < index
    return counted & known & ((x < at_label) | ((x == at_label) & ~lower)).all(dim=-1)


def sampled_rows(logits: Tensor, labels: Tensor, loss: Loss, seed: Tensor) -> Tensor:
    """A token for every row, sampled from softmax(x / temperature): int64 [N], ignore_index where the label is.

    The cumulative distribution function is inverted: the token is the first one at which the running sum of exp((x -
    max) / temperature) exceeds u times the total, or the last token if there is a NaN. u comes from Philox, for the
    i-th row of the call: 23 bits of the first word of

        philox(key=seed, counter=(i mod 2^32, i / 2^32, 0, 2^32 - 1))
    """
    x = accumulate(logits)
    counted, _, _ = _looked_up(x, labels, loss)
    scaled = (x - x.amax(dim=-1, keepdim=True)) / loss.temperature
    running = torch.exp(scaled).cumsum(dim=-1)
    target = uniform(seed, len(x)).to(x.dtype)[:, None] * running[:, -1:]
    words = (~(running > target)).sum(dim=-1).clamp(max=x.shape[1] - 1)
    return torch.where(counted, words, loss.ignore_index)


def uniform(seed: Tensor, count: int) -> Tensor:
    """Random numbers in (0, 1), one for each row: fp32 [count]."""
    rows = torch.arange(count, device=seed.device)
    zero = torch.zeros_like(rows)
    word, *_ = philox.philox(seed, rows & 0xFFFFFFFF, rows >> 32, zero, zero + SAMPLING_COUNTER)
    return ((word >> 9).float() + 0.5) * 2.0**-23


def reduced(losses: Tensor, reduction: str, divisor: Tensor | None) -> Tensor:
    """The losses themselves for "none", their sum for "sum", and that over ``divisor`` for "mean"."""
    if reduction == "none":
        return losses
    if reduction == "sum" or divisor is None:
        return losses.sum()
    return losses.sum() / divisor.to(losses.dtype)


def divisor(labels: Tensor, total: Tensor | float | None, ignore_index: int) -> Tensor:
    """The divisor of a mean: ``total``, otherwise the number of labels that count; 1 instead of 0, to avoid 0 / 0."""
    if total is None:
        return (labels != ignore_index).sum().clamp(min=1)
    if isinstance(total, Tensor):
        total = total.reshape(())
        return torch.where(total == 0, torch.ones_like(total), total)
    return torch.full((), total or 1, device=labels.device, dtype=torch.float32)


def _looked_up(x: Tensor, labels: Tensor, loss: Loss) -> tuple[Tensor, Tensor, Tensor]:
    """Which labels are not ignored, which of them are token ids, and an index [N, 1] that always is."""
    counted = labels != loss.ignore_index
    known = (labels >= 0) & (labels < x.shape[1])
    return counted, known, torch.where(known, labels, 0).long()[:, None]
