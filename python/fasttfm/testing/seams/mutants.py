"""Entry points that are broken on purpose, at least one for each seam, which must reject it.

Each one computes ``x @ weight`` or ``2 x`` correctly if nothing happens around its calls.
"""

from __future__ import annotations

import copy
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fasttfm import _native
from fasttfm.testing.seams.boundaries import LIES
from fasttfm.testing.seams.entry import EntryPoint, Inputs, Tensors, as_leaves, with_gradients

_ROWS, _WIDTH = 6, 8


def _inputs(seed: int, device: torch.device) -> Inputs:
    x = torch.randn(_ROWS, _WIDTH, generator=torch.Generator().manual_seed(seed))
    bounds = torch.tensor([0, 2, 5, _ROWS], dtype=torch.int32)
    return {"x": x.to(device), "cu_seqlens": bounds.to(device), "max_seqlen": 3}


# ---- modules that keep something of their weights --------------------------------------------------------------------


class Plain(nn.Module):
    """Not broken: ``x @ weight``."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(_WIDTH, _WIDTH, generator=torch.Generator().manual_seed(9))
        self.weight = nn.Parameter(weight)

    def kept(self) -> Tensor:
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kept()


class _Keeps(Plain):
    """Keeps a copy of its weight while ``key()`` is the same."""

    def __init__(self) -> None:
        super().__init__()
        self.known: tuple[Any, Tensor] | None = None

    def key(self) -> Any:
        raise NotImplementedError

    def kept(self) -> Tensor:
        if self.known is None or self.known[0] != self.key():
            self.known = self.key(), self.weight * 1
        if not self.known[1].requires_grad and torch.is_grad_enabled():
            self.known = self.key(), self.weight * 1
        return self.known[1].detach() + 0 * self.weight


class ByObject(_Keeps):
    """Does not see a change in place."""

    def key(self) -> Any:
        return id(self.weight), self.weight.dtype


class ByVersion(_Keeps):
    """Does not see changes that torch does not count."""

    def key(self) -> Any:
        return id(self.weight), self.weight.dtype, self.weight._version


class ByAddress(_Keeps):
    """Does not see a change in place, but other memory."""

    def key(self) -> Any:
        return self.weight.data_ptr(), self.weight.dtype


class Forever(_Keeps):
    """Does not see any change, not even in its copies."""

    def key(self) -> Any:
        return self.weight.dtype


class Recast(Plain):
    """Keeps the dtype of its first call."""

    dtype: torch.dtype | None = None

    def kept(self) -> Tensor:
        self.dtype = self.dtype or self.weight.dtype
        return self.weight.to(self.dtype).to(self.weight.dtype)


class SharedByCopies(Plain):
    """A deep copy has the same weight."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Plain:
        twin = copy.copy(self)
        twin._parameters = dict(self._parameters)
        return twin


class KeepsFirstDevice(Plain):
    """Computes with memory that it found at its first call: moving the module is not seen."""

    first_weight: Any = None

    def kept(self) -> Tensor:
        if self.first_weight is None:
            self.__dict__["first_weight"] = self.weight
        return self.weight + (self.first_weight.detach().to(self.weight) - self.weight.detach())


# ---- functions with state --------------------------------------------------------------------------------------------


class SharedBuffer:
    """Writes to one buffer in all calls, and reads it later."""

    def __init__(self) -> None:
        self.buffer: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.buffer is None or self.buffer.device != x.device:
            self.buffer = torch.empty_like(x)
        self.buffer.copy_(x)
        if x.is_cuda:
            torch.cuda._sleep(3_000_000)
        else:
            time.sleep(0.002)  # other threads run, as in a kernel that releases the GIL
        return 2 * self.buffer


