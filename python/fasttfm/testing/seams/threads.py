"""Calls at once, after a fork, and with the garbage collector at work."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fasttfm.testing.seams.entry import EntryPoint, Inputs, SeamError, Tensors, check_same

_THREADS = 2
_ROUNDS = 3
_SECONDS = 60.0  # after which a thread or a child hangs


# ---- threads ---------------------------------------------------------------------------------------------------------


def check_threads_of_one_object(entry: EntryPoint, device: torch.device) -> None:
    """Two threads call one object at once, with other inputs each."""
    subject = entry.make(device)
    _check_threads(entry, device, lambda _: subject)


def check_threads_of_objects(entry: EntryPoint, device: torch.device) -> None:
    """Two threads call an object each, at once."""
    subjects = [entry.make(device) for _ in range(_THREADS)]
    _check_threads(entry, device, lambda index: subjects[index])


def _check_threads(entry: EntryPoint, device: torch.device, subject_of: Callable[[int], Any]) -> None:
    drawn = [entry.inputs(seed, device) for seed in range(_THREADS)]
    expected = [entry.expected(seed, device) for seed in range(2)]
    barrier = threading.Barrier(_THREADS)
    results: list[list[Tensors]] = [[] for _ in range(_THREADS)]
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            barrier.wait(_SECONDS)
            for _ in range(_ROUNDS):
                results[index].append(entry.call(subject_of(index), drawn[index]))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    with _frequent_switches():
        threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_SECONDS)
    if any(thread.is_alive() for thread in threads):
        raise SeamError(f"{entry}: a thread has not ended after {_SECONDS:.0f} s")
    if errors:
        raise SeamError(f"{entry}: a call in a thread raised {errors[0]!r}") from errors[0]
    _synchronize(device)
    for index in range(_THREADS):
        for result in results[index]:
            check_same(result, expected[index], f"{entry}: thread {index}")


@contextlib.contextmanager
def _frequent_switches() -> Iterator[None]:
    """Python changes threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- streams ---------------------------------------------------------------------------------------------------------


def check_streams(entry: EntryPoint, device: torch.device) -> None:
    """Two CUDA streams run calls of one object, without synchronization between them, while the first one is busy."""
    subject = entry.make(device)
    drawn = [entry.inputs(seed, device) for seed in range(2)]
    expected = [entry.expected(seed, device) for seed in range(2)]
    entry.call(subject, drawn[0])
    torch.cuda.synchronize(device)
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    results: list[tuple[int, Tensors]] = []
    for round_ in range(_ROUNDS):
        for index in (0, 1) if round_ % 2 else (1, 0):
            with torch.cuda.stream(streams[index]):
                torch.cuda._sleep(2_000_000 * (1 + (index + round_) % 2))  # one is a millisecond later
                results.append((index, entry.call(subject, drawn[index])))
    torch.cuda.synchronize(device)
    for index, result in results:
        check_same(result, expected[index], f"{entry}: stream {index}")


# ---- the garbage collector -------------------------------------------------------------------------------------------


def check_garbage_collection(entry: EntryPoint, device: torch.device) -> None:
    """The collector runs at every allocation of a Python object, and frees objects of the entry point that were used
    and dropped as parts of cycles."""
    inputs = entry.inputs(0, device)
    subject = entry.make(device)
    expected = entry.expected(0, device)
    before, enabled = gc.get_threshold(), gc.isenabled()
    gc.collect()
    gc.freeze()  # only what the calls make is looked at, so that a collection takes microseconds
    try:
        gc.disable()
        _drop_in_a_cycle(entry, device, inputs)
        gc.set_threshold(1, 5, 5)
        gc.enable()
        results = entry.call(subject, inputs)
    finally:
        gc.set_threshold(*before)
        (gc.enable if enabled else gc.disable)()
        gc.unfreeze()
    _synchronize(device)
    check_same(results, expected, f"{entry}: with collections of garbage")


def _drop_in_a_cycle(entry: EntryPoint, device: torch.device, inputs: Inputs) -> None:
    dropped = entry.make(device)
    entry.call(dropped, inputs)
    cycle: list[Any] = [dropped]
    cycle.append(cycle)


# ---- forks -----------------------------------------------------------------------------------------------------------


def check_fork(entry: EntryPoint, device: torch.device) -> None:
    """A child process that is forked after a call computes the same as its parent, with the parent's object and with a
    new one, and the parent computes afterwards."""
    if device.type != "cpu":
        raise ValueError("check_fork: device: expected cpu, got cuda: CUDA does not support a fork after its start")
    inputs = entry.inputs(0, device)
    subject = entry.make(device)
    expected = entry.expected(0, device)
    entry.call(subject, inputs)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _run_child(writer, lambda: [entry.call(module, inputs) for module in (entry.make(device), subject)])
    os.close(writer)
    results = _read_child(child, reader, entry)
    for tensors in results:
        check_same(tensors, expected, f"{entry}: in a forked child")
    after = entry.call(subject, inputs)
    check_same(after, expected, f"{entry}: in the parent after a fork")


def _run_child(writer: int, compute: Callable[[], list[Tensors]]) -> None:
    """Runs in the child; never returns."""
    with contextlib.suppress(BaseException):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a child that hangs ends with its parent
        torch.set_num_threads(1)  # torch's own OpenMP pool does not survive a fork (docs/threads.md)
        try:
            result: Any = compute()
        except BaseException as error:
            result = f"{type(error).__name__}: {error}"
        buffer = io.BytesIO()
        torch.save(result, buffer)
        with os.fdopen(writer, "wb") as file:
            file.write(buffer.getvalue())
    os._exit(0)


def _read_child(child: int, reader: int, entry: EntryPoint) -> list[Tensors]:
    deadline, parts = time.monotonic() + _SECONDS, []
    with os.fdopen(reader, "rb", buffering=0) as file:
        while True:
            ready, _, _ = select.select([file], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                raise SeamError(f"{entry}: a forked child has not ended after {_SECONDS:.0f} s")
            part = file.read(1 << 20)
            if not part:
                break
            parts.append(part)
    _, status = os.waitpid(child, 0)
    if not parts:
        raise SeamError(f"{entry}: a forked child ended with status {status}")
    results = torch.load(io.BytesIO(b"".join(parts)), weights_only=True)
    if isinstance(results, str):
        raise SeamError(f"{entry}: a forked child raised {results}")
    return list(results)
