"""The loss of a discriminator that detects replaced tokens (ELECTRA), in plain torch: the specification and the only
implementation, because one logit per token takes a thousandth of a training step.

For a token's logit x and label y (1: replaced):

    loss = max(x, 0) - x * y + log(1 + exp(-|x|))        dloss/dx = 1 / (1 + exp(-x)) - y

in fp32 (fp64 for fp64). A masked token has loss 0 and gradient 0, whatever its logit and label are. A token whose label
is neither 0 nor 1 has loss NaN and gradient 0; on the CPU the op raises an error instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fasttfm.kernels.common.linear import accumulate
from fasttfm.kernels.vocabulary.cross_entropy import divisor, reduced


def replaced_token_loss(
    logits: Tensor,
    labels: Tensor,
    *,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    reduction: str = "mean",
    total: Tensor | float | None = None,
) -> Tensor:
    """The formula as autograd can differentiate it; tests hold the op against this."""
    counted = counted_tokens(logits, mask, lengths)
    losses = replaced_token_loss_forward(logits, labels, counted)
    return reduced(losses, reduction, divisor(counted, total, ignore_index=0))


def replaced_token_loss_forward(logits: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
    """The loss of every token, in the logits' shape."""
    x = torch.where(counted, accumulate(logits), 0.0)
    losses = x.clamp(min=0) - x * labels + torch.log1p(torch.exp(-x.abs()))
    return torch.where(counted, torch.where(_is_label(labels), losses, torch.nan), 0.0).contiguous()


def replaced_token_loss_backward(dlosses: Tensor, logits: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
    """The logits' gradient; ``dlosses`` has their shape or is one number for all."""
    difference = torch.sigmoid(accumulate(logits)) - labels.to(accumulate(logits).dtype)
    return torch.where(counted & _is_label(labels), difference * dlosses, 0.0).to(logits.dtype).contiguous()


def _is_label(labels: Tensor) -> Tensor:
    return (labels == 0) | (labels == 1)


def counted_tokens(logits: Tensor, mask: Tensor | None, lengths: Tensor | None) -> Tensor:
    """Which tokens count, bool in the logits' shape: where ``mask`` is not 0 and, in each sequence of [..., S], the
    first ``lengths`` of them."""
    counted = torch.ones_like(logits, dtype=torch.bool) if mask is None else mask != 0
    if lengths is None:
        return counted
    return counted & (torch.arange(logits.shape[-1], device=logits.device) < lengths.unsqueeze(-1))
