"""``Scheduler``: launches the sequences of a session as batches on its device, and puts their results in order."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from fasttfm.data.tokenizer import Tokenizer
from fasttfm.inference.adapters import grouped, with_adapters
from fasttfm.inference.batches import Packed, SortedIds, concatenate, cut, pack, sort_ids
from fasttfm.inference.counts import SessionCounts
from fasttfm.inference.dispatch import register_fork_reset
from fasttfm.inference.formats import Tokens, segments_of
from fasttfm.inference.graphs import GraphCounts, Graphs
from fasttfm.inference.late_interaction import KeptTokenRows
from fasttfm.inference.launches import DirectLaunch, Launches
from fasttfm.inference.network import TOKENS, Inputs, Network, Output
from fasttfm.inference.requests import Item, launch_items
from fasttfm.inference.results import MaybeNan, SequenceRows, TokenRows, Wait
from fasttfm.inference.sparse import DenseRows, TokenWeights
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.ops.core.checks import in_one_line
from fasttfm.ops.core.streams import OrderedStream, has_failed
from fasttfm.ops.layers import few_tokens

# For larger batches the GPU's time far exceeds the host's for the launches. Buckets have more sequences than their
# batches, and so more padding where pooling pads them.
_GRAPH_TOKENS, _PADDED_GRAPH_TOKENS = 40960, 16384
_RESET_INTERVAL = 2**22  # launches, each with up to 2^10 tags of the workspace of layers over few tokens


class BatchLimits(NamedTuple):
    """The sizes of batches.

    Args:
        max_tokens: Tokens of a batch.
        max_rows: Tokens of a batch whose result has a row for each.
        max_batch: Sequences of a batch.
        max_positions: Ids of a sequence.
        vocabulary: Ids are less than it.
    """

    max_tokens: int
    max_rows: int
    max_batch: int
    max_positions: int
    vocabulary: int


class Scheduler:
    """Computes sequences in batches. Its methods may be called from several threads.

    On a GPU its stream orders everything that it keeps there. After a fault of the device it computes nothing more.

    Args:
        tokenizer: Of late interaction, whose documents have no vectors for some tokens.
        special: The ids of tokens that have no weights in sparse vectors.
        max_graphs: The maximum number of CUDA graphs; 0 disables them.
        padding: The id of padding tokens.
    """

    def __init__(
        self,
        network: Network,
        limits: BatchLimits,
        *,
        tokenizer: Tokenizer | None,
        special: Sequence[int],
        max_graphs: int,
        padding: int,
    ) -> None:
        self.network, self.settings, self.device, self.limits = network, network.settings, network.device, limits
        self._tokenizer, self._special = tokenizer, special
        self.counts = SessionCounts()
        self.lock = threading.Lock()  # guards the device's buffers and the counts
        self.ended: str | None = None  # why it computes no more
        self.on_launch: Callable[[list[Any], int, int], None] | None = None  # called by the dispatcher's thread
        self.graphs: Graphs | None = None
        self._launches = 0
        self._has_split = False  # a batch that did not fit into memory
        self._ordered = OrderedStream(self.device)
        self.kept = few_tokens.FewTokens()
        if self.device.type == "cuda":
            self._stream: Any = self._ordered.stream
            self._copies = torch.cuda.Stream(self.device)  # of inputs and results of launches without a graph
            with self._ordered.ordered():  # after the weights are copied
                if max_graphs > 0:
                    self.graphs = self._make_graphs(max_graphs, padding)
        register_fork_reset(self)

    def _make_graphs(self, limit: int, padding: int) -> Graphs:
        most = _PADDED_GRAPH_TOKENS if self.network.pads else _GRAPH_TOKENS
        return Graphs(
            self.network,
            self._stream,
            kept=self.kept,
            limit=limit,
            max_tokens=min(self.limits.max_tokens, most),
            max_batch=self.limits.max_batch,
            max_length=self.limits.max_positions,
            vocabulary=self.limits.vocabulary,
            padding=padding,
        )

    def reset_after_fork(self) -> None:
        """In a child process, where no other thread computes."""
        self.lock = threading.Lock()

    def take_weights(self, model: PretrainedModel) -> bool:
        """``Session.take_weights``."""
        with self.lock, self._ordered.ordered():
            taken = self.network.take_weights(model)
            if taken:
                self.kept.folded.refresh()
            return taken

    def free(self) -> None:
        """Ends the computation, and frees the CUDA graphs."""
        with self.lock:
            if self.ended is None:
                self.ended = "Session: expected an open session, got a closed one"
                if self.device.type == "cuda":
                    self._stream.synchronize()
            if self.graphs is not None:
                self.graphs.clear()

    def check_open(self) -> None:
        if self.ended is not None:
            raise RuntimeError(self.ended)

    @property
    def graph_counts(self) -> GraphCounts:
        return GraphCounts() if self.graphs is None else self.graphs.counts

    # ---- sequences ---------------------------------------------------------------------------------------------------

    def launch_items(self, items: list[Item]) -> Callable[[], Sequence[Any]]:
        """Starts the computation of submitted items; for the dispatcher."""
        return launch_items(items, self.launch, self.on_launch)

    def launch(self, sequences: Sequence[Tokens], output: Output) -> Callable[..., Any]:
        """Starts the computation of sequences. Returns a function that waits for it and returns each one's result: an
        array with one row per sequence, or a list of arrays with one row per token. It puts errors of single sequences
        into the dictionary that it is called with, by their index, or raises the first one if there is none."""
        ids = sort_ids([sequence.ids for sequence in sequences])
        return self.launch_ids(ids, len(sequences), output, sequences)

    def launch_ids(
        self, ids: SortedIds, count: int, output: Output, sequences: Sequence[Tokens] = ()
    ) -> Callable[..., Any]:
        """The same for the sorted ids of ``count`` sequences; ``sequences`` has their segments and cuts, if any."""
        begun = time.perf_counter()
        max_tokens = self.limits.max_tokens if self.network.is_per_sequence(output) else self.limits.max_rows

        def launch(first: int, last: int) -> Wait:
            kinds = None
            if sequences and self.network.reads_segments(output):
                kinds = segments_of([sequences[index] for index in ids.order[first:last].tolist()])
            batch = ids.part(first, last, None if kinds is None else concatenate(kinds))
            return self.run(with_adapters(batch, ids.order[first:last], adapters), output)

        groups = cut(ids.cu_seqlens, max_tokens, self.limits.max_batch)
        ids, adapters = (ids, None) if self.network.adapters is None else grouped(ids, groups, sequences)
        launches = Launches(groups, ids.cu_seqlens, launch, self._warn_of_split)

        def finish(errors: dict[int, BaseException] | None = None) -> Any:
            cuts = [sequence.cut for sequence in sequences]
            with self.lock:  # while the device computes
                self._count(count, len(ids.ids), count - len(ids.order))
                self.counts.truncated += len(cuts) - cuts.count(0)
                self.counts.left_out += sum(cuts)
            results = self._collector(ids, count, output)
            try:
                for batch in launches:
                    results.add(*batch)
                self._check_kernels(results)
            except RuntimeError as error:
                self._check_device(error)
                raise
            for number, failure in launches.errors.items():
                if errors is None:
                    raise failure
                errors[ids.order.item(number)] = failure
            rows = results.rows()
            with self.lock:
                self.counts.seconds += time.perf_counter() - begun
            return self.typed(rows, output)

        return finish

    def replay(self, inputs: Any, output: Output) -> np.ndarray | None:
        """The results of lists or arrays of ids that are one batch, if its graph is captured; otherwise, also for wrong
        ids, None. On the host such a call takes less time than one that may have several batches."""
        if self.graphs is None or not self.network.is_captured(output):
            return None
        begun = time.perf_counter()
        try:
            with self.lock:
                self._prepare_launch()
                launched = self.graphs.replay(output, inputs)
                if launched is None:
                    return None
                wait, order, (tokens, sequences, _) = launched
                self.counts.batches += 1
                self._count(len(inputs), tokens, len(inputs) - sequences)  # while the device computes
            rows = wait.in_given_order(order)
            self._check_kernels(wait)
        except RuntimeError as error:
            self._check_device(error)
            raise
        with self.lock:
            self.counts.seconds += time.perf_counter() - begun
        return self.typed(rows, output)

    # ---- batches -----------------------------------------------------------------------------------------------------

    def run(self, batch: Packed, output: Output) -> Wait:
        """Starts the computation of a packed batch. Returns a function that waits for it and returns the host's
        rows."""
        try:
            with self.lock:
                self._prepare_launch()
                launched = self._run_cuda(batch, output) if self.device.type == "cuda" else self._run_cpu(batch, output)
                self.counts.batches += 1
        except RuntimeError as error:
            self._check_device(error)
            raise
        return launched

    def _run_cpu(self, batch: Packed, output: Output) -> Wait:
        rows = self.network.run(output, Inputs.of(batch, self.device)).cpu().numpy()
        return lambda read=None: rows if read is None else read(rows)

    def _prepare_launch(self) -> None:
        """Called with the lock, before each launch."""
        self.check_open()
        self._launches += 1
        if self._launches % _RESET_INTERVAL == 0 and self.device.type == "cuda":
            with torch.cuda.stream(self._stream), torch.inference_mode():
                self.kept.workspace.reset()

    def _run_cuda(self, batch: Packed, output: Output) -> Wait:
        graphs = self.graphs if self.network.is_captured(output) else None
        launched = None if graphs is None else graphs.launch(output, batch)
        if launched is not None:
            return launched
        with torch.cuda.stream(self._copies), torch.inference_mode():
            inputs = Inputs.of(batch, self.device)
        with torch.cuda.stream(self._stream), torch.inference_mode(), few_tokens.using(self.kept):
            return DirectLaunch(inputs, self.network.run(output, inputs), self._stream, self._copies)

    def _check_device(self, error: RuntimeError) -> None:
        """Called after an error of a launch. If the device has failed, it computes nothing more in this process."""
        with self.lock:  # no thread may wait for the stream while another one captures on it
            if self.ended is None and has_failed(self._ordered.stream):
                got = f"one on which a kernel has failed: {in_one_line(error)}"
                self.ended = f"Session: expected a device that computes (a new process has one), got {got}"

    def _check_kernels(self, result: MaybeNan) -> None:
        """Raises if a kernel gave up, after which results are NaN. Reads the device only after such a result."""
        if result.starts_with_nan:
            with self.lock:  # as in _check_device
                self.kept.workspace.raise_if_any()

    def _warn_of_split(self, tokens: int) -> None:
        if not self._has_split:
            advice = "a session with a smaller max_tokens does not try"
            warnings.warn(
                f"Session: a batch of {tokens:,} tokens does not fit into the device's memory and is split ({advice})",
                stacklevel=2,
            )
            self._has_split = True

    def _count(self, texts: int, tokens: int, empty: int) -> None:
        """Called with the lock."""
        self.counts.texts += texts
        self.counts.tokens += tokens
        self.counts.empty += empty

    # ---- results -----------------------------------------------------------------------------------------------------

    def finished(self, pooled: np.ndarray) -> np.ndarray:
        """``Session.finished``."""
        with self.lock, self._ordered.ordered():
            vectors = self.network.finish(torch.as_tensor(pooled, dtype=torch.float32, device=self.device))
            return self.typed(vectors.cpu().numpy(), Output.VECTORS)

    def typed(self, rows: Any, output: Output) -> Any:
        """Results in the type that the settings state for vectors; others as they are."""
        return self.settings.in_precision(rows) if output is Output.VECTORS else rows

    def _collector(self, ids: SortedIds, count: int, output: Output) -> Any:
        """What puts the rows of batches into the order of the sequences."""
        if output is Output.SPARSE:
            width = self.network.sparse_width
            if self.network.has_token_weights:
                return TokenWeights(ids, count, width, self._special)
            return DenseRows(ids, count, width)
        if output in TOKENS:
            tokens = self.settings.late_interaction
            assert tokens is not None
            skipped = tokens.skipped_ids(self._tokenizer) if output is Output.MULTI else ()
            return KeptTokenRows(ids, count, lambda: self.empty_shape(output), dropped=tokens.dropped, skipped=skipped)
        kind = SequenceRows if self.network.is_per_sequence(output) else TokenRows
        return kind(ids, count, lambda: self.empty_shape(output))

    def empty_shape(self, output: Output) -> tuple[int, ...]:
        """The shape of the result of a text without tokens."""
        shape = self.network.empty_shape(output)
        if shape is not None:
            return shape
        return (0, *self.run(pack([[0]]), output)().shape[1:])
