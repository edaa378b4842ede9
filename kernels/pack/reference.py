"""Removing and restoring padding, in plain torch: the specification. B sequences, S padded and T packed tokens.

    packed[cu_seqlens[b] + s] = x[b, s]        for s < cu_seqlens[b + 1] - cu_seqlens[b]; other rows of packed are 0
    x[b, s] = packed[cu_seqlens[b] + s]        for the same s; other tokens of x are 0

Each is the other's gradient. A token may have any shape and type. Whatever the boundaries are, nothing outside of the
tensors is accessed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fasttfm.kernels.common import philox


def pack(x: Tensor, cu_seqlens: Tensor, total: int) -> Tensor:
    """x [B, S, ...] as [T, ...]; ``total`` is T."""
    batch, longest = x.shape[:2]
    if batch == 0:
        return x.new_zeros(total, *x.shape[2:])
    sequences, tokens = philox.row_positions(torch.Size([total, 1]), cu_seqlens, x.device)
    present = (tokens >= 0) & (tokens < longest) & (tokens < cu_seqlens.diff()[sequences])
    return _take(x.flatten(0, 1), (sequences * longest + tokens).where(present, batch * longest))


def unpack(packed: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """packed [T, ...] as [B, S, ...]; ``max_seqlen`` is S."""
    total = packed.shape[0]
    rows = cu_seqlens[:-1, None] + torch.arange(max_seqlen, device=packed.device)
    present = (rows >= 0) & (rows < total) & (rows < cu_seqlens[1:, None])
    return _take(packed, rows.where(present, total).flatten()).unflatten(0, rows.shape)


def _take(source: Tensor, rows: Tensor) -> Tensor:
    """The rows of ``source`` at the indices ``rows``; zeros for the index after the last."""
    return torch.cat([source, source.new_zeros(1, *source.shape[1:])]).index_select(0, rows)
