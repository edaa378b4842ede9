"""The stream of an object: what it waits for, and what waits for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fasttfm.ops.core.streams import OrderedStream, has_failed

CUDA: Any = SimpleNamespace(type="cuda")


class Stream:
    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls, self.device = name, calls, CUDA

    def wait_stream(self, other: Stream) -> None:
        self.calls.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of torch's functions for streams, the caller's and the object's."""
    found: list[str] = []
    caller = Stream("caller", found)

    @contextlib.contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        found.append(f"enter {stream.name}")
        yield
        found.append(f"leave {stream.name}")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("own", found))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: caller)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    return found


def test_the_caller_and_the_object_wait_for_each_other(calls: list[str]) -> None:
    with OrderedStream(CUDA).ordered():
        calls.append("work")
    assert calls == ["own waits for caller", "enter own", "work", "leave own", "caller waits for own"]


def test_the_caller_waits_also_after_an_error(calls: list[str]) -> None:
    with pytest.raises(ZeroDivisionError), OrderedStream(CUDA).ordered():
        raise ZeroDivisionError
    assert calls[-1] == "caller waits for own"


def test_a_cpu_needs_no_stream(calls: list[str]) -> None:
    ordered = OrderedStream(torch.device("cpu"))
    with ordered.ordered():
        pass
    assert ordered.stream is None
    assert not calls
    assert not has_failed(None)


@pytest.mark.parametrize("error", [None, RuntimeError("CUDA error: unspecified launch failure")])
def test_a_device_has_failed_if_waiting_fails(error: Exception | None) -> None:
    def synchronize() -> None:
        if error is not None:
            raise error

    stream: Any = SimpleNamespace(synchronize=synchronize)
    assert has_failed(stream) == (error is not None)


@pytest.mark.gpu
def test_work_of_two_callers_is_in_order() -> None:
    """Each adds to the same number, after a pause on the device."""
    ordered = OrderedStream(torch.device("cuda", 0))
    with ordered.ordered():
        number = torch.zeros(1, device="cuda")
    callers = [torch.cuda.Stream() for _ in range(4)]
    for turn in range(40):
        with torch.cuda.stream(callers[turn % 4]), ordered.ordered():
            torch.cuda._sleep(20_000)
            number.copy_(number * 2 + turn % 3)
    expected = 0.0
    for turn in range(40):
        expected = float(torch.tensor(expected * 2 + turn % 3))
    torch.cuda.synchronize()
    assert number.item() == expected
