"""``Limits``: what a request may ask for; ``Admission``: how many are admitted at a time."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, replace
from typing import Any

from fasttfm.serve import errors


@dataclass(frozen=True)
class Limits:
    """The limits of a server. Names and defaults are those of text-embeddings-inference where it has the limit.

    Args:
        max_client_batch_size: Texts of a request.
        max_request_tokens: Tokens of a request.
        payload_limit: Bytes of a body.
        max_concurrent_requests: Requests that have arrived and are not answered.
        max_queue: Sequences that wait for a batch.
        request_timeout: Seconds from the first byte of a request to the end of its computation.
        read_timeout: Seconds for the body of a request to arrive.
        auto_truncate: Whether longer texts are truncated where a request does not say.
    """

    max_client_batch_size: int = 32
    max_request_tokens: int = 131_072
    payload_limit: int = 2_000_000
    max_concurrent_requests: int = 512
    max_queue: int = 4096
    request_timeout: float = 60.0
    read_timeout: float = 30.0
    auto_truncate: bool = True

    def divided(self, processes: int) -> Limits:
        """The limits of each of several processes: an equal part of those that a whole server has."""
        shares = {name: -(-getattr(self, name) // processes) for name in ("max_concurrent_requests", "max_queue")}
        return replace(self, **shares)

    def check_texts(self, count: int) -> None:
        if count > self.max_client_batch_size:
            message = f"batch size {count} > maximum allowed batch size {self.max_client_batch_size}"
            raise errors.too_large("max-client-batch-size", message)

    def check_tokens(self, count: int) -> None:
        if count > self.max_request_tokens:
            message = f"the request has {count} tokens > maximum allowed {self.max_request_tokens}"
            raise errors.too_large("max-request-tokens", message)

    def check_bytes(self, count: int) -> None:
        if count > self.payload_limit:
            message = f"the body has more than the maximum of {self.payload_limit} bytes"
            raise errors.too_large("payload-limit", message, cause="payload")


class Admission:
    """Counts requests and waiting sequences. Only the event loop changes ``requests``; sequences leave the queue in the
    sessions' threads."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.requests = 0
        self.waiting = 0  # sequences in the queue
        self._lock = threading.Lock()  # guards ``waiting``

    def enter_request(self) -> None:
        most = self.limits.max_concurrent_requests
        if self.requests >= most:
            raise errors.overloaded("max-concurrent-requests", most, f"{self.requests} requests are in flight")
        self.requests += 1

    def leave_request(self) -> None:
        self.requests -= 1

    def enter_queue(self, sequences: int) -> None:
        most = self.limits.max_queue
        if self.waiting + sequences > most:
            raise errors.overloaded("max-queue", most, f"{self.waiting} sequences are in the queue")
        with self._lock:
            self.waiting += sequences

    def leave_queue(self, sequences: int) -> None:
        with self._lock:
            self.waiting -= sequences


class Deadline:
    """Raises TimeoutError in the task that enters it once the seconds are over. (``asyncio.timeout`` is part of Python
    since 3.11.)"""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._expired = seconds, False

    def __enter__(self) -> None:
        self._task: Any = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._expire)

    def _expire(self) -> None:
        self._expired = True
        self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._timer.cancel()
        if self._expired and kind is asyncio.CancelledError:
            if hasattr(self._task, "uncancel"):
                self._task.uncancel()
            raise TimeoutError from None
