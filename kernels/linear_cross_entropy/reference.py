"""A linear layer onto a vocabulary and the cross entropy of its logits, in plain torch: the specification.

With rows h [N, C], weight [V, C] and bias [V]:

    x = scale * h weight^T        loss_n = cross entropy of x_n + bias (kernels/vocabulary/cross_entropy.py)

    g = c_n * dloss_n/dx_n        dh = g weight        dweight = g^T h        dbias = sum over rows of g

scale is 1, or 1 / temperature in contrastive_loss. dh and dweight do not include it: like a factor of c_n that all rows
share (1 / N of a mean, for example), it is applied at the end, and dweight and dbias are fp32 until then. x and g are
rounded to h's type, in which they are stored; products are summed in fp32 (fp64 for fp64).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fasttfm.kernels.common.linear import accumulate, linear
from fasttfm.kernels.common.rows import as_rows
from fasttfm.kernels.vocabulary import cross_entropy
from fasttfm.kernels.vocabulary.cross_entropy import Loss, LossRows
from fasttfm.kernels.vocabulary.pick_rows import gather


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    total: Tensor | float | None = None,
) -> Tensor:
    """The formula as autograd can differentiate it; tests hold every backend against this."""
    loss = Loss(ignore_index, label_smoothing, z_loss)
    losses = cross_entropy.row_losses(_logits(as_rows(hidden), weight, bias), labels.flatten(), loss)
    divisor = cross_entropy.divisor(labels, total, ignore_index)
    result = cross_entropy.reduced(losses, reduction, divisor)
    return result.reshape(labels.shape) if reduction == "none" else result


def linear_cross_entropy_forward(inputs: LossRows, loss: Loss, needed: Sequence[bool]) -> tuple[Tensor, ...]:
    """losses [N], correct [N] or empty, samples [N] or empty; dh [N, C], dweight [V, C] and dbias [V], each empty if it
    is not needed, of the sum over rows of ``coefficients`` (1 without them) times losses."""
    hidden, weight, bias, labels, positions, coefficients, seed = inputs
    rows = gather(hidden, positions)
    logits = _logits(rows, weight, bias, loss.scale)
    losses = cross_entropy.row_losses(logits, labels, loss)
    nothing = torch.empty(0, dtype=losses.dtype, device=losses.device)
    correct = cross_entropy.correct_rows(logits, labels, loss) if loss.count_correct else nothing.bool()
    samples = nothing.long() if seed is None else cross_entropy.sampled_rows(logits, labels, loss, seed)
    dh, dweight, dbias = nothing.to(hidden.dtype), nothing, nothing
    if any(needed):
        exact = cross_entropy.row_gradients(logits, labels, loss)
        g = accumulate((exact if coefficients is None else exact * coefficients[:, None]).to(hidden.dtype))
        dh = (g @ accumulate(weight)).to(hidden.dtype) if needed[0] else dh
        dweight = g.t() @ accumulate(rows) if needed[1] else dweight
        dbias = g.sum(dim=0) if needed[2] else dbias
    return losses, correct, samples, dh, dweight, dbias


def _logits(rows: Tensor, weight: Tensor, bias: Tensor | None, scale: float = 1.0) -> Tensor:
    x = accumulate(linear(rows, weight, scale=scale))
    return x if bias is None else x + accumulate(bias)
