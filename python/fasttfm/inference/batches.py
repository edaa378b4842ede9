"""Which sequences are computed together, and the shapes that CUDA graphs are captured for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np

Item = TypeVar("Item")
Prepared = TypeVar("Prepared")

_LEAST_TOKENS = 16  # token counts of buckets are multiples of it
_STEPS = 8  # of token counts between a power of two and the next one
_LEAST_LENGTH = 64  # the smallest bound of lengths
_WASTE = 2  # a padded batch has at most as many times the tokens of the budget


def plan(lengths: Sequence[int], max_tokens: int, max_batch: int) -> list[list[int]]:
    """Groups of the indices of sequences, longest first, so that sequences of similar length are computed together.

    A group has at most ``max_tokens`` tokens and ``max_batch`` sequences, and at least one. Sequences without tokens
    are in no group.
    """
    order = sorted((index for index, length in enumerate(lengths) if length), key=lambda index: -lengths[index])
    groups: list[list[int]] = []
    tokens = longest = 0
    for index in order:
        length, size = lengths[index], len(groups[-1]) if groups else max_batch
        if size >= max_batch or tokens + length > max_tokens or (size + 1) * longest > _WASTE * max_tokens:
            groups.append([])
            tokens, longest = 0, length
        groups[-1].append(index)
        tokens += length
    return groups


class Packed(NamedTuple):
    """Sequences one after the other, on the host."""

    ids: np.ndarray  # int32 [T]
    segments: np.ndarray | None  # int32 [T]
    cu_seqlens: np.ndarray  # int32 [sequences + 1]
    longest: int

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def sequences(self) -> int:
        return len(self.cu_seqlens) - 1


def pack(ids: Sequence[Sequence[int]], segments: Sequence[Sequence[int]] | None = None) -> Packed:
    """A batch of these sequences, in their order."""
    lengths = [len(each) for each in ids]
    total = sum(lengths)
    return Packed(
        _joined(ids, total),
        None if segments is None else _joined(segments, total),
        np.cumsum([0, *lengths], dtype=np.int32),
        max(lengths, default=0),
    )


def _joined(lists: Sequence[Sequence[int]], total: int) -> np.ndarray:
    if isinstance(lists[0], np.ndarray):
        return np.concatenate(lists).astype(np.int32)
    return np.fromiter(itertools.chain.from_iterable(lists), np.int32, total)


def one_ahead(items: Iterable[Item], prepare: Callable[[Item], Prepared]) -> Iterator[Prepared]:
    """``prepare(item)`` for each of ``items``, computed in a thread while the result before it is in use."""
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
    """The shape that a batch is filled up to. A batch fits if it has no more of each."""

    tokens: int
    sequences: int
    longest: int


def bucket_of(tokens: int, sequences: int, longest: int, most: int) -> Bucket:
    """The smallest bucket for a batch; ``most`` is the most tokens of a sequence of the model.

    Tokens go up in eighths of a power of two, so that at most an eighth of a large batch is filler. Sequences and their
    bound, for which attention only starts more blocks that have nothing to do, go up by factors of 4 and 2.
    """
    length = max(longest, min(most, max(_LEAST_LENGTH, power_of_two(longest))))
    filled = -(-tokens // (step := _step(tokens))) * step
    fillers = -(-(filled - tokens) // length)
    count = 1
    while count < sequences + fillers:
        count *= 4
    return Bucket(filled, count, length)


def _step(tokens: int) -> int:
    return max(_LEAST_TOKENS, power_of_two(tokens) // 2 // _STEPS)


def power_of_two(value: int) -> int:
    """The smallest one that is not below ``value``."""
    return 1 << max(0, value - 1).bit_length()


def fill(whole: np.ndarray, batch: Packed, bucket: Bucket, padding: int) -> None:
    """Writes the batch in the shape of the bucket into an array of int32, which ``parts`` divides: ids, segments if the
    batch has them, and boundaries.

    Fillers are sequences of their own after the batch's, so that no sequence of the batch changes, and empty sequences
    follow them.
    """
    ids, segments, boundaries = parts(whole, bucket, batch.segments is not None)
    ids[: batch.tokens] = batch.ids
    ids[batch.tokens :] = padding
    if segments is not None:
        segments[: batch.tokens] = batch.segments
        segments[batch.tokens :] = 0
    known = len(batch.cu_seqlens)
    boundaries[:known] = batch.cu_seqlens
    more = np.arange(1, len(boundaries) - known + 1, dtype=np.int64) * bucket.longest + batch.tokens
    boundaries[known:] = np.minimum(more, bucket.tokens)


def size_of(bucket: Bucket, segments: bool) -> int:
    """The numbers that ``fill`` writes."""
    return bucket.tokens * (1 + segments) + bucket.sequences + 1


def parts(whole: Any, bucket: Bucket, segments: bool) -> tuple[Any, Any, Any]:
    """Views of an array or a tensor as ``fill`` writes it: ids, segments or None, boundaries."""
    tokens = bucket.tokens
    end = tokens * (1 + segments)
    return whole[:tokens], whole[tokens:end] if segments else None, whole[end : end + bucket.sequences + 1]
