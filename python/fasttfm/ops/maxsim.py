"""``maxsim``: the late interaction score (ColBERT), without storing the matrix of token similarities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm.kernels.common.linear import accumulate, accumulation_type
from fasttfm.kernels.common.rows import empty_output
from fasttfm.kernels.maxsim import reference
from fasttfm.ops import linear
from fasttfm.ops.core import checks
from fasttfm.ops.core.arguments import Output, checked, flag
from fasttfm.ops.core.backends import (
    Backend,
    always,
    dtype_name,
    refuse_native_cpu,
    torch_reference,
    triton_kernels,
)
from fasttfm.ops.core.declare import Op
from fasttfm.ops.core.library import is_plain, needs_gradient

NAME = "maxsim"
_BLOCK_BYTES = 4 * 2**20  # a block of similarities on the CPU, which stays in its caches


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
    backend: str | None = None,
) -> Tensor:
    """For each query token the largest dot product with a document's tokens, summed over the query's tokens.

    Args:
        queries: ``[B, Sq, D]``, or with ``query_cu_seqlens`` packed ``[Tq, D]``; fp32, bf16 or fp16 (fp64 on the
            reference backend). For cosine similarity normalize both sides first.
        documents: ``[C, Sd, D]``, or with ``document_cu_seqlens`` packed ``[Td, D]``, in the queries' type.
        query_lengths, document_lengths: int32 or int64 ``[B]`` and ``[C]``, for dense tensors: how many tokens of each
            are used; by default all.
        query_cu_seqlens, document_cu_seqlens: int32 ``[B + 1]`` and ``[C + 1]``, the first row of each packed sequence,
            and the row count.
        query_mask, document_mask: Booleans or integers, of the tensors' shape without D: tokens with 0 are ignored.
            They may be anywhere; ColBERT ignores the punctuation of documents.
        pairs: Whether each query is scored only against its own documents: of ``n B`` documents the first n are the
            first query's, and so on. By default every query is scored against every document.
        backend: Requests one backend; by default the first that supports the call.

    Returns:
        fp32 (fp64 for fp64) ``[B, C]``, or with ``pairs`` ``[B, n]``. A document without tokens scores -inf. A
        maximum that is not finite has no gradient. Under autocast both sides are cast to its type first.

    Boundaries and lengths are not validated on a GPU, so that a call never synchronizes; kernels do not access memory
    outside of the tensors for any values.
    """
    queries, documents = linear.autocast(queries, documents)
    _check_tensors(queries, documents, query_cu_seqlens, document_cu_seqlens)
    query = side("query", queries, query_lengths, query_cu_seqlens, query_mask)
    document = side("document", documents, document_lengths, document_cu_seqlens, document_mask)
    _check_pairs(pairs, len(query.starts), len(document.starts))
    keep = needs_gradient(queries, documents)
    scores: Tensor = OP.apply(*arguments(query, document), pairs, keep, backend=backend)
    return scores


class Side(NamedTuple):
    """Queries or documents for the kernels: rows, and the start and end of each sequence."""

    rows: Tensor  # [T, D]
    starts: Tensor  # int32 [sequences]
    ends: Tensor
    mask: Tensor | None  # bool [T]: rows that are used
    padded: int | None  # rows per sequence, if it is the same for all


def arguments(query: Side, document: Side) -> tuple[Any, ...]:
    """The tensors of ``fasttfm::maxsim_forward``."""
    spans = (query.starts, query.ends, document.starts, document.ends)
    return query.rows, document.rows, _owners(query), *spans, document.mask


def side(name: str, tokens: Tensor, lengths: Any, cu_seqlens: Any, mask: Any) -> Side:
    """Checks one side's arguments. ``name`` is the prefix of their names."""
    _check_mask(f"{name}_mask", mask, tokens)
    counted = None if mask is None else (mask if mask.dtype == torch.bool else mask != 0).flatten()
    if cu_seqlens is not None:
        if lengths is not None:
            raise checks.bad_value(NAME, f"{name}_lengths", f"None next to {name}_cu_seqlens", "a tensor")
        if is_plain((cu_seqlens,)):
            argument = f"{name}_cu_seqlens"
            checks.check_cu_seqlens_values(NAME, cu_seqlens, len(tokens), exact=False, argument=argument)
        cu_seqlens = cu_seqlens.contiguous()
        return Side(tokens, cu_seqlens[:-1], cu_seqlens[1:], counted, None)
    count, longest = tokens.shape[:2]
    bounds = torch.arange(count + 1, dtype=torch.int32, device=tokens.device) * longest
    starts, ends = bounds[:-1], bounds[1:]
    if lengths is not None:
        _check_lengths(f"{name}_lengths", lengths, tokens)
        ends = starts + lengths.clamp(0, longest).to(torch.int32)
        real = (torch.arange(longest, device=tokens.device) < lengths[:, None]).flatten()
        counted = real if counted is None else counted & real
    return Side(tokens.flatten(0, 1), starts, ends, counted, longest)


