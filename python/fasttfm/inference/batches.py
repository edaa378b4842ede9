"""Which sequences are computed together, and the shapes that CUDA graphs are captured for."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

Item = TypeVar("Item")
Prepared = TypeVar("Prepared")

_TOKENS_MULTIPLE = 16  # the token counts of buckets are multiples of it
_STEPS_PER_DOUBLING = 8  # token counts of buckets between one power of two and the next
_FINE_FROM = 4096  # above it there are _FINE_STEPS: there padding costs more time than another graph
_FINE_STEPS = 32
_MIN_SEQLEN = 64  # the smallest max_seqlen of a bucket
_MAX_PADDED = 2  # padded to its longest sequence, a batch has at most this many times max_tokens


def plan(lengths: Sequence[int], max_tokens: int, max_batch: int) -> list[list[int]]:
    """Groups the indices of sequences, longest first, so that sequences of similar length are computed together.

    A group has at most ``max_tokens`` tokens and ``max_batch`` sequences; a longer sequence is a group by itself.
    Groups have about the same number of tokens: a GPU computes a small last one less efficiently. Sequences without
    tokens are in no group.
    """
    order = sorted(filter(lengths.__getitem__, range(len(lengths))), key=lengths.__getitem__, reverse=True)
    if not order:
        return []
    total, longest = sum(lengths), lengths[order[0]]
    if total <= max_tokens and len(order) <= max_batch and len(order) * longest <= _MAX_PADDED * max_tokens:
        return [order]
    # As many groups as max_tokens requires are enough, because each has more tokens than its share of all.
    most = min(max_tokens, total // -(-total // max_tokens) + longest)
    groups: list[list[int]] = []
    tokens = 0
    for index in order:
        length, size = lengths[index], len(groups[-1]) if groups else max_batch
        if size >= max_batch or tokens + length > most or (size + 1) * longest > _MAX_PADDED * max_tokens:
            groups.append([])
            tokens, longest = 0, length
        groups[-1].append(index)
        tokens += length
    return groups


class Packed(NamedTuple):
    """Sequences one after the other, on the host."""

    ids: np.ndarray  # [T], of some integer type
    segments: np.ndarray | None  # [T]
    cu_seqlens: np.ndarray  # int32 [sequences + 1]
    max_seqlen: int

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def sequences(self) -> int:
        return len(self.cu_seqlens) - 1


def pack(ids: Sequence[Sequence[int]], segments: Sequence[Sequence[int]] | None = None) -> Packed:
    """Concatenates the sequences to one batch."""
    lengths = list(map(len, ids))
    total = sum(lengths)
    return Packed(
        _concatenate(ids, total),
        None if segments is None else _concatenate(segments, total),
        np.fromiter(itertools.accumulate(lengths, initial=0), np.int32, len(lengths) + 1),
        max(lengths, default=0),
    )


def _concatenate(lists: Sequence[Sequence[int]], total: int) -> np.ndarray:
    if isinstance(lists[0], np.ndarray):
        return lists[0] if len(lists) == 1 else np.concatenate(lists)
    return np.fromiter(itertools.chain.from_iterable(lists), np.int32, total)


def prefetch(items: Iterable[Item], prepare: Callable[[Item], Prepared]) -> Iterator[Prepared]:
    """Yields ``prepare(item)`` for each of ``items``; a thread prepares the next item while the caller uses this
    one."""
    with ThreadPoolExecutor(1, thread_name_prefix="fasttfm-batches") as pool:
        following: Future[Prepared] | None = None
        for item in items:
            ready, following = following, pool.submit(prepare, item)
            if ready is not None:
                yield ready.result()
        if following is not None:
            yield following.result()


# ---- shapes of graphs ------------------------------------------------------------------------------------------------


class Bucket(NamedTuple):
    """The shape that batches are padded to. A batch fits if it does not exceed any of these numbers."""

    tokens: int
    sequences: int
    max_seqlen: int


@functools.lru_cache(maxsize=4096)
def bucket_for(tokens: int, sequences: int, max_seqlen: int, max_length: int) -> Bucket:
    """The smallest bucket for a batch; ``max_length`` is the maximum number of tokens that the model reads.

    Token counts increase by eighths of a power of two, above 4,096 by 32nds, so that at most an eighth or a 32nd of a
    large batch is padding. The number of sequences and ``max_seqlen`` increase by factors of 4 and 2: if they are
    larger than needed, attention only launches blocks that return at once.
    """
    length = max(max_seqlen, min(max_length, max(_MIN_SEQLEN, next_power_of_two(max_seqlen))))
    filled = -(-tokens // (step := _step(tokens))) * step
    fillers = -(-(filled - tokens) // length)
    count = 1
    while count < sequences + fillers:
        count *= 4
    return Bucket(filled, count, length)


def _step(tokens: int) -> int:
    steps = _FINE_STEPS if tokens > _FINE_FROM else _STEPS_PER_DOUBLING
    return max(_TOKENS_MULTIPLE, next_power_of_two(tokens) // 2 // steps)


def next_power_of_two(value: int) -> int:
    """The smallest power of two that is at least ``value``."""
    return 1 << max(0, value - 1).bit_length()


def write_bucket(buffer: np.ndarray, batch: Packed, bucket: Bucket, padding: int) -> None:
    """Writes the batch, padded to the bucket, into an int32 array that ``split_buffer`` splits.

    Padding tokens form sequences of their own at the end, so that the sequences of the batch do not change. Empty
    sequences follow them.
    """
    ids, segments, boundaries = split_buffer(buffer, bucket, batch.segments is not None)
    tokens, known = len(batch.ids), len(batch.cu_seqlens)
    ids[:tokens] = batch.ids
    if tokens < bucket.tokens:
        ids[tokens:] = padding
    if segments is not None:
        segments[:tokens] = batch.segments
        segments[tokens:] = 0
    boundaries[:known] = batch.cu_seqlens
    if known < len(boundaries):
        more = np.arange(1, len(boundaries) - known + 1, dtype=np.int64) * bucket.max_seqlen + tokens
        boundaries[known:] = np.minimum(more, bucket.tokens)


def buffer_size(bucket: Bucket, segments: bool) -> int:
    """The length of the array that ``write_bucket`` fills."""
    return _first_boundary(bucket, segments) + bucket.sequences + 1


def split_buffer(buffer: Any, bucket: Bucket, segments: bool) -> tuple[Any, Any, Any]:
    """Views of an int32 array or tensor: ids (int64, as embedding's kernels read them), segments (int64) or None, and
    boundaries (int32)."""
    wide = np.int64 if isinstance(buffer, np.ndarray) else torch.int64
    end, first = 2 * bucket.tokens, _first_boundary(bucket, segments)
    kinds = buffer[end : 2 * end].view(wide) if segments else None
    return buffer[:end].view(wide), kinds, buffer[first : first + bucket.sequences + 1]


def _first_boundary(bucket: Bucket, segments: bool) -> int:
    """The index of the first boundary, a multiple of 16 bytes."""
    return -(-2 * bucket.tokens * (1 + segments) // 4) * 4
