"""Gathers rows of a matrix by index, and scatters their gradient, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from fasttfm.kernels.common.linear import accumulate
from fasttfm.kernels.common.rows import as_rows


def gather(x: Tensor, positions: Tensor | None) -> Tensor:
    """The rows of x [..., C] at ``positions`` [N], or all; NaN for an invalid position."""
    rows = as_rows(x)
    if positions is None:
        return rows
    known = (positions >= 0) & (positions < len(rows))
    return torch.where(known[:, None], rows[positions.clamp(0, max(0, len(rows) - 1))], torch.nan)


def scatter(dh: Tensor, positions: Tensor, labels: Tensor, ignore_index: int, out: Tensor, scale: Tensor) -> None:
    """out[r] = scale * the sum of dh[i] over all i with positions[i] = r: [T, C] from [N, C], rounded once. Where
    labels[i] is ignore_index, dh[i] is zero."""
    total = torch.zeros(out.shape, dtype=accumulate(dh[:0]).dtype, device=out.device)
    total.index_add_(0, positions.clamp(0, len(out) - 1).long(), accumulate(dh))
    torch.mul(total, scale, out=out)