def _owners(query: Side) -> Tensor:
    """int32 [Tq]: the query that each row belongs to, -1 for ignored rows."""
    count, rows = len(query.starts), torch.arange(len(query.rows), dtype=torch.int32, device=query.rows.device)
    if query.padded is not None:
        owners = rows // max(1, query.padded)
    else:
        owners = torch.searchsorted(query.ends, rows, right=True, out_int32=True)
        owners = torch.where(owners < count, owners, -1)
    return owners if query.mask is None else torch.where(query.mask, owners, -1)


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check_tensors(queries: Any, documents: Any, query_cu_seqlens: Any, document_cu_seqlens: Any) -> None:
    for name, tensor, cu_seqlens in (
        ("queries", queries, query_cu_seqlens),
        ("documents", documents, document_cu_seqlens),
    ):
        checks.check_floating(NAME, name, tensor)
        singular = "query" if name == "queries" else "document"
        if tensor.dim() != (3 if cu_seqlens is None else 2) or tensor.shape[-1] == 0:
            layout = "sequences, S, D" if cu_seqlens is None else "T, D"
            expected = f"[{layout}] {'without' if cu_seqlens is None else 'next to'} {singular}_cu_seqlens"
            raise checks.bad_value(NAME, name, expected, f"shape {tuple(tensor.shape)}")
        checks.check_device(NAME, name, tensor, like=queries)
        if cu_seqlens is not None:
            checks.check_cu_seqlens(NAME, cu_seqlens, like=tensor, argument=f"{singular}_cu_seqlens")
    if documents.shape[-1] != queries.shape[-1]:
        raise checks.bad_value(NAME, "documents", f"the queries' {queries.shape[-1]} columns", documents.shape[-1])
    if documents.dtype != queries.dtype:
        raise checks.bad_type(
            NAME, "documents", f"the queries' {dtype_name(queries.dtype)}", dtype_name(documents.dtype)
        )


def _check_mask(argument: str, mask: Any, tokens: Tensor) -> None:
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise checks.bad_type(NAME, argument, "a tensor or None", type(mask).__name__)
    if mask.is_floating_point() or mask.is_complex():
        raise checks.bad_type(NAME, argument, "a tensor of bool or integers", dtype_name(mask.dtype))
    checks.check_shape(NAME, argument, mask, tokens.shape[:-1])
    checks.check_device(NAME, argument, mask, like=tokens)


def _check_lengths(argument: str, lengths: Any, tokens: Tensor) -> None:
    checks.check_index(NAME, argument, lengths)
    checks.check_shape(NAME, argument, lengths, tokens.shape[:1])
    checks.check_device(NAME, argument, lengths, like=tokens)
    if lengths.is_cpu and is_plain((lengths,)):
        for sequence, length in enumerate(lengths.tolist()):
            if not 0 <= length <= tokens.shape[1]:
                got = f"{length} of sequence {sequence}"
                raise checks.bad_value(NAME, argument, f"lengths in [0, {tokens.shape[1]}]", got)


def _check_pairs(pairs: Any, queries: int, documents: int) -> None:
    if not isinstance(pairs, bool):
        raise checks.bad_type(NAME, "pairs", "True or False", type(pairs).__name__)
    if pairs and (documents % queries if queries else documents):
        got = f"{documents} for {queries} queries"
        raise checks.bad_value(NAME, "documents", "the same number for each query, with pairs", got)


# ---- the CPU: blocks of torch's GEMMs --------------------------------------------------------------------------------


