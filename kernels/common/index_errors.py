"""Reports indices outside of their table that kernels find on a GPU, without synchronizing with it.

A kernel that finds a bad index does not use it, writes NaN to its output and records the first such row in a few words
on the device. Each call starts an asynchronous copy of these words to the host after its kernels and does not wait for
it: a later call raises if a completed copy holds an error, and ``check_errors()`` synchronizes and raises. CUDA graphs
write the same words when they are replayed; errors of replays are only found by ``check_errors()``.

The words of an op and device exist before its first call continues, and no graph contains their initialization: a first
call inside of a capture raises.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch
from torch import Tensor

_NONE = 2**63 - 1
_LARGEST = 2**31 - 1
_all: list[IndexErrors] = []


class Checked(Protocol):
    """What ``check_errors()`` also asks. It synchronizes with its GPU itself."""

    def raise_if_any(self) -> None: ...


_also: weakref.WeakSet[Checked] = weakref.WeakSet()


def also_checked(checked: Checked) -> None:
    """Registers an object with ``check_errors()`` for as long as it exists."""
    _also.add(checked)


class IndexErrors:
    """The bad indices of one op, for every GPU.

    The words are int64 [2, arguments]. First row: ``row << 32 | index`` of the first bad row, the index saturated to 32
    bits; the largest int64 if there is none. Second row: the number of rows of the table.
    """

    def __init__(self, op: str, arguments: tuple[str, ...], *, rows: str = "token") -> None:
        self._op = op
        self._arguments = arguments
        self._rows = rows  # what one index belongs to, in the messages
        self._devices: dict[torch.device, _DeviceState] = {}
        _all.append(self)

    def words(self, device: torch.device) -> Tensor:
        """The tensor to which kernels on this device write."""
        return self._state(device).words

    def record(self, argument: str, indices: Tensor, valid: Tensor, limits: Tensor) -> None:
        """Records the ``indices`` [N] that are not ``valid`` [N] as a kernel does; on the CPU it raises.
        ``limits`` [N] is the number of rows of each index's table."""
        if indices.device.type != "cuda":
            for row in (~valid).nonzero().flatten().tolist():
                raise ValueError(self._message(argument, row, int(indices[row]), int(limits[row]), "this call"))
            return
        self.raise_if_seen(indices.device)
        word, limit = self.words(indices.device)[:, self._arguments.index(argument)]
        rows = torch.arange(len(indices), device=indices.device)
        index = indices.clamp(-_LARGEST - 1, _LARGEST).long() & 0xFFFFFFFF
        first, row = ((rows << 32) | index).where(~valid, _NONE).min(0, keepdim=True)
        limit.copy_(torch.where(first < word, limits.index_select(0, row), limit)[0])
        word.copy_(torch.minimum(first, word)[0])
        self.watch(indices.device)

    def watch(self, device: torch.device) -> None:
        """Starts the copy that a later call checks. Called after the kernels."""
        if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            self._state(device).copy()

    def raise_if_seen(self, device: torch.device) -> None:
        """Raises if a completed copy holds an error. Does not synchronize."""
        state = self._devices.get(device)
        if state is not None and state.arrived():
            self._raise(state, "an earlier call")

    def raise_if_any(self) -> None:
        """Synchronizes with every GPU and raises if a kernel has recorded an error."""
        for device, state in self._devices.items():
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            state.host.copy_(state.words)
            self._raise(state, "a call")

    def _state(self, device: torch.device) -> _DeviceState:
        if device not in self._devices:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"{self._op}: expected a call on {device} before the first one inside of the capture of a CUDA"
                    " graph, got none: the words in which kernels record wrong indices are not part of a graph"
                )
            self._devices[device] = _DeviceState(device, len(self._arguments))
        return self._devices[device]

    def _raise(self, state: _DeviceState, when: str) -> None:
        for argument, word, limit in zip(self._arguments, *state.host.tolist(), strict=True):
            if word != _NONE:
                state.reset()
                row, index = word >> 32, word & 0xFFFFFFFF
                index -= 2**32 if index > _LARGEST else 0
                raise ValueError(self._message(argument, row, index, limit, when))

    def _message(self, argument: str, row: int, index: int, limit: int, when: str) -> str:
        beyond = " or beyond" if index in (_LARGEST, -_LARGEST - 1) else ""
        expected = f"expected indices in [0, {limit}), got {index}{beyond} at {self._rows} {row} in {when}"
        return f"{self._op}: {argument}: {expected}"


class _DeviceState:
    """The words of one op on one device, and their copy on the host.

    No stream orders the words: kernels of any stream and graph change them by atomics. They are filled before the first
    kernel gets them, by a stream of their own that the host waits for: a copy of a few bytes, which no kernel delays. A
    reset is ordered by the stream of the call that raises; copies by other streams wait for it.
    """

    @torch.inference_mode(False)  # later calls change the tensors, wherever the first call runs
    def __init__(self, device: torch.device, arguments: int) -> None:
        self._shape = (2, arguments)
        self.host = self._no_errors(pinned=device.type == "cuda")
        self._event: torch.cuda.Event | None = None  # after the latest copy to the host
        self._reset: torch.cuda.Event | None = None  # after the latest reset
        if device.type != "cuda":
            self.words = self.host.to(device, copy=True)
            return
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):  # allocated there too: no kernel of another stream still writes to the memory
            self.words = self.host.to(device, non_blocking=True)
        stream.synchronize()

    def _no_errors(self, *, pinned: bool) -> Tensor:
        return torch.full(self._shape, _NONE, dtype=torch.int64, device="cpu", pin_memory=pinned)

    def copy(self) -> None:
        stream = torch.cuda.current_stream(self.words.device)
        if self._reset is not None:
            stream.wait_event(self._reset)
        if self._event is None:
            self._event = torch.cuda.Event()
        self.host.copy_(self.words, non_blocking=True)
        self._event.record(stream)

    def arrived(self) -> bool:
        return self._event is not None and not torch.cuda.is_current_stream_capturing() and self._event.query()

    @torch.inference_mode(False)
    def reset(self) -> None:
        """Copies that are in flight still hold the error: they go to the former tensor on the host."""
        self.words.fill_(_NONE)
        self.host = self._no_errors(pinned=self.words.is_cuda)
        self._event = None
        if self.words.is_cuda:
            self._reset = torch.cuda.Event()
            self._reset.record(torch.cuda.current_stream(self.words.device))


def check_errors() -> None:
    """Synchronizes with the GPUs and raises ValueError if a kernel has recorded an index outside of its table, or
    RuntimeError if it gave up; its results are NaN then."""
    for errors in _all:
        errors.raise_if_any()
    for checked in list(_also):
        checked.raise_if_any()
