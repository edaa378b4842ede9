"""``GenerationSession``: continuous batching. Sequences are submitted at any time and continued together.

Every sequence has a slot in one KV cache (decoder.py) and a row in tensors on the device: its last token, its length,
the tokens that end it, how its tokens are drawn. A step reads and writes only these tensors. On a GPU one CUDA graph
for each number of rows therefore runs all steps, sampling included, and no step synchronizes with the host. Every few
steps the state is copied; the host reads the copy while later steps run. Finished sequences then leave, and waiting
ones take their slots.

The session's stream orders cache, state and graphs, whichever threads and streams call it. A round waits for what its
caller has launched before, such as changes of parameters, and what the caller launches later waits for the round.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fasttfm import ops
from fasttfm.generate.decoder import CachedDecoder, body_of, logits_of
from fasttfm.generate.sampling import Sampling, check_logits, check_new_tokens, end_tokens
from fasttfm.models.families import longest_input
from fasttfm.models.text_model import TextModel
from fasttfm.nn import CausalLMHead, PackedBatch
from fasttfm.nn.plain import Tree, is_plain
from fasttfm.ops.core.checks import in_one_line
from fasttfm.ops.core.graph_cache import GraphCache
from fasttfm.ops.core.graph_capture import CaptureError, GraphPool
from fasttfm.ops.core.streams import OrderedStream, to_host
from fasttfm.ops.sample_tokens import Sequences

Array = np.ndarray[Any, Any]
Ids = np.ndarray[Any, np.dtype[np.int64]]

_NAME = "GenerationSession"
_DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32, np.dtype(np.float32): torch.float32}
_MAX_STOP_TOKENS = 8  # of one sequence
_MOST_LIKELY = Sampling()
_MAX_PROMPT_TOKENS = 16384  # of prompts that are read together; a longer prompt is read by itself
_STEPS_PER_ROUND = 8  # steps between two copies of the state to the host
_RESET_INTERVAL = 1 << 26  # steps before the tags of ops/layers/decode_layers.py are used up


class Generation:
    """A sequence that a session continues. ``result()`` waits for all its tokens; iteration yields each one as soon as
    it is computed. The thread that waits runs the session's steps."""

    def __init__(self, session: GenerationSession, prompt: Ids, row: _Row) -> None:
        self.tokens: list[int] = []  # the new tokens that have reached the host
        self.done = False
        self._session, self._row = session, row
        self._ids: Array = prompt
        self._steps = 0  # the number of new tokens that are launched
        self._error: BaseException | None = None  # what ended the sequence before its end

    @property
    def prompt(self) -> list[int]:
        ids: list[int] = self._ids.tolist()
        return ids

    def result(self) -> list[int]:
        """The new tokens, including the one that ends the sequence. Raises RuntimeError where a step that the sequence
        was part of has failed."""
        while not self.done:
            self._session._advance(_STEPS_PER_ROUND)
        self._raise_error()
        return self.tokens

    def cancel(self) -> None:
        """Ends the sequence with the tokens in ``tokens``; does nothing if it has ended."""
        self._session._cancel(self)

    def __iter__(self) -> Iterator[int]:
        yielded = 0
        while True:
            done = self.done  # read first: the last tokens are known before the end, which another thread may note
            if yielded < len(self.tokens):
                yield self.tokens[yielded]
                yielded += 1
            elif done:
                break
            else:
                self._session._advance(1)
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"generate: a step of the session has failed: {self._error!r}") from self._error


@dataclass(frozen=True)
class _Row:
    """The options of a sequence."""

    new: int  # the maximum number of new tokens
    ends: tuple[int, ...]
    seed: int
    temperature: float  # 0: the most likely token
    top_k: int
    top_p: float


