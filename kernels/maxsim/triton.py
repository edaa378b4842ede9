"""MaxSim in Triton, without the matrix of similarities.

Forward: a program has BLOCK_M query tokens and one document. It iterates over the document's tokens with a running
maximum for each query token, which it writes to best [K, Tq], and the row of the maximum to index [K, Tq]. K is the
number of documents, or with PAIRS that of each query. A second kernel sums best over the tokens of each query.

Backward: dq_i is a sum of the K rows of documents given by index. For dd the entries of index are sorted by row, so
that the query tokens whose gradients a program sums are next to each other. All sums have a fixed order.

Whatever the spans contain, nothing outside of the tensors is accessed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.common.launch import ahead_of_time, cdiv, next_power_of_2, on_device
from fasttfm.kernels.common.rows import as_rows, empty_output
from fasttfm.kernels.common.triton.launcher import launched_kernel

_NONE = tl.constexpr(2147483647)
_SIZES_OF_A_BATCH = ["Tq", "Td", "K", "tiles"]


@triton.jit
def _span(starts, ends, sequence, size):
    first = tl.minimum(tl.maximum(tl.load(starts + sequence), 0), size)
    return first, tl.minimum(tl.load(ends + sequence), size)


@triton.jit
def _load_tile(rows, numbers, stride, inside, columns, D: tl.constexpr):
    """Rows ``numbers`` of a matrix, zeros where not ``inside``; columns past D are zeros."""
    keep = inside[:, None] & (columns < D)[None, :]
    return tl.load(rows + numbers.to(tl.int64)[:, None] * stride + columns[None, :], mask=keep, other=0.0)


@launched_kernel
@triton.jit(do_not_specialize=_SIZES_OF_A_BATCH)
def _best_kernel(
    queries,  # [Tq, D]
    documents,  # [Td, D]
    owners,  # int32 [Tq]: the query of each token, -1 for masked tokens
    query_starts,  # int32 [B]
    query_ends,
    document_starts,  # int32 [C]
    document_ends,
    document_mask,  # uint8 [Td] or unused
    best,  # fp32 [K, Tq]
    index,  # int32 [K, Tq] or unused
    Tq,
    Td,
    K,
    tiles,  # of all query tokens; 1 for pairs
    query_stride,
    document_stride,
    PAIRS: tl.constexpr,
    MASKED: tl.constexpr,
    KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    document = tl.program_id(0) // tiles
    column = document % K
    first_row = (tl.program_id(0) % tiles) * BLOCK_M
    end_row = tl.minimum(first_row + BLOCK_M, Tq)
    if PAIRS:
        first_row, end_row = _span(query_starts, query_ends, document // K, Tq)
    first_token, end_token = _span(document_starts, document_ends, document, Td)
    for row in range(first_row, end_row, BLOCK_M):
        rows = row + tl.arange(0, BLOCK_M)
        here = rows < end_row
        columns = tl.arange(0, BLOCK_D)
        if D <= BLOCK_D:
            q = _load_tile(queries, rows, query_stride, here, columns, D)
        m = tl.full((BLOCK_M,), -float("inf"), tl.float32)
        argmax = tl.full((BLOCK_M,), -1, tl.int32)
        for token in range(first_token, end_token, BLOCK_N):
            tokens = token + tl.arange(0, BLOCK_N)
            inside = tokens < end_token
            if D <= BLOCK_D:
                d = _load_tile(documents, tokens, document_stride, inside, columns, D)
                products = tl.dot(q, tl.trans(d), input_precision=PRECISION)
            else:
                products = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                for part in range(0, D, BLOCK_D):
                    q = _load_tile(queries, rows, query_stride, here, part + columns, D)
                    d = _load_tile(documents, tokens, document_stride, inside, part + columns, D)
                    products = tl.dot(q, tl.trans(d), products, input_precision=PRECISION)
            if MASKED:
                inside = inside & (tl.load(document_mask + tokens, mask=inside, other=0) != 0)
            products = tl.where(products == products, products, float("inf"))  # a NaN is the maximum
            products = tl.where(inside[None, :], products, -float("inf"))
            top = tl.max(products, 1)
            if KEEP:
                largest = (products == top[:, None]) & inside[None, :]
                best_token = tl.min(tl.where(largest, tokens[None, :], _NONE), 1)
                argmax = tl.where((best_token != _NONE) & ((top > m) | (argmax < 0)), best_token, argmax)
            m = tl.maximum(m, top)
        counted = tl.load(owners + rows, mask=here, other=-1) >= 0
        finite = m < float("inf")
        results = column.to(tl.int64) * Tq + rows
        tl.store(best + results, tl.where(counted, tl.where(finite, m, float("nan")), 0.0), mask=here)
        if KEEP:
            tl.store(index + results, tl.where(counted & finite, argmax, -1), mask=here)


@launched_kernel
@triton.jit(do_not_specialize=["Tq", "K"])
def _sum_kernel(
    best,  # fp32 [K, Tq]
    query_starts,  # int32 [B]
    query_ends,
    scores,  # fp32 [B, K]
    Tq,
    K,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """scores[b, k] = sum of best[k] over the tokens of query b."""
    blocks = tl.cdiv(K, BLOCK_K)
    query = tl.program_id(0) // blocks
    columns = tl.program_id(0) % blocks * BLOCK_K + tl.arange(0, BLOCK_K)
    first, end = _span(query_starts, query_ends, query, Tq)
    total = tl.zeros((BLOCK_K,), tl.float32)
    for token in range(first, end, BLOCK_T):
        tokens = token + tl.arange(0, BLOCK_T)
        inside = (columns < K)[:, None] & (tokens < end)[None, :]
        total += tl.sum(tl.load(best + columns.to(tl.int64)[:, None] * Tq + tokens[None, :], mask=inside, other=0.0), 1)
    tl.store(scores + query.to(tl.int64) * K + columns, total, mask=columns < K)


@launched_kernel
@triton.jit(do_not_specialize=["Tq", "K"])
def _gradient_kernel(
    dscores,  # fp32 [B, K]
    rows,  # what is summed: documents [Td, D] for dqueries, queries [Tq, D] for ddocuments
    owners,  # int32 [Tq]
    entries,  # int32 index [K, Tq] for dqueries; int64 [K Tq], its entries in order of their rows, for ddocuments
    bounds,  # int64 [Td + 1], where each document row's entries begin, or unused
    gradient,  # [N, D]
    Tq,
    K,
    stride,
    OF_DOCUMENTS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One row of a gradient, BLOCK_E of the terms of its sum at a time."""
    number = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    if OF_DOCUMENTS:
        first, end = tl.load(bounds + number), tl.load(bounds + number + 1)
    else:
        first, end = number * 0, number * 0 + K
    total = tl.zeros((BLOCK_D,), tl.float32)
    for position in range(first, end, BLOCK_E):
        positions = position + tl.arange(0, BLOCK_E)
        inside = positions < end
        if OF_DOCUMENTS:
            entry = tl.load(entries + positions, mask=inside, other=0)
            source, column = entry % Tq, entry // Tq
            owner = tl.load(owners + source, mask=inside, other=0)
        else:
            source = tl.load(entries + positions * Tq + number, mask=inside, other=-1).to(tl.int64)
            column, owner = positions, tl.load(owners + number)
            inside = source >= 0
        weight = tl.load(dscores + owner.to(tl.int64) * K + column, mask=inside, other=0.0)
        tile = _load_tile(rows, source, stride, inside, columns, D)
        total += tl.sum(tl.where(inside[:, None], weight[:, None] * tile.to(tl.float32), 0.0), 0)
    tl.store(gradient + number * D + columns, total, mask=columns < D)


