"""Plans of batches, buckets of shapes, and the cache of CUDA graphs: the parts that need no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from fasttfm.inference.batches import Bucket, bucket_for, buffer_size, pack, plan, split_buffer, write_bucket
from fasttfm.inference.graphs import GraphCache
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


def test_groups_of_a_plan_have_about_the_same_size() -> None:
    """No more groups than the budget requires, and no small last one."""
    lengths = np.random.default_rng(1).integers(1, 60, 600).tolist()
    for max_tokens in (1000, 5000, sum(lengths) - 1):
        tokens = [sum(lengths[index] for index in group) for group in plan(lengths, max_tokens, 1000)]
        assert len(tokens) == -(-sum(lengths) // max_tokens)
        assert max(tokens) - min(tokens) <= len(tokens) * max(lengths)


def test_a_plan_of_no_sequences() -> None:
    assert plan([], 10, 10) == plan([0, 0], 10, 10) == []


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
    network = Network(bert, EmbedSettings(pooling=pooling), torch.device("cpu"), torch.float32, 0)
    bucket = bucket_for(batch.tokens, batch.sequences, batch.max_seqlen, max_length=128)
    assert (bucket.tokens, bucket.sequences) != (batch.tokens, batch.sequences)
    buffer = np.full(buffer_size(bucket, segments), -1, np.int32)
    write_bucket(buffer, batch, bucket, padding=0)
    inputs = Inputs(*(split_buffer(torch.from_numpy(buffer), bucket, segments)), bucket.max_seqlen)
    exact = Inputs.of(batch, torch.device("cpu"))
    for output in Output:
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


def test_a_graph_is_captured_when_its_shape_repeats() -> None:
    made: list[str] = []
    cache: GraphCache[str] = GraphCache(lambda key: made.append(key) or key.upper(), limit=2)  # type: ignore[func-returns-value]
    assert [cache.get("a"), cache.get("a"), cache.get("a")] == [None, "A", "A"]
    assert made == ["a"]
    assert [cache.get("b"), cache.get("b")] == [None, "B"]
    assert [cache.get("c") for _ in range(3)] == [None, None, None]  # looked up no more often than a
    assert cache.get("c") == "C"
    assert len(cache) == 2
    assert cache.get("b") == "B"
    assert (cache.counts.captured, cache.counts.evicted) == (3, 1)


def test_alternating_shapes_do_not_evict_each_other() -> None:
    """With more shapes than the limit, the existing graphs are kept and used."""
    cache: GraphCache[int] = GraphCache(lambda key: key, limit=8)
    for _ in range(1000):
        for key in range(10):
            cache.get(key)
    assert cache.counts.captured <= 20
    assert cache.counts.replayed > 7000
    assert GraphCache(lambda key: key, limit=0).get("a") is None
