"""A client of a server of text embeddings that takes little processor time: closed and open loops of requests."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_TIMEOUT = 60.0


@dataclass
class Measured:
    """The latencies of requests, in seconds, and how many failed."""

    seconds: float
    latencies: list[float] = field(default_factory=list)
    errors: int = 0

    def add(self, other: Measured) -> None:
        self.seconds += other.seconds
        self.latencies += other.latencies
        self.errors += other.errors


def request_of(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Connection(asyncio.Protocol):
    """A connection that is kept open. It reads only what the servers write: a status, a length or chunks, a body."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._transport: Any = None
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._parts: list[bytes] = []
        self._missing = -1  # bytes of the answer; negative while its length is not known

    async def post(self, request: bytes) -> tuple[int, bytes]:
        """The status and body of the answer; raises OSError or TimeoutError."""
        loop = asyncio.get_running_loop()
        if self._transport is None:
            await loop.create_connection(lambda: self, "127.0.0.1", self._port)
        self._answer = loop.create_future()
        timer = loop.call_later(_TIMEOUT, self._fail, TimeoutError())
        self._transport.write(request)
        try:
            return await self._answer
        finally:
            timer.cancel()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        if self._missing >= 0:
            self._missing -= len(data)
            if self._missing > 0:
                return
        answer = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = [answer]
        end = answer.find(b"\r\n\r\n") + 4
        if end < 4:
            return
        head = answer[:end].lower()
        place = head.find(b"\r\ncontent-length:")
        if place >= 0:
            self._missing = int(head[place + 17 : head.index(b"\r\n", place + 2)]) - (len(answer) - end)
            if self._missing <= 0:
                self._finish(int(head[9:12]), answer[end:])
        elif answer.endswith(b"0\r\n\r\n"):  # chunks, each after its length
            self._finish(int(head[9:12]), b"".join(_chunks(answer[end:])))

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._fail(error if isinstance(error, OSError) else ConnectionResetError("the server has closed"))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def _finish(self, status: int, body: bytes) -> None:
        self._parts, self._missing = [], -1
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((status, body))

    def _fail(self, error: Exception) -> None:
        self._parts, self._missing = [], -1
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)


def _chunks(body: bytes) -> list[bytes]:
    chunks: list[bytes] = []
    begin = 0
    while True:
        end = body.index(b"\r\n", begin)
        size = int(body[begin:end], 16)
        if size == 0:
            return chunks
        chunks.append(body[end + 2 : end + 2 + size])
        begin = end + size + 4


async def _status(connection: Connection, request: bytes) -> int:
    """The status of the answer; 0 if there is none."""
    try:
        return (await connection.post(request))[0]
    except (OSError, TimeoutError, asyncio.TimeoutError):
        connection.close()
        return 0


async def closed_loop(port: int, path: str, bodies: Sequence[bytes], clients: int, seconds: float) -> Measured:
    """``clients`` clients, each with one request at a time, after a second that does not count."""
    begun = time.perf_counter() + min(1.0, seconds / 4)
    end = begun + seconds
    measured, requests = Measured(seconds), [request_of(path, body) for body in bodies]

    async def client(number: int) -> None:
        connection, index = Connection(port), number * 17
        while (now := time.perf_counter()) < end:
            status = await _status(connection, requests[index % len(requests)])
            index += 1
            if now < begun:
                continue
            if status == 200:
                measured.latencies.append(time.perf_counter() - now)
            else:
                measured.errors += 1
        connection.close()

    await asyncio.gather(*(client(number) for number in range(clients)))
    return measured


async def open_loop(
    port: int, path: str, bodies: Sequence[bytes], rate: float, seconds: float, most: int = 512
) -> Measured:
    """Requests at a rate, at random times. A latency counts from the time at which the request was due. At most
    ``most`` are in flight: a request that finds no free connection is an error."""
    measured, generator = Measured(seconds), random.Random(0)
    requests = [request_of(path, body) for body in bodies]
    free = [Connection(port) for _ in range(most)]
    running: set[asyncio.Task[None]] = set()

    async def send(due: float, request: bytes) -> None:
        connection = free.pop()
        status = await _status(connection, request)
        free.append(connection)
        if status == 200:
            measured.latencies.append(time.perf_counter() - due)
        else:
            measured.errors += 1

    begun = due = time.perf_counter()
    index = 0
    while due < begun + seconds:
        due += generator.expovariate(rate)
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        index += 1
        if not free:
            measured.errors += 1
            continue
        task = asyncio.ensure_future(send(due, requests[index % len(requests)]))
        running.add(task)
        task.add_done_callback(running.discard)
    await asyncio.gather(*running)
    for connection in free:
        connection.close()
    return measured
