"""``Session``: a trained model that is ready to compute."""

from __future__ import annotations

import itertools
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fasttfm.data.tokenizer import Tokenizer
from fasttfm.inference.batches import Packed, one_ahead, pack, plan
from fasttfm.inference.dispatch import Dispatcher
from fasttfm.inference.formats import Tokens, text_format
from fasttfm.inference.graphs import GraphCounts, Graphs
from fasttfm.inference.network import Inputs, Network, Output
from fasttfm.inference.opening import longest_input, open_whole, tokenizer_of
from fasttfm.inference.sentence_folder import read_sentence_folder
from fasttfm.inference.settings import EmbedSettings
from fasttfm.models.pretrained import PretrainedModel

Text = str | tuple[str, str] | Sequence[int]  # a text, a pair of texts, or ids with the special tokens
_WINDOWS = (256, 4096)  # texts that are sorted by length at a time: the first window, and the largest
_IN_FLIGHT = 2  # batches that are launched before the first is waited for
# Tokens of a batch by default. On a CPU a batch's activations are to fit into its caches.
_MAX_TOKENS = {"cuda": 16384, "cpu": 2048}
_GRAPH_TOKENS = 4096  # above, a GPU takes longer for a batch than the host for its launches


@dataclass
class SessionCounts:
    """What a session has read so far."""

    texts: int = 0
    tokens: int = 0
    batches: int = 0
    seconds: float = 0.0  # in which something was computed or waited for
    empty: int = 0  # texts without a token, whose vector is 0
    truncated: int = 0
    left_out: int = 0  # tokens of truncated texts

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def note(self, max_length: int) -> str:
        """What a reader of the results has to know; empty if every text was read as a whole."""
        parts = []
        if self.truncated:
            texts = f"{self.truncated:,} of {self.texts:,} texts have more than {max_length} tokens and are truncated"
            parts.append(f"{texts} ({self.left_out:,} tokens are left out)")
        if self.empty:
            parts.append(f"{self.empty:,} of {self.texts:,} texts have no token, and a vector of zeros")
        return "; ".join(parts)


class _Item(NamedTuple):
    """A sequence of ``submit``, and what is computed of it."""

    tokens: Tokens
    output: Output


