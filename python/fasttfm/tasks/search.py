"""Search over vectors: the nearest ones by cosine similarity, read a block at a time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fasttfm.data.lines import data_error
from fasttfm.tasks.vector_files import VectorFile
from fasttfm.train.progress import tracked

_BLOCK_BYTES = 1 << 26  # the size of a block of fp32 vectors


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
    wanted = functional.normalize(torch.as_tensor(queries, dtype=torch.float32, device=device), dim=-1)
    best: list[list[Match]] = [[] for _ in range(len(wanted))]
    rows = max(1, _BLOCK_BYTES // (4 * max(1, wanted.shape[1])))
    first = 0
    blocks = vectors.blocks(rows)
    if progress:
        blocks = tracked(blocks, "blocks", total=None if vectors.count is None else -(-vectors.count // rows))
    for block, texts in blocks:
        if block.shape[1] != wanted.shape[1]:
            got = f"{block.shape[1]}; --model, --layers and --pooling must be those of the file"
            raise data_error(vectors.path, f"vectors of the queries' width {wanted.shape[1]}", got)
        scores = wanted @ functional.normalize(torch.as_tensor(block, device=device, dtype=torch.float32), dim=-1).T
        for found, row in zip(best, _largest(scores, count), strict=True):
            found += [Match(first + at, score, None if texts is None else texts[at]) for at, score in row]
            found.sort(key=lambda match: (-match.score, match.row))
            del found[count:]
        first += len(block)
    if not first:
        raise data_error(vectors.path, "vectors", "none")
    return best


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
    wanted = {match.row for row in matches for match in row}
    found: dict[int, str] = {}
    number = -1
    for number, text in enumerate(texts):
        if number in wanted:
            found[number] = text
    if number + 1 != total:
        raise data_error(source, f"{total:,} texts, one for each vector", f"{number + 1:,}")
    return [[match._replace(text=found[match.row]) for match in row] for row in matches]
