"""``run``: several processes that serve one port, each with an event loop and sessions of its own.

The kernel distributes connections over the processes (SO_REUSEPORT). A process that is asked for the health or the
metrics of the server asks the others, each of which has a Unix socket in a folder that only this user may read.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import orjson
import torch

from fasttfm.serve import server
from fasttfm.serve.server import Settings, listen, set_up_logging

_LOG = logging.getLogger("fasttfm.serve")
_ANSWER_SECONDS = 2.0  # for a process to say its state


class Peers:
    """The processes of a server, as one of them sees the others.

    Args:
        folder: Has the socket of each.
        number: Of this process, from 0 on.
        count: Of all processes.
    """

    def __init__(self, folder: Path, number: int, count: int) -> None:
        self._folder, self.number, self._count = folder, number, count

    def _socket(self, number: int) -> str:
        return str(self._folder / f"{number}.socket")

    async def publish(self, state: Callable[[], dict[str, Any]]) -> asyncio.AbstractServer:
        """Tells the others this process's state whenever they connect."""

        async def tell(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(orjson.dumps(state()))
            writer.close()

        return await asyncio.start_unix_server(tell, self._socket(self.number))

    async def states(self) -> list[dict[str, Any]]:
        """The states of the other processes."""
        others = [number for number in range(self._count) if number != self.number]
        return list(await asyncio.gather(*(self._ask(number) for number in others)))

    async def _ask(self, number: int) -> dict[str, Any]:
        try:
            return await asyncio.wait_for(self._read(number), _ANSWER_SECONDS)
        except (OSError, TimeoutError, asyncio.TimeoutError, orjson.JSONDecodeError):
            return {"reason": f"process {number} does not answer"}

    async def _read(self, number: int) -> dict[str, Any]:
        reader, writer = await asyncio.open_unix_connection(self._socket(number))
        try:
            state: dict[str, Any] = orjson.loads(await reader.read())
            return state
        finally:
            writer.close()


def run(settings: Settings, count: int, *, started: Callable[[int], None] | None = None) -> int:
    """Starts ``count`` processes and waits for them. SIGTERM and SIGINT drain all of them, and SIGHUP makes them load
    their models again. If one of them ends by itself, the others are drained.

    Args:
        started: Called with the port.

    Returns:
        The exit status: 0 if all processes ended with 0 after a signal.
    """
    reserved = listen(settings.hostname, settings.port, shared=True)  # bound, not listening: it gets no connection
    settings = replace(settings, port=reserved.getsockname()[1], limits=settings.limits.divided(count))
    if started is not None:
        started(settings.port)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as processes inherit it, until they handle it
    context = multiprocessing.get_context("spawn")  # CUDA works in a forked process only if it was not used before
    with tempfile.TemporaryDirectory(prefix="fasttfm-") as folder:
        threads = max(1, torch.get_num_threads() // count)
        processes = [
            context.Process(target=_serve, args=(settings, Peers(Path(folder), number, count), threads), daemon=True)
            for number in range(count)
        ]
        for process in processes:
            process.start()
        try:
            return _supervise(processes)
        finally:
            reserved.close()


def _supervise(processes: list[Any]) -> int:
    """Passes signals on until all processes have ended."""
    is_ending = False

    def end(*_: Any) -> None:
        nonlocal is_ending
        is_ending = True
        _signal(processes, signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    signal.signal(signal.SIGHUP, lambda *_: _signal(processes, signal.SIGHUP))
    failed = False
    while running := [process for process in processes if process.is_alive()]:
        wait([process.sentinel for process in running])
        for number, process in enumerate(processes):
            if not process.is_alive() and not is_ending:
                _LOG.error("process %d has ended with status %s; the others end too", number, process.exitcode)
                failed = True
                end()
    ended = {0, -signal.SIGTERM}  # the latter of a process that had not yet begun to handle it
    return int(failed or any(process.exitcode not in ended for process in processes))


def _signal(processes: list[Any], number: int) -> None:
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, number)


def _serve(settings: Settings, peers: Peers, threads: int) -> None:
    """One process."""
    set_up_logging(f"process {peers.number}: ")
    torch.set_num_threads(threads)
    raise SystemExit(server.run(settings, peers=peers))
