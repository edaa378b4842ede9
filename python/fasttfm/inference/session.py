"""``Session``: a trained model that computes vectors, hidden states and logits of texts."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fasttfm._progress import progress
from fasttfm.data.tokenizer import Tokenizer
from fasttfm.data.tokenizer_files import load_tokenizer
from fasttfm.inference.batches import (
    Packed,
    SortedIds,
    checked_ids,
    concatenate,
    cut,
    pack,
    prefetch,
    sort_ids,
    texts_of_array,
)
from fasttfm.inference.calibration import CALIBRATION, Calibration, calibrate, run_in_fp8
from fasttfm.inference.counts import SessionCounts
from fasttfm.inference.dispatch import Dispatcher, register_fork_reset
from fasttfm.inference.formats import Tokens, segments_of, text_format
from fasttfm.inference.graphs import GraphCounts, Graphs
from fasttfm.inference.input_reader import InputReader, readers_of_sides
from fasttfm.inference.late_interaction import KeptTokenRows
from fasttfm.inference.launches import DirectLaunch, Launches
from fasttfm.inference.network import TOKENS, Inputs, Network, Output
from fasttfm.inference.opening import (
    checkpoint_of,
    device_of,
    open_with_stated_head,
    stack_of,
    stated_length,
)
from fasttfm.inference.requests import Item, launch_items
from fasttfm.inference.results import MaybeNan, SequenceRows, TokenRows, Wait
from fasttfm.inference.sentence_folder import read_sentence_folder
from fasttfm.inference.settings import EmbedSettings, check_limits, check_types
from fasttfm.inference.sparse import DenseRows, SparseVectors, TokenWeights
from fasttfm.inference.windows import check_iterable, is_one_window, is_single, windows
from fasttfm.models.families import longest_input
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.models.text_model import TextModel
from fasttfm.ops import few_tokens
from fasttfm.ops.checks import in_one_line
from fasttfm.ops.streams import OrderedStream, has_failed

_OUTPUTS = {each.value: each for each in Output}
# The default number of tokens in a batch. A GPU's GEMMs over more tokens have a smaller fraction of idle SMs in their
# last wave of blocks; on a CPU the activations of a batch should fit into its caches.
_MAX_TOKENS = {"cuda": 40960, "cpu": 2048}
_MAX_ROWS = 16384  # the default for results with a row for each token: a language model has many logits in each
# For larger batches the GPU's time far exceeds the host's for the launches. Buckets have more sequences than their
# batches, and so more padding where pooling pads them.
_GRAPH_TOKENS, _PADDED_GRAPH_TOKENS = 40960, 16384
_RESET_INTERVAL = 2**22  # launches, each with up to 2^10 tags of the workspace of layers over few tokens


class Session:
    """Computes vectors, hidden states and logits of any number of texts of any length.

    Weights are cast once; the given model is not modified. Parameters that already have the session's device and dtype
    are shared with it, others are copied: after a change of the model's weights call ``take_weights``. Texts are
    sorted by length and packed without padding into batches of up to ``max_tokens`` tokens; results come in the order
    of the texts. On a GPU small batches run as CUDA graphs, one for each bucket of shapes. ``encode`` and ``submit``
    may be called from several threads. The session's stream orders everything that it keeps on a GPU, and only the
    session uses it; inputs and results are on the host.

    Args:
        model: A model of ``fasttfm.models``, or a checkpoint directory or hub id of transformers, sentence-transformers
            or fasttfm, whose tokenizer and settings are used.
        tokenizer: Required for texts if ``model`` is not a directory or hub id.
        settings: How vectors are pooled; by default the settings of the directory.
        device: By default a GPU if there is one.
        dtype: The dtype of weights and hidden states; by default bf16 on a GPU and fp32 on a CPU. On a CPU bf16 applies
            only to the layers' GEMMs, and only if the CPU has bf16 instructions. Results are fp32.
        precision: ``"fp8"`` computes the layers' GEMMs in FP8, with one static scale for each tensor (docs/fp8.md).
            ``"int8"`` computes them in 8 bits on a CPU, with one scale for each row of a weight and one for each token.
        adapter: The name of a LoRA adapter, which is a folder of the model's directory, or another directory or hub id.
            It is added to the weights.
        calibration: What the scales of FP8 follow from: inputs of ``encode``, or an earlier session's ``calibration``.
            By default the file of the checkpoint directory that ``session.calibration.save(directory)`` writes.
        max_tokens: The maximum number of tokens in a batch; a longer text is a batch by itself. By default 40,960 on a
            GPU, 16,384 for results with a row for each token, and 2,048 on a CPU.
        max_batch: The maximum number of sequences in a batch.
        max_graphs: The maximum number of CUDA graphs that are kept; 0 disables them.
        max_waiting: The maximum number of submitted requests in the queue.
    """

    def __init__(
        self,
        model: PretrainedModel | str | Path,
        tokenizer: Tokenizer | None = None,
        settings: EmbedSettings | None = None,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        precision: str | None = None,
        adapter: str | Path | None = None,
        calibration: Calibration | Sequence[Any] | None = None,
        max_tokens: int | None = None,
        max_batch: int = 1024,
        max_graphs: int = 128,
        max_waiting: int = 4096,
    ) -> None:
        self.device = device_of(device, model)
        self.dtype = dtype or (torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        self.max_tokens = _MAX_TOKENS.get(self.device.type, 2048) if max_tokens is None else max_tokens
        self._max_rows = min(self.max_tokens, _MAX_ROWS) if max_tokens is None else max_tokens
        self.max_batch, self.precision = max_batch, precision
        check_types(self.device, self.dtype, precision)
        if calibration is not None and precision != "fp8":
            raise ValueError(f"Session: calibration: expected None with precision={precision!r}")
        check_limits(max_tokens=self.max_tokens, max_batch=max_batch, max_waiting=max_waiting, max_graphs=max_graphs)
        _check_model(model, adapter)
        if not isinstance(model, PretrainedModel):
            folder = read_sentence_folder(model)
            if precision == "fp8" and calibration is None:
                calibration = Calibration.load(checkpoint_of(folder.model))
            settings = settings or EmbedSettings.of_folder(folder)
            tokenizer = tokenizer or load_tokenizer(folder.model)
            model = open_with_stated_head(folder.model, adapter).eval().requires_grad_(False).to(self.device)
        if not isinstance(stack_of(model), TextModel):
            raise ValueError(f"Session: model: expected one that reads tokens, got {type(model).__name__}")
        self.settings, self.tokenizer = settings or EmbedSettings(), tokenizer
        longest = longest_input(model.config)
        stated = stated_length(model.config, longest) if self.settings.max_length is None else self.settings.max_length
        self.max_length = stated
        if not isinstance(self.max_length, int) or not 3 <= self.max_length <= longest:
            expected = f"3 to the model's {longest} positions"
            raise ValueError(f"Session: max_length: expected {expected}, got {self.max_length!r}")
        self._max_positions = longest
        self._vocabulary: int = model.config.vocab_size
        form = None if tokenizer is None else text_format(model.config, tokenizer, self.max_length)
        self.reader = InputReader(tokenizer, form, self.settings, longest, self._vocabulary)
        self._readers = readers_of_sides(self.reader)
        fill = self._readers[Output.MULTI_QUERY].fill
        self.network = Network(
            model,
            self.settings,
            self.device,
            self.dtype,
            self.reader.prompt_tokens(),
            int8=precision == "int8",
            fill=fill,
        )
        self.settings.check_width(self.network.vector_width)
        self.calibration = self._in_fp8(calibration) if precision == "fp8" else None
        self.counts = SessionCounts()
        self._lock = threading.Lock()  # guards the device's buffers and the counts
        self._launches = 0
        self._warned = self._has_split = False  # of truncated texts, of a batch that did not fit into memory
        self._graphs: Graphs | None = None
        self._ordered = OrderedStream(self.device)
        self._kept = few_tokens.FewTokens()
        if self.device.type == "cuda":
            self._stream: Any = self._ordered.stream
            self._copies = torch.cuda.Stream(self.device)  # of inputs and results of launches without a graph
            with self._ordered.ordered():  # after the weights are copied
                if max_graphs > 0:
                    self._graphs = self._make_graphs(max_graphs, padding=model.config.pad_token_id or 0)
        self._dispatcher: Dispatcher[Item] = Dispatcher(
            self._launch_items, max_tokens=self.max_tokens, max_waiting=max_waiting
        )
        self._ended: str | None = None  # why it computes no more
        self.on_launch: Callable[[list[Any], int, int], None] | None = None  # called by the dispatcher's thread
        register_fork_reset(self)

    def _make_graphs(self, limit: int, padding: int) -> Graphs:
        most = _PADDED_GRAPH_TOKENS if self.network.pads else _GRAPH_TOKENS
        return Graphs(
            self.network,
            self._stream,
            kept=self._kept,
            limit=limit,
            max_tokens=min(self.max_tokens, most),
            max_batch=self.max_batch,
            max_length=self._max_positions,
            vocabulary=self._vocabulary,
            padding=padding,
        )

    def take_weights(self, model: PretrainedModel) -> bool:
        """Copies the weights of the model of which this session was made, after they have changed. False if the session
        stores them in 8 bits or in another layout, or if the model has other modules now: then a new session is
        needed."""
        if self.calibration is not None:
            return False
        with self._lock, self._ordered.ordered():
            taken = self.network.take_weights(model)
            if taken:
                self._kept.folded.refresh()
            return taken

    def _in_fp8(self, given: Calibration | Sequence[Any] | None) -> Calibration:
        """Makes the network compute in FP8. Returns what its scales follow from."""
        if given is None:
            raise ValueError(f"Session: calibration: expected texts, or {CALIBRATION} next to the checkpoint, got none")
        found = given
        if not isinstance(found, Calibration):
            texts = [found] if is_single(found) else found
            found = calibrate(self.network, self.reader.read(texts), self.max_tokens, self.max_batch)
        run_in_fp8(self.network, found)
        return found

    def reset_after_fork(self) -> None:
        """In a child process, where no other thread computes. (The dispatcher follows by itself.)"""
        self._lock = threading.Lock()

    # ---- calls -------------------------------------------------------------------------------------------------------

    def encode(self, inputs: Any, *, output: str = "vectors") -> Any:
        """Computes all inputs and returns their results in order.

        Args:
            inputs: Texts, pairs of texts (tuples), or lists of ids with their special tokens; or a single one of them.
            output: ``"vectors"`` (pooled and normalised as the settings say), ``"states"`` of the tokens, or
                ``"logits"`` of the model's head, or ``"sparse"``: weights of words, SPLADE's or bge-m3's;
                ``"multi"`` and ``"multi-query"``: a vector for each token of a document or a query (ColBERT).

        Returns:
            fp32: an array ``[inputs, width]`` of vectors (in the precision of the settings) or of logits of sequences;
            a list of arrays ``[tokens, ...]`` of states, logits or vectors of tokens; ``SparseVectors``. Of a single
            input, its part of it.
        """
        kind = self._output(output)
        graphs = self._graphs if self.network.is_captured(kind) else None
        found = None if graphs is None else self._replay(graphs, inputs, kind)
        if found is not None:
            return found
        inputs = texts_of_array(inputs)
        if is_single(inputs):
            return self.encode([inputs], output=output)[0]
        if is_one_window(inputs):
            return self._encode_window(inputs, kind)
        count = len(inputs) if hasattr(inputs, "__len__") else None
        results = []
        for tokens, result in progress(self._results(inputs, kind), count):
            self._warn_truncated([tokens])
            results.append(result)
        if kind is Output.SPARSE:
            return SparseVectors.of(results, self.network.sparse_width)
        if self.network.is_per_sequence(kind):
            return (
                np.stack(results) if results else self._typed(np.zeros((0, *self._empty_shape(kind)), np.float32), kind)
            )
        return results

    def stream(self, inputs: Iterable[Any], *, output: str = "vectors") -> Iterator[Any]:
        """Yields the results of ``encode`` one by one, in order. Inputs are read lazily, a bounded number ahead. A
        warning at the end says how many texts were truncated."""
        for _, result in self.stream_with_ids(inputs, output=output):
            yield result

    def stream_with_ids(self, inputs: Iterable[Any], *, output: str = "vectors") -> Iterator[tuple[list[int], Any]]:
        """As ``stream``, with the ids of each input, special tokens included."""
        with self._lock:
            before = replace(self.counts)
        for tokens, result in self._results(inputs, self._output(output)):
            yield list(tokens.ids), result
        if note := self.counts.since(before).note(self.max_length):
            warnings.warn(note, stacklevel=2)

    def submit(self, input: Any, *, output: str = "vectors", timeout: float | None = None) -> Future[Any]:
        """Returns the future of one input's result, for servers: requests that wait at the same time form a batch.

        Args:
            timeout: Seconds to wait for room in the queue before ``queue.Full`` is raised; without limit by default.
        """
        self._check_open()
        kind = self._output(output)
        if isinstance(input, (list, np.ndarray)) and len(input) and isinstance(input[0], (str, tuple, list)):
            expected = "one text, pair of texts or list of ids (submit each of them, or encode all)"
            raise TypeError(f"Session.submit: input: expected {expected}, got {len(input)} inputs")
        (tokens,) = self._reader_of(kind).read([input])
        self._warn_truncated([tokens])
        return self._dispatcher.submit(Item([tokens], kind), len(tokens.ids), timeout)

    def read(self, inputs: Sequence[Any], *, output: str = "vectors") -> list[Tokens]:
        """The sequences of inputs, as ``submit_sequences`` takes them."""
        return self._reader_of(self._output(output)).read(inputs)

    def submit_sequences(
        self,
        sequences: Sequence[Tokens],
        *,
        output: str = "vectors",
        single: bool = False,
        timeout: float | None = None,
        tag: Any = None,
    ) -> Future[Any]:
        """Returns the future of the results of several sequences (``inference.formats``), in the form of ``encode``;
        with ``single``, of the result of the only one. When a batch is launched, ``on_launch`` is called with the tags
        of its requests, its sequences and tokens."""
        self._check_open()
        item = Item(sequences, self._output(output), single, tag)
        return self._dispatcher.submit(item, sum(len(each.ids) for each in sequences), timeout)

    def close(self) -> None:
        """Computes the submitted requests and frees the CUDA graphs. Later calls raise RuntimeError. A future's
        callback that calls it does not wait for the other requests."""
        self._dispatcher.close(self._free)

    def _free(self) -> None:
        with self._lock:
            if self._ended is None:
                self._ended = "Session: expected an open session, got a closed one"
                if self.device.type == "cuda":
                    self._stream.synchronize()
            if self._graphs is not None:
                self._graphs.clear()

    def _check_open(self) -> None:
        if self._ended is not None:
            raise RuntimeError(self._ended)

    def _check_device(self, error: RuntimeError) -> None:
        """Called after an error of a launch. If the device has failed, it computes nothing more in this process."""
        with self._lock:  # no thread may wait for the stream while another one captures on it
            if self._ended is None and has_failed(self._ordered.stream):
                got = f"one on which a kernel has failed: {in_one_line(error)}"
                self._ended = f"Session: expected a device that computes (a new process has one), got {got}"

    def _check_kernels(self, result: MaybeNan) -> None:
        """Raises if a kernel gave up, after which results are NaN. Reads the device only after such a result."""
        if result.starts_with_nan:
            with self._lock:  # as in _check_device
                self._kept.workspace.raise_if_any()

    def __reduce__(self) -> Any:
        raise TypeError(
            "Session: expected to stay in its process (make one of the model in each), got a copy or pickle"
        )

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def ended(self) -> str | None:
        """Why the session computes no more: it is closed, or its device has failed."""
        return self._ended

    @property
    def width(self) -> int:
        """How many numbers a vector has."""
        return self.settings.stored_width(self.network.vector_width)

    @property
    def graph_counts(self) -> GraphCounts:
        return GraphCounts() if self._graphs is None else self._graphs.counts

    def __repr__(self) -> str:
        form = self.precision or str(self.dtype).removeprefix("torch.")
        sizes = f"vectors of {self.width}, up to {self.max_length} tokens"
        done = f"{self.counts.texts:,} texts computed"
        return f"Session({type(self.network.model).__name__}, {sizes}, {form} on {self.device}, {done})"

    # ---- texts -------------------------------------------------------------------------------------------------------

    def _results(self, inputs: Any, output: Output) -> Iterator[tuple[Tokens, Any]]:
        """The tokens and result of each input, by windows: while one is computed, the next one is tokenized."""
        inputs = texts_of_array(inputs)
        if is_single(inputs):
            inputs = [inputs]
        check_iterable(inputs)
        if is_one_window(inputs):
            sequences = self._reader_of(output).read(inputs)
            yield from zip(sequences, self._launch(sequences, output)(), strict=True)
            return
        for sequences in prefetch(windows(inputs), self._reader_of(output).read):
            yield from zip(sequences, self._launch(sequences, output)(), strict=True)

    def _reader_of(self, output: Output) -> InputReader:
        return self._readers.get(output, self.reader)

    def _encode_window(self, inputs: Sequence[Any], output: Output) -> Any:
        """The results of inputs that are tokenized at once, as ``encode`` returns them."""
        ids = checked_ids(inputs, self._max_positions, self._vocabulary)
        if ids is None:
            sequences = self._reader_of(output).read(inputs)
            self._warn_truncated(sequences)
            return self._launch(sequences, output)()
        # needs no object for each sequence: that would take longer than the rest
        return self._launch_ids(ids, len(inputs), output)()

    def _warn_truncated(self, sequences: Sequence[Tokens]) -> None:
        """Warns of the first truncated text; ``counts`` has the number of all."""
        if self._warned:
            return
        for tokens in sequences:
            if tokens.cut:
                self._warned = True
                note = f"a text of {len(tokens.ids) + tokens.cut} tokens is truncated to {len(tokens.ids)}"
                warnings.warn(f"Session: {note}; session.counts.truncated counts further ones", stacklevel=3)
                return

    def _replay(self, graphs: Graphs, inputs: Any, output: Output) -> np.ndarray | None:
        """The results of lists or arrays of ids that are one batch, if its graph is captured; otherwise, also for wrong
        ids, None. On the host such a call takes less time than one that may have several batches."""
        begun = time.perf_counter()
        try:
            with self._lock:
                self._prepare_launch()
                launched = graphs.replay(output, inputs)
                if launched is None:
                    return None
                wait, given, (tokens, sequences, _) = launched
                self.counts.batches += 1
                self._count(len(inputs), tokens, len(inputs) - sequences)  # while the device computes
            found = wait.in_given_order(given)
            self._check_kernels(wait)
        except RuntimeError as error:
            self._check_device(error)
            raise
        with self._lock:
            self.counts.seconds += time.perf_counter() - begun
        return self._typed(found, output)

    # ---- batches -----------------------------------------------------------------------------------------------------

    def _launch_items(self, items: list[Item]) -> Callable[[], Sequence[Any]]:
        return launch_items(items, self._launch, self.on_launch)

    def _launch(self, sequences: Sequence[Tokens], output: Output) -> Callable[..., Any]:
        """Starts the computation of sequences. Returns a function that waits for it and returns each one's result: an
        array with one row per sequence, or a list of arrays with one row per token. It puts errors of single sequences
        into the dictionary that it is called with, by their index, or raises the first one if there is none."""
        return self._launch_ids(sort_ids([each.ids for each in sequences]), len(sequences), output, sequences)

    def _launch_ids(
        self, ids: SortedIds, count: int, output: Output, sequences: Sequence[Tokens] = ()
    ) -> Callable[..., Any]:
        """The same for the sorted ids of ``count`` sequences; ``sequences`` has their segments and cuts, if any."""
        begun = time.perf_counter()
        per_sequence = self.network.is_per_sequence(output)
        max_tokens = self.max_tokens if per_sequence else self._max_rows

        def launch(first: int, last: int) -> Wait:
            kinds = None
            if sequences and self.network.has_segments:
                kinds = segments_of([sequences[index] for index in ids.order[first:last].tolist()])
            return self.run(ids.part(first, last, None if kinds is None else concatenate(kinds)), output)

        groups = cut(ids.cu_seqlens, max_tokens, self.max_batch)
        launches = Launches(groups, ids.cu_seqlens, launch, self._warn_of_split)

        def finish(errors: dict[int, BaseException] | None = None) -> Any:
            cuts = [each.cut for each in sequences]
            with self._lock:  # while the device computes
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
            for number, each in launches.errors.items():
                if errors is None:
                    raise each
                errors[ids.order.item(number)] = each
            found = results.found()
            with self._lock:
                self.counts.seconds += time.perf_counter() - begun
            return self._typed(found, output)

        return finish

    def run(self, batch: Packed, output: Output) -> Wait:
        """Starts the computation of a packed batch. Returns a function that waits for it and returns the host's
        rows."""
        try:
            with self._lock:
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
        if self._ended is not None:
            raise RuntimeError(self._ended)
        self._launches += 1
        if self._launches % _RESET_INTERVAL == 0 and self.device.type == "cuda":
            with torch.cuda.stream(self._stream), torch.inference_mode():
                self._kept.workspace.reset()

    def _run_cuda(self, batch: Packed, output: Output) -> Wait:
        graphs = self._graphs if self.network.is_captured(output) else None
        launched = None if graphs is None else graphs.launch(output, batch)
        if launched is not None:
            return launched
        with torch.cuda.stream(self._copies), torch.inference_mode():
            inputs = Inputs.of(batch, self.device)
        with torch.cuda.stream(self._stream), torch.inference_mode(), few_tokens.using(self._kept):
            return DirectLaunch(inputs, self.network.run(output, inputs), self._stream, self._copies)

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

    def _output(self, name: str) -> Output:
        output = _OUTPUTS.get(name)
        if output is None:
            raise ValueError(f"Session: output: expected {', '.join(_OUTPUTS)}, got {name!r}")
        self.network.check(output)
        return output

    def finished(self, pooled: np.ndarray) -> np.ndarray:
        """The vectors [n, width] of pooled states, fp32 [n, width of the layers], as ``encode`` returns them."""
        with self._lock, self._ordered.ordered():
            found = self.network.finish(torch.as_tensor(pooled, dtype=torch.float32, device=self.device))
            return self._typed(found.cpu().numpy(), Output.VECTORS)

    def _typed(self, found: Any, output: Output) -> Any:
        """Results in the type that the settings state for vectors; others as they are."""
        return self.settings.in_precision(found) if output is Output.VECTORS else found

    def _collector(self, ids: SortedIds, count: int, output: Output) -> Any:
        """What puts the rows of batches into the order of the sequences."""
        if output is Output.SPARSE:
            width = self.network.sparse_width
            if self.network.has_token_weights:
                return TokenWeights(ids, count, width, self.reader.special)
            return DenseRows(ids, count, width)
        if output in TOKENS:
            tokens = self.settings.late_interaction
            assert tokens is not None
            skipped = tokens.skipped_ids(self.tokenizer) if output is Output.MULTI else ()
            return KeptTokenRows(ids, count, lambda: self._empty_shape(output), dropped=tokens.dropped, skipped=skipped)
        kind = SequenceRows if self.network.is_per_sequence(output) else TokenRows
        return kind(ids, count, lambda: self._empty_shape(output))

    def _empty_shape(self, output: Output) -> tuple[int, ...]:
        """The shape of the result of a text without tokens."""
        if output is Output.VECTORS:
            return (self.network.vector_width,)
        if self.network.is_per_sequence(output):
            return (int(self.network.model.config.num_labels),)
        if output is Output.STATES:
            return (0, self.network.state_width)
        if output in TOKENS:
            return (0, self.network.token_width)
        return (0, *self.run(pack([[0]]), output)().shape[1:])


def _check_model(model: Any, adapter: str | Path | None) -> None:
    if not isinstance(model, (PretrainedModel, str, Path)):
        got = type(model).__name__
        raise TypeError(f"Session: model: expected a model of fasttfm.models, a directory or a hub id, got {got}")
    if isinstance(model, PretrainedModel) and adapter is not None:
        raise ValueError("Session: adapter: expected with a directory or hub id (models.merge_adapter)")
