"""CUDA graphs of a network: one for each bucket of shapes, captured when the bucket is used for the second time."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
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
from fasttfm.inference.results import Wait
from fasttfm.ops import few_rows_layers
from fasttfm.ops.graph_launch import HostMemory, LaunchableGraph

Value = TypeVar("Value")
_MIN_LOOKUPS = 2  # a key that is looked up this often gets a value
_DECAY_INTERVAL = 4096  # after this many lookups all counts are halved
_SMALL_RESULT = 2**18  # a result of up to this many bytes has memory of its own, which saves a kernel
_MAX_TOKEN_ROWS = 4096  # of a result with a row for each token: a language model has many logits in each


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
    graph: LaunchableGraph
    # Of a row of the result, which is fp32. If the result is not small, it is in memory that all graphs share, and
    # copied before the next launch.
    shape: tuple[int, ...]
    size: int  # the number of elements of a row


class _Staging(HostMemory):
    """Host memory for the inputs and small results of one launch at a time."""

    def __init__(self, size: int, stream: torch.cuda.Stream) -> None:
        inputs = torch.empty(size, dtype=torch.int32, pin_memory=True)
        results = torch.empty(_SMALL_RESULT // 4, dtype=torch.float32, pin_memory=True)
        super().__init__(inputs, results, stream)
        self.input_array, self.result_array = inputs.numpy(), results.numpy()

    def __del__(self) -> None:
        with contextlib.suppress(RuntimeError):  # CUDA may have ended before
            self.done.synchronize()  # torch must not give the memory to others while a launch uses it


class _Launched:
    """A launch. Called once, it waits for the result and makes its staging memory available to other launches."""

    def __init__(self, staging: _Staging, shape: tuple[int, ...], large: Tensor | None, free: list[_Staging]) -> None:
        self._staging: _Staging | None = staging  # deleted before `large`, for which it waits
        self._shape, self._large, self._free = shape, large, free

    def __call__(self, read: Callable[[np.ndarray], Any] | None = None) -> Any:
        staging, self._staging = self._staging, None
        assert staging is not None
        staging.done.synchronize()
        if self._large is not None:
            rows = self._large.numpy()
            found = rows if read is None else read(rows)
        else:
            rows = staging.result_array[: math.prod(self._shape)].reshape(self._shape)
            found = rows.copy() if read is None else read(rows)
        self._free.append(staging)
        return found


class Graphs:
    """Runs batches of up to ``max_tokens`` tokens by CUDA graphs. All graphs read the same input buffer and share one
    memory pool, whose size is that of the activations of the largest batch: they are launched on one stream.

    Args:
        limit: The maximum number of graphs that are kept.
        max_length: The maximum number of tokens in a sequence.
        padding: The id of padding tokens.
        workspace: That of layers over few tokens; the network's other launches with it are on the same stream.
    """

    def __init__(
        self,
        network: Network,
        stream: torch.cuda.Stream,
        *,
        workspace: few_rows_layers.Workspace,
        limit: int,
        max_tokens: int,
        max_length: int,
        padding: int,
    ) -> None:
        self._network, self._max_tokens, self._max_length, self._padding = network, max_tokens, max_length, padding
        self._stream, self._workspace = stream, workspace
        self._cache: GraphCache[_Graph] = GraphCache(self._capture, limit)
        self._pool = torch.cuda.graph_pool_handle()
        room = bucket_for(max_tokens, max_tokens, 1, max_length)
        self._static = torch.zeros(buffer_size(room, True), dtype=torch.int32, device=network.device)
        stream.wait_stream(torch.cuda.current_stream(network.device))  # until it is zero
        self._results: dict[Output, Tensor] = {}
        self._free: list[_Staging] = []

    @property
    def counts(self) -> GraphCounts:
        return self._cache.counts

    def launch(self, output: Output, batch: Packed) -> Wait | None:
        """Starts the computation of a batch. Returns a function, to be called once, that waits for it and returns the
        rows of the output; None if the batch has to run without a graph."""
        per_sequence, tokens = self._network.is_per_sequence(output), batch.tokens
        if tokens > (self._max_tokens if per_sequence else min(self._max_tokens, _MAX_TOKEN_ROWS)):
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
        staging = self._free.pop() if self._free else _Staging(len(self._static), self._stream)
        write_bucket(staging.input_array, batch, key.bucket, self._padding)
        rows = batch.sequences if per_sequence else tokens
        shape = (rows, *found.shape)
        large = torch.empty(shape, pin_memory=True) if 4 * rows * found.size > _SMALL_RESULT else None
        found.graph.launch(staging, rows, large)
        return _Launched(staging, shape, large, self._free)

    def bucket(self, batch: Packed) -> Bucket:
        return bucket_for(batch.tokens, batch.sequences, batch.max_seqlen, self._max_length)

    def clear(self) -> None:
        self._stream.synchronize()
        self._cache.clear()

    @torch.inference_mode()
    def _capture(self, key: _Key) -> _Graph:
        """Captures a graph of the bucket, which reads the shared inputs."""
        bucket = key.bucket
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.stream(self._stream), few_rows_layers.using(self._workspace):
            ids, segments, boundaries = split_buffer(self._static, bucket, key.segments)
            ids.zero_()
            if segments is not None:
                segments.zero_()
            ends = torch.arange(len(boundaries), device=boundaries.device) * bucket.max_seqlen
            boundaries.copy_(ends.clamp(max=bucket.tokens))
            inputs = Inputs(ids, segments, boundaries, bucket.max_seqlen)
            warm = self._network.run(key.output, inputs)  # compiles, tunes and loads the kernels
            result = None if warm.nbytes <= _SMALL_RESULT else self._result(key.output, warm)
            del warm
            self._stream.synchronize()
            # Other threads may allocate memory and copy while this one captures.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                rows = self._network.run(key.output, inputs).float().contiguous()
                if result is not None:
                    result.copy_(rows)
        results, shape = rows if result is None else result, tuple(rows.shape[1:])
        copied = self._static[: buffer_size(bucket, key.segments)]
        return _Graph(LaunchableGraph(graph, copied, results, self._stream), shape, math.prod(shape))

    def _result(self, output: Output, like: Tensor) -> Tensor:
        """A slice, in the shape of ``like``, of the memory that the graphs of an output share for their results. If it
        is too small, larger memory is allocated; existing graphs keep the old one."""
        room = self._results.get(output)
        if room is None or len(room) < len(like):
            rows = next_power_of_two(len(like))
            room = self._results[output] = like.new_empty((rows, *like.shape[1:]))
        return room[: len(like)]
