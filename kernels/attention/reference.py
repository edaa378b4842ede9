"""Attention in plain torch: the specification, and a backend of its own.

    s = scale * q k^T + bias - slope * |distance|        over the keys that the query may attend to
    lse = log(sum over keys of exp(s))        P = exp(s - lse)        out = (kept * c * P) v

    dv = (kept * c * P)^T dout        dP = kept * c * (dout v^T)        delta = sum over D of dout * out
    ds = P * (dP - delta)        dq = scale * ds k        dk = scale * ds^T q        dbias = sum of ds

kept and c are the mask and scale of dropout. The mask is a function of the seed and of the weights' positions
(common/philox.py); without a seed both are 1. Query i of a sequence with Lq queries and Lk keys is at key position i +
Lk - Lq; its window and its distances are measured from there. Where no key may be attended to, or all scores are -inf,
as with a bias of -inf, out and the gradients are 0 and lse is -inf.

Every layout is computed as a padded batch [B, S, H, D]; elements past a sequence's end are replaced by 0 first, so that
nothing there, not even a NaN, affects a result. Arithmetic is fp32 (fp64 for fp64 input), but kept * c * P and ds are
rounded to the type of q before they are multiplied, because tensor cores take both operands in one type.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fasttfm.kernels.attention.problem import UNLIMITED, AttentionProblem, of_sequences, window_bounds
from fasttfm.kernels.common import philox
from fasttfm.kernels.common.linear import accumulate, without_autocast


def attention(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen: int | None = None,
    max_seqlen_k: int | None = None,
    lengths: Tensor | None = None,
    lengths_k: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    seed: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The public op as autograd can differentiate it; tests hold every backend against this."""
    if k is None:
        q, k, v = q.unbind(-3)
    left, right = window_bounds(causal, window)
    if cu_seqlens is None:
        longest, longest_k = q.shape[1], k.shape[1]
    else:
        longest = q.shape[0] if max_seqlen is None else max_seqlen
        longest_k = max_seqlen_k
        if longest_k is None:
            longest_k = longest if cu_seqlens_k is None else k.shape[0]
    problem = AttentionProblem(
        cu_seqlens=cu_seqlens,
        cu_seqlens_k=cu_seqlens_k,
        lengths=lengths,
        lengths_k=lengths_k,
        bias=of_sequences(bias),
        alibi_slopes=alibi_slopes,
        seed=seed if dropout_p else None,
        max_seqlen=longest,
        max_seqlen_k=longest_k,
        window_left=left,
        window_right=right,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        p=dropout_p,
    )
    out, lse = attention_forward(q, k, v, problem)
    return (out, lse) if return_lse else out


def attention_forward(q: Tensor, k: Tensor, v: Tensor, problem: AttentionProblem) -> tuple[Tensor, Tensor]:
    """Returns out, of q's shape and type, and lse: [B, H, Sq], or [H, T] of packed sequences."""
    queries, keys = _sides(q, k, problem)
    weights, total, lse = _softmax(q, k, queries, keys, problem)
    values = _per_head(keys.padded(v), q)
    with without_autocast(q):
        out = torch.einsum("bhij,bjhd->bihd", _rounded(_dropout(weights, problem), q), values)
    out = _where_attending(lse, out / total.transpose(1, 2)[..., None])
    out = queries.restored(out).to(q.dtype).contiguous()
    if problem.packed:
        lse = queries.restored(lse.transpose(1, 2), fill=-torch.inf).t()
    return out, lse.contiguous()


