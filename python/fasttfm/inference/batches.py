"""Which sequences are computed together, and the shapes that CUDA graphs are captured for."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from fasttfm import _native

Item = TypeVar("Item")
Prepared = TypeVar("Prepared")

_TOKENS_MULTIPLE = 16  # the token counts of buckets are multiples of it
_STEPS_PER_DOUBLING = 8  # token counts of buckets between one power of two and the next
_FINE_FROM = 4096  # above it there are _FINE_STEPS: there padding costs more time than another graph
_FINE_STEPS = 32
_MIN_SEQLEN = 64  # the smallest max_seqlen of a bucket
_MAX_INT64 = 2**63 - 1
_MAX_PADDED = 2  # padded to its longest sequence, a batch has at most this many times max_tokens


def texts_of_array(inputs: Any) -> Any:
    """An array of texts as a list; other inputs as they are."""
    if isinstance(inputs, np.ndarray) and inputs.dtype.kind in "UO" and inputs.ndim == 1:
        return inputs.tolist()
    return inputs


def plan(lengths: Sequence[int], max_tokens: int, max_batch: int) -> list[list[int]]:
    """Groups the indices of sequences, longest first, so that sequences of similar length are computed together.

    A group has at most ``max_tokens`` tokens and ``max_batch`` sequences; a longer sequence is a group by itself.
    Groups have about the same number of tokens: a GPU computes a small last one less efficiently. Sequences without
    tokens are in no group.
    """
    order = _longest_first(lengths)
    ends = _boundaries([lengths[index] for index in order])
    return [order[first:last] for first, last in cut(ends, max_tokens, max_batch)]


def cut(boundaries: np.ndarray, max_tokens: int, max_batch: int) -> list[tuple[int, int]]:
    """The groups of ``plan`` for sequences that are sorted, as the first of each and the one after its last;
    ``boundaries`` are int32 [sequences + 1]."""
    count, total = len(boundaries) - 1, boundaries.item(-1)
    if not count:
        return []
    if is_one_batch(total, count, boundaries.item(1), max_tokens, max_batch):
        return [(0, count)]
    groups = []
    first = 0
    while first < count:
        begin = boundaries.item(first)
        longest, rest = boundaries.item(first + 1) - begin, total - begin
        # A group has at least its share of the rest, unless a limit stops it; so later groups are not much smaller.
        most = min(max_tokens, rest // -(-rest // max_tokens) + longest)
        last = int(boundaries.searchsorted(begin + most, "right")) - 1
        last = max(first + 1, min(last, first + max_batch, first + _MAX_PADDED * max_tokens // longest))
        groups.append((first, last))
        first = last
    return groups


def is_one_batch(tokens: int, sequences: int, longest: int, max_tokens: int, max_batch: int) -> bool:
    """Whether sequences are a single group, if they have tokens."""
    return 0 < tokens <= max_tokens and sequences <= max_batch and sequences * longest <= _MAX_PADDED * max_tokens


def _longest_first(lengths: Sequence[int]) -> list[int]:
    """The indices of sequences that have tokens; of those with the same length, in their order."""
    return sorted(filter(lengths.__getitem__, range(len(lengths))), key=lengths.__getitem__, reverse=True)


def _boundaries(lengths: Sequence[int]) -> np.ndarray:
    return np.fromiter(itertools.accumulate(lengths, initial=0), np.int32, len(lengths) + 1)


class Packed(NamedTuple):
    """Sequences one after the other, on the host."""

    ids: np.ndarray  # [T], of some integer type
    segments: np.ndarray | None  # [T]
    cu_seqlens: np.ndarray  # int32 [sequences + 1]
    max_seqlen: int
    adapters: np.ndarray | None = None  # int32 [T]: the index of each token's LoRA adapter, -1 for none

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def sequences(self) -> int:
        return len(self.cu_seqlens) - 1


def pack(ids: Sequence[Sequence[int]], segments: Sequence[Sequence[int]] | None = None) -> Packed:
    """Concatenates the sequences to one batch."""
    lengths = list(map(len, ids))
    return Packed(
        concatenate(ids),
        None if segments is None else concatenate(segments),
        _boundaries(lengths),
        max(lengths, default=0),
    )


def concatenate(lists: Sequence[Sequence[int]]) -> np.ndarray:
    """int64 [T]"""
    if any(isinstance(ids, np.ndarray) for ids in lists):
        return np.concatenate(lists, dtype=np.int64, casting="unsafe")  # arrays without elements may be of any type
    return np.fromiter(itertools.chain.from_iterable(lists), np.int64, sum(map(len, lists)))


class SortedIds(NamedTuple):
    """Sequences one after the other, longest first. Those without tokens are left out."""

    ids: np.ndarray  # int64 [T]
    cu_seqlens: np.ndarray  # int32 [sequences + 1]
    order: np.ndarray  # int64 [sequences]: the index of each among those that were given

    def part(self, first: int, last: int, segments: np.ndarray | None = None) -> Packed:
        """The batch of the sequences from ``first`` up to ``last``, without it; ``segments`` are its own."""
        ends = self.cu_seqlens
        if last - first == len(self.order):
            return Packed(self.ids, segments, ends, ends.item(1))
        begin, end = ends.item(first), ends.item(last)
        boundaries = ends[first : last + 1] - np.int32(begin)
        return Packed(self.ids[begin:end], segments, boundaries, ends.item(first + 1) - begin)

    def unsorted(self, count: int) -> list[np.ndarray]:
        """The ids of each of the ``count`` sequences that were given, in their order."""
        ids = [self.ids[:0]] * count
        ends = self.cu_seqlens.tolist()
        for number, index in enumerate(self.order.tolist()):
            ids[index] = self.ids[ends[number] : ends[number + 1]]
        return ids


def sort_ids(sequences: Sequence[Sequence[int]]) -> SortedIds:
    """Sorts and concatenates sequences, which are lists or arrays of ids."""
    checked = checked_ids(sequences)
    if checked is not None:
        return checked
    order = _longest_first(list(map(len, sequences)))
    ordered = [sequences[index] for index in order]
    ids = concatenate(ordered) if ordered else np.empty(0, np.int64)
    return SortedIds(ids, _boundaries(list(map(len, ordered))), np.array(order, np.int64))


def checked_ids(
    sequences: Sequence[Any], max_length: int = _MAX_INT64, vocabulary: int = _MAX_INT64
) -> SortedIds | None:
    """The same by the native core, if all sequences are lists of ``int`` or one-dimensional arrays of integers, have
    at most ``max_length`` ids, and these are less than ``vocabulary``; otherwise, and without the core, None."""
    read = None if _native.sequences is None else _native.sequences(sequences, max_length)
    arrays = None if read is None else read.sorted(vocabulary)
    return None if arrays is None else SortedIds(*arrays)


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
    if _native.write_bucket is not None:
        _native.write_bucket(buffer, batch.ids, batch.segments, batch.cu_seqlens, *bucket, padding)
        return
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