# ---- launches --------------------------------------------------------------------------------------------------------


def _tile(columns: int, element_bytes: int) -> dict[str, int]:
    """Vectors of up to 128 columns are one part. fp32 products do not use tensor cores: their operands are in
    registers, so parts are small."""
    if element_bytes == 4:
        return {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_D": 16, "num_warps": 8}
    block_d = max(16, next_power_of_2(columns)) if columns <= 128 else 64
    return {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_D": block_d, "num_warps": 4}


def _gradient_tile(columns: int) -> dict[str, int]:
    block_d = min(128, max(16, next_power_of_2(columns)))
    return {"BLOCK_D": block_d, "BLOCK_E": 16, "num_warps": 2}


def maxsim_forward_triton(
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
    queries, documents = as_rows(queries), as_rows(documents)
    tokens, count, number = len(queries), len(query_starts), len(document_starts)
    per_query = number // max(1, count) if pairs else number
    scores = torch.zeros((count, per_query), dtype=torch.float32, device=queries.device)
    index = torch.full((per_query, tokens) if keep else (0,), -1, dtype=torch.int32, device=queries.device)
    if scores.numel() == 0 or tokens == 0:
        return scores, index
    best = torch.empty((per_query, tokens), dtype=torch.float32, device=queries.device)
    tile = _tile(queries.shape[1], queries.element_size())
    tiles = 1 if pairs else cdiv(tokens, tile["BLOCK_M"])
    with on_device(queries):
        _best_kernel[(number * tiles,)](
            queries,
            documents,
            owners,
            query_starts,
            query_ends,
            document_starts,
            document_ends,
            owners if document_mask is None else document_mask.view(torch.uint8),
            best,
            index,
            tokens,
            len(documents),
            per_query,
            tiles,
            queries.stride(0),
            documents.stride(0),
            PAIRS=pairs,
            MASKED=document_mask is not None,
            KEEP=keep,
            PRECISION="ieee" if queries.dtype == torch.float32 else "tf32",
            D=queries.shape[1],
            **tile,
        )
        _sum_kernel[(count * cdiv(per_query, _SUMMED),)](
            best, query_starts, query_ends, scores, tokens, per_query, BLOCK_K=_SUMMED, BLOCK_T=32, num_warps=4
        )
    return scores, index


_SUMMED = 16  # documents that a program of _sum_kernel takes


def maxsim_backward_triton(
    dscores: Tensor,
    queries: Tensor,
    documents: Tensor,
    owners: Tensor,
    index: Tensor,
    want_dqueries: bool,
    want_ddocuments: bool,
) -> tuple[Tensor, Tensor]:
    queries, documents, dscores = as_rows(queries), as_rows(documents), dscores.contiguous()
    dqueries, ddocuments = empty_output(queries), empty_output(documents)
    if want_dqueries:
        dqueries = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        _sum_rows(dqueries, dscores, documents, owners, index, index, None)
    if want_ddocuments:
        ddocuments = torch.empty(documents.shape, dtype=documents.dtype, device=documents.device)
        ordered, entries = index.flatten().sort(stable=True)
        rows = torch.arange(len(documents) + 1, dtype=index.dtype, device=index.device)
        _sum_rows(ddocuments, dscores, queries, owners, index, entries, torch.searchsorted(ordered, rows))
    return dqueries, ddocuments


def _sum_rows(
    gradient: Tensor,
    dscores: Tensor,
    rows: Tensor,
    owners: Tensor,
    index: Tensor,
    entries: Tensor,
    bounds: Tensor | None,
) -> None:
    if gradient.numel() == 0 or index.numel() == 0:
        gradient.zero_()
        return
    columns = gradient.shape[1]
    tile = _gradient_tile(columns)
    with on_device(gradient):
        _gradient_kernel[(len(gradient), cdiv(columns, tile["BLOCK_D"]))](
            dscores,
            rows,
            owners,
            entries,
            index if bounds is None else bounds,
            gradient,
            index.shape[1],
            index.shape[0],
            rows.stride(0),
            OF_DOCUMENTS=bounds is not None,
            D=columns,
            **tile,
        )


def compile_signatures(columns: int, element: str) -> list[dict[str, object]]:
    """The kernels as they are compiled for vectors of ``columns`` elements of Triton type ``element``."""
    e, i, f = f"*{element}", "*i32", "*fp32"
    tile = _tile(columns, 4 if element == "fp32" else 2)
    spans = dict.fromkeys(("query_starts", "query_ends"), i)
    forward = {"queries": e, "documents": e, "owners": i, **spans, "document_starts": i, "document_ends": i}
    forward |= {"document_mask": "*u8", "best": f, "index": i}
    forward |= dict.fromkeys(("Tq", "Td", "K", "tiles", "query_stride", "document_stride"), "i32")
    precision = "ieee" if element == "fp32" else "tf32"
    constants = {"MASKED": True, "KEEP": True, "PRECISION": precision, "D": columns}
    calls = [ahead_of_time(_best_kernel, forward, tile, PAIRS=pairs, **constants) for pairs in (False, True)]
    sums = {"best": f, **spans, "scores": f, "Tq": "i32", "K": "i32"}
    calls.append(ahead_of_time(_sum_kernel, sums, {"BLOCK_K": _SUMMED, "BLOCK_T": 32}))
    tile = _gradient_tile(columns)
    for of_documents in (False, True):
        pointers = {"dscores": f, "rows": e, "owners": i, "entries": "*i64" if of_documents else i, "bounds": "*i64"}
        signature = {**pointers, "gradient": e, **dict.fromkeys(("Tq", "K", "stride"), "i32")}
        calls.append(ahead_of_time(_gradient_kernel, signature, tile, OF_DOCUMENTS=of_documents, D=columns))
    return calls
