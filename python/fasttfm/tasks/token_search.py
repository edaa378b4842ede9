"""Search over vectors of tokens: the documents with the largest ``ops.maxsim`` scores (ColBERT), read a block at a
time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from fasttfm import ops
from fasttfm.data.lines import data_error
from fasttfm.tasks.search import Match, keep_best
from fasttfm.tasks.vector_files import VectorFile
from fasttfm.train.progress import tracked

_BLOCK_TOKENS = 1 << 16


def search_tokens(
    vectors: VectorFile,
    queries: Sequence[np.ndarray],
    count: int = 10,
    *,
    device: torch.device | str = "cpu",
    progress: bool = False,
) -> list[list[Match]]:
    """The ``count`` documents with the largest scores for each query, the largest first; ties are ordered as in the
    file. Documents without tokens are not found.

    Args:
        vectors: A file with ``offsets``, of which one block is in memory at a time.
        queries: The vectors [tokens, width] of each query's tokens.
        device: The device that computes the scores.
        progress: Whether to show the progress on stderr.
    """
    offsets = vectors.offsets
    if offsets is None:
        raise data_error(vectors.path, "vectors of tokens, with the array 'offsets'", "vectors of texts")
    width = queries[0].shape[1] if queries else 0
    if width != vectors.restored_width:
        raise data_error(vectors.path, f"vectors of the queries' width {width}", f"{vectors.restored_width}")
    packed = torch.as_tensor(np.concatenate(queries), dtype=torch.float32, device=device)
    bounds = torch.as_tensor(np.cumsum([0, *map(len, queries)]), dtype=torch.int32, device=device)
    best: list[list[Match]] = [[] for _ in queries]
    blocks = _blocks(offsets)
    if progress:
        blocks = tracked(blocks, "blocks", total=None)
    for first, last in blocks:
        rows = torch.as_tensor(vectors.rows(offsets[first], offsets[last]), dtype=torch.float32, device=device)
        starts = torch.as_tensor(offsets[first : last + 1] - offsets[first], dtype=torch.int32, device=device)
        scores = ops.maxsim(packed, rows, query_cu_seqlens=bounds, document_cu_seqlens=starts)
        values, places = scores.topk(min(count, last - first), dim=1)
        for query_matches, row, at in zip(best, values.tolist(), places.tolist(), strict=True):
            matches = (Match(first + n, score, None) for n, score in zip(at, row, strict=True) if score > -np.inf)
            keep_best(query_matches, matches, count)
    return best


def _blocks(offsets: np.ndarray) -> Iterator[tuple[int, int]]:
    """The first document of each block and the one after its last; a longer document is a block by itself."""
    first, count = 0, len(offsets) - 1
    while first < count:
        last = int(np.searchsorted(offsets, offsets[first] + _BLOCK_TOKENS, "right")) - 1
        last = min(count, max(first + 1, last))
        yield first, last
        first = last