@dataclass
class _State:
    """The state of n slots, on the device."""

    ids: Tensor  # int64 [n]: the last token, which is not in the cache yet
    active: Tensor  # bool [n]: whether the sequence continues
    limits: Tensor  # int32 [n]: the maximum length of the sequence, prompt included
    ends: Tensor  # int64 [n, _MAX_STOP_TOKENS]: padded with -1
    seeds: Tensor  # int64 [n]
    temperature: Tensor  # fp32 [n]
    top_k: Tensor  # int32 [n]
    top_p: Tensor  # fp32 [n]
    history: Tensor  # int64 [n, capacity]: drawn tokens at their positions

    @staticmethod
    def empty(slots: int, capacity: int, device: torch.device) -> _State:
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return _State(
            ids=zeros(slots, dtype=torch.int64),
            active=zeros(slots, dtype=torch.bool),
            limits=zeros(slots, dtype=torch.int32),
            ends=zeros(slots, _MAX_STOP_TOKENS, dtype=torch.int64) - 1,
            seeds=zeros(slots, dtype=torch.int64),
            temperature=zeros(slots, dtype=torch.float32),
            top_k=zeros(slots, dtype=torch.int32),
            top_p=zeros(slots, dtype=torch.float32) + 1,
            history=zeros(slots, capacity, dtype=torch.int64),
        )

    @staticmethod
    def of(generations: Sequence[Generation], capacity: int, device: torch.device, *others: Array) -> tuple[Any, ...]:
        """The state of new sequences, and the ``others`` on their device: by one copy to it."""
        rows = [generation._row for generation in generations]
        ends = np.full((len(rows), _MAX_STOP_TOKENS), -1, np.int64)
        for own, row in zip(ends, rows, strict=True):
            own[: len(row.ends)] = row.ends
        arrays: dict[str, Array] = {
            "limits": np.array([len(each._ids) + each._row.new for each in generations], np.int32),
            "ends": ends,
            "seeds": np.array([row.seed for row in rows], np.int64),
            "temperature": np.array([row.temperature for row in rows], np.float32),
            "top_k": np.array([row.top_k for row in rows], np.int32),
            "top_p": np.array([row.top_p for row in rows], np.float32),
        }
        tensors = _on_device([*arrays.values(), *others], device)
        state = _State(
            ids=torch.zeros(len(rows), dtype=torch.int64, device=device),
            active=torch.ones(len(rows), dtype=torch.bool, device=device),
            history=torch.zeros(len(rows), capacity, dtype=torch.int64, device=device),
            **dict(zip(arrays, tensors, strict=False)),
        )
        return state, *tensors[len(arrays) :]

    def first(self, rows: int) -> _State:
        return _State(*(getattr(self, field.name)[:rows] for field in fields(self)))

    def store(self, slots: Tensor, rows: _State) -> None:
        for field in fields(self):
            getattr(self, field.name)[slots] = getattr(rows, field.name)

    def move(self, source: Tensor, target: Tensor) -> None:
        for field in fields(self):
            tensor = getattr(self, field.name)
            tensor[target] = tensor[source]

    def take(self, logits: Tensor, lengths: Tensor, backend: str | None) -> None:
        """Draws the token at position ``lengths`` of each active sequence, and clears ``active`` where it is the
        last."""
        check_logits(logits)
        sampling = (self.temperature, self.top_k, self.top_p)
        sequences = Sequences(self.ids, self.active, self.limits, self.ends, self.history)
        ops.sample_tokens(logits, self.seeds, lengths, *sampling, sequences=sequences, backend=backend)


@dataclass
class _Snapshot:
    """A copy of the state of sequences at some step. On a GPU it is complete once ``ready`` is reached on the session's
    stream. Only ``apply`` reads it then, on the stream ``copies``, so that it does not wait for later steps."""

    generations: dict[int, Generation]
    active: Tensor
    lengths: Tensor
    history: Tensor
    ready: torch.cuda.Event | None
    copies: torch.cuda.Stream | None

    def apply(self) -> None:
        """Appends the new tokens to their sequences, and marks finished sequences."""
        active, lengths, rows = self._on_host()
        continues, ends, history = active.tolist(), lengths.tolist(), rows.numpy()
        for slot, generation in self.generations.items():
            if generation.done:
                continue
            known = len(generation._ids) + len(generation.tokens)
            generation.tokens += history[slot, known : ends[slot] + 1].tolist()
            generation.done = not continues[slot]

    def _on_host(self) -> list[Tensor]:
        tensors = [self.active, self.lengths, self.history]
        if self.ready is None or self.copies is None:
            return tensors
        self.ready.synchronize()
        return [to_host(tensor, self.copies) for tensor in tensors]


