"""``Session``: a trained model that computes vectors, hidden states and logits of texts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from fasttfm._progress import progress
from fasttfm.data.tokenizer import Tokenizer
from fasttfm.data.tokenizer_files import load_tokenizer
from fasttfm.inference.adapters import Adapter, directories_in, selected
from fasttfm.inference.batches import Packed, texts_of_array
from fasttfm.inference.calibration import Calibration, in_fp8
from fasttfm.inference.counts import SessionCounts
from fasttfm.inference.dispatch import Dispatcher
from fasttfm.inference.formats import Tokens, text_format
from fasttfm.inference.graphs import GraphCounts
from fasttfm.inference.input_reader import InputReader
from fasttfm.inference.network import Network, Output
from fasttfm.inference.opening import (
    check_model,
    checkpoint_of,
    device_of,
    max_length_of,
    open_with_stated_head,
    stack_of,
)
from fasttfm.inference.precision import Precision, choose
from fasttfm.inference.requests import Item
from fasttfm.inference.results import Wait
from fasttfm.inference.scheduling import BatchLimits, Scheduler
from fasttfm.inference.sentence_folder import read_sentence_folder
from fasttfm.inference.settings import EmbedSettings, check_limits, check_types
from fasttfm.inference.spans import AnswerSpans
from fasttfm.inference.sparse import SparseVectors
from fasttfm.inference.tokenizing import SessionReader
from fasttfm.inference.windows import check_iterable, is_one_window, is_single
from fasttfm.models.families import longest_input
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.models.text_model import TextModel

_OUTPUTS = {output.value: output for output in Output}
# The default number of tokens in a batch. A GPU's GEMMs over more tokens have a smaller fraction of idle SMs in their
# last wave of blocks; on a CPU the activations of a batch should fit into its caches.
_MAX_TOKENS = {"cuda": 40960, "cpu": 2048}
_MAX_ROWS = 16384  # the default for results with a row for each token: a language model has many logits in each


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
            ``"auto"`` chooses the fastest of int8, bf16 and fp32 on a CPU that keeps the vectors of sample texts
            (inference/precision.py); ``reason`` then says why. On a GPU it is the default dtype.
        adapter: The name of a LoRA adapter, which is a folder of the model's directory, or another directory or hub id.
            It is added to the weights.
        adapters: LoRA adapters, by the names by which ``encode`` chooses one for each input, as ``adapter``'s. They
            are not added to the weights, and one batch may have several (docs/lora.md).
        calibration: What the scales of FP8 follow from: inputs of ``encode``, or an earlier session's ``calibration``.
            By default the file of the checkpoint directory that ``session.calibration.save(directory)`` writes.
        answers: How ``output="spans"`` finds answers; by default of up to 30 tokens, in the tokenizer's pairs of texts.
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
        adapters: Mapping[str, str | Path] = MappingProxyType({}),
        calibration: Calibration | Sequence[Any] | None = None,
        answers: AnswerSpans | None = None,
        max_tokens: int | None = None,
        max_batch: int = 1024,
        max_graphs: int = 128,
        max_waiting: int = 4096,
    ) -> None:
        self.device = device_of(device, model)
        self.dtype = dtype or (torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        self.max_tokens = _MAX_TOKENS.get(self.device.type, 2048) if max_tokens is None else max_tokens
        max_rows = min(self.max_tokens, _MAX_ROWS) if max_tokens is None else max_tokens
        self.max_batch, self.precision = max_batch, precision
        check_types(self.device, dtype, self.dtype, precision)
        if calibration is not None and precision != "fp8":
            raise ValueError(f"Session: calibration: expected None with precision={precision!r}")
        check_limits(max_tokens=self.max_tokens, max_batch=max_batch, max_waiting=max_waiting, max_graphs=max_graphs)
        check_model(model, adapter)
        directory = None
        if not isinstance(model, PretrainedModel):
            folder = read_sentence_folder(model)
            if precision == "fp8" and calibration is None:
                calibration = Calibration.load(checkpoint_of(folder.model))
            settings, directory = settings or EmbedSettings.of_folder(folder), folder.model
            tokenizer = tokenizer or load_tokenizer(folder.model)
            model = open_with_stated_head(folder.model, adapter).eval().requires_grad_(False).to(self.device)
        if not isinstance(stack_of(model), TextModel):
            raise ValueError(f"Session: model: expected one that reads tokens, got {type(model).__name__}")
        self.settings, self.tokenizer = settings or EmbedSettings(), tokenizer
        longest = longest_input(model.config)
        self.max_length = max_length_of(model.config, self.settings.max_length, longest)
        vocabulary: int = model.config.vocab_size
        form = None if tokenizer is None else text_format(model.config, tokenizer, self.max_length)
        self.reader = InputReader(tokenizer, form, self.settings, longest, vocabulary)
        self._inputs = SessionReader(self.reader)
        self.network = self._make_network(
            model,
            answers=AnswerSpans.of(form) if answers is None else answers,
            adapters=directories_in(directory, adapters),
            fill=self._inputs.fill,
            owns_model=directory is not None,
        )
        self.settings.check_width(self.network.vector_width)
        sources = (calibration, self.max_tokens, max_batch)
        self.calibration = in_fp8(self.network, self.reader, *sources) if precision == "fp8" else None
        self._scheduler = Scheduler(
            self.network,
            BatchLimits(self.max_tokens, max_rows, max_batch, longest, vocabulary),
            tokenizer=tokenizer,
            special=self.reader.special,
            max_graphs=max_graphs,
            padding=model.config.pad_token_id or 0,
        )
        self._dispatcher: Dispatcher[Item] = Dispatcher(
            self._scheduler.launch_items, max_tokens=self.max_tokens, max_waiting=max_waiting
        )

    def _make_network(self, model: PretrainedModel, **options: Any) -> Network:
        skipped = self.reader.prompt_tokens()

        def make(types: Precision) -> Network:
            return Network(model, self.settings, self.device, types.dtype, skipped, int8=types.int8, **options)

        self.reason: str | None = None  # why "auto" chose the precision
        is_measured = self.precision == "auto" and self.device.type == "cpu"
        self.precision = None if self.precision == "auto" else self.precision
        if not is_measured:
            return make(Precision(self.dtype, self.precision == "int8"))
        network, precision, self.reason = choose(make, self.reader)
        self.dtype, self.precision = precision.dtype, "int8" if precision.int8 else None
        return network

    def take_weights(self, model: PretrainedModel) -> bool:
        """Copies the weights of the model of which this session was made, after they have changed. False if the session
        stores them in 8 bits or in another layout, or if the model has other modules now: then a new session is
        needed."""
        if self.calibration is not None:
            return False
        return self._scheduler.take_weights(model)

    # ---- calls -------------------------------------------------------------------------------------------------------

    def encode(self, inputs: Any, *, output: str = "vectors", adapter: Adapter = None) -> Any:
        """Computes all inputs and returns their results in order.

        Args:
            inputs: Texts, pairs of texts (tuples), or lists of ids with their special tokens; or a single one of them.
            output: ``"vectors"`` (pooled and normalised as the settings say), ``"states"`` of the tokens, or
                ``"logits"`` of the model's head, or ``"sparse"``: weights of words, SPLADE's or bge-m3's;
                ``"multi"`` and ``"multi-query"``: a vector for each token of a document or a query (ColBERT);
                ``"spans"``: the answers in pairs of a question and a context (``AnswerSpans.found``).
            adapter: The name of one of the session's ``adapters``, or a list with one for each input, of which some may
                be None; without an adapter by default.

        Returns:
            fp32: an array ``[inputs, width]`` of vectors (in the precision of the settings) or of logits of sequences;
            a list of arrays ``[tokens, ...]`` of states, logits or vectors of tokens; ``SparseVectors``. Of a single
            input, its part of it.
        """
        kind = self._output(output)
        if adapter is not None:
            single = is_single(inputs)
            sequences = self.read([inputs] if single else list(inputs), output=output, adapter=adapter)
            self._inputs.warn_truncated(sequences)
            results = self._scheduler.launch(sequences, kind)()
            return results[0] if single else results
        replayed = self._scheduler.replay(inputs, kind)
        if replayed is not None:
            return replayed
        inputs = texts_of_array(inputs)
        if is_single(inputs):
            return self.encode([inputs], output=output)[0]
        if is_one_window(inputs):
            return self._encode_window(inputs, kind)
        count = len(inputs) if hasattr(inputs, "__len__") else None
        results = []
        for tokens, result in progress(self._results(inputs, kind), count):
            self._inputs.warn_truncated([tokens])
            results.append(result)
        if kind is Output.SPARSE:
            return SparseVectors.of(results, self.network.sparse_width)
        if self.network.is_per_sequence(kind):
            if results:
                return np.stack(results)
            return self._scheduler.typed(np.zeros((0, *self._scheduler.empty_shape(kind)), np.float32), kind)
        return results

    def stream(self, inputs: Iterable[Any], *, output: str = "vectors") -> Iterator[Any]:
        """Yields the results of ``encode`` one by one, in order. Inputs are read lazily, a bounded number ahead. A
        warning at the end says how many texts were truncated."""
        for _, result in self.stream_with_ids(inputs, output=output):
            yield result

    def stream_with_ids(self, inputs: Iterable[Any], *, output: str = "vectors") -> Iterator[tuple[list[int], Any]]:
        """As ``stream``, with the ids of each input, special tokens included."""
        with self._scheduler.lock:
            before = replace(self.counts)
        for tokens, result in self._results(inputs, self._output(output)):
            yield list(tokens.ids), result
        if note := self.counts.since(before).note(self.max_length):
            warnings.warn(note, stacklevel=2)

    def submit(
        self, input: Any, *, output: str = "vectors", adapter: str | None = None, timeout: float | None = None
    ) -> Future[Any]:
        """Returns the future of one input's result, for servers: requests that wait at the same time form a batch.

        Args:
            adapter: The name of one of the session's ``adapters``.
            timeout: Seconds to wait for room in the queue before ``queue.Full`` is raised; without limit by default.
        """
        self._scheduler.check_open()
        kind = self._output(output)
        if isinstance(input, (list, np.ndarray)) and len(input) and isinstance(input[0], (str, tuple, list)):
            expected = "one text, pair of texts or list of ids (submit each of them, or encode all)"
            raise TypeError(f"Session.submit: input: expected {expected}, got {len(input)} inputs")
        (tokens,) = self.read([input], output=output, adapter=adapter)
        self._inputs.warn_truncated([tokens])
        return self._dispatcher.submit(Item([tokens], kind), len(tokens.ids), timeout)

    def read(self, inputs: Sequence[Any], *, output: str = "vectors", adapter: Adapter = None) -> list[Tokens]:
        """The sequences of inputs, as ``submit_sequences`` takes them. ``adapter`` is ``encode``'s."""
        return selected(self._inputs.read(inputs, self._output(output)), self.network.adapters, adapter)

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
        self._scheduler.check_open()
        item = Item(sequences, self._output(output), single, tag)
        return self._dispatcher.submit(item, sum(len(tokens.ids) for tokens in sequences), timeout)

    def close(self) -> None:
        """Computes the submitted requests and frees the CUDA graphs. Later calls raise RuntimeError. A future's
        callback that calls it does not wait for the other requests."""
        self._dispatcher.close(self._scheduler.free)

    def __reduce__(self) -> Any:
        raise TypeError(
            "Session: expected to stay in its process (make one of the model in each), got a copy or pickle"
        )

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, batch: Packed, output: Output) -> Wait:
        """Starts the computation of a packed batch. Returns a function that waits for it and returns the host's
        rows."""
        return self._scheduler.run(batch, output)

    def finished(self, pooled: np.ndarray) -> np.ndarray:
        """The vectors [n, width] of pooled states, fp32 [n, width of the layers], as ``encode`` returns them."""
        return self._scheduler.finished(pooled)

    @property
    def counts(self) -> SessionCounts:
        """What has been computed."""
        return self._scheduler.counts

    @property
    def on_launch(self) -> Callable[[list[Any], int, int], None] | None:
        """Called by the dispatcher's thread before a batch is launched (``submit_sequences``)."""
        return self._scheduler.on_launch

    @on_launch.setter
    def on_launch(self, function: Callable[[list[Any], int, int], None] | None) -> None:
        self._scheduler.on_launch = function

    @property
    def ended(self) -> str | None:
        """Why the session computes no more: it is closed, or its device has failed."""
        return self._scheduler.ended

    @property
    def width(self) -> int:
        """How many numbers a vector has."""
        return self.settings.stored_width(self.network.vector_width)

    @property
    def graph_counts(self) -> GraphCounts:
        return self._scheduler.graph_counts

    def __repr__(self) -> str:
        form = self.precision or str(self.dtype).removeprefix("torch.")
        sizes = f"vectors of {self.width}, up to {self.max_length} tokens"
        done = f"{self.counts.texts:,} texts computed"
        return f"Session({type(self.network.model).__name__}, {sizes}, {form} on {self.device}, {done})"

    # ---- parts of calls ----------------------------------------------------------------------------------------------

    def _results(self, inputs: Any, output: Output) -> Iterator[tuple[Tokens, Any]]:
        """The tokens and result of each input, by windows."""
        inputs = texts_of_array(inputs)
        if is_single(inputs):
            inputs = [inputs]
        check_iterable(inputs)
        read = [self._inputs.read(inputs, output)] if is_one_window(inputs) else self._inputs.read_ahead(inputs, output)
        for sequences in read:
            yield from zip(sequences, self._scheduler.launch(sequences, output)(), strict=True)

    def _encode_window(self, inputs: Sequence[Any], output: Output) -> Any:
        """The results of inputs that are tokenized at once, as ``encode`` returns them."""
        ids = self._inputs.sorted_ids(inputs)
        if ids is not None:
            return self._scheduler.launch_ids(ids, len(inputs), output)()
        sequences = self._inputs.read(inputs, output)
        self._inputs.warn_truncated(sequences)
        return self._scheduler.launch(sequences, output)()

    def _output(self, name: str) -> Output:
        output = _OUTPUTS.get(name)
        if output is None:
            raise ValueError(f"Session: output: expected {', '.join(_OUTPUTS)}, got {name!r}")
        self.network.check(output)
        return output