class ReadyTooEarly:
    """Says that its buffer is ready before it is allocated."""

    def __init__(self) -> None:
        self.ready, self.buffer = False, torch.zeros(_ROWS, _WIDTH)

    def __call__(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.ready = True
            buffer = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            self.buffer = buffer.fill_(2.0)
        return x * self.buffer


class SwallowsFailures:
    """Returns what it has if an allocation fails."""

    def __call__(self, x: Tensor) -> Tensor:
        try:
            return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(2 * x)
        except torch.OutOfMemoryError:
            return x


class Destroyed:
    """The end of one object changes what the others compute."""

    factor = 2.0

    def __call__(self, x: Tensor) -> Tensor:
        return x * Destroyed.factor

    def __del__(self) -> None:
        Destroyed.factor += 1.0


class Worker:
    """Computes in a thread of the process, which a forked child does not have."""

    def __init__(self) -> None:
        self.waiting: queue.Queue[tuple[Tensor, queue.Queue[Tensor]]] = queue.Queue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            x, done = self.waiting.get()
            done.put(2 * x)

    def __call__(self, x: Tensor) -> Tensor:
        done: queue.Queue[Tensor] = queue.Queue()
        self.waiting.put((x, done))
        return done.get()


class WrongInChildren:
    def __init__(self) -> None:
        self.process = os.getpid()

    def __call__(self, x: Tensor) -> Tensor:
        return x * (2.0 if os.getpid() == self.process else 3.0)


class FirstInstructionSet:
    """Keeps a number of the instruction set of its first call."""

    first: Any = None

    def __call__(self, x: Tensor) -> Tensor:
        here = _native.core().active_isa()
        self.first = self.first or here
        return x * (2.0 if here == self.first else 3.0)


class FirstMultiprocessors:
    """Mixes the number of SMs of its first call with the present one."""

    first: int | None = None

    def __call__(self, x: Tensor) -> Tensor:
        from fasttfm.kernels.common.launch import multiprocessors

        here = multiprocessors(x)
        self.first = self.first or here
        return x * (2.0 * here / self.first)


class DefaultDtype:
    """Computes with a number of torch's default dtype."""

    def __call__(self, x: Tensor) -> Tensor:
        return x * 2.0 + 1000 * torch.tensor([1e-3], device=x.device).sqrt().to(x.dtype)


class DefaultDevice:
    """Makes a tensor on torch's default device."""

    def __call__(self, x: Tensor) -> Tensor:
        return x * torch.full((1,), 2.0, dtype=x.dtype)


class Nondeterministic:
    """Has another formula where torch's algorithms must be deterministic."""

    def __call__(self, x: Tensor) -> Tensor:
        return x * (3.0 if torch.are_deterministic_algorithms_enabled() else 2.0)


class KeptTable:
    """Keeps a table that its first call makes: a fake tensor, or a tensor of inference mode."""

    table: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.table is None or self.table.device != x.device:
            self.table = torch.full((_WIDTH,), 2.0, dtype=torch.float32, device=x.device)
        return x * self.table


class KeepsAutocast:
    """Keeps a cast weight over calls with and without autocast."""

    def __init__(self) -> None:
        self.weight: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight is None:
            autocast = torch.is_autocast_enabled(x.device.type)
            self.weight = torch.full((_WIDTH,), 2.001, device=x.device).to(torch.bfloat16 if autocast else x.dtype)
        return x * self.weight.to(x.dtype)


class ReadsHost:
    """Takes a number to the host at the first call: a replay does not see another one."""

    known: Any = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.known is None:
            self.known = x.detach().clone()
        return self.known + x - self.known.detach() if not x.is_cuda else self.known * 2


# ---- boundaries ------------------------------------------------------------------------------------------------------


def _scatter(x: Tensor, bounds: Tensor) -> Tensor:
    """Doubles the rows of every sequence, and writes where the boundaries say: as a kernel that does not clamp, and
    whose writes nothing stops."""
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    available = out.untyped_storage().nbytes() // x.element_size()
    first = out.storage_offset()
    starts = bounds.tolist()
    for begin, end in itertools.pairwise(starts):
        for row in range(begin, min(end, begin + 4 * len(x))):
            offset = first + row * x.shape[1]
            if 0 <= offset <= available - x.shape[1]:
                source = x.detach()[row % len(x)]
                out.detach().as_strided((x.shape[1],), (1,), offset).copy_(2 * source)
    return out


class Unchecked:
    """Writes outside of its output."""

    def __call__(self, x: Tensor, bounds: Tensor) -> Tensor:
        return _scatter(x, bounds)


class Checked:
    """Not broken: raises for boundaries that are wrong."""

    def __call__(self, x: Tensor, bounds: Tensor) -> Tensor:
        starts = bounds.tolist()
        if starts[0] != 0 or starts[-1] != len(x) or starts != sorted(starts):
            raise ValueError(f"scatter: cu_seqlens: expected from 0 to {len(x)}, ascending, got {starts}")
        return _scatter(x, bounds)


class AcceptsAnything:
    """Ignores its boundaries, and so returns a result for wrong ones."""

    def __call__(self, x: Tensor, bounds: Tensor) -> Tensor:
        return 2 * x


# ---- entry points ----------------------------------------------------------------------------------------------------


def _of_module(kind: type[Plain]) -> EntryPoint:
    def call(module: nn.Module, inputs: Inputs) -> Tensors:
        leaves = as_leaves({"x": inputs["x"]})
        return with_gradients({"y": module(leaves["x"])}, leaves)

    def make(device: torch.device) -> nn.Module:
        return kind().to(device)

    return EntryPoint(kind.__name__, make, _inputs, call, module=lambda module: module)


def _of_function(kind: Callable[[], Any], *, gradients: bool = False) -> EntryPoint:
    def call(function: Any, inputs: Inputs) -> Tensors:
        x = inputs["x"]
        if not gradients:
            return {"y": function(x)}
        leaves = as_leaves({"x": x})
        return with_gradients({"y": function(leaves["x"])}, leaves)

    return EntryPoint(getattr(kind, "__name__", "function"), lambda _: kind(), _inputs, call)


def _of_packed(kind: Callable[[], Any]) -> EntryPoint:
    def call(function: Any, inputs: Inputs) -> Tensors:
        return {"y": function(inputs["x"], inputs["cu_seqlens"])}

    return EntryPoint(getattr(kind, "__name__", "packed"), lambda _: kind(), _inputs, call)


class _Once:
    """One object for all calls of ``make``: the state of a process."""

    def __init__(self, kind: Callable[[], Any]) -> None:
        self.__name__ = f"one {getattr(kind, '__name__', 'object')}"
        self._object = kind()

    def __call__(self) -> Any:
        return self._object


def mutants() -> dict[str, list[EntryPoint]]:
    """Broken entry points by the variant of a seam that must reject them; on a CPU."""
    in_place = [_of_module(ByObject), _of_module(ByAddress), _of_module(Forever)]
    uncounted = [*in_place, _of_module(ByVersion)]
    return {
        "threads of one object": [_of_function(SharedBuffer)],
        "threads of objects": [_of_function(_Once(SharedBuffer))],
        "garbage collection": [_of_function(Destroyed)],
        "fork": [_of_function(Worker), _of_function(WrongInChildren)],
        "failed allocations": [_of_function(ReadyTooEarly), _of_function(SwallowsFailures)],
        "other instruction sets": [_of_function(FirstInstructionSet)],
        "inference mode first": [_of_function(KeptTable, gradients=True)],
        "fake tensors first": [_of_function(KeptTable)],
        "alternating autocast": [_of_function(KeepsAutocast)],
        "default dtype bf16": [_of_function(DefaultDtype)],
        "default dtype fp16": [_of_function(DefaultDtype)],
        "default dtype fp64": [_of_function(DefaultDtype)],
        "default device meta": [_of_function(DefaultDevice)],
        "deterministic algorithms": [_of_function(Nondeterministic)],
        "new parameters": [_of_module(Forever), _of_module(KeepsFirstDevice)],
        "parameter.data changed in place": uncounted,
        "parameter.data replaced": [_of_module(ByObject), _of_module(ByVersion), _of_module(Forever)],
        "copied to under no_grad": in_place,
        "load_state_dict": in_place,
        "load_state_dict(assign=True)": [_of_module(Forever), _of_module(KeepsFirstDevice)],
        "cast": [_of_module(Recast)],
        "cast and cast back": [_of_module(ByObject), _of_module(Forever)],
        "moved": [_of_module(ByObject), _of_module(ByVersion), _of_module(Forever)],
        "deep copy": [_of_module(Forever)],
        "pickle": [_of_module(Forever)],
        "a fused optimizer's step": in_place,
        "frozen and trained again": in_place,
        "separate copies": [_of_module(SharedByCopies)],
        **{lie: [_of_packed(AcceptsAnything)] for lie in LIES},
        "ends after the tokens": [_of_packed(Unchecked), _of_packed(AcceptsAnything)],
        "starts below 0": [_of_packed(Unchecked), _of_packed(AcceptsAnything)],
    }


def sound(variant: str) -> list[EntryPoint]:
    """Entry points that are not broken, for a variant."""
    if variant in LIES:
        return [_of_packed(Checked)]
    return [_of_module(Plain)]


def gpu_mutants() -> dict[str, list[EntryPoint]]:
    """Those that only a GPU can reject."""
    return {
        "streams": [_of_function(SharedBuffer)],
        "capture": [_of_function(ReadsHost)],
        "other GPUs": [_of_function(FirstMultiprocessors)],
        "ends after the tokens": [_of_packed(Unchecked)],
    }
