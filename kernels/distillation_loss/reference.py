"""A student's divergence from a teacher over a vocabulary, in plain torch: the specification.

With student logits s = h weight^T + bias, teacher logits t (given, or computed in the same way) and a temperature T:

    q = softmax(t / T)        p = softmax(s / T)
    loss_n = T^2 * sum over v of q_v * (log q_v - log p_v)        dloss_n/ds = T * (p - q)

T^2 compensates for the factor 1 / T^2 of the gradient, so that the temperature does not change its size (Hinton et
al.). Ignored rows have loss 0 and gradient 0. Products are summed in fp32 (fp64 for fp64); logits and the gradient of s
are rounded to the type of h, in which they are stored. The teacher gets no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fasttfm.kernels.common.linear import accumulate, linear
from fasttfm.kernels.vocabulary.cross_entropy import divisor, reduced
from fasttfm.kernels.vocabulary.pick_rows import gather


def distillation_loss(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher: Tensor,
    teacher_weight: Tensor | None = None,
    *,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    positions: Tensor | None = None,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    reduction: str = "mean",
    total: Tensor | float | None = None,
) -> Tensor:
    """The formula as autograd can differentiate it; tests hold every backend against this."""
    selected = None if positions is None else positions.flatten()
    counted = _counted(student_hidden if positions is None else positions.unsqueeze(-1), mask)
    s = _logits(gather(student_hidden, selected), student_weight, student_bias)
    t = _logits(gather(teacher.detach(), selected), teacher_weight, teacher_bias)
    losses = torch.where(counted.flatten(), _row_losses(s, t, temperature), 0.0)
    result = reduced(losses, reduction, divisor(counted, total, ignore_index=0))
    return result.reshape(counted.shape) if reduction == "none" else result


class DistillationRows(NamedTuple):
    """The rows at ``positions`` [N], or all N of them, of a student and of a teacher."""

    student_hidden: Tensor  # [..., C]
    student_weight: Tensor  # [V, C]
    student_bias: Tensor | None  # [V]
    teacher: Tensor  # [..., D]; logits [..., V] without a weight
    teacher_weight: Tensor | None  # [V, D]
    teacher_bias: Tensor | None  # [V]
    counted: Tensor  # int32 [N]: not 0 for rows that count
    positions: Tensor | None
    coefficients: Tensor | None  # [N]: gradients are those of the sum of these times losses; 1 by default
    temperature: float


def distillation_loss_forward(inputs: DistillationRows, needed: Sequence[bool]) -> tuple[Tensor, ...]:
    """losses [N]; dh [N, C], dweight [V, C] and dbias [V], each empty if it is not needed, of the sum over rows of
    ``coefficients`` (1 without them) times losses."""
    student_hidden, student_weight, student_bias, teacher, teacher_weight, teacher_bias = inputs[:6]
    counted, positions, coefficients, temperature = inputs[6:]
    rows = gather(student_hidden, positions)
    s = _logits(rows, student_weight, student_bias)
    t = _logits(gather(teacher, positions), teacher_weight, teacher_bias)
    losses = torch.where(counted != 0, _row_losses(s, t, temperature), 0.0)
    nothing = torch.empty(0, dtype=losses.dtype, device=losses.device)
    dh, dweight, dbias = nothing.to(rows.dtype), nothing, nothing
    if any(needed):
        difference = torch.softmax(s / temperature, dim=-1) - torch.softmax(t / temperature, dim=-1)
        factors = temperature * (torch.ones_like(losses) if coefficients is None else coefficients)
        g = torch.where((counted != 0)[:, None], difference * factors[:, None], 0.0)
        g = accumulate(g.to(rows.dtype))
        dh = (g @ accumulate(student_weight)).to(rows.dtype) if needed[0] else dh
        dweight = g.t() @ accumulate(rows) if needed[1] else dweight
        dbias = g.sum(dim=0) if needed[2] else dbias
    return losses, dh, dweight, dbias


def _row_losses(s: Tensor, t: Tensor, temperature: float) -> Tensor:
    """[N] of logits [N, V]."""
    log_p, log_q = torch.log_softmax(s / temperature, dim=-1), torch.log_softmax(t / temperature, dim=-1)
    q = torch.exp(log_q)
    return temperature**2 * torch.where(q == 0, 0.0, q * (log_q - log_p)).sum(dim=-1)


def _counted(like: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return torch.ones(like.shape[:-1], dtype=torch.bool, device=like.device)
    return mask != 0


def _logits(rows: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = accumulate(rows if weight is None else linear(rows, weight))
    return x if bias is None else x + accumulate(bias)
