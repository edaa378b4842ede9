"""Plans of batches, buckets of shapes, and the cache of CUDA graphs: the parts that need no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from fasttfm import _native
from fasttfm.inference.batches import (
    Bucket,
    Packed,
    bucket_for,
    buffer_size,
    checked_ids,
    cut,
    pack,
    plan,
    sort_ids,
    split_buffer,
    write_bucket,
)
from fasttfm.inference.late_interaction import LateInteraction
from fasttfm.inference.network import Inputs, Network, Output
from fasttfm.inference.settings import EmbedSettings


@pytest.mark.parametrize(("max_tokens", "max_batch"), [(64, 1000), (1000, 3), (10, 1000), (1 << 20, 1 << 20)])
def test_a_plan_keeps_to_its_budgets(max_tokens: int, max_batch: int) -> None:
    lengths = np.random.default_rng(1).integers(0, 60, 500).tolist()
    groups = plan(lengths, max_tokens, max_batch)
    assert sorted(index for group in groups for index in group) == [i for i, length in enumerate(lengths) if length]
    for group in groups:
        tokens = [lengths[index] for index in group]
        assert len(group) == 1 or (sum(tokens) <= max_tokens and len(group) <= max_batch)
        assert tokens == sorted(tokens, reverse=True)
        assert len(group) * max(tokens) <= max(2 * max_tokens, max(tokens))


def test_groups_have_about_the_same_number_of_tokens() -> None:
    """If max_tokens leaves room for one more sequence than a group's share, there are no more groups than it requires.
    A group has between its share of the rest and one sequence more, so the share of the rest decreases by at most that
    sequence divided by the number of groups that follow."""
    generator = np.random.default_rng(2)
    for _ in range(300):
        lengths = np.sort(generator.integers(1, generator.integers(2, 100), generator.integers(100, 1000)))[::-1]
        longest, total = lengths[0].item(), lengths.sum().item()
        max_tokens = generator.integers(longest, total).item()
        required = -(-total // max_tokens)
        groups = cut(np.cumsum([0, *lengths]).astype(np.int32), max_tokens, 1000)
        padded = any((last - first + 1) * lengths[first] > 2 * max_tokens for first, last in groups)
        if padded or total // required + longest > max_tokens:
            continue
        tokens = [lengths[first:last].sum().item() for first, last in groups]
        assert len(tokens) == required
        assert max(tokens) - min(tokens) <= longest * (1 + sum(1 / left for left in range(1, required)))


def greedy(lengths: list[int], max_tokens: int, max_batch: int) -> list[tuple[int, int]]:
    """The groups of sorted sequences, one sequence after the other."""
    starts, tokens, rest = [0], 0, sum(lengths)
    for index, length in enumerate(lengths):
        size, longest = index - starts[-1], lengths[starts[-1]]
        most = min(max_tokens, rest // -(-rest // max_tokens) + longest)
        if size and (size >= max_batch or tokens + length > most or (size + 1) * longest > 2 * max_tokens):
            starts.append(index)
            rest -= tokens
            tokens = 0
        tokens += length
    return list(zip(starts, [*starts[1:], len(lengths)], strict=True))


def test_groups_are_as_large_as_the_budgets_allow() -> None:
    """In their order, without gaps and empty groups; every group but a single longer sequence is within its limits."""
    generator = np.random.default_rng(3)
    for _ in range(300):
        drawn = generator.integers(1, generator.integers(2, 100), generator.integers(1, 60))
        lengths = sorted(drawn.tolist(), reverse=True)
        max_tokens, max_batch = generator.integers(1, 600).item(), generator.integers(1, 40).item()
        boundaries = np.cumsum([0, *lengths]).astype(np.int32)
        groups = cut(boundaries, max_tokens, max_batch)
        for first, last in groups:
            assert last == first + 1 or sum(lengths[first:last]) <= max_tokens
            assert 0 < last - first <= max_batch
        assert [first for first, _ in groups] == [0, *(last for _, last in groups[:-1])]
        assert groups[-1][1] == len(lengths)
        if len(groups) > 1:
            assert groups == greedy(lengths, max_tokens, max_batch)


def test_a_plan_of_no_sequences() -> None:
    assert plan([], 10, 10) == plan([0, 0], 10, 10) == []


# ---- the native core against Python ----------------------------------------------------------------------------------

needs_core = pytest.mark.skipif(_native.missing() is not None, reason="needs the native core")
TYPES = ("list", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "strided", "reversed", "unaligned")


def as_type(ids: np.ndarray, kind: str) -> Any:
    """The same ids as a list or as an array of some type and layout."""
    if kind == "list":
        return ids.tolist()
    if kind == "strided":
        return np.repeat(ids, 3)[::3]
    if kind == "reversed":
        return ids[::-1].copy()[::-1]
    if kind == "unaligned":
        return np.frombuffer(b"x" + ids.tobytes(), np.int64, offset=1) if len(ids) else ids
    return ids.astype(kind)


@needs_core
def test_the_core_sorts_ids_as_python_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists and arrays of every type, with sequences of the same length and without tokens."""
    generator = np.random.default_rng(4)
    for count in (0, 1, 2, 7, 100):
        drawn = [generator.integers(0, 128, generator.integers(0, 20)) for _ in range(count)]
        given = [as_type(ids, generator.choice(TYPES)) for ids in drawn]
        found = sort_ids(given)
        assert checked_ids(tuple(given), 19, 128) is not None
        with monkeypatch.context() as without:
            without.setattr(_native, "sequences", None)
            expected = sort_ids(given)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == theirs.dtype
            assert np.array_equal(ours, theirs)
        assert all(map(np.array_equal, found.unsorted(count), drawn))
        for first, last in cut(found.cu_seqlens, 64, 5):
            own = pack([drawn[index] for index in found.order[first:last]])
            part = found.part(first, last)
            assert part.max_seqlen == own.max_seqlen
            assert np.array_equal(part.ids, own.ids)
            assert np.array_equal(part.cu_seqlens, own.cu_seqlens)


