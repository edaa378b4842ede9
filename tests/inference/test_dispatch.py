"""Requests of many threads: batching, errors, a full queue, and closing."""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import signal
import threading
import weakref
from collections.abc import Callable, Sequence

import pytest

from fasttfm.inference.dispatch import Dispatcher


class Worker:
    """Squares numbers while ``gate`` is open; 13 raises an error."""

    def __init__(self) -> None:
        self.groups: list[list[int]] = []
        self.gate, self.started = threading.Event(), threading.Event()

    def launch(self, items: list[int]) -> Callable[[], Sequence[int]]:
        self.groups.append(items)
        self.started.set()
        self.gate.wait()
        if 13 in items:
            raise ValueError("unlucky")
        if 14 in items:
            return lambda: 1 // 0
        return lambda: [item * item for item in items]


def test_waiting_requests_are_computed_together() -> None:
    worker = Worker()
    dispatcher = Dispatcher(worker.launch, max_tokens=10, max_waiting=100)
    first = dispatcher.submit(1, 3)
    worker.started.wait()  # the first is being computed: the others gather
    others = [dispatcher.submit(item, 3) for item in range(2, 9)]
    large = dispatcher.submit(9, 50)
    worker.gate.set()
    assert [future.result(10) for future in (first, *others, large)] == [item * item for item in range(1, 10)]
    assert worker.groups == [[1], [2, 3, 4], [5, 6, 7], [8], [9]]
    dispatcher.close()


def test_errors_reach_the_futures_and_the_rest_continues() -> None:
    worker = Worker()
    worker.gate.set()
    dispatcher = Dispatcher(worker.launch, max_tokens=1, max_waiting=100)
    with pytest.raises(ValueError, match="unlucky"):
        dispatcher.submit(13, 1).result(10)
    with pytest.raises(ZeroDivisionError):
        dispatcher.submit(14, 1).result(10)
    assert dispatcher.submit(3, 1).result(10) == 9
    dispatcher.close()


def test_a_full_queue_raises_and_a_cancelled_request_is_skipped() -> None:
    worker = Worker()
    dispatcher = Dispatcher(worker.launch, max_tokens=1, max_waiting=2)
    first = dispatcher.submit(1, 1)
    worker.started.wait()
    second, third = dispatcher.submit(2, 1), dispatcher.submit(3, 1)
    with pytest.raises(queue.Full):
        dispatcher.submit(4, 1, timeout=0)
    assert second.cancel()
    worker.gate.set()
    assert first.result(10) == 1
    assert third.result(10) == 9
    dispatcher.close()
    assert worker.groups == [[1], [3]]


def test_closing_computes_waiting_requests() -> None:
    worker = Worker()
    dispatcher = Dispatcher(worker.launch, max_tokens=2, max_waiting=100)
    futures = [dispatcher.submit(item, 1) for item in range(10)]
    worker.gate.set()
    dispatcher.close()
    assert [future.result(0) for future in futures] == [item * item for item in range(10)]
    with pytest.raises(RuntimeError, match="closed"):
        dispatcher.submit(1, 1)
    dispatcher.close()  # again
    Dispatcher(worker.launch, max_tokens=2, max_waiting=1).close()  # without a request


def test_many_threads_get_their_own_results() -> None:
    worker = Worker()
    worker.gate.set()
    dispatcher = Dispatcher(worker.launch, max_tokens=64, max_waiting=8)
    wrong: list[int] = []

    def ask(start: int) -> None:
        numbers = range(start, start + 50)
        futures = [dispatcher.submit(100 + item, 1) for item in numbers]
        wrong.extend(i for i, future in zip(numbers, futures, strict=True) if future.result(30) != (100 + i) ** 2)

    threads = [threading.Thread(target=ask, args=(50 * index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dispatcher.close()
    assert wrong == []


def test_the_thread_of_a_deleted_dispatcher_ends() -> None:
    worker = Worker()
    dispatcher = Dispatcher(worker.launch, max_tokens=1, max_waiting=100)
    futures = [dispatcher.submit(item, 1) for item in range(5)]
    thread, gone = dispatcher._thread, weakref.ref(dispatcher)
    del dispatcher  # requests still wait
    worker.gate.set()
    assert [future.result(10) for future in futures] == [0, 1, 4, 9, 16]
    gc.collect()
    assert thread is not None
    thread.join(10)
    assert not thread.is_alive()
    assert gone() is None


def test_a_callback_may_close() -> None:
    worker = Worker()
    dispatcher = Dispatcher(worker.launch, max_tokens=1, max_waiting=100)
    errors: list[BaseException] = []

    def close(_: object) -> None:
        try:
            dispatcher.close()
        except BaseException as error:
            errors.append(error)

    first = dispatcher.submit(2, 1)
    first.add_done_callback(close)
    second = dispatcher.submit(3, 1)
    worker.gate.set()
    assert second.result(10) == 9
    thread = dispatcher._thread
    assert thread is not None
    thread.join(10)
    assert not thread.is_alive()
    assert errors == []


def test_a_request_is_refused_if_a_callback_closes_while_it_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    dispatcher = Dispatcher(worker.launch, max_tokens=1, max_waiting=100)
    closed, done = threading.Event(), threading.Event()

    def close(_: object) -> None:
        dispatcher.close()
        closed.set()
        done.wait(10)  # the thread is still alive

    def acquire(timeout: float | None = None) -> bool:
        worker.gate.set()
        return closed.wait(10)

    dispatcher.submit(2, 1).add_done_callback(close)
    thread = dispatcher._thread
    assert thread is not None
    monkeypatch.setattr(dispatcher._room, "acquire", acquire)
    try:
        with pytest.raises(RuntimeError, match="closed"):
            dispatcher.submit(3, 1)
    finally:
        done.set()
    thread.join(10)
    assert not thread.is_alive()


def test_every_close_waits_for_the_requests() -> None:
    worker = Worker()
    dispatcher = Dispatcher(worker.launch, max_tokens=1, max_waiting=100)
    future = dispatcher.submit(2, 1)
    found: list[bool] = []
    threads = [threading.Thread(target=lambda: (dispatcher.close(), found.append(future.done()))) for _ in range(2)]
    threads[0].start()
    while not dispatcher._closed:
        pass
    threads[1].start()
    threads[1].join(0.2)
    worker.gate.set()
    for thread in threads:
        thread.join(10)
    assert found == [True, True]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here")
def test_a_child_process_computes_its_own_requests() -> None:
    """It has the parent's queue and locks, one of which is held, but no thread."""
    worker = Worker()
    worker.gate.set()
    dispatcher = Dispatcher(worker.launch, max_tokens=1, max_waiting=100)
    assert dispatcher.submit(2, 1).result(10) == 4
    with dispatcher._lock:
        child = os.fork()
        if child == 0:
            result = 0
            with contextlib.suppress(BaseException):
                signal.alarm(20)  # ends a child that deadlocks
                result = dispatcher.submit(3, 1).result(10)
            os._exit(result)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 9
    assert dispatcher.submit(4, 1).result(10) == 16
    dispatcher.close()