def attention_weights(q: Tensor, k: Tensor, problem: AttentionProblem) -> Tensor:
    """P of the formula: [B, H, Sq, Sk], rows and columns past a sequence's end 0. Autograd can differentiate it."""
    weights, total, _ = _softmax(q, k, *_sides(q, k, problem), problem)
    return weights / total[..., None]


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    problem: AttentionProblem,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Writes dq, dk and dv, of the shapes of q, k and v."""
    queries, keys = _sides(q, k, problem)
    weights, dscores, lse = _score_gradients(dout, q, k, v, out, lse, problem)
    padded_dout, padded_q = queries.padded(dout), queries.padded(q)
    with without_autocast(q):
        rounded = _rounded(dscores, q)
        padded_dq = problem.scale * torch.einsum("bhij,bjhd->bihd", rounded, _per_head(keys.padded(k), q))
        padded_dk = problem.scale * torch.einsum("bhij,bihd->bjhd", rounded, padded_q)
        padded_dv = torch.einsum("bhij,bihd->bjhd", _rounded(_dropout(weights, problem), q), padded_dout)
    dq.copy_(queries.restored(_where_attending(lse, padded_dq)))
    dk.copy_(keys.restored(_sum_groups(padded_dk, k)))
    dv.copy_(keys.restored(_sum_groups(padded_dv, v)))


def attention_bias_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: AttentionProblem, dbias: Tensor
) -> None:
    """Writes the gradient of the bias, [1 or B, 1 or H, rows, keys]."""
    weights, dscores, _ = _score_gradients(dout, q, k, v, out, lse, problem)
    dscores = torch.where(weights == 0, 0.0, dscores)  # a NaN among values or keys survives weights of 0
    shared = [dimension for dimension in (0, 1) if dbias.shape[dimension] == 1]
    gradient = dscores.sum(dim=shared, keepdim=True) if shared else dscores
    dbias.zero_()
    dbias[..., : gradient.shape[2], : gradient.shape[3]] = gradient.to(dbias.dtype)


def _score_gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: AttentionProblem
) -> tuple[Tensor, Tensor, Tensor]:
    """P and ds [B, H, Sq, Sk] of the formula, and lse [B, H, Sq]."""
    queries, keys = _sides(q, k, problem)
    if problem.packed:
        lse = queries.padded(lse.t()).transpose(1, 2)
    scores, attended = _scores(q, k, queries, keys, problem)
    weights = torch.where(attended, (scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None]).exp(), 0.0)
    dout, out = queries.padded(dout), queries.padded(out)
    delta = (dout * out).sum(dim=-1).transpose(1, 2)[..., None]
    # [B, H, Sk, D] is made contiguous because torch adds the terms of few products one by one otherwise, with several
    # times the rounding error.
    values = _per_head(keys.padded(v), q).transpose(1, 2).contiguous()
    with without_autocast(q):
        dweights = _dropout(dout.transpose(1, 2) @ values.mT, problem)
    return weights, weights * (dweights - delta), lse


# ---- scores and weights of a padded batch ----------------------------------------------------------------------------


def _scores(q: Tensor, k: Tensor, queries: _Side, keys: _Side, problem: AttentionProblem) -> tuple[Tensor, Tensor]:
    """Scaled and biased scores [B, H, Sq, Sk], -inf where ``attended`` [B, 1, Sq, Sk] is false; and ``attended``."""
    with without_autocast(q):
        scores = problem.scale * torch.einsum("bihd,bjhd->bhij", queries.padded(q), _per_head(keys.padded(k), q))
    i = torch.arange(queries.longest, device=q.device)[:, None]
    j = torch.arange(keys.longest, device=q.device)
    lengths, lengths_k = (side.lengths[:, None, None, None] for side in (queries, keys))
    distance = j - (i + lengths_k - lengths)  # of the key from the query's position: [B, 1, Sq, Sk]
    attended = (i < lengths) & (j < lengths_k)
    if problem.window_left != UNLIMITED:
        attended = attended & (distance >= -problem.window_left)
    if problem.window_right != UNLIMITED:
        attended = attended & (distance <= problem.window_right)
    if problem.bias is not None:
        scores = scores + problem.bias[..., : queries.longest, : keys.longest].to(scores.dtype)
    if problem.alibi_slopes is not None:
        scores = scores - problem.alibi_slopes.to(scores.dtype)[:, None, None] * distance.abs()
    return torch.where(attended, scores, -torch.inf), attended


def _softmax(
    q: Tensor, k: Tensor, queries: _Side, keys: _Side, problem: AttentionProblem
) -> tuple[Tensor, Tensor, Tensor]:
    """P [B, H, Sq, Sk] before dropout up to a factor that is 1 but for rounding, its sum, and lse, both [B, H, Sq].

    The division by the sum comes after the product with v, as in kernels; so autograd takes delta from dout and out, as
    they do, and rounds as they do.
    """
    scores, _ = _scores(q, k, queries, keys, problem)
    lse = scores.detach().logsumexp(dim=-1)
    nothing = lse == -torch.inf
    weights = (scores - torch.where(nothing, 0.0, lse)[..., None]).exp()
    return weights, torch.where(nothing, 1.0, weights.sum(dim=-1)), lse


def _where_attending(lse: Tensor, x: Tensor) -> Tensor:
    """[B, Sq, H, D], 0 for queries that attend to nothing: a NaN among values or keys survives weights of 0."""
    return torch.where((lse == -torch.inf).transpose(1, 2)[..., None], 0.0, x)


def _dropout(weights: Tensor, problem: AttentionProblem) -> Tensor:
    if problem.seed is None:
        return weights
    sequences, heads, queries = (torch.arange(size, device=weights.device) for size in weights.shape[:3])
    kept = philox.kept_weights(
        problem.seed, sequences[:, None, None], heads[:, None], queries, weights.shape[3], problem.threshold
    )
    return torch.where(kept, weights * problem.dropout_scale, 0.0)


def _rounded(x: Tensor, like: Tensor) -> Tensor:
    """Numbers of the type of ``like``, still in the type of sums."""
    return x.to(like.dtype).to(x.dtype)


def _per_head(keys: Tensor, q: Tensor) -> Tensor:
    """Keys or values [B, Sk, Hk, D], repeated so that each of q's heads has its own: [B, Sk, H, D]."""
    return keys.repeat_interleave(q.shape[-2] // keys.shape[2], dim=2)


def _sum_groups(gradient: Tensor, keys: Tensor) -> Tensor:
    """The gradient of what _per_head() repeated."""
    return gradient.unflatten(2, (keys.shape[-2], -1)).sum(dim=3)


# ---- layouts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Side:
    """The queries or the keys of all sequences, and how their layout and the padded one turn into each other."""

    lengths: Tensor  # int64 [B]
    longest: int
    rows: Tensor | None = None  # int64 [B, longest]: the packed row of each token; one past the last for padding
    total: int = 0  # packed rows

    def padded(self, x: Tensor) -> Tensor:
        """[B, S, ...] or packed [T, ...] as [B, S, ...] in the type of sums, 0 past each sequence's end."""
        x = accumulate(x)
        if self.rows is None:
            present = torch.arange(self.longest, device=x.device) < self.lengths[:, None]
            return torch.where(present.reshape(*present.shape, *(1 for _ in x.shape[2:])), x, 0.0)
        return torch.cat([x, x.new_zeros(1, *x.shape[1:])])[self.rows]

    def restored(self, padded: Tensor, fill: float = 0.0) -> Tensor:
        """[B, S, ...] in the layout it has outside. A packed row that is no sequence's is ``fill``, a dense row past
        the end of its sequence 0."""
        if self.rows is None:
            return self.padded(padded)
        x = padded.new_full((self.total + 1, *padded.shape[2:]), fill)
        return x.index_put((self.rows,), padded)[: self.total]


def _sides(q: Tensor, k: Tensor, problem: AttentionProblem) -> tuple[_Side, _Side]:
    if problem.cu_seqlens is not None and problem.key_cu_seqlens is not None:
        return (
            _packed_side(problem.cu_seqlens, problem.max_seqlen, q.shape[0]),
            _packed_side(problem.key_cu_seqlens, problem.max_seqlen_k, k.shape[0]),
        )
    return _dense_side(q, problem.lengths), _dense_side(k, problem.key_lengths)


def _packed_side(cu_seqlens: Tensor, longest: int, total: int) -> _Side:
    cu_seqlens = cu_seqlens.long().clamp(0, total)
    lengths = cu_seqlens.diff().clamp(0, longest)
    token = torch.arange(longest, device=cu_seqlens.device)
    rows = torch.where(token < lengths[:, None], cu_seqlens[:-1, None] + token, total)
    return _Side(lengths, longest, rows, total)


def _dense_side(x: Tensor, lengths: Tensor | None) -> _Side:
    longest = x.shape[1]
    if lengths is None:
        return _Side(torch.full(x.shape[:1], longest, device=x.device, dtype=torch.int64), longest)
    return _Side(lengths.long().clamp(0, longest), longest)
