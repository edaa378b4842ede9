"""CUDA graphs of a network: one for each bucket of shapes, captured when the bucket is used for the second time."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.inference.batches import (
    Bucket,
    Packed,
    bucket_for,
    buffer_size,
    is_one_batch,
    next_power_of_two,
    split_buffer,
    write_bucket,
)
from fasttfm.inference.network import Inputs, Network, Output
from fasttfm.inference.results import Wait
from fasttfm.ops.core.checks import in_one_line
from fasttfm.ops.core.graph_cache import Entry, GraphCache, GraphCounts
from fasttfm.ops.core.graph_capture import CaptureError, GraphPool
from fasttfm.ops.core.graph_launch import HostMemory, LaunchableGraph, make_slot, release_after, write_results
from fasttfm.ops.layers import few_tokens

_SMALL_RESULT = 2**18  # a result of up to this many bytes has memory of its own, which saves a kernel
_MAX_KNOWN = 4096  # sizes of batches
_MAX_TOKEN_ROWS = 4096  # of a result with a row for each token: a language model has many logits in each


def _input_size(bucket: Bucket, segments: bool, adapters: bool = False) -> int:
    """The number of int32 of a bucket's inputs, in whole vectors of 16 bytes. ``adapters``: with those of the tokens,
    which are the last ones."""
    return -(-buffer_size(bucket, segments) // 4) * 4 + (-(-bucket.tokens // 4) * 4 if adapters else 0)


def _adapters_in(buffer: Any, key: _Key) -> Any:
    """The part of a bucket's inputs that has the adapter of each token."""
    first = _input_size(key.bucket, key.segments)
    return buffer[first : first + key.bucket.tokens]


Sizes = tuple[int, int, int]  # of a batch: the numbers of tokens and sequences, and the length of the longest one


class _Key(NamedTuple):
    output: Output
    bucket: Bucket
    segments: bool
    adapters: bool = False


class _Graph(NamedTuple):
    graph: LaunchableGraph
    bucket: Bucket
    # Of a row of the result, which is fp32. If the result is not small, it is in memory that all graphs share, and
    # copied before the next launch.
    shape: tuple[int, ...]
    size: int  # the number of elements of a row