class GenerationSession:
    """Continues many sequences of a causal model together. ``submit`` may be called from several threads.

    Args:
        model: A causal language model (GPT2LMHeadModel, LlamaForCausalLM, ...), in evaluation mode.
        max_batch: The maximum number of sequences at a time; others wait.
        max_length: The maximum number of tokens in a sequence, prompt included; the model's positions by default. The
            cache is allocated for ``max_batch * max_length`` tokens.
        graphs: Whether steps run as CUDA graphs. By default they do on a GPU if all modules are plain (no hooks or
            wrappers). True raises ValueError if they cannot.
        fused: Whether steps on a GPU use the kernels for decoding (attention to the cache, GEMMs of few rows, sampling)
            instead of the other ops and plain torch.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_batch: int = 32,
        max_length: int | None = None,
        graphs: bool | None = None,
        fused: bool = True,
    ) -> None:
        _check_mode(model)
        positions = longest_input(model.config)
        capacity = positions if max_length is None else max_length
        if not 1 <= capacity <= positions:
            raise ValueError(
                f"{_NAME}: max_length: expected from 1 to the model's {positions} positions, got {capacity}"
            )
        if max_batch < 1:
            raise ValueError(f"{_NAME}: max_batch: expected at least 1, got {max_batch}")
        body: TextModel = body_of(model)
        self.model, self.max_batch, self.capacity = model, max_batch, capacity
        self.head: CausalLMHead = model.lm_head
        self.decoder = CachedDecoder(body, capacity, max_batch, fused=fused)
        parameter = next(body.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self._stream = OrderedStream(self.device)
        self._copies = OrderedStream(self.device).stream  # of results to the host
        self._sampler = None if fused or self.device.type == "cpu" else "reference"
        with torch.inference_mode(False), self._stream.ordered():  # later calls may be outside of inference mode
            self._state = _State.empty(max_batch, capacity, self.device)
        self._waiting: deque[Generation] = deque()
        self._running: dict[int, Generation] = {}
        self._snapshots: deque[_Snapshot] = deque()
        self._lock = threading.RLock()
        self._steps = 0
        self._graphs = _Graphs(model, self._stream) if _uses_graphs(model, self.device, graphs) else None

    def __repr__(self) -> str:
        sizes = f"up to {self.max_batch} sequences of {self.capacity} tokens"
        where = f"{str(self.dtype).removeprefix('torch.')} on {self.device}"
        return f"GenerationSession({type(self.model).__name__}, {sizes}, {where})"

    def submit(
        self,
        prompt: Sequence[int] | Tensor,
        *,
        max_new_tokens: int = 20,
        eos_token_id: int | Sequence[int] | None = None,
        seed: int | None = None,
        sampling: Sampling | None = None,
        **options: Any,
    ) -> Generation:
        """Adds a sequence that starts with ``prompt``. Its tokens do not depend on the other sequences of the session.

        Args:
            max_new_tokens: The maximum number of new tokens.
            eos_token_id: One or several tokens, each of which ends the sequence; the configuration's by default.
            seed: The random seed with ``do_sample``; by default drawn from torch's generator.
            sampling: How tokens are drawn; by default ``Sampling(**options)``.
            options: ``do_sample``, ``temperature``, ``top_k``, ``top_p``: see ``Sampling``.
        """
        ids = self._checked(prompt)
        check_new_tokens(max_new_tokens)
        if len(ids) + max_new_tokens > self.capacity:
            got = f"{max_new_tokens} after {len(ids)}"
            expected = f"no more than {self.capacity} tokens with the prompt"
            raise ValueError(f"generate: max_new_tokens: expected {expected}, got {got}")
        self._check_model()
        ends = end_tokens(self.model.config, eos_token_id)
        if len(ends) > _MAX_STOP_TOKENS:
            raise ValueError(f"generate: eos_token_id: expected at most {_MAX_STOP_TOKENS} tokens, got {len(ends)}")
        if sampling is None:
            sampling = Sampling(**options) if options else _MOST_LIKELY
        row = sampling.row(seed)
        generation = Generation(self, ids, _Row(max_new_tokens, tuple(ends), *row))
        if max_new_tokens == 0:
            generation.done = True
            return generation
        with self._lock:
            self._waiting.append(generation)
        return generation

    def _checked(self, prompt: Sequence[int] | Tensor) -> Ids:
        """The ids of a prompt. A wrong one would end the sequences that are read with it, too."""
        try:
            ids = np.asarray(prompt.cpu() if isinstance(prompt, Tensor) else prompt)
        except (TypeError, ValueError, OverflowError):  # lists of different lengths
            ids = np.empty((0, 0))
        if ids.shape == (0,):
            raise ValueError("generate: input_ids: expected prompts of at least one token, got an empty one")
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(f"generate: input_ids: expected a list of ids, got {prompt!r:.80}")
        ids, words = ids.astype(np.int64), self.model.config.vocab_size
        if ids.view(np.uint64).max() >= words:  # also the negative ones
            got = f"{ids.min()} to {ids.max()}"
            raise ValueError(f"generate: input_ids: expected ids from 0 to {words - 1}, got {got}")
        return ids

    def fits(self, sequences: int, tokens: int) -> bool:
        """Whether the cache has room for this many sequences of this many tokens, and still has the device and dtype of
        the model's parameters."""
        return self._fits_model() and sequences <= self.max_batch and tokens <= self.capacity

    def _fits_model(self) -> bool:
        parameter = body_of(self.model).embeddings.word.weight
        return bool(parameter.device == self.device and parameter.dtype == self.dtype)

    def _check_model(self) -> None:
        _check_mode(self.model)
        if not self._fits_model():
            parameter = next(body_of(self.model).parameters())
            expected, got = (
                f"{str(dtype).removeprefix('torch.')} on {device}"
                for dtype, device in ((self.dtype, self.device), (parameter.dtype, parameter.device))
            )
            raise ValueError(f"{_NAME}: model: expected parameters in {expected} as at first, got {got}")

    # ---- rounds ----

    @torch.no_grad()
    def _advance(self, steps: int) -> None:
        """Runs a round: admits waiting sequences, launches up to ``steps`` steps and reads earlier results. On a GPU
        the results are those of the previous round, so that the GPU does not wait for the host."""
        self._check_model()
        with self._lock, self._stream.ordered():
            try:
                self._run_round(steps)
            except BaseException as error:
                self._fail(error)
                raise

    def _run_round(self, steps: int) -> None:
        steps -= self._admit_waiting()
        missing = [generation._row.new - generation._steps for generation in self._running.values()]
        steps = min(steps, max(missing, default=0))
        rows = max(self._running, default=-1) + 1
        for _ in range(steps):
            self._step(rows)
        for generation in self._running.values():
            generation._steps += steps
        if steps or not self._snapshots:
            self._snapshots.append(self._snapshot(rows))
        ahead = 1 if steps and self.device.type == "cuda" else 0
        while len(self._snapshots) > ahead:
            self._snapshots.popleft().apply()
        self._running = {slot: generation for slot, generation in self._running.items() if not generation.done}
        self._compact_slots()

    def _fail(self, error: BaseException) -> None:
        """Ends all running sequences: what a step has changed before its error is not known. Others still wait."""
        for generation in self._running.values():
            generation._error, generation.done = error, True
        self._running = {}
        self._snapshots.clear()
        with contextlib.suppress(RuntimeError):  # of a device that has failed; the first error says more
            self._state.active.zero_()

    def _admit_waiting(self) -> bool:
        """Reads the prompts of waiting sequences for which there are free slots, and draws their first tokens. Returns
        whether there were any."""
        free = [slot for slot in range(self.max_batch) if slot not in self._running]
        taken: list[Generation] = []
        tokens = 0
        while self._waiting and len(taken) < len(free):
            tokens += len(self._waiting[0]._ids)
            if taken and tokens > _MAX_PROMPT_TOKENS:
                break
            taken.append(self._waiting.popleft())
        if not taken:
            return False
        for slot, generation in zip(free, taken, strict=False):
            self._running[slot] = generation
            generation._steps = 1
        if self._graphs is not None:
            self._graphs.drop_if_model_changed()
        self._read(taken, free[: len(taken)])
        return True

    def _read(self, taken: Sequence[Generation], slots: Sequence[int]) -> None:
        """Reads the prompts of sequences and draws their first tokens."""
        lengths = [len(generation._ids) for generation in taken]
        ids = np.concatenate([generation._ids for generation in taken])
        bounds = np.cumsum([0, *lengths], dtype=np.int32)
        given = (ids, bounds, np.array(slots, np.int64), np.array(lengths, np.int32))
        rows, flat, cu_seqlens, own, positions = _State.of(taken, self.capacity, self.device, *given)
        logits = logits_of(self.head, self.decoder.read(flat, PackedBatch(cu_seqlens, max(lengths), len(ids)), own))
        rows.take(logits, positions, self._sampler)
        self._state.store(own, rows)

    def _cancel(self, generation: Generation) -> None:
        with self._lock:
            if generation.done:
                return
            generation.done = True
            if generation in self._waiting:
                self._waiting.remove(generation)
            for slot, running in list(self._running.items()):
                if running is generation:
                    del self._running[slot]
                    with self._stream.ordered():
                        self._state.active[slot] = False

    def _step(self, rows: int) -> None:
        self._steps += 1
        if self._steps % _RESET_INTERVAL == 0:
            self.decoder.reset_workspace()
        if self._graphs is None:
            self._step_eagerly(rows)
        else:
            self._graphs.run(self._bucket(rows), self._step_eagerly, self._state.active)

    def _bucket(self, rows: int) -> int:
        """The number of rows of the graph to use: a power of two or ``max_batch``."""
        return min(self.max_batch, 1 << (rows - 1).bit_length())

    def _step_eagerly(self, rows: int) -> None:
        state = self._state.first(rows)
        logits = self.decoder.next_logits(self.head, state.ids, state.active)
        state.take(logits, self.decoder.lengths[:rows], self._sampler)

    def _snapshot(self, rows: int) -> _Snapshot:
        """Copies the state that the host reads, on the device."""
        sources = (self._state.active[:rows], self.decoder.lengths[:rows], self._state.history[:rows])
        active, lengths, history = (source.clone() for source in sources)
        ready = None
        if self._copies is not None:
            ready = torch.cuda.Event()
            ready.record()
        return _Snapshot(dict(self._running), active, lengths, history, ready, self._copies)

    def _compact_slots(self) -> None:
        """Moves the last sequences to free slots in front of them if a smaller graph then is enough."""
        if not self._running:
            return
        rows, count = max(self._running) + 1, len(self._running)
        if self._bucket(rows) == self._bucket(count):
            return
        moved = sorted(slot for slot in self._running if slot >= count)
        free = [slot for slot in range(count) if slot not in self._running]
        source, target = (torch.tensor(slots, device=self.device, dtype=torch.int64) for slots in (moved, free))
        self.decoder.copy(source, target)
        self._state.move(source, target)
        self._state.active[source] = False
        for before, after in zip(moved, free, strict=True):
            self._running[after] = self._running.pop(before)