def _forward_cpu(
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
    q, d = accumulate(queries), accumulate(documents)
    spans, count = list(zip(query_starts.tolist(), query_ends.tolist(), strict=True)), len(document_starts)
    per_query = count // max(1, len(spans)) if pairs else count
    best = q.new_zeros(per_query, len(q))
    index = q.new_full((per_query, len(q)), -1, dtype=torch.int32)
    ignored = None if document_mask is None else ~document_mask
    counted = owners >= 0
    documents_of = list(zip(document_starts.tolist(), document_ends.tolist(), strict=True))
    for number, several in _equal_runs(documents_of, 1 if pairs else max(1, _BLOCK_BYTES // (4 * 128))):
        first, end = documents_of[number]
        rows = slice(*spans[number // per_query]) if pairs else slice(0, len(q))
        columns = slice(number % per_query, number % per_query + several)
        tokens = slice(first, first + several * (end - first))
        hidden = None if ignored is None else ignored[tokens].unflatten(0, (several, -1))
        if end <= first:
            best[columns, rows] = torch.where(counted[rows], -torch.inf, 0.0)
            continue
        step = max(1, _BLOCK_BYTES // (q.element_size() * (tokens.stop - first)))
        for row in range(rows.start, rows.stop, step):
            block = slice(row, min(row + step, rows.stop))
            similarities = linear.matmul(q[block], d[tokens].t()).unflatten(1, (several, -1))
            if hidden is not None:
                similarities.masked_fill_(hidden, -torch.inf)
            if not keep:
                best[columns, block] = torch.where(counted[block], similarities.amax(dim=2).t(), 0.0)
                continue
            values, argmax = similarities.max(dim=2)
            finite = counted[block, None] & (values < torch.inf)
            if hidden is not None:
                finite &= ~hidden.all(dim=1)
            argmax += torch.arange(first, tokens.stop, end - first, device=argmax.device)
            best[columns, block] = torch.where(counted[block], values.t(), 0.0)
            index[columns, block] = torch.where(finite, argmax, -1).t().int()
    scores = (
        torch.stack([best[:, first:end].sum(dim=1) for first, end in spans]) if spans else q.new_zeros(0, per_query)
    )
    return scores, index if keep else index.new_empty(0)


def _equal_runs(spans: Sequence[tuple[int, int]], most: int) -> Iterator[tuple[int, int]]:
    """Runs of adjacent documents of the same length with at most ``most`` tokens, as first document and count. Each run
    is one GEMM."""
    number = 0
    while number < len(spans):
        first, end = spans[number]
        length, several = end - first, 1
        while (
            length > 0
            and (several + 1) * length <= most
            and spans[number + several : number + several + 1] == [(first + several * length, end + several * length)]
        ):
            several += 1
        yield number, several
        number += several


def _backward_cpu(
    dscores: Tensor,
    queries: Tensor,
    documents: Tensor,
    owners: Tensor,
    index: Tensor,
    want_dqueries: bool,
    want_ddocuments: bool,
) -> tuple[Tensor, Tensor]:
    q, d = accumulate(queries), accumulate(documents)
    dqueries, ddocuments = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, d))
    every = (index >= 0).all(dim=1).tolist()
    for column, argmax in enumerate(index):
        rows = slice(None) if every[column] else (argmax >= 0).nonzero().squeeze(1)
        tokens = argmax[rows]
        weights = dscores[owners[rows], column, None]
        if want_dqueries:
            dqueries[rows] += d[tokens] * weights
        if want_ddocuments:
            ddocuments.index_add_(0, tokens, q[rows] * weights)
    return (
        dqueries.to(queries.dtype) if want_dqueries else empty_output(queries),
        ddocuments.to(documents.dtype) if want_ddocuments else empty_output(documents),
    )


# ---- the declaration -------------------------------------------------------------------------------------------------


def _make_scores(queries: Tensor, *others: Any) -> Tensor:
    _, _, starts, _, document_starts, _, _, pairs, *_ = others
    count, columns = starts.shape[0], document_starts.shape[0]
    shape = (count, columns // max(1, count) if pairs else columns)
    return queries.new_empty(shape, dtype=accumulation_type(queries))


def _make_index(queries: Tensor, documents: Tensor, owners: Tensor, *others: Any) -> Tensor:
    keep = others[6]
    shape = (_make_scores(queries, documents, owners, *others).shape[1], queries.shape[0]) if keep else (0,)
    return owners.new_empty(shape)


# The CPU's comes before Triton, so that Triton's interpreter runs on CPU tensors only if it is requested by name.
OP = Op(
    NAME,
    inputs=(
        checked("queries", flagged=True),
        checked("documents", flagged=True),
        checked("owners"),
        checked("query_starts"),
        checked("query_ends"),
        checked("document_starts"),
        checked("document_ends"),
        checked("document_mask", optional=True),
    ),
    options=(flag("pairs"), flag("keep")),
    outputs=(Output("scores", _make_scores), Output("index", _make_index)),
    saves=("queries", "documents", "owners", "index"),
    gradients=("queries", "documents"),
    chosen_by=("queries",),
    instead="torch.einsum and amax",
    backends=(
        Backend("cpu", always, refuse_native_cpu, _forward_cpu, _backward_cpu),
        triton_kernels(NAME),
        torch_reference(reference.maxsim_forward, reference.maxsim_backward),
    ),
)
