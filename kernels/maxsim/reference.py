"""MaxSim, the score of late interaction (ColBERT), in plain torch: the specification.

With the tokens q of a query and d of a document:

    score = sum over i of  max over j of  q_i . d_j

Masked tokens are in neither; the maximum over no token is -inf, the sum over none 0. With y_i the j of the largest
product, the first of equal ones, the gradients are

    dq_i = sum over documents of  dscore d_{y_i}        dd_j = sum over queries' tokens i with y_i = j of  dscore q_i

Products and sums are fp32 (fp64 for fp64). Nothing is rounded in between. A maximum that is NaN or infinity has no
gradient: the score is NaN or infinity too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from fasttfm.kernels.common.linear import accumulate, fp32_product, without_autocast
from fasttfm.kernels.common.rows import empty_output


def maxsim(
    queries: Tensor,
    documents: Tensor,
    *,
    query_lengths: Tensor | None = None,
    document_lengths: Tensor | None = None,
    query_cu_seqlens: Tensor | None = None,
    document_cu_seqlens: Tensor | None = None,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    pairs: bool = False,
) -> Tensor:
    """The formula as autograd can differentiate it; tests hold every backend against this."""
    every_query = list(_sequences(queries, query_lengths, query_cu_seqlens, query_mask))
    every_document = list(_sequences(documents, document_lengths, document_cu_seqlens, document_mask))
    if not every_query or not every_document:
        return accumulate(queries.new_zeros(len(every_query), 0 if pairs else len(every_document)))
    per_query = len(every_document) // len(every_query)
    rows = []
    for number, query in enumerate(every_query):
        candidates = every_document[number * per_query : (number + 1) * per_query] if pairs else every_document
        rows.append(torch.stack([_score(query, document) for document in candidates]))
    return torch.stack(rows)


def _score(query: Tensor, document: Tensor) -> Tensor:
    with without_autocast(query):
        similarities = fp32_product(query, document.t())
    if similarities.shape[1] == 0:
        return similarities.new_full((len(similarities),), -torch.inf).sum()
    return similarities.max(dim=1).values.sum()


def _sequences(
    tokens: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None, mask: Tensor | None
) -> Iterator[Tensor]:
    """The tokens of each sequence that are not masked."""
    counted = torch.ones(tokens.shape[:-1], dtype=torch.bool, device=tokens.device) if mask is None else mask.bool()
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        spans = [slice(first, end) for first, end in itertools.pairwise(bounds)]
        yield from (tokens[span][counted[span]] for span in spans)
        return
    kept = [tokens.shape[1]] * len(tokens) if lengths is None else lengths.tolist()
    yield from (tokens[i, :length][counted[i, :length]] for i, length in enumerate(kept))


# ---- the backend: the arguments are those of fasttfm::maxsim_forward and fasttfm::maxsim_backward (ops/maxsim.py) ----


def maxsim_forward(
    queries: Tensor,
    documents: Tensor,
    owners: Tensor,
    query_starts: Tensor,
    query_ends: Tensor,
    document_starts: Tensor,
    document_ends: Tensor,
    document_mask: Tensor | None,
    pairs: bool,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """Scores [B, K] and, with ``keep``, the document row of each query token's maximum: int32 [K, Tq], -1 for none."""
    with without_autocast(queries):
        similarities = fp32_product(queries, documents.t())
    similarities = torch.nn.functional.pad(similarities, (0, 1), value=-torch.inf)  # for documents without a token
    rows = torch.arange(len(documents) + 1, device=documents.device)
    counted = rows < len(documents)
    if document_mask is not None:
        counted[:-1] &= document_mask
    spans = list(zip(query_starts.tolist(), query_ends.tolist(), strict=True))
    count = len(document_starts) // max(1, len(spans)) if pairs else len(document_starts)
    scores = similarities.new_zeros(len(spans), count)
    index = torch.full((count, len(queries)), -1, dtype=torch.int32, device=queries.device)
    for number in range(len(document_starts)):
        inside = counted & (rows >= document_starts[number]) & (rows < document_ends[number])
        best, argmax = similarities.masked_fill(~inside, -torch.inf).max(dim=1)
        argmax = torch.where(inside.any() & (owners >= 0) & (best < torch.inf), argmax, -1).int()
        best = torch.where(owners >= 0, best, 0.0)
        column = number % count if pairs else number
        for query in [number // count] if pairs else range(len(spans)):
            first, end = spans[query]
            scores[query, column] = best[first:end].sum()
            index[column, first:end] = argmax[first:end]
    return scores, index if keep else index.new_empty(0)


def maxsim_backward(
    dscores: Tensor,
    queries: Tensor,
    documents: Tensor,
    owners: Tensor,
    index: Tensor,
    want_dqueries: bool,
    want_ddocuments: bool,
) -> tuple[Tensor, Tensor]:
    """dqueries and ddocuments; results that are not needed are empty."""
    q, d = accumulate(queries), accumulate(documents)
    dqueries, ddocuments = torch.zeros_like(q), torch.zeros_like(d)
    for column, argmax in enumerate(index):
        rows = (argmax >= 0).nonzero().squeeze(1)
        best, weights = argmax[rows].long(), dscores[owners[rows].long(), column, None].to(q.dtype)
        dqueries[rows] += weights * d[best]
        terms = weights * q[rows]
        # Each in the order of the rows.
        ddocuments.index_put_((best,), terms, accumulate=True) if q.is_cuda else ddocuments.index_add_(0, best, terms)
    return (
        dqueries.to(queries.dtype) if want_dqueries else empty_output(queries),
        ddocuments.to(documents.dtype) if want_ddocuments else empty_output(documents),
    )