@needs_core
@pytest.mark.parametrize(
    "given",
    [
        np.array([1, 5]),
        np.array([-1, 2]),
        np.array([3, -1], np.int8),
        np.array([2**64 - 1], np.uint64),
        np.array([1, 2, 3, 4]),
        np.array([1.0]),
        np.array([]),
        np.array([True]),
        np.array([[1]]),
        np.array(1),
        np.array([1], np.dtype(np.int64).newbyteorder()),
        np.ma.masked_array([1, 2], [False, True]),
        [1, 5],
        [-1],
        [2**70],
        [1, 2, 3, 4],
        [1, 2.0],
        [True, 1],
        [np.int64(1)],
        [[1]],
        (1, 2),
        "text",
        None,
        torch.tensor([1]),
    ],
    ids=str,
)
def test_the_core_leaves_other_inputs_to_python(given: Any) -> None:
    """Ids from 0 to 4, up to three of them."""
    for others in ([], [[1, 2]], [np.array([4, 0, 3])]):
        assert checked_ids(others, 3, 5) is not None
        assert checked_ids([*others, given], 3, 5) is None
        assert checked_ids([given, *others], 3, 5) is None
    assert checked_ids(iter([[1]]), 3, 5) is None  # type: ignore[arg-type]


@needs_core
@pytest.mark.parametrize("segments", [False, True])
def test_the_core_writes_buckets_as_python_does(segments: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(5)
    for kind in ("i4", "i8", "u2", "strided"):
        for _ in range(20):
            chosen = [generator.integers(0, 300, generator.integers(1, 100)) for _ in range(generator.integers(1, 20))]
            batch = pack(chosen, chosen[::-1] if segments else None)
            batch = batch._replace(ids=as_type(batch.ids, kind))
            bucket = bucket_for(batch.tokens, batch.sequences, batch.max_seqlen, max_length=128)
            ours, theirs = (np.full(buffer_size(bucket, segments) + 8, -7, np.int32) for _ in range(2))
            write_bucket(ours, batch, bucket, padding=3)
            with monkeypatch.context() as without:
                without.setattr(_native, "write_bucket", None)
                write_bucket(theirs, batch, bucket, padding=3)
            size = buffer_size(bucket, segments)
            assert np.array_equal(ours[-8:], np.full(8, -7))
            for mine, expected in zip(
                split_buffer(ours[:size], bucket, segments), split_buffer(theirs[:size], bucket, segments), strict=True
            ):
                assert (mine is None and expected is None) or np.array_equal(mine, expected)


@needs_core
def test_the_core_writes_nothing_outside_of_a_buffer() -> None:
    batch, buffer = pack([[1, 2], [3]]), np.zeros(64, np.int32)
    write_bucket(buffer, batch, Bucket(16, 4, 64), 0)
    wrong: list[tuple[np.ndarray, Packed, Bucket]] = [
        (buffer[:36], batch, Bucket(16, 4, 64)),
        (buffer, batch, Bucket(2, 4, 64)),
        (buffer, batch, Bucket(16, 1, 64)),
        (buffer, batch, Bucket(-16, 4, 64)),
        (buffer, batch._replace(segments=np.zeros(17, np.int64)), Bucket(8, 4, 64)),
        (buffer, batch._replace(ids=np.zeros(3)), Bucket(16, 4, 64)),
        (buffer, batch._replace(cu_seqlens=np.zeros(0, np.int32)), Bucket(16, 4, 64)),
    ]
    for each in wrong:
        with pytest.raises(ValueError, match="write_bucket: expected"):
            write_bucket(*each, 0)
    readonly = np.zeros(64, np.int32)
    readonly.flags.writeable = False
    for other in (readonly, np.zeros(64, np.int64), np.zeros(128, np.int32)[::2]):
        with pytest.raises((TypeError, ValueError)):
            write_bucket(other, batch, Bucket(16, 4, 64), 0)


# ---- buckets ---------------------------------------------------------------------------------------------------------


def test_a_batch_fits_its_bucket() -> None:
    """Including the sequences that its fillers need, with little excess."""
    generator = np.random.default_rng(2)
    found = set()
    for _ in range(2000):
        lengths = generator.integers(1, generator.integers(2, 129), generator.integers(1, 40)).tolist()
        tokens, sequences, longest = sum(lengths), len(lengths), max(lengths)
        bucket = bucket_for(tokens, sequences, longest, max_length=128)
        assert bucket.tokens >= tokens
        assert 128 >= bucket.max_seqlen >= longest
        assert bucket.sequences >= sequences + -(-(bucket.tokens - tokens) // bucket.max_seqlen)
        assert bucket.tokens - tokens < max(16, tokens / 8)
        assert bucket.tokens % 16 == 0
        found.add(bucket)
    assert len(found) < 160  # of 2000 shapes
    assert bucket_for(32, 1, 32, max_length=512) == Bucket(32, 1, 64)
    assert bucket_for(300, 1, 300, max_length=300).max_seqlen == 300


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("pooling", ["mean", "first", "last", "max,weighted"])
def test_a_bucket_changes_no_result(
    bert: Any, sentences: Sequence[Sequence[int]], pooling: str, segments: bool
) -> None:
    chosen = sentences[3:9]
    kinds = [[index % 2 for index in range(len(each))] for each in chosen] if segments else None
    batch = pack(chosen, kinds)
    settings = EmbedSettings(pooling=pooling, late_interaction=LateInteraction())
    network = Network(bert, settings, torch.device("cpu"), torch.float32, 0)
    bucket = bucket_for(batch.tokens, batch.sequences, batch.max_seqlen, max_length=128)
    assert (bucket.tokens, bucket.sequences) != (batch.tokens, batch.sequences)
    buffer = np.full(buffer_size(bucket, segments), -1, np.int32)
    write_bucket(buffer, batch, bucket, padding=0)
    inputs = Inputs(*(split_buffer(torch.from_numpy(buffer), bucket, segments)), bucket.max_seqlen)
    exact = Inputs.of(batch, torch.device("cpu"))
    for output in filter(network.is_captured, Output):
        if output is Output.SPANS:  # of another head: tests/inference/test_spans.py
            continue
        rows = batch.sequences if network.is_per_sequence(output) else batch.tokens
        found, expected = network.run(output, inputs)[:rows], network.run(output, exact)
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)
        assert bool(network.run(output, inputs).isfinite().all())


def test_buckets_have_little_padding() -> None:
    """An eighth of the tokens at most, above 4,096 tokens a 32nd."""
    for tokens in range(128, 16385, 7):
        bucket = bucket_for(tokens, 1, tokens, tokens)
        assert 0 <= bucket.tokens - tokens < tokens / (32 if tokens > 4096 else 8)
    assert len({bucket_for(tokens, 1, 1, 1).tokens for tokens in range(4097, 16385)}) == 64
