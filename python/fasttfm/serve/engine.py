"""``Engine``: computes the sequences of requests on a model's sessions, for an event loop.

Sessions compute in their own threads. A request is one item of a session's queue, whatever the number of its
sequences. Results of a batch reach the event loop in one call.
"""

from __future__ import annotations

import asyncio
import functools
import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from fasttfm.inference.formats import Tokens
from fasttfm.serve import errors
from fasttfm.serve.limits import Admission
from fasttfm.serve.metrics import Metrics
from fasttfm.serve.models import ServedModel


class Job:
    """The computation of a request's sequences. Times are those of ``time.perf_counter``.

    Args:
        output: Of ``Session.encode``.
    """

    __slots__ = (
        "engine", "finished", "future", "launched", "output", "replica", "sequences", "submitted", "tokens", "waiter",
    )  # fmt: skip

    def __init__(self, engine: Engine, output: str) -> None:
        self.engine, self.output = engine, output
        self.waiter: asyncio.Future[Any] = asyncio.get_running_loop().create_future()  # of the results
        self.sequences: Sequence[Tokens] = ()
        self.tokens = self.replica = 0
        self.submitted = self.launched = self.finished = 0.0  # the latter two are written by the session's thread
        self.future: Future[Any] | None = None  # of the session

    def submit(self, sequences: Sequence[Tokens]) -> None:
        self.sequences, self.tokens = sequences, sum([len(sequence.ids) for sequence in sequences])
        self.submitted = time.perf_counter()
        self.engine.submit(self)

    def refuse(self, error: Exception) -> None:
        """Ends the job with an error."""
        if not self.waiter.done():
            self.waiter.set_exception(error)
        self.cancel()

    def cancel(self) -> None:
        """Removes the job from the queue; a batch that is launched is computed to its end."""
        self.engine.cancel(self)

    @property
    def queue_seconds(self) -> float:
        return max(0.0, self.launched - self.submitted)

    @property
    def inference_seconds(self) -> float:
        return max(0.0, self.finished - self.launched)


class Arrivals:
    """Calls functions in the event loop for threads; those of the same moment wake the loop once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[Callable[[], None]] = deque()
        self._scheduled = False

    def put(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        self._scheduled = False  # before the calls are taken: a later one schedules again
        while self._calls:
            self._calls.popleft()()


class Engine:
    """The sessions of one model, with one queue.

    A request goes to the session with the fewest tokens that are submitted and not finished.
    """

    def __init__(self, model: ServedModel, admission: Admission, metrics: Metrics, arrivals: Arrivals) -> None:
        self.model = model
        self._admission, self._metrics, self._arrivals = admission, metrics, arrivals
        self._tokens = [0] * len(model.sessions)  # in each session; only the event loop changes them
        self._pending: list[Job] = []
        for session in model.sessions:
            session.on_launch = self._launched

    def submit(self, job: Job) -> None:
        """Starts a job; raises RequestError if the queue is full."""
        self._admission.enter_queue(len(job.sequences))
        self._pending.append(job)
        if self._admission.requests == 1:
            self._submit_pending()
        elif len(self._pending) == 1:
            asyncio.get_running_loop().call_soon(self._submit_pending)

    def _submit_pending(self) -> None:
        """Jobs of one pass of the event loop: the session's thread wakes up once for them."""
        pending, self._pending = self._pending, []
        for job in pending:
            if job.waiter.done():  # cancelled meanwhile
                self._admission.leave_queue(len(job.sequences))
                continue
            job.replica = 0 if len(self._tokens) == 1 else min(range(len(self._tokens)), key=self._tokens.__getitem__)
            session = self.model.sessions[job.replica]
            try:
                job.future = session.submit_sequences(job.sequences, output=job.output, timeout=0, tag=job)
            except Exception as error:
                self._admission.leave_queue(len(job.sequences))
                job.waiter.set_exception(self._refusal(error))
                continue
            self._tokens[job.replica] += job.tokens
            job.future.add_done_callback(functools.partial(self._computed, job))

    def _refusal(self, error: Exception) -> Exception:
        if isinstance(error, queue.Full):
            most = self.model.source.max_queue
            return errors.overloaded("max-queue", most, f"{most} requests are in the queue")
        if isinstance(error, RuntimeError):  # the session is closed or dead
            return errors.unavailable(f"the model does not compute: {error}")
        return error

    def cancel(self, job: Job) -> None:
        if job.future is not None and not job.future.cancelled() and job.future.cancel():
            self._admission.leave_queue(len(job.sequences))

    def _launched(self, jobs: list[Any], sequences: int, tokens: int) -> None:
        """In a session's thread."""
        now = time.perf_counter()
        for job in jobs:
            if job is not None:
                job.launched = now
        self._admission.leave_queue(sequences)
        self._metrics.launched(sequences, tokens)

    def _computed(self, job: Job, future: Future[Any]) -> None:
        """In a session's thread, or in the event loop where the request was cancelled."""
        job.finished = time.perf_counter()
        self._arrivals.put(functools.partial(self._deliver, job, future))

    def _deliver(self, job: Job, future: Future[Any]) -> None:
        self._tokens[job.replica] -= job.tokens
        if job.waiter.done():  # a deadline or a disconnection was earlier
            return
        if future.cancelled():
            job.waiter.cancel()
        elif (error := future.exception()) is not None:
            job.waiter.set_exception(errors.failed(error))
        else:
            job.waiter.set_result(future.result())
