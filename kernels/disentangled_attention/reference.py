"""Disentangled attention (DeBERTa, XLNet) in plain torch: the specification, and a backend of its own.

Of query i and key j of a sequence, with d = rows[i - j + L - 1] for the distance i - j, tables kp and qp [R, H, D],
biases u and e [T, H] of keys and queries, and segments g [T]:

    s = scale * (q_i k_j + q_i kp_d + k_j qp_d + u_j + (g_i != g_j) e_i)        what is not given is 0
    lse = log(sum over keys of exp(s))        P = exp(s - lse)        out = (kept * c * P) v

    dv = (kept * c * P)^T dout        dP = kept * c * (dout v^T)        delta = sum over D of dout * out
    ds = P * (dP - delta)
    dq_i = scale * sum over j of ds (k_j + kp_d)        dk_j = scale * sum over i of ds (q_i + qp_d)
    dkp_d = scale * sum over i and j at d of ds q_i     dqp_d = scale * sum over i and j at d of ds k_j
    du_j = scale * sum over i of ds                     de_i = scale * sum over j of another segment of ds

kept and c are the mask and scale of dropout, a function of the seed and of the weights' positions (common/philox.py).
Where ``mask`` is false, or past the end of a packed sequence, there is neither a query nor a key: out and gradients are
0 and lse is -inf.

Arithmetic is fp32 (fp64 for fp64), but kept * c * P and ds are rounded to q's type before they are multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fasttfm.kernels.common import philox
from fasttfm.kernels.common.linear import accumulate, without_autocast
from fasttfm.kernels.common.rows import empty_output
from fasttfm.kernels.disentangled_attention.problem import Problem


def disentangled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    distance_rows: Tensor,
    *,
    position_keys: Tensor | None = None,
    position_queries: Tensor | None = None,
    key_bias: Tensor | None = None,
    segments: Tensor | None = None,
    segment_bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """The formula as autograd can differentiate it; tests hold every backend against this."""
    tables = (position_keys, position_queries)
    terms = 1 + sum(table is not None for table in tables)
    scale = (q.shape[-1] * terms) ** -0.5 if scale is None else scale
    longest = len(distance_rows) // 2 + 1 if max_seqlen is None else max_seqlen
    biases = (key_bias, segment_bias, distance_rows, segments)
    fields = (*tables, *biases, cu_seqlens, mask, seed if dropout_p else None)
    return forward(q, k, v, Problem(*fields, min(longest, q.shape[-3]), scale, dropout_p))[0]


def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """out of q's shape and type, and lse [H, T], also of T = B S dense tokens."""
    layout = _Layout.of(q, problem)
    wide = [layout.padded(tensor) for tensor in (q, k, v)]
    scores = _scores(*wide[:2], layout, problem)
    scores = torch.where(layout.attended(), scores, -torch.inf)
    lse = scores.detach().logsumexp(dim=-1)
    nothing = lse == -torch.inf
    weights = (scores - torch.where(nothing, 0.0, lse)[..., None]).exp()
    total = torch.where(nothing, 1.0, weights.sum(dim=-1))
    with without_autocast(q):
        out = torch.einsum("bhij,bjhd->bihd", _rounded(_dropout(weights, problem), q), wide[2])
    out = torch.where(nothing.mT[..., None], 0.0, out / total.mT[..., None])
    lse = layout.restored(lse.mT, -torch.inf).flatten(0, -2).t()
    return layout.restored(out).to(q.dtype).contiguous(), lse.contiguous()


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    problem: Problem,
    want_dkeys: bool,
    want_dqueries: bool,
    want_dkey_bias: bool,
    want_dsegment_bias: bool,
) -> tuple[Tensor, ...]:
    """dq, dk and dv, and the gradients of both tables and both biases; those that are not needed are empty."""
    layout = _Layout.of(q, problem)
    position_keys, position_queries, scale = problem.position_keys, problem.position_queries, problem.scale
    wide_q, wide_k, wide_v, wide_dout, wide_out = (layout.padded(tensor) for tensor in (q, k, v, dout, out))
    places = layout.places(problem.distance_rows)
    lse = layout.padded(lse.t().unflatten(0, q.shape[:-2])).mT
    attending = lse != -torch.inf
    scores = _scores(wide_q, wide_k, layout, problem)
    weights = (scores - torch.where(attending, lse, 0.0)[..., None]).exp()
    weights = torch.where(layout.attended() & attending[..., None], weights, 0.0)
    delta = (wide_dout * wide_out).sum(dim=-1).mT[..., None]
    with without_autocast(q):
        dweights = torch.einsum("bihd,bjhd->bhij", wide_dout, wide_v)
        dscores = torch.where(weights == 0, 0.0, weights * (_dropout(dweights, problem) - delta))
        dscores = _rounded(dscores, q) * scale
        dv = torch.einsum("bhij,bihd->bjhd", _rounded(_dropout(weights, problem), q), wide_dout)
        dq = torch.einsum("bhij,bjhd->bihd", dscores, wide_k)
        dk = torch.einsum("bhij,bihd->bjhd", dscores, wide_q)
        dkeys, dqueries, dbiases = empty_output(q), empty_output(q), [empty_output(q), empty_output(q)]
        if position_keys is not None:
            of_rows = _by_row(dscores, places, len(position_keys))
            dq += torch.einsum("bhir,rhd->bihd", of_rows, accumulate(position_keys))
            if want_dkeys:
                dkeys = torch.einsum("bhir,bihd->rhd", of_rows, wide_q).to(position_keys.dtype).contiguous()
        if position_queries is not None:
            of_rows = _by_row(dscores.mT, places.mT, len(position_queries))
            dk += torch.einsum("bhjr,rhd->bjhd", of_rows, accumulate(position_queries))
            if want_dqueries:
                dqueries = torch.einsum("bhjr,bjhd->rhd", of_rows, wide_k).to(position_queries.dtype).contiguous()
        if problem.key_bias is not None and want_dkey_bias:
            dbiases[0] = layout.restored(dscores.sum(2).mT).to(problem.key_bias.dtype).contiguous()
        if problem.segment_bias is not None and want_dsegment_bias:
            sums = (dscores * layout.others(problem.segments)).sum(3)
            dbiases[1] = layout.restored(sums.mT).to(problem.segment_bias.dtype).contiguous()
    dq, dk, dv = (layout.restored(gradient).to(q.dtype).contiguous() for gradient in (dq, dk, dv))
    return dq, dk, dv, dkeys, dqueries, *dbiases


