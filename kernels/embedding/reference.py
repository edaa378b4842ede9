"""Embedding in plain torch: the specification. N tokens, C columns.

    x = word_table[id] + position_table[position] + segment_table[segment]
    y = dropout(LayerNorm(x) * weight + bias)        or, without LayerNorm, y = dropout(x)

    h = kept * scale * dy        g = h * weight
    dx = rstd * (g - mean(g) - xhat * mean(g * xhat))        or, without LayerNorm, dx = h
    dword_table[v] = sum of dx over the tokens whose id is v, in their order; the other two tables likewise
    dweight = sum over tokens of h * xhat        dbias = sum over tokens of h

A position that is not given is the token's index in its own sequence, a segment that is not given is 0. The dropout
mask is a function of the seed and of the elements' positions (common/philox.py). The row ``padding_idx`` of the word
table gets no gradient. An index outside of its table gives a row of NaN and does not change the table's gradient.

Arithmetic is fp32 (fp64 for fp64 tables); only y and the gradients are rounded. mean(xhat) is zero except for the
rounding error of the mean, which every implementation subtracts.

``tables`` and ``indices`` are triples (word, position, segment), of which the last two may be None.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fasttfm.kernels.common import philox
from fasttfm.kernels.common.linear import accumulate

Triple = tuple[Tensor, Tensor | None, Tensor | None]


def embedding(
    ids: Tensor,
    word_table: Tensor,
    position_table: Tensor | None = None,
    segment_table: Tensor | None = None,
    *,
    position_ids: Tensor | None = None,
    segment_ids: Tensor | None = None,
    layer_norm: bool = False,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    p: float = 0.0,
    cu_seqlens: Tensor | None = None,
    padding_idx: int | None = None,
    dtype: torch.dtype | None = None,
    seed: Tensor | None = None,
) -> Tensor:
    """The forward formula as autograd can differentiate it; tests hold every backend against this. fp64 gives fp64."""
    tables = (word_table, position_table, segment_table)
    if padding_idx is not None:  # the same values, but that row gets no gradient
        is_padding = torch.arange(len(word_table), device=word_table.device)[:, None] == padding_idx
        tables = (torch.where(is_padding, word_table.detach(), word_table), position_table, segment_table)
    normalise = layer_norm or weight is not None or bias is not None
    wide = word_table.dtype == torch.float64
    return embedding_forward(
        tables,
        (ids, position_ids, segment_ids),
        cu_seqlens,
        weight,
        bias,
        seed,
        normalise,
        eps,
        p,
        torch.float64 if wide else dtype or word_table.dtype,
    )[0]


def embedding_forward(
    tables: Triple,
    indices: Triple,
    cu_seqlens: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    layer_norm: bool,
    eps: float,
    p: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Returns y [..., C] in ``dtype``, and statistics [2, N]: mean and rstd, in the accumulation type; [2, 0] without
    LayerNorm."""
    x = _rows(tables, indices, cu_seqlens)
    statistics = x.new_empty(2, 0)
    if layer_norm:
        mean = x.mean(dim=1)
        centered = x - mean[:, None]
        centered = centered - centered.mean(dim=1, keepdim=True)
        rstd = (centered.square().mean(dim=1) + eps).rsqrt()
        x = centered * rstd[:, None]
        if weight is not None:
            x = x * accumulate(weight)
        if bias is not None:
            x = x + accumulate(bias)
        statistics = torch.stack([mean, rstd])
    y = _dropout(x, indices[0], cu_seqlens, seed, p)
    return y.to(dtype).reshape(*indices[0].shape, x.shape[1]), statistics


def embedding_backward(
    dy: Tensor,
    tables: Triple,
    indices: Triple,
    cu_seqlens: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
    seed: Tensor | None,
    layer_norm: bool,
    p: float,
    padding_idx: int | None,
    needed: list[bool],
) -> tuple[Tensor, ...]:
    """Returns the gradients of the three tables, weight and bias, in their types; results that are not needed are
    empty."""
    h = _dropout(accumulate(dy).reshape(-1, dy.shape[-1]), indices[0], cu_seqlens, seed, p)
    dx, dweight, dbias = h, h.new_empty(0), h.new_empty(0)
    if layer_norm:
        mean, rstd = statistics
        xhat = (_rows(tables, indices, cu_seqlens) - mean[:, None]) * rstd[:, None]
        xhat = xhat - xhat.mean(dim=1, keepdim=True)
        g = h if weight is None else h * accumulate(weight)
        dx = rstd[:, None] * (g - g.mean(dim=1, keepdim=True) - xhat * (g * xhat).mean(dim=1, keepdim=True))
        dweight = (h * xhat).sum(dim=0).to(weight.dtype) if needed[3] else dweight
        dbias = h.sum(dim=0).to(bias.dtype) if needed[4] else dbias
    per_table = zip(
        tables, _all_indices(tables, indices, cu_seqlens), (padding_idx, None, None), needed[:3], strict=True
    )
    dtables = [
        _sum_rows(dx, rows, table, excluded) if wants and table is not None and rows is not None else h.new_empty(0)
        for table, rows, excluded, wants in per_table
    ]
    return (*dtables, dweight, dbias)


def _rows(tables: Triple, indices: Triple, cu_seqlens: Tensor | None) -> Tensor:
    """x: [N, C] in the accumulation type."""
    x = None
    for table, rows in zip(tables, _all_indices(tables, indices, cu_seqlens), strict=True):
        if table is not None and rows is not None:
            named = (rows >= 0) & (rows < len(table))
            embedded = accumulate(table)[rows.clamp(0, len(table) - 1)].where(named[:, None], float("nan"))
            x = embedded if x is None else x + embedded
    assert x is not None
    return x


def _all_indices(tables: Triple, indices: Triple, cu_seqlens: Tensor | None) -> list[Tensor | None]:
    """Each table's row for every token, int64 [N]; None where there is no table."""
    ids, position_ids, segment_ids = indices
    if position_ids is None and tables[1] is not None:
        position_ids = _positions(ids, cu_seqlens)[1]
    if segment_ids is None and tables[2] is not None:
        segment_ids = torch.zeros_like(ids)
    return [None if rows is None else rows.reshape(-1).long() for rows in (ids, position_ids, segment_ids)]


def _positions(ids: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    return philox.row_positions(torch.Size([*ids.shape, 1]), cu_seqlens, ids.device)


def _dropout(x: Tensor, ids: Tensor, cu_seqlens: Tensor | None, seed: Tensor | None, p: float) -> Tensor:
    """x [N, C] as dropout leaves it; without a seed nothing is dropped."""
    if seed is None:
        return x
    threshold = philox.threshold(p)
    kept = philox.kept(seed, *_positions(ids, cu_seqlens), x.shape[1], threshold)
    return torch.where(kept, x * philox.scale(threshold), 0.0)


def _sum_rows(dx: Tensor, rows: Tensor, table: Tensor, excluded: int | None) -> Tensor:
    """A table's gradient, by an operation of torch that is deterministic on this device."""
    counted = (rows >= 0) & (rows < len(table))
    if excluded is not None:
        counted &= rows != excluded
    dx, rows = dx.where(counted[:, None], 0.0), rows.where(counted, 0)
    total = dx.new_zeros(table.shape)
    total = total.index_put_((rows,), dx, accumulate=True) if dx.is_cuda else total.index_add_(0, rows, dx)
    return total.to(table.dtype)
