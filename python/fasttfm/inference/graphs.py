"""CUDA graphs of a network, one for each bucket of shapes, captured when a bucket is seen again."""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from fasttfm.inference.batches import Bucket, Packed, bucket_of, fill, parts, power_of_two, size_of
from fasttfm.inference.network import Inputs, Network, Output

Value = TypeVar("Value")
_SEEN = 2  # calls of a bucket from which on it is worth a capture
_HALVED = 4096  # lookups after which what was counted so far counts half


@dataclass
class GraphCounts:
    """What a cache has done so far."""

    replayed: int = 0
    captured: int = 0
    evicted: int = 0


class GraphCache(Generic[Value]):
    """A bounded number of values by key, which are made when their key comes the second time.

    In a full cache the least recently used value makes room, but only for a key that was looked up more often lately:
    more keys in turn than fit do not replace each other over and over.
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
        """The value of a key; None where there is none yet."""
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
        if self._lookups % _HALVED == 0:
            self._seen = Counter({each: count // 2 for each, count in self._seen.items() if count > 1})
        self._seen[key] += 1

    def _is_admitted(self, key: Hashable) -> bool:
        if self._limit < 1 or self._seen[key] < _SEEN:
            return False
        return len(self._values) < self._limit or self._seen[key] > self._seen[next(iter(self._values))]


class _Key(NamedTuple):
    output: Output
    bucket: Bucket
    segments: bool


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    result: Tensor  # in the memory that all graphs share: to be copied before the next replay


class Graphs:
    """Runs batches of up to ``max_tokens`` tokens by graphs, on the current stream. All graphs read one buffer of
    inputs and share one memory pool: they are replayed one after the other, in the order of the stream.

    Args:
        limit: The most graphs that are kept.
        most: The most tokens of a sequence of the model.
        padding: The id of filler tokens.
    """

    def __init__(self, network: Network, *, limit: int, max_tokens: int, most: int, padding: int) -> None:
        self._network, self._max_tokens, self._most, self._padding = network, max_tokens, most, padding
        self._cache: GraphCache[_Graph] = GraphCache(self._captured, limit)
        self._pool = torch.cuda.graph_pool_handle()
        room = bucket_of(max_tokens, max_tokens, 1, most)
        self._static = torch.zeros(size_of(room, True), dtype=torch.int32, device=network.device)
        self._results: dict[Output, Tensor] = {}

    @property
    def counts(self) -> GraphCounts:
        return self._cache.counts

    @torch.inference_mode()
    def run(self, output: Output, batch: Packed) -> Tensor | None:
        """The output's rows, which the next call overwrites; None where the batch is to be run without a graph."""
        if batch.tokens > self._max_tokens:
            return None
        key = _Key(output, self.bucket(batch), batch.segments is not None)
        try:
            found = self._cache.get(key)
        except RuntimeError as error:
            self._cache = GraphCache(self._captured, 0)  # what cannot be captured once cannot be later
            warnings.warn(f"Session: runs without CUDA graphs: {error}", stacklevel=2)
            return None
        if found is None:
            return None
        host = torch.empty(size_of(key.bucket, key.segments), dtype=torch.int32, pin_memory=True)
        fill(host.numpy(), batch, key.bucket, self._padding)
        self._static[: len(host)].copy_(host, non_blocking=True)
        found.graph.replay()
        count = batch.sequences if self._network.is_of_sequences(output) else batch.tokens
        return found.result[:count]

    def bucket(self, batch: Packed) -> Bucket:
        return bucket_of(batch.tokens, batch.sequences, batch.longest, self._most)

    def clear(self) -> None:
        self._cache.clear()

    def _captured(self, key: _Key) -> _Graph:
        """A graph of the bucket, from the shared inputs to the shared results."""
        bucket = key.bucket
        ids, segments, boundaries = parts(self._static, bucket, key.segments)
        ids.zero_()
        if segments is not None:
            segments.zero_()
        ends = torch.arange(len(boundaries), device=boundaries.device) * bucket.longest
        boundaries.copy_(ends.clamp(max=bucket.tokens))
        inputs = Inputs(ids, segments, boundaries, bucket.longest)
        stream = torch.cuda.current_stream()
        warm = self._network.run(key.output, inputs)  # kernels are compiled, tuned and loaded
        result = self._result(key.output, warm)
        del warm
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate memory and copy while this one captures.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            result.copy_(self._network.run(key.output, inputs))
        return _Graph(graph, result)

    def _result(self, output: Output, like: Tensor) -> Tensor:
        """A part of the memory that graphs of an output share for their results, with the shape of ``like``. Larger
        memory is made where the first is too small; graphs that use that keep it."""
        room = self._results.get(output)
        if room is None or len(room) < len(like):
            rows = power_of_two(len(like))
            room = self._results[output] = like.new_empty((rows, *like.shape[1:]))
        return room[: len(like)]
