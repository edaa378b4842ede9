"""The loss of a masked language model at the masked positions, in plain torch: the specification.

    rows = hidden[positions]        loss = cross entropy of rows weight^T + bias (kernels/vocabulary/cross_entropy.py)

Without positions every row has a label, and rows whose label is ignore_index are ignored.
"""

from __future__ import annotations

from torch import Tensor

from fasttfm.kernels.common.linear import accumulate, linear
from fasttfm.kernels.vocabulary import cross_entropy
from fasttfm.kernels.vocabulary.cross_entropy import Loss


def masked_lm_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    positions: Tensor | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    total: Tensor | float | None = None,
) -> Tensor:
    """The formula as autograd can differentiate it; tests hold every backend against this."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    rows = rows if positions is None else rows[positions.flatten()]
    logits = accumulate(linear(rows, weight))
    logits = logits if bias is None else logits + accumulate(bias)
    losses = cross_entropy.row_losses(logits, labels.flatten(), Loss(ignore_index, label_smoothing, z_loss))
    divisor = cross_entropy.divisor(labels, total, ignore_index)
    result = cross_entropy.reduced(losses, reduction, divisor)
    return result.reshape(labels.shape) if reduction == "none" else result