class Session:
    """A model that computes vectors, hidden states and logits of any number of texts of any lengths.

    Weights are cast once, and the model that is given stays as it is. Texts are sorted by length, packed without
    padding under a budget of tokens, and their results are put back in order. On a GPU small batches run as CUDA
    graphs, one for each bucket of shapes. ``encode`` and ``submit`` may be called by several threads.

    Args:
        model: A model of ``fasttfm.models``, or a checkpoint directory or hub id of transformers, sentence-transformers
            or fasttfm, which brings its tokenizer and settings.
        tokenizer: Needed for texts where ``model`` is no directory.
        settings: How vectors are pooled; by default those of the directory.
        device: By default a GPU if there is one.
        dtype: Of weights and states; by default bf16 on a GPU and fp32 on a CPU. On a CPU bf16 is the type of the
            layers' products, where the CPU has instructions for them. Results are fp32.
        precision: ``"int8"`` for 8-bit products of the layers on a CPU: weights have a scale for each row, inputs one
            for each token.
        max_tokens: The most tokens of a batch; a single longer text is a batch of its own. By default 16,384 on a GPU
            and 2,048 on a CPU.
        max_batch: The most sequences of a batch.
        max_graphs: The most CUDA graphs that are kept; 0 for none.
        max_waiting: The most requests of ``submit`` that wait.
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
        max_tokens: int | None = None,
        max_batch: int = 1024,
        max_graphs: int = 128,
        max_waiting: int = 4096,
    ) -> None:
        self.device = _device(device, model)
        self.dtype = dtype or (torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        self.max_tokens = _MAX_TOKENS.get(self.device.type, 2048) if max_tokens is None else max_tokens
        self.max_batch = max_batch
        if precision not in (None, "int8"):
            raise ValueError(f"Session: precision: expected None or 'int8', got {precision!r}")
        if precision == "int8" and (self.device.type != "cpu" or self.dtype != torch.float32):
            got = f"{str(self.dtype).removeprefix('torch.')} on {self.device}"
            raise ValueError(f"Session: precision: expected float32 on a CPU with 'int8', got {got}")
        for name, value in (("max_tokens", self.max_tokens), ("max_batch", max_batch), ("max_waiting", max_waiting)):
            if value < 1:
                raise ValueError(f"Session: {name}: expected a number from 1 on, got {value}")
        if not isinstance(model, PretrainedModel):
            folder = read_sentence_folder(model)
            settings = settings or EmbedSettings.of_folder(folder)
            tokenizer = tokenizer or tokenizer_of(folder.model)
            model = open_whole(folder.model).eval().requires_grad_(False).to(self.device)
        self.settings, self.tokenizer = settings or EmbedSettings(), tokenizer
        longest = longest_input(model.config)
        self.max_length = longest if self.settings.max_length is None else self.settings.max_length
        if not 3 <= self.max_length <= longest:
            expected = f"3 to the model's {longest} positions"
            raise ValueError(f"Session: max_length: expected {expected}, got {self.max_length}")
        self._longest = longest
        self._form = None if tokenizer is None else text_format(model.config, tokenizer, self.max_length)
        self._vocabulary: int = model.config.vocab_size
        self.network = Network(
            model, self.settings, self.device, self.dtype, self._prompt_tokens(), int8=precision == "int8"
        )
        self.counts = SessionCounts()
        self._lock = threading.Lock()  # of the device's buffers and the counts
        self._graphs: Graphs | None = None
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)
            self._stream.wait_stream(torch.cuda.current_stream(self.device))  # which has the weights
            if max_graphs > 0:
                padding = model.config.pad_token_id or 0
                most_tokens = min(self.max_tokens, _GRAPH_TOKENS)
                self._graphs = Graphs(
                    self.network, limit=max_graphs, max_tokens=most_tokens, most=longest, padding=padding
                )
        self._dispatcher: Dispatcher[_Item] = Dispatcher(
            self._launch_items, max_tokens=self.max_tokens, max_waiting=max_waiting
        )
        self._closed = False

    # ---- calls -------------------------------------------------------------------------------------------------------

    def encode(self, inputs: Any, *, output: str = "vectors") -> Any:
        """Computes all inputs and returns their results in order.

        Args:
            inputs: Texts, pairs of texts (tuples), or lists of ids with their special tokens; or a single one of them.
            output: ``"vectors"`` (pooled and normalised as the settings say), ``"states"`` of the tokens, or
                ``"logits"`` of the model's head.

        Returns:
            fp32: an array ``[inputs, width]`` of vectors or of logits of sequences; a list of arrays ``[tokens, ...]``
            of states or of logits of tokens. Of a single input, its part of it.
        """
        single = _is_single(inputs)
        kind = self._output(output)
        found = [result for _, result in self._streamed([inputs] if single else inputs, kind)]
        if single:
            return found[0]
        if self.network.is_of_sequences(kind):
            return np.stack(found) if found else np.zeros((0, self._width(kind)), np.float32)
        return found

    def stream(self, inputs: Iterable[Any], *, output: str = "vectors") -> Iterator[np.ndarray]:
        """The results of ``encode`` one by one, in order. Inputs are read as they are needed, a bounded number at a
        time. A warning at the end says how many texts were truncated."""
        for _, result in self.stream_with_ids(inputs, output=output):
            yield result

    def stream_with_ids(
        self, inputs: Iterable[Any], *, output: str = "vectors"
    ) -> Iterator[tuple[list[int], np.ndarray]]:
        """``stream``, with the ids of each input's tokens, special ones included."""
        for tokens, result in self._streamed(inputs, self._output(output)):
            yield list(tokens.ids), result
        if note := self.counts.note(self.max_length):
            warnings.warn(note, stacklevel=2)

    def submit(self, input: Any, *, output: str = "vectors", timeout: float | None = None) -> Future[Any]:
        """The future of one input's result, for servers: requests that wait at the same time are computed together.

        Args:
            timeout: Seconds to wait for room in the queue before ``queue.Full`` is raised; by default any time.
        """
        kind = self._output(output)
        (tokens,) = self._tokenized([input])
        return self._dispatcher.submit(_Item(tokens, kind), len(tokens.ids), timeout)

    def close(self) -> None:
        """Computes what was submitted and frees graphs. Calls that follow raise RuntimeError."""
        self._dispatcher.close()
        with self._lock:
            self._closed = True
            if self._graphs is not None:
                self._graphs.clear()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def width(self) -> int:
        """The numbers of a vector."""
        return self.network.vector_width

    @property
    def graph_counts(self) -> GraphCounts:
        return GraphCounts() if self._graphs is None else self._graphs.counts

    # ---- texts -------------------------------------------------------------------------------------------------------

    def _streamed(self, inputs: Iterable[Any], output: Output) -> Iterator[tuple[Tokens, np.ndarray]]:
        """Windows of inputs: while one is computed, the next one is tokenized."""
        if isinstance(inputs, Sequence) and len(inputs) <= _WINDOWS[0]:
            sequences = self._tokenized(inputs)
            yield from zip(sequences, self._launch(sequences, output)(), strict=True)
            return
        for sequences in one_ahead(_windows(inputs), self._tokenized):
            yield from zip(sequences, self._launch(sequences, output)(), strict=True)

    def _tokenized(self, inputs: Sequence[Any]) -> list[Tokens]:
        """The sequences of inputs; ids are taken as they are."""
        found: list[Tokens | None] = [None] * len(inputs)
        texts: list[str] = []
        places: list[tuple[int, int]] = []  # of an input's texts: where they begin in ``texts``, and how many they are
        for index, each in enumerate(inputs):
            if isinstance(each, str):
                places.append((index, 1))
                texts.append(self._written(each))
            elif isinstance(each, tuple) and len(each) == 2 and all(isinstance(text, str) for text in each):
                places.append((index, 2))
                texts += each
            else:
                found[index] = self._checked(each)
        if len(places) < len(inputs):
            self._check_values([each.ids for each in found if each is not None])  # type: ignore[misc]
        if texts:
            if self.tokenizer is None or self._form is None:
                raise ValueError("Session: tokenizer: expected one for texts, got None")
            ids = iter(self.tokenizer.encode_batch(texts))
            for index, count in places:
                found[index] = self._form.one(next(ids)) if count == 1 else self._form.two(next(ids), next(ids))
        return found  # type: ignore[return-value]

    def _checked(self, given: Any) -> Tokens:
        """The sequence of ids that are given; their values are validated with all others'."""
        ids = given.cpu().numpy() if isinstance(given, Tensor) else np.asarray(given)
        if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
            raise TypeError(f"Session: inputs: expected texts, pairs of texts or lists of ids, got {given!r:.80}")
        if ids.size > self._longest:
            raise ValueError(f"Session: inputs: expected up to {self._longest} ids, got {ids.size}")
        return Tokens(ids, [0] * ids.size)  # type: ignore[arg-type]

    def _check_values(self, ids: list[np.ndarray]) -> None:
        every = np.concatenate(ids)
        if every.size and not 0 <= every.min() <= every.max() < self._vocabulary:
            got = f"{every.min()} to {every.max()}"
            raise ValueError(f"Session: inputs: expected ids from 0 to {self._vocabulary - 1}, got {got}")

    def _written(self, text: str) -> str:
        text = self.settings.prompt + text
        return text.lower() if self.settings.lowercase else text

    def _prompt_tokens(self) -> int:
        """The tokens in front of a text that are not pooled."""
        if self.tokenizer is None or self._form is None or self.settings.pool_prompt:
            return 0
        prompt = self.tokenizer.encode(self._written(""))
        return len(self._form.first) + len(prompt) if prompt else 0

    # ---- batches -----------------------------------------------------------------------------------------------------

    def _launch_items(self, items: list[_Item]) -> Callable[[], Sequence[np.ndarray]]:
        """Starts the computation of requests, which may be of several outputs."""
        outputs = list(dict.fromkeys(item.output for item in items))
        places = [[index for index, item in enumerate(items) if item.output is output] for output in outputs]
        waiting = [
            self._launch([items[index].tokens for index in own], output)
            for output, own in zip(outputs, places, strict=True)
        ]

        def finish() -> list[np.ndarray]:
            found: list[Any] = [None] * len(items)
            for own, wait in zip(places, waiting, strict=True):
                for index, result in zip(own, wait(), strict=True):
                    found[index] = result
            return found

        return finish

    def _launch(self, sequences: Sequence[Tokens], output: Output) -> Callable[[], list[np.ndarray]]:
        """Starts the computation of sequences; the result waits for it and returns what belongs to each."""
        begun = time.perf_counter()
        of_sequences = self.network.is_of_sequences(output)
        groups = deque(plan([len(each.ids) for each in sequences], self.max_tokens, self.max_batch))
        launched: deque[tuple[list[int], Packed, Callable[[], np.ndarray]]] = deque()

        def launch_next() -> None:
            group = groups.popleft()
            pairs = any(sequences[index].segments[-1] for index in group)
            batch = pack(
                [sequences[index].ids for index in group],
                [sequences[index].segments for index in group] if pairs and self.network.has_segments else None,
            )
            launched.append((group, batch, self.run(batch, output)))

        for _ in range(min(_IN_FLIGHT, len(groups))):
            launch_next()

        def finish() -> list[np.ndarray]:
            found: list[Any] = [None] * len(sequences)
            while launched:
                group, batch, wait = launched.popleft()
                if groups:
                    launch_next()
                rows = wait()
                ends = batch.cu_seqlens
                for number, index in enumerate(group):
                    found[index] = rows[number] if of_sequences else rows[ends[number] : ends[number + 1]]
            self._count(sequences, time.perf_counter() - begun)
            for index, each in enumerate(sequences):
                if not len(each.ids):
                    found[index] = np.zeros(self._shape_of_nothing(output), np.float32)
            return found

        return finish

    def run(self, batch: Packed, output: Output) -> Callable[[], np.ndarray]:
        """Starts the computation of a packed batch; the result waits for it and returns the rows on the host."""
        with self._lock:
            if self._closed:
                raise RuntimeError("Session: expected an open session, got a closed one")
            self.counts.batches += 1
            if self.device.type == "cuda":
                return self._run_cuda(batch, output)
            rows = self.network.run(output, Inputs.of(batch, self.device)).cpu().numpy()
        return lambda: rows

    def _run_cuda(self, batch: Packed, output: Output) -> Callable[[], np.ndarray]:
        with torch.cuda.stream(self._stream), torch.inference_mode():
            rows = None if self._graphs is None else self._graphs.run(output, batch)
            if rows is None:
                rows = self.network.run(output, Inputs.of(batch, self.device))
            host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            host.copy_(rows, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)

        def wait() -> np.ndarray:
            done.synchronize()
            return host.numpy()

        return wait

    def _count(self, sequences: Sequence[Tokens], seconds: float) -> None:
        with self._lock:
            counts = self.counts
            counts.texts += len(sequences)
            counts.tokens += sum(len(each.ids) for each in sequences)
            counts.seconds += seconds
            counts.empty += sum(not len(each.ids) for each in sequences)
            counts.truncated += sum(each.cut > 0 for each in sequences)
            counts.left_out += sum(each.cut for each in sequences)

    def _output(self, name: str) -> Output:
        names = [each.value for each in Output]
        if name not in names:
            raise ValueError(f"Session: output: expected {', '.join(names)}, got {name!r}")
        output = Output(name)
        self.network.check(output)
        return output

    def _width(self, output: Output) -> int:
        """Of a row of an output that has one for each sequence."""
        return self.width if output is Output.VECTORS else int(self.network.model.config.num_labels)

    def _shape_of_nothing(self, output: Output) -> tuple[int, ...]:
        """That of the result of a text without tokens."""
        if self.network.is_of_sequences(output):
            return (self._width(output),)
        return (0, self.network.state_width if output is Output.STATES else 0)


def _device(given: str | torch.device | None, model: Any) -> torch.device:
    if given is None and isinstance(model, PretrainedModel):
        return next(model.parameters()).device
    if given is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(given)
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def _is_single(inputs: Any) -> bool:
    """Whether the input is one text, one pair of texts or one list of ids."""
    if isinstance(inputs, str) or (isinstance(inputs, (Tensor, np.ndarray)) and inputs.ndim == 1):
        return True
    if isinstance(inputs, tuple):
        return len(inputs) == 2 and all(isinstance(text, str) for text in inputs)
    return isinstance(inputs, list) and bool(inputs) and isinstance(inputs[0], (int, np.integer))


def _windows(inputs: Iterable[Any]) -> Iterator[list[Any]]:
    """The inputs in lists that grow from the first size of ``_WINDOWS`` to the second."""
    source, size = iter(inputs), _WINDOWS[0]
    while window := list(itertools.islice(source, size)):
        yield window
        size = min(2 * size, _WINDOWS[1])
