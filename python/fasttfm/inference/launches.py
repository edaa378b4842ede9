"""Launches of batches without CUDA graphs, and the batches of one call in the order of their launches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fasttfm.inference.network import Inputs
from fasttfm.inference.results import Wait
from fasttfm.ops.core.graph_launch import release_after
from fasttfm.ops.core.streams import to_host

_IN_FLIGHT = 2  # batches that are launched before the first one is synchronized


class DirectLaunch:
    """A batch that kernels compute on the session's stream. Called once, it waits for the result and copies it on the
    stream ``copies``. The inputs are in memory of that stream, and held until the device has read them. Both copies
    wait (see ``to_host``).
    """

    def __init__(self, inputs: Inputs, rows: Tensor, stream: torch.cuda.Stream, copies: torch.cuda.Stream) -> None:
        self._inputs, self._rows, self._copies = inputs, rows, copies
        self._done = torch.cuda.Event()
        self._done.record(stream)

    def __call__(self, read: Callable[[np.ndarray], Any] | None = None) -> Any:
        self._done.synchronize()
        rows = to_host(self._rows, self._copies).numpy()
        return rows if read is None else read(rows)

    def __del__(self) -> None:
        release_after(self._done, self._inputs)


class Launches:
    """The batches of one call. Iterated over, it launches all of them, a few ahead of the one that it yields: the first
    of its sequences, the one after the last, and the function that waits for it.

    A batch that does not fit into the device's memory is split in two. Of a single sequence, the error is in ``errors``
    by the number of the sequence.

    Args:
        groups: The batches: the first sequence of each and the one after its last.
        boundaries: int32 [sequences + 1]
        launch: Starts the computation of the sequences from the first up to the last, without it.
        on_split: Called with the number of tokens of a batch that did not fit.
    """

    def __init__(
        self,
        groups: Iterable[tuple[int, int]],
        boundaries: np.ndarray,
        launch: Callable[[int, int], Wait],
        on_split: Callable[[int], None],
    ) -> None:
        self._groups, self._boundaries = deque(groups), boundaries
        self._launch, self._on_split = launch, on_split
        self._launched: deque[tuple[int, int, Wait]] = deque()
        self.errors: dict[int, torch.OutOfMemoryError] = {}
        for _ in range(_IN_FLIGHT):
            self._launch_next()

    def __iter__(self) -> Iterator[tuple[int, int, Wait]]:
        while self._launched:
            batch = self._launched.popleft()
            self._launch_next()
            yield batch

    def _launch_next(self) -> None:
        while self._groups:
            first, last = self._groups.popleft()
            try:
                self._launched.append((first, last, self._launch(first, last)))
                return
            except torch.OutOfMemoryError as error:
                reason = str(error)
            self._split(first, last, reason)  # after the error, whose traceback refers to tensors, is freed

    def _split(self, first: int, last: int, reason: str) -> None:
        begin, end = self._boundaries.item(first), self._boundaries.item(last)
        if last - first == 1:
            message = f"Session: inputs: {end - begin} tokens do not fit into the device's memory: {reason}"
            self.errors[first] = torch.OutOfMemoryError(message)
            return
        self._on_split(end - begin)
        middle = int(self._boundaries.searchsorted((begin + end) // 2))
        middle = max(first + 1, min(middle, last - 1))
        self._groups.extendleft([(middle, last), (first, middle)])