def _on_device(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """The arrays as tensors on a device, by one copy to it."""
    starts = np.cumsum([0, *(-(-array.nbytes // 8) * 8 for array in arrays)])  # at multiples of the largest element
    packed = np.empty(starts[-1], np.uint8)
    for array, start in zip(arrays, starts, strict=False):
        packed[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    copied = torch.from_numpy(packed).to(device)
    return [
        copied[start : start + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
        for array, start in zip(arrays, starts.tolist(), strict=False)
    ]


def _check_mode(model: Any) -> None:
    if model.training:
        raise ValueError(f"{_NAME}: model: expected evaluation mode (model.eval()), got training mode")


def _uses_graphs(model: Any, device: torch.device, requested: bool | None) -> bool:
    if requested and not (device.type == "cuda" and _has_plain_modules(model)):
        raise ValueError(f"{_NAME}: graphs: expected modules without hooks and wrappers on a GPU, got others")
    return device.type == "cuda" if requested is None else requested


def _has_plain_modules(model: Any) -> bool:
    """Whether no module has hooks or wrappers, whose Python code a replayed graph would not run."""
    return all(is_plain(module) for module in model.modules() if not list(module.children()))


class _Graphs:
    """The CUDA graphs of steps, by number of rows. They are captured again if the model has changed, which is noticed
    when a sequence starts; until then they keep the memory of the parameters that they read. Steps of a model with
    hooks or wrappers run without graphs, and so do steps for some time after a capture has failed."""

    def __init__(self, model: Any, stream: OrderedStream) -> None:
        self._model = model
        self._pool = GraphPool(stream.stream)
        self._forget()

    def _forget(self) -> None:
        self._cache: GraphCache[torch.cuda.CUDAGraph] = GraphCache(sys.maxsize, lookups=1)
        self._usable = _has_plain_modules(self._model)
        self._tree = Tree(self._model)
        self._owners = [module._parameters for module in self._model.modules() if module._parameters]
        self._addresses = self._addresses_now()
        self._parameters = [parameter.detach() for parameter in self._model.parameters()]  # with the same memory

    def drop_if_model_changed(self) -> None:
        if not self._usable or not self._tree.is_unchanged() or self._addresses_now() != self._addresses:
            self._forget()

    def _addresses_now(self) -> list[int]:
        return [each.data_ptr() for own in self._owners for each in own.values() if each is not None]

    def captured(self, rows: int) -> torch.cuda.CUDAGraph | None:
        """The graph of this many rows; None if there is none."""
        entry = self._cache.kept(rows)
        return None if entry is None else entry.value

    def run(self, rows: int, step: Callable[[int], None], active: Tensor) -> None:
        graph = None
        if self._usable:
            try:
                graph = self._cache.get(rows, lambda rows: self._capture(rows, step, active))
            except CaptureError as error:
                warnings.warn(
                    f"{_NAME}: runs without a new CUDA graph for some time: {in_one_line(error)}", stacklevel=2
                )
        if graph is None:
            step(rows)
        else:
            graph.replay()

    def _capture(self, rows: int, step: Callable[[int], None], active: Tensor) -> torch.cuda.CUDAGraph:
        """Captures a step, after a first run that compiles its kernels. Without active sequences that run changes
        nothing that is read later."""
        saved = active.clone()
        active.zero_()
        try:
            step(rows)
            graph, _ = self._pool.capture(lambda: step(rows))
        finally:
            active.copy_(saved)
        return graph
