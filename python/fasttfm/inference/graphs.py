"""CUDA graphs of a network: one for each bucket of shapes, captured when the bucket is used for the second time."""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from fasttfm.inference.batches import (
    Bucket,
    Packed,
    bucket_for,
    buffer_size,
    next_power_of_two,
    split_buffer,
    write_bucket,
)
from fasttfm.inference.network import Inputs, Network, Output

Value = TypeVar("Value")
_MIN_LOOKUPS = 2  # a key that is looked up this often gets a value
_DECAY_INTERVAL = 4096  # after this many lookups all counts are halved
_SMALL_RESULT = 2**18  # a result of up to this many bytes has memory of its own, which saves a kernel


@dataclass
class GraphCounts:
    """What a cache has done so far."""

    replayed: int = 0
    captured: int = 0
    evicted: int = 0


class GraphCache(Generic[Value]):
    """A bounded cache whose values are made when their key is looked up for the second time.

    A full cache evicts the least recently used value, but only for a key that was looked up more often in the recent
    past. Otherwise keys that take turns, more than fit, would evict each other on every lookup.
    """

    def __init__(self, make: Callable[[Any], Value], limit: int) -> None:
        self._make, self._limit = make, limit
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self._seen: Counter[Hashable] = Counter()
        self._lookups = 0
        self.counts = GraphCounts()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable) -> Value | None:
        """The value of a key; None if the key is not in the cache and not admitted yet."""
        self._count(key)
        value = self._values.get(key)
        if value is None:
            if not self._is_admitted(key):
                return None
            if len(self._values) >= self._limit:
                self._values.popitem(last=False)
                self.counts.evicted += 1
            value = self._values[key] = self._make(key)
            self.counts.captured += 1
        self._values.move_to_end(key)
        self.counts.replayed += 1
        return value

    def clear(self) -> None:
        self._values.clear()

    def _count(self, key: Hashable) -> None:
        self._lookups += 1
        if self._lookups % _DECAY_INTERVAL == 0:
            self._seen = Counter({each: count // 2 for each, count in self._seen.items() if count > 1})
        self._seen[key] += 1

    def _is_admitted(self, key: Hashable) -> bool:
        if self._limit < 1 or self._seen[key] < _MIN_LOOKUPS:
            return False
        return len(self._values) < self._limit or self._seen[key] > self._seen[next(iter(self._values))]


class _Key(NamedTuple):
    output: Output
    bucket: Bucket
    segments: bool


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    result: Tensor  # if it is not small, in memory that all graphs share: copy it before the next replay


class Graphs:
    """Runs batches of up to ``max_tokens`` tokens by CUDA graphs, on the current stream. All graphs read the same input
    buffer and share one memory pool, so they must be replayed in stream order.

    Args:
        limit: The maximum number of graphs that are kept.
        max_length: The maximum number of tokens in a sequence.
        padding: The id of padding tokens.
    """

    def __init__(self, network: Network, *, limit: int, max_tokens: int, max_length: int, padding: int) -> None:
        self._network, self._max_tokens, self._max_length, self._padding = network, max_tokens, max_length, padding
        self._cache: GraphCache[_Graph] = GraphCache(self._capture, limit)
        self._pool = torch.cuda.graph_pool_handle()
        room = bucket_for(max_tokens, max_tokens, 1, max_length)
        self._static = torch.zeros(buffer_size(room, True), dtype=torch.int32, device=network.device)
        self._results: dict[Output, Tensor] = {}

    @property
    def counts(self) -> GraphCounts:
        return self._cache.counts

    @torch.inference_mode()
    def run(self, output: Output, batch: Packed) -> Tensor | None:
        """The rows of the output, which the next call overwrites; None if the batch has to run without a graph."""
        if batch.tokens > self._max_tokens:
            return None
        key = _Key(output, self.bucket(batch), batch.segments is not None)
        try:
            found = self._cache.get(key)
        except RuntimeError as error:
            self._cache = GraphCache(self._capture, 0)  # a later capture would fail too
            warnings.warn(f"Session: runs without CUDA graphs: {error}", stacklevel=2)
            return None
        if found is None:
            return None
        host = torch.empty(buffer_size(key.bucket, key.segments), dtype=torch.int32, pin_memory=True)
        write_bucket(host.numpy(), batch, key.bucket, self._padding)
        self._static[: len(host)].copy_(host, non_blocking=True)
        found.graph.replay()
        count = batch.sequences if self._network.is_per_sequence(output) else batch.tokens
        return found.result[:count]

    def bucket(self, batch: Packed) -> Bucket:
        return bucket_for(batch.tokens, batch.sequences, batch.max_seqlen, self._max_length)

    def clear(self) -> None:
        self._cache.clear()

    def _capture(self, key: _Key) -> _Graph:
        """Captures a graph of the bucket, which reads the shared inputs."""
        bucket = key.bucket
        ids, segments, boundaries = split_buffer(self._static, bucket, key.segments)
        ids.zero_()
        if segments is not None:
            segments.zero_()
        ends = torch.arange(len(boundaries), device=boundaries.device) * bucket.max_seqlen
        boundaries.copy_(ends.clamp(max=bucket.tokens))
        inputs = Inputs(ids, segments, boundaries, bucket.max_seqlen)
        stream = torch.cuda.current_stream()
        warm = self._network.run(key.output, inputs)  # compiles, tunes and loads the kernels
        result = None if warm.nbytes <= _SMALL_RESULT else self._result(key.output, warm)
        del warm
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate memory and copy while this one captures.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            rows = self._network.run(key.output, inputs)
            if result is not None:
                result.copy_(rows)
        return _Graph(graph, rows if result is None else result)

    def _result(self, output: Output, like: Tensor) -> Tensor:
        """A slice, in the shape of ``like``, of the memory that the graphs of an output share for their results. If it
        is too small, larger memory is allocated; existing graphs keep the old one."""
        room = self._results.get(output)
        if room is None or len(room) < len(like):
            rows = next_power_of_two(len(like))
            room = self._results[output] = like.new_empty((rows, *like.shape[1:]))
        return room[: len(like)]
