"""The sum over rows, in plain torch: the specification.

    sum[c] = sum over rows of x[row, c]        dx[row, c] = dsum[c]

Rows are all dimensions but the last. Arithmetic is fp32 (fp64 for fp64 input); the sum is rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def column_sum(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the sum over rows [C] in ``dtype``; autograd can differentiate it."""
    rows = x.reshape(-1, x.shape[-1])
    return (rows if x.dtype == torch.float64 else rows.float()).sum(dim=0).to(dtype)


def column_sum_backward(dsum: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns dx [..., C] of ``shape`` in x's type, a view: every row is the same memory."""
    return dsum.to(dtype).expand(shape)