def _scores(q: Tensor, k: Tensor, layout: _Layout, problem: Problem) -> Tensor:
    """[B, H, S, S] of q and k [B, S, H, D]."""
    position_keys, position_queries = problem.position_keys, problem.position_queries
    places = layout.places(problem.distance_rows)
    with without_autocast(q):
        scores = torch.einsum("bihd,bjhd->bhij", q, k)
        if position_keys is not None:
            products = torch.einsum("bihd,rhd->bhir", q, accumulate(position_keys))
            scores = scores + products.gather(-1, places.expand(*scores.shape))
        if position_queries is not None:
            products = torch.einsum("bjhd,rhd->bhjr", k, accumulate(position_queries))
            scores = scores + products.gather(-1, places.mT.expand(*scores.shape)).mT
    if problem.key_bias is not None:
        scores = scores + layout.padded(problem.key_bias).mT[:, :, None]
    if problem.segment_bias is not None:
        scores = scores + layout.padded(problem.segment_bias).mT[..., None] * layout.others(problem.segments)
    return scores * problem.scale


def _by_row(dscores: Tensor, places: Tensor, rows: int) -> Tensor:
    """The sums of dscores [B, H, S, S] over the keys with the same row of a table: [B, H, S, rows]. A place depends on
    the distance of query and key only. So row i of the flipped dscores is moved by i columns, which are distances then,
    and a GEMM adds those of each row: scatter_add_ would add in another order in every call on a GPU."""
    longest = dscores.shape[-1]
    if longest == 0:
        return dscores.new_zeros(*dscores.shape[:3], rows)
    by_distance = torch.nn.functional.pad(dscores.flip(-1), (0, longest)).flatten(2)
    by_distance = by_distance[..., : longest * (2 * longest - 1)].unflatten(2, (longest, 2 * longest - 1))
    of_distances = torch.cat([places[0].flip(0), places[1:, 0]])
    return by_distance @ (of_distances[:, None] == torch.arange(rows, device=places.device)).to(dscores.dtype)