class _Staging(HostMemory):
    """Host memory for the inputs and small results of one launch at a time. The session's stream orders it; ``done``
    says when the device is done with it, and only the launch that has it holds it."""

    large: Tensor | None = None  # of a launch with a large result: memory for it

    def __init__(self, size: int, stream: torch.cuda.Stream) -> None:
        inputs = torch.empty(size, dtype=torch.int32, device="cpu", pin_memory=True)
        results = torch.empty(_SMALL_RESULT // 4, dtype=torch.float32, device="cpu", pin_memory=True)
        super().__init__(inputs, results, stream)
        self.input_array, self.result_array = inputs.numpy(), results.numpy()

    def __del__(self) -> None:
        release_after(self.done, self.inputs, self.results, self.flag, self.large)


class _Launched:
    """A launch. Called once, it waits for the result and makes its staging memory available to other launches."""

    def __init__(self, graph: _Graph, staging: _Staging, rows: int, free: list[_Staging]) -> None:
        self._graph, self._rows, self._free = graph, rows, free
        self._large = None
        if 4 * rows * graph.size > _SMALL_RESULT:
            self._large = torch.empty(rows * graph.size, dtype=torch.float32, device="cpu", pin_memory=True)
            staging.large = self._large
        self._staging: _Staging | None = staging
        self.starts_with_nan = False
        graph.graph.launch(staging, rows, self._large)

    def __call__(self, read: Callable[[np.ndarray], Any] | None = None) -> Any:
        staging = self._wait()
        memory = staging.result_array if self._large is None else self._large.numpy()
        rows = memory[: self._rows * self._graph.size].reshape(self._rows, *self._graph.shape)
        if read is None:
            read = np.copy if self._large is None else np.asarray
        result = read(rows)
        self._free.append(staging)
        return result

    def in_given_order(self, sequences: Any) -> np.ndarray:
        """The same for sequences that ``Graphs.replay`` returned: a row for each of those that were given."""
        staging = self._wait()
        memory = staging.result_array if self._large is None else self._large.numpy()
        rows: np.ndarray = sequences.in_given_order(memory, self._graph.size)
        self.starts_with_nan = math.isnan(memory.item(0))
        self._free.append(staging)
        return rows

    def _wait(self) -> _Staging:
        staging = self._staging
        assert staging is not None
        self._graph.graph.wait(staging)
        self._staging = None
        if self._large is not None:
            staging.large = None
        return staging


class Graphs:
    """Runs batches of up to ``max_tokens`` tokens by CUDA graphs. All graphs read the same input buffer and share one
    memory pool, whose size is that of the activations of the largest batch. The session's stream orders all of it: the
    input buffer, the pool, the slot and the shared results. Only the session holds them, and launches with its lock.

    Args:
        limit: The maximum number of graphs that are kept.
        max_batch: The maximum number of sequences in a batch.
        max_length: The maximum number of tokens in a sequence.
        vocabulary: The number of ids that the model reads.
        padding: The id of padding tokens.
        kept: What layers over few tokens keep; the network's other launches with it are on the same stream.
    """

    def __init__(
        self,
        network: Network,
        stream: torch.cuda.Stream,
        *,
        kept: few_tokens.FewTokens,
        limit: int,
        max_tokens: int,
        max_batch: int,
        max_length: int,
        vocabulary: int,
        padding: int,
    ) -> None:
        self._network, self._max_tokens, self._max_length, self._padding = network, max_tokens, max_length, padding
        self._stream, self._kept = stream, kept
        self._cache: GraphCache[_Graph] = GraphCache(limit)
        self._pool = GraphPool(stream)
        self._warned = False
        room = bucket_for(max_tokens, max_tokens, 1, max_length)
        with torch.cuda.stream(stream):
            count = _input_size(room, True, network.adapters is not None)
            self._static = torch.zeros(count, dtype=torch.int32, device=network.device)
            self._slot = make_slot(network.device)
        self._stage, self._vocabulary, self._max_batch = _native.stage_sequences, vocabulary, max_batch
        # The buckets and graphs of batches that ``replay`` has launched, by their sizes: `Sequences.stage` reads them.
        self._known: dict[Output, dict[Sizes, tuple[int, int, int, Entry[_Graph]]]]
        self._known = {output: {} for output in Output}
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
        key = _Key(output, self.bucket(batch), batch.segments is not None, batch.adapters is not None)
        try:
            graph = self._cache.get(key, self._capture)
        except (CaptureError, torch.OutOfMemoryError) as error:
            if not self._warned:
                warnings.warn(f"Session: runs without a new CUDA graph for a while: {in_one_line(error)}", stacklevel=2)
                self._warned = True
            return None
        if graph is None:
            return None
        staging = self._staging()
        write_bucket(staging.input_array, batch, key.bucket, self._padding)
        if batch.adapters is not None:
            of_bucket = _adapters_in(staging.input_array, key)
            of_bucket[:tokens] = batch.adapters
            of_bucket[tokens:] = -1
        return _Launched(graph, staging, batch.sequences if per_sequence else tokens, self._free)

    def replay(self, output: Output, inputs: Any) -> tuple[_Launched, Any, Sizes] | None:
        """Starts the computation of lists or arrays of ids that are one batch, with a row for each sequence. Returns
        the launch, the core's ``Sequences`` and their sizes. None if there is no graph, and for other inputs and wrong
        ids."""
        if self._stage is None or (isinstance(inputs, (list, tuple)) and len(inputs) > self._max_batch):
            return None  # several batches, which are sorted once for all
        known, staging = self._known[output], self._staging()
        staged = self._stage(inputs, known, staging.input_array, self._max_length, self._vocabulary, self._padding)
        if staged is not None:
            sequences, entry, sizes = staged
            if entry is None:
                entry = self._write(output, sequences, sizes, staging)
            graph = None if entry is None else self._cache.use(entry)
            if graph is not None:
                return _Launched(graph, staging, sizes[1], self._free), sequences, sizes
            known.pop(sizes, None)
        self._free.append(staging)
        return None

    def _write(self, output: Output, sequences: Any, sizes: Sizes, staging: _Staging) -> Entry[_Graph] | None:
        """Writes sequences of unknown sizes into a bucket. Returns the entry of its graph; None as ``replay``."""
        if not self._network.is_per_sequence(output) or not is_one_batch(*sizes, self._max_tokens, self._max_batch):
            return None
        bucket = bucket_for(*sizes, self._max_length)
        entry = self._cache.kept(_Key(output, bucket, False))
        if entry is None or not sequences.write(staging.input_array, *bucket, self._vocabulary, self._padding):
            return None
        known = self._known[output]
        if len(known) >= _MAX_KNOWN:
            known.clear()
        known[sizes] = (*bucket, entry)
        return entry

    def _staging(self) -> _Staging:
        return self._free.pop() if self._free else _Staging(len(self._static), self._stream)

    def bucket(self, batch: Packed) -> Bucket:
        return bucket_for(batch.tokens, batch.sequences, batch.max_seqlen, self._max_length)

    def clear(self) -> None:
        self._cache.clear()

    @torch.inference_mode()
    def _capture(self, key: _Key) -> _Graph:
        """Captures a graph of the bucket, which reads the shared inputs."""
        bucket = key.bucket
        with torch.cuda.stream(self._stream), few_tokens.using(self._kept):
            ids, segments, boundaries = split_buffer(self._static, bucket, key.segments)
            ids.zero_()
            if segments is not None:
                segments.zero_()
            ends = torch.arange(len(boundaries), device=boundaries.device) * bucket.max_seqlen
            boundaries.copy_(ends.clamp(max=bucket.tokens))
            adapters = _adapters_in(self._static, key).zero_() if key.adapters else None
            inputs = Inputs(ids, segments, boundaries, bucket.max_seqlen, adapters)
            warm = self._network.run(key.output, inputs)  # compiles, tunes and loads the kernels
            result = None if warm.nbytes <= _SMALL_RESULT else self._result(key.output, warm)
            del warm

            def work() -> Tensor:
                rows = self._network.run(key.output, inputs).float().contiguous()
                if result is not None:
                    result.copy_(rows)
                elif self._slot is not None:
                    write_results(rows, self._slot)
                return rows

            graph, rows = self._pool.capture(work, keep_graph=True)
        results, shape = rows if result is None else result, tuple(rows.shape[1:])
        copied = self._static[: _input_size(bucket, key.segments, key.adapters)]
        slot = self._slot if result is None else None
        launchable = LaunchableGraph(graph, copied, results, self._stream, slot)
        return _Graph(launchable, bucket, shape, math.prod(shape))

    def _result(self, output: Output, like: Tensor) -> Tensor:
        """A slice, in the shape of ``like``, of the memory that the graphs of an output share for their results. If it
        is too small, larger memory is allocated; existing graphs keep the old one."""
        room = self._results.get(output)
        if room is None or len(room) < len(like):
            rows = next_power_of_two(len(like))
            room = self._results[output] = like.new_empty((rows, *like.shape[1:]))
        return room[: len(like)]
