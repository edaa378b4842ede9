"""Search for the nearest of very many vectors by a graph of neighbours (usearch's HNSW) instead of comparing all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fasttfm import _extras
from fasttfm._atomic_files import atomic_write
from fasttfm.data.lines import data_error
from fasttfm.tasks.search import Match
from fasttfm.tasks.vector_files import VectorFile
from fasttfm.train.progress import tracked

LEAST = 100_000  # vectors: making an index takes much longer than comparing fewer
_BLOCK = 1 << 14
_CANDIDATES = 4  # times the number of matches


def why_exact(vectors: VectorFile) -> str | None:
    """Why a search does not use an index; None if it does."""
    if vectors.count is None:
        return f"{vectors.path} has text, and an index reads arrays"
    if vectors.count < LEAST:
        return f"an index is for {LEAST:,} vectors or more, and these are {vectors.count:,}"
    try:
        import usearch.index  # noqa: F401
    except ImportError:
        return str(_extras.missing("an index", "usearch", "search"))
    return None


def search_index(
    vectors: VectorFile, queries: np.ndarray, count: int, path: Path, *, progress: bool = False
) -> list[list[Match]]:
    """About the ``count`` nearest vectors to each query, as ``search`` finds them. Their scores are exact.

    Args:
        vectors: The file, which ``why_exact`` has nothing against.
        path: The file of the index; it is made if there is none.
    """
    width = vectors.restored_width
    if queries.shape[1] != width:
        raise data_error(vectors.path, f"vectors of the queries' width {queries.shape[1]}", f"{width}")
    index = _opened(vectors, path, width) if path.exists() else _made(vectors, path, width, progress)
    matches = []
    for query in queries.astype(np.float32):
        keys = np.sort(
            np.asarray(index.search(query, min(_CANDIDATES * count, vectors.count or 0)).keys).astype(np.int64)
        )
        rows = vectors.some(keys)
        norms = np.linalg.norm(rows, axis=1) * np.linalg.norm(query)
        scores = rows @ query / np.maximum(norms, np.finfo(np.float32).tiny)
        order = np.lexsort((keys, -scores))[:count]
        matches.append([Match(int(keys[at]), float(scores[at]), None) for at in order])
    return matches


def _opened(vectors: VectorFile, path: Path, width: int) -> Any:
    from usearch.index import Index

    try:
        index = Index.restore(str(path), view=True)
    except Exception as error:  # usearch raises errors of its core
        raise data_error(path, "an index of usearch", str(error)) from None
    if index is None or (len(index), index.ndim) != (vectors.count, width):
        got = "none" if index is None else f"{len(index):,} of {index.ndim}"
        raise data_error(path, f"an index of {vectors.path}: {vectors.count:,} vectors of {width} numbers", got)
    return index


def _made(vectors: VectorFile, path: Path, width: int, progress: bool) -> Any:
    from usearch.index import Index

    index, first = Index(ndim=width, metric="cos", dtype="f16"), 0
    blocks = vectors.blocks(_BLOCK)
    if progress:
        blocks = tracked(blocks, "blocks", total=-(-(vectors.count or 0) // _BLOCK))
    for block, _ in blocks:
        index.add(np.arange(first, first + len(block), dtype=np.uint64), block)
        first += len(block)
    with atomic_write(path) as partial:
        index.save(str(partial))
    return index