def _dropout(weights: Tensor, problem: Problem) -> Tensor:
    if problem.seed is None:
        return weights
    sequences, heads, queries = (torch.arange(size, device=weights.device) for size in weights.shape[:3])
    threshold = philox.threshold(problem.p)
    counters = (sequences[:, None, None], heads[:, None], queries, weights.shape[3])
    return torch.where(philox.kept_weights(problem.seed, *counters, threshold), weights * philox.scale(threshold), 0.0)


def _rounded(x: Tensor, like: Tensor) -> Tensor:
    """Numbers of the type of ``like``, still in the type of sums."""
    return x.to(like.dtype).to(x.dtype)


@dataclass(frozen=True)
class _Layout:
    """How the tokens of a call, and a padded batch, turn into each other."""

    present: Tensor  # bool [B, S]
    rows: Tensor | None  # int64 [B, S]: the packed row of each token; one past the last for padding
    total: int  # packed rows

    @staticmethod
    def of(q: Tensor, problem: Problem) -> _Layout:
        cu_seqlens, mask = problem.cu_seqlens, problem.mask
        if cu_seqlens is None:
            ones = torch.ones(q.shape[:2], dtype=torch.bool, device=q.device)
            return _Layout(ones if mask is None else mask.bool(), None, 0)
        total = q.shape[0]
        bounds, token = cu_seqlens.long().clamp(0, total), torch.arange(problem.max_seqlen, device=q.device)
        present = token < bounds.diff()[:, None]
        return _Layout(present, torch.where(present, bounds[:-1, None] + token, total), total)

    def attended(self) -> Tensor:
        """bool [B, 1, S, S]: of queries and keys that are both there."""
        return (self.present[:, :, None] & self.present[:, None, :])[:, None]

    def padded(self, x: Tensor) -> Tensor:
        """[B, S, ...] in the type of sums; 0 where there is no token, so that a NaN there has no effect."""
        x = accumulate(x)
        if self.rows is not None:
            return torch.cat([x, x.new_zeros(1, *x.shape[1:])])[self.rows]
        return torch.where(self.present[(...,) + (None,) * (x.dim() - 2)], x, 0.0)

    def restored(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """[B, S, ...] in the layout it has outside."""
        if self.rows is None:
            return torch.where(self.present[(...,) + (None,) * (x.dim() - 2)], x, fill)
        return x.new_full((self.total + 1, *x.shape[2:]), fill).index_put((self.rows,), x)[: self.total]

    def others(self, segments: Tensor | None) -> Tensor:
        """bool [B, 1, S, S]: whether query and key are of different segments."""
        assert segments is not None
        if self.rows is not None:
            segments = torch.cat([segments, segments.new_zeros(1)])[self.rows]
        return (segments[:, :, None] != segments[:, None, :])[:, None]

    def places(self, distance_rows: Tensor) -> Tensor:
        """int64 [S, S]: the table's row for each query and key."""
        token, middle = torch.arange(self.present.shape[1], device=distance_rows.device), len(distance_rows) // 2
        return distance_rows.long()[token[:, None] - token + middle]
