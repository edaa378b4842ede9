"""``Sessions``: a session on each of several devices of one process, with the calls of a single one."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fasttfm.data.tokenizer import Tokenizer
from fasttfm.inference.batches import texts_of_array
from fasttfm.inference.counts import SessionCounts
from fasttfm.inference.formats import Tokens
from fasttfm.inference.opening import device_of
from fasttfm.inference.session import Session
from fasttfm.inference.settings import EmbedSettings
from fasttfm.inference.sparse import SparseVectors
from fasttfm.inference.windows import check_iterable, is_single
from fasttfm.models.pretrained import PretrainedModel

_INPUTS = 1024  # which are tokenized and placed together
_AHEAD = 2  # such lists for each session, before the first one is returned


class Sessions:
    """Computes on several devices what ``Session`` computes on one: the calls, their arguments and results are the
    same. Inputs go to the session with the fewest tokens that are submitted and not computed.

    Args:
        model, tokenizer, settings: As ``Session`` takes them; each session has a copy of the weights.
        devices: ``"all"`` GPUs, or the CPU where there is none; or a list of devices, in which one may be repeated.
        options: Further arguments of ``Session``, for each of them.
    """

    def __init__(
        self,
        model: PretrainedModel | str | Path,
        tokenizer: Tokenizer | None = None,
        settings: EmbedSettings | None = None,
        *,
        devices: str | Sequence[str | torch.device] = "all",
        **options: Any,
    ) -> None:
        if "device" in options:
            raise TypeError("Sessions: expected devices, got device")
        names = devices_named(devices)
        self.sessions = [Session(model, tokenizer, settings, device=device, **options) for device in names]
        self._tokens = [0] * len(self.sessions)  # that are submitted to each session and not computed
        self._placed = [0] * len(self.sessions)  # that have been submitted to each session
        self._lock = threading.Lock()  # guards both

    def encode(self, inputs: Any, *, output: str = "vectors") -> Any:
        """As ``Session.encode``."""
        inputs = texts_of_array(inputs)
        if is_single(inputs):
            return self.encode([inputs], output=output)[0]
        check_iterable(inputs)
        size = _INPUTS
        if hasattr(inputs, "__len__"):  # few inputs are divided evenly
            size = max(1, min(size, -(-len(inputs) // len(self.sessions))))
        parts = list(self._parts(inputs, output, size))
        if not parts:
            return self.sessions[0].encode([], output=output)
        if isinstance(parts[0], np.ndarray):
            return np.concatenate(parts)
        results = [part[index] for part in parts for index in range(len(part))]
        return SparseVectors.of(results, parts[0].width) if isinstance(parts[0], SparseVectors) else results

    def stream(self, inputs: Iterable[Any], *, output: str = "vectors") -> Iterator[Any]:
        """As ``Session.stream``."""
        for part in self._parts(inputs, output, _INPUTS):
            yield from (part[index] for index in range(len(part)))

    def submit(self, input: Any, *, output: str = "vectors", timeout: float | None = None) -> Future[Any]:
        """As ``Session.submit``."""
        if not is_single(input):
            raise TypeError(f"Sessions.submit: input: expected one text, pair or list of ids, got {input!r:.80}")
        sequences = self.sessions[0].read([input], output=output)
        return self._place(sequences, output, single=True, timeout=timeout)

    def _parts(self, inputs: Iterable[Any], output: str, size: int) -> Iterator[Any]:
        """The results of inputs in lists of ``size``, in order. The next ones are tokenized while devices compute."""
        source, begun, before = iter(inputs), deque[Future[Any]](), self.counts
        while window := list(itertools.islice(source, size)):
            begun.append(self._place(self.sessions[0].read(window, output=output), output))
            if len(begun) > _AHEAD * len(self.sessions):
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
        if note := self.counts.since(before).note(self.sessions[0].max_length):
            warnings.warn(note, stacklevel=3)

    def _place(
        self, sequences: Sequence[Tokens], output: str, *, single: bool = False, timeout: float | None = None
    ) -> Future[Any]:
        """Submits sequences to the session with the fewest tokens, of those that still compute."""
        count = sum(len(tokens.ids) for tokens in sequences)
        with self._lock:
            able = [index for index, session in enumerate(self.sessions) if session.ended is None] or [0]
            chosen = min(able, key=lambda index: (self._tokens[index], self._placed[index]))
            self._tokens[chosen] += count
            self._placed[chosen] += count
        try:
            session = self.sessions[chosen]
            future = session.submit_sequences(sequences, output=output, single=single, timeout=timeout)
        except BaseException:
            self._computed(chosen, count)
            raise
        future.add_done_callback(lambda _: self._computed(chosen, count))
        return future

    def _computed(self, index: int, tokens: int) -> None:
        with self._lock:
            self._tokens[index] -= tokens

    @property
    def counts(self) -> SessionCounts:
        """The sums of the sessions' counts."""
        names = [field.name for field in fields(SessionCounts)]
        return SessionCounts(
            **{name: sum(getattr(session.counts, name) for session in self.sessions) for name in names}
        )

    @property
    def devices(self) -> list[torch.device]:
        return [session.device for session in self.sessions]

    @property
    def width(self) -> int:
        """How many numbers a vector has."""
        return self.sessions[0].width

    def close(self) -> None:
        """As ``Session.close``, of all sessions."""
        for session in self.sessions:
            session.close()

    def __enter__(self) -> Sessions:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Sessions({', '.join(map(str, self.devices))}: {self.sessions[0]!r})"


def devices_named(names: str | Sequence[str | torch.device]) -> list[torch.device]:
    """The devices of a list, of names with commas between them, or ``"all"``: every GPU, or the CPU where there is
    none. ``"cuda"`` is every GPU, too."""
    listed = names.split(",") if isinstance(names, str) else list(names)
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if listed == ["all"]:
        return gpus or [torch.device("cpu")]
    if listed == ["cuda"] and gpus:
        return gpus
    devices = []
    for name in listed:
        try:
            device = torch.device(name)
        except RuntimeError:
            device = torch.device("meta")
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"devices: expected all, or cpu, cuda or cuda:N with commas between them, got {names!r}")
        devices.append(device_of(device, None))
    if not devices:
        raise ValueError("devices: expected at least one, got none")
    return devices
