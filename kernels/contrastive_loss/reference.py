"""A contrastive loss over a batch (InfoNCE), in plain torch: the specification.

With queries q [B, D] and candidates k [K, D], which are the keys and after them the negatives:

    x = q k^T / temperature        loss_i = log(sum over j of exp(x_ij)) - x_iy        y = labels_i, by default i

    symmetric: half of that, and half of the same with keys as queries and queries as candidates

Scores x are rounded to q's type, in which they are stored, as in linear_cross_entropy; a row whose label is -100 has
loss 0 and gradient 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fasttfm.kernels.common.linear import accumulate, linear
from fasttfm.kernels.vocabulary import cross_entropy
from fasttfm.kernels.vocabulary.cross_entropy import Loss


def contrastive_loss(
    queries: Tensor,
    keys: Tensor,
    negatives: Tensor | None = None,
    *,
    labels: Tensor | None = None,
    temperature: float = 0.05,
    symmetric: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """The formula as autograd can differentiate it; tests hold every backend against this."""
    labels = torch.arange(len(queries), device=queries.device) if labels is None else labels
    candidates = keys if negatives is None else torch.cat([keys, negatives.flatten(0, -2)])
    loss = _one_side(queries, candidates, labels, temperature, reduction)
    if symmetric:
        loss = (loss + _one_side(keys, queries, labels, temperature, reduction)) / 2
    return loss


def _one_side(rows: Tensor, candidates: Tensor, labels: Tensor, temperature: float, reduction: str) -> Tensor:
    x = accumulate(linear(rows, candidates, scale=1 / temperature))
    losses = cross_entropy.row_losses(x, labels, Loss())
    return cross_entropy.reduced(losses, reduction, cross_entropy.divisor(labels, None, Loss().ignore_index))
