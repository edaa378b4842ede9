"""``Dispatcher``: one thread computes the requests of many threads in groups."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

Item = TypeVar("Item")
Finish = Callable[[], Sequence[Any]]  # waits for a group, and returns the result of each item
Launch = Callable[[list[Item]], Finish]


@dataclass
class Request(Generic[Item]):
    """A request that waits for its result. It holds what computes it."""

    item: Item
    tokens: int
    launch: Launch[Item]
    future: Future[Any] = field(default_factory=Future)


class Dispatcher(Generic[Item]):
    """A queue of requests, and a thread that takes all waiting requests at a time, up to a number of tokens. While one
    group is computed, requests for the next one arrive: groups grow with the rate of requests, and a single request
    does not wait.

    The thread holds no reference to the dispatcher, and ends once that is garbage-collected. A forked child has an
    empty queue and starts its own thread.

    Args:
        launch: A method that starts the computation of items and returns a function that waits for it and returns
            their results; a result that is an exception is raised by its future. The next group is launched before
            this function is called. Only requests hold the method's object, which may hold the dispatcher: it is freed
            as soon as nothing else refers to it.
        max_tokens: The maximum number of tokens in a group. A request with more is a group by itself.
        max_waiting: The maximum number of requests in the queue; ``submit`` waits while it is full.
    """

    def __init__(self, launch: Launch[Item], *, max_tokens: int, max_waiting: int) -> None:
        self._launch = weakref.WeakMethod(launch)
        self._max_tokens, self._max_waiting = max_tokens, max_waiting
        self._closed = False
        self.reset_after_fork()
        register_fork_reset(self)

    def reset_after_fork(self) -> None:
        self._queue: queue.SimpleQueue[Request[Item] | _End] = queue.SimpleQueue()
        self._room = threading.Semaphore(self._max_waiting)
        self._lock = threading.Lock()  # guards _thread, _closed and what is put into the queue
        self._thread: threading.Thread | None = None

    def submit(self, item: Item, tokens: int, timeout: float | None = None) -> Future[Any]:
        """Returns the future of an item's result. Raises ``queue.Full`` if the queue stays full for ``timeout``
        seconds, and RuntimeError if the dispatcher is closed, also while this call waits."""
        launch = self._launch()
        assert launch is not None  # its object calls this
        request = Request(item, tokens, launch)
        if not self._room.acquire(timeout=timeout):
            raise queue.Full
        with self._lock:
            if self._closed:
                self._room.release()
                raise RuntimeError("Session: submit: expected an open session, got a closed one")
            if self._thread is None:
                self._start()
            self._queue.put(request)
        return request.future

    def close(self, then: Callable[[], object] = lambda: None) -> None:
        """Computes the waiting requests, ends the thread, and calls ``then``. A future's callback that calls it does
        not wait: the thread calls ``then`` when it ends."""
        with self._lock:
            thread = self._thread
            in_callback = thread is threading.current_thread()
            if not self._closed and thread is not None:
                self._queue.put(_End(then if in_callback else None))  # after all requests
            self._closed = True
        if in_callback:
            return
        if thread is not None:
            thread.join()
        then()

    def _start(self) -> None:
        worker = _Worker(self._queue, self._room, self._max_tokens)
        self._thread = threading.Thread(target=worker.run, name="fasttfm-session", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._queue.put, _End()).atexit = False


_registered: weakref.WeakSet[Any] = weakref.WeakSet()


def register_fork_reset(resettable: Any) -> None:
    """Registers an object whose ``reset_after_fork()`` is called in a forked child, which has no thread but its own."""
    _registered.add(resettable)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: [resettable.reset_after_fork() for resettable in list(_registered)])


# ---- the thread ------------------------------------------------------------------------------------------------------


class _End(NamedTuple):
    """The last item of a queue."""

    then: Callable[[], object] | None = None  # called after all requests


class _Worker(Generic[Item]):
    """What the thread does. It holds no dispatcher."""

    def __init__(
        self, source: queue.SimpleQueue[Request[Item] | _End], room: threading.Semaphore, max_tokens: int
    ) -> None:
        self._queue, self._room, self._max_tokens = source, room, max_tokens
        self._end = _End()
        self._deferred: Request[Item] | None = None  # taken from the queue, but did not fit the group

    def run(self) -> None:
        launched: deque[tuple[list[Request[Item]], Finish]] = deque()
        is_open = True
        while is_open or launched:
            group: list[Request[Item]] = []  # a new list, so that the previous one releases its requests
            if is_open:
                group, is_open = self._take(wait=not launched)
            group = [request for request in group if request.future.set_running_or_notify_cancel()]
            if group:
                try:
                    launched.append((group, group[0].launch([request.item for request in group])))
                except BaseException as error:
                    _fail(group, error)
            if launched and (not group or len(launched) > 1):
                _finish(*launched.popleft())
        if self._end.then is not None:
            self._end.then()

    def _take(self, *, wait: bool) -> tuple[list[Request[Item]], bool]:
        """Returns the requests of the next group, and whether the dispatcher is still open."""
        group: list[Request[Item]] = []
        tokens = 0
        while True:
            request = self._deferred
            self._deferred = None
            if request is None:
                try:
                    taken = self._queue.get(block=wait and not group)
                except queue.Empty:
                    return group, True
                if isinstance(taken, _End):
                    self._end = taken
                    return group, False
                request = taken
                self._room.release()
            if group and tokens + request.tokens > self._max_tokens:
                self._deferred = request
                return group, True
            group.append(request)
            tokens += request.tokens


def _finish(group: list[Request[Any]], finish: Finish) -> None:
    try:
        results = finish()
    except BaseException as error:
        _fail(group, error)
        return
    for request, result in zip(group, results, strict=True):
        if isinstance(result, BaseException):
            request.future.set_exception(result)
        else:
            request.future.set_result(result)


def _fail(group: list[Request[Any]], error: BaseException) -> None:
    for request in group:
        request.future.set_exception(error)
    group.clear()  # the error's traceback refers to this list, and a request to its future, which holds the error
