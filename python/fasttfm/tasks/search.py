"""Search over vectors: the nearest ones by cosine similarity, read a block at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fasttfm.data.lines import data_error
from fasttfm.inference.quantization import (
    PACKED,
    WITH_RANGES,
    as_unsigned,
    restore_vectors,
    scales_of,
    stored_width,
)
from fasttfm.tasks.vector_files import VectorFile
from fasttfm.train.progress import tracked

_BLOCK_BYTES = 1 << 26  # the size of a block of fp32 vectors
_RESCORED = 4  # how many times ``count`` vectors are scored exactly, the best ones by integers


class Match(NamedTuple):
    """A vector that was found."""

    row: int  # its index in the file
    score: float  # its cosine similarity with the query
    text: str | None  # None if the file has no texts


def search(
    vectors: VectorFile,
    queries: np.ndarray,
    count: int = 10,
    *,
    device: torch.device | str = "cpu",
    progress: bool = False,
) -> list[list[Match]]:
    """The ``count`` nearest vectors to each query, the nearest first; ties are ordered as in the file.

    Args:
        vectors: The file, of which one block is in memory at a time.
        queries: [queries, width].
        device: The device that computes the similarities.
        progress: Whether to show the progress on stderr.
    """
    if count < 1:
        raise ValueError(f"search: count: expected a number from 1 on, got {count}")
    normalized = functional.normalize(torch.as_tensor(queries, dtype=torch.float32, device=device), dim=-1)
    best: list[list[Match]] = [[] for _ in range(len(normalized))]
    rows = max(1, _BLOCK_BYTES // (4 * max(1, normalized.shape[1])))
    first = 0
    blocks = _blocks(vectors, normalized, rows, count)
    if progress:
        blocks = tracked(blocks, "blocks", total=None if vectors.count is None else -(-vectors.count // rows))
    for size, texts, nearest in blocks:
        for query_matches, row in zip(best, nearest, strict=True):
            matches = (Match(first + at, score, None if texts is None else texts[at]) for at, score in row)
            keep_best(query_matches, matches, count)
        first += size
    if not first:
        raise data_error(vectors.path, "vectors", "none")
    return best


def search_texts(vectors: VectorFile, queries: np.ndarray, count: int = 10, **options: Any) -> list[list[Match]]:
    """``search`` for texts by the nearest of their chunks: the rows of matches are the texts' numbers. Other arguments
    are those of ``search``."""
    chunks = vectors.chunks
    if chunks is None:
        raise data_error(vectors.path, "vectors of chunks, with the array 'chunks'", "none")
    texts, rows = min(count, len(chunks) - 1), count
    while True:
        text_matches = []
        for matches in search(vectors, queries, rows, **options):
            owners = np.searchsorted(chunks, [match.row for match in matches], "right") - 1
            best: dict[int, Match] = {}
            for owner, match in zip(owners.tolist(), matches, strict=True):
                best.setdefault(owner, match._replace(row=owner))
            text_matches.append(list(best.values())[:count])
        if rows >= int(chunks[-1]) or all(len(row) >= texts for row in text_matches):
            return text_matches
        rows *= 4  # some text has many of the nearest chunks


def keep_best(best: list[Match], matches: Iterable[Match], count: int) -> None:
    """Adds matches to ``best`` and leaves the ``count`` with the largest scores, the largest first; ties are ordered by
    their rows."""
    best += matches
    best.sort(key=lambda match: (-match.score, match.row))
    del best[count:]


class _Block(NamedTuple):
    """Vectors that were compared, and for each query the nearest of them: their rows and scores."""

    size: int
    texts: list[str] | None
    nearest: list[list[tuple[int, float]]]


def _blocks(vectors: VectorFile, queries: Tensor, rows: int, count: int) -> Iterator[_Block]:
    """Compares the file with normalized queries [Q, D], a block of ``rows`` vectors at a time. Vectors of bytes are
    compared as integers, and the best of them are scored by the fp32 queries."""
    width = queries.shape[1]
    if vectors.precision not in (*WITH_RANGES, *PACKED):
        for block, texts in vectors.blocks(rows):
            _check_width(vectors, block.shape[1], width)
            exact = functional.normalize(torch.as_tensor(block, device=queries.device, dtype=torch.float32), dim=-1)
            yield _Block(len(block), texts, _largest(queries @ exact.T, count))
        return
    _check_width(vectors, vectors.width or 0, width)
    compare = _of_signs(queries) if vectors.precision in PACKED else _of_integers(vectors, queries)
    first = 0
    for stored in vectors.stored(rows):
        rough = compare(stored, first)
        candidates = rough.topk(min(_RESCORED * count, len(stored)), dim=1).indices.sort(dim=1).values
        nearest = []
        for query, query_candidates in zip(queries, candidates, strict=True):
            restored = restore_vectors(stored[query_candidates.cpu().numpy()], vectors.precision, vectors.ranges)[
                :, :width
            ]
            exact = functional.normalize(torch.as_tensor(restored, dtype=torch.float32, device=query.device), dim=-1)
            (exact_best,) = _largest((exact @ query)[None], count)
            nearest.append([(query_candidates.tolist()[at], score) for at, score in exact_best])
        first += len(stored)
        yield _Block(len(stored), None, nearest)


def _check_width(vectors: VectorFile, query_width: int, width: int) -> None:
    expected = stored_width(vectors.precision, width)
    if query_width != expected:
        bytes_of = "" if expected == width else f", {expected} bytes of signs"
        got = f"{query_width}; --model, --layers and --pooling must be those of the file"
        raise data_error(vectors.path, f"vectors of the queries' width {width}{bytes_of}", got)


Compare = Callable[[np.ndarray, int], Tensor]  # of a block and the number of its first row: scores [Q, rows]


def _of_signs(queries: Tensor) -> Compare:
    """Minus the Hamming distance of the signs."""
    bits = np.packbits(queries.cpu().numpy() > 0, axis=1)

    def compare(stored: np.ndarray, first: int) -> Tensor:
        return -torch.from_numpy(_hamming(as_unsigned(stored), bits)).to(queries.device)

    return compare


def _hamming(bytes_of: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """int32 [Q, rows]: how many bits differ, of uint8 [rows, n] and uint8 [Q, n]."""
    wide = np.uint64 if queries.shape[1] % 8 == 0 else np.uint8
    words = np.ascontiguousarray(bytes_of.view(wide).T)  # the sums run over its rows
    count = getattr(np, "bitwise_count", None)  # since numpy 2
    distances = np.empty((len(queries), len(bytes_of)), np.int32)
    for row, query in zip(distances, queries.view(wide), strict=True):
        different = words ^ query[:, None]
        if count is not None:
            count(different).sum(0, dtype=np.int32, out=row)
        else:
            ones = _ONES[different.view(np.uint8)].reshape(*different.shape, -1)
            ones.sum((0, 2), dtype=np.int32, out=row)
    return distances


_ONES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(1, dtype=np.uint8)


def _of_integers(vectors: VectorFile, queries: Tensor) -> Compare:
    """About the cosine: the product with int8 queries, which have the vectors' steps as factors, over the norms."""
    assert vectors.ranges is not None
    assert vectors.norms is not None
    device = queries.device
    offsets, steps = (torch.from_numpy(scale).to(device) for scale in scales_of(vectors.ranges))
    scaled = queries * steps
    scale = scaled.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 127
    rounded, constant = (scaled / scale).round().to(torch.int8), (queries @ offsets)[:, None]
    norms = torch.from_numpy(vectors.norms).to(device)

    def compare(stored: np.ndarray, first: int) -> Tensor:
        signed = stored if stored.dtype == np.int8 else (stored ^ 128).view(np.int8)
        block = torch.from_numpy(signed).to(device)
        # cuBLAS's int8 GEMM needs more rows than searches have queries
        is_cpu = device.type == "cpu"
        product = torch._int_mm(rounded, block.T).float() if is_cpu else rounded.float() @ block.float().T
        return (product * scale + constant) / norms[first : first + len(stored)].clamp(min=1e-12)

    return compare


def _largest(scores: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """The columns and values of the largest scores of each row."""
    values, columns = scores.topk(min(count, scores.shape[1]), dim=1)
    return [list(zip(*row, strict=True)) for row in zip(columns.tolist(), values.tolist(), strict=True)]


def with_texts(matches: list[list[Match]], texts: Iterable[str], total: int, source: str) -> list[list[Match]]:
    """Adds their texts to matches. Only these texts are kept in memory.

    Args:
        texts: The texts of all vectors, in their order.
        total: The number of vectors.
        source: The origin of the texts, for error messages.
    """
    rows = {match.row for row in matches for match in row}
    texts_by_row: dict[int, str] = {}
    number = -1
    for number, text in enumerate(texts):
        if number in rows:
            texts_by_row[number] = text
    if number + 1 != total:
        raise data_error(source, f"{total:,} texts, one for each vector", f"{number + 1:,}")
    return [[match._replace(text=texts_by_row[match.row]) for match in row] for row in matches]
