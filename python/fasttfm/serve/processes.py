"""``run``: several processes that serve one port, each with an event loop and sessions of its own.

The kernel distributes connections over the processes (SO_REUSEPORT).
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from fasttfm.serve import server
from fasttfm.serve.peers import Peers
from fasttfm.serve.server import Settings, listen, set_up_logging

_LOG = logging.getLogger("fasttfm.serve")
_CLOSE_SECONDS = 30.0  # for sessions to close, after the requests have ended
_POLL_SECONDS = 1.0


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
            return _supervise(processes, settings.drain_timeout + _CLOSE_SECONDS)
        finally:
            reserved.close()


def _supervise(processes: list[Any], most_seconds: float) -> int:
    """Passes signals on until all processes have ended. One that has not ended ``most_seconds`` after it was to end is
    killed."""
    deadline: float | None = None  # None until they are to end

    def end(*_: Any) -> None:
        nonlocal deadline
        deadline = time.monotonic() + most_seconds
        _signal(processes, signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    signal.signal(signal.SIGHUP, lambda *_: _signal(processes, signal.SIGHUP))
    failed = False
    while True:
        # Asked once for each process: a sentinel is ready before the process has ended, so that two answers may differ.
        running = [process for process in processes if process.is_alive()]
        if deadline is None and len(running) < len(processes):
            for number, process in enumerate(processes):
                if process not in running:
                    _LOG.error("process %d has ended with status %s; the others end too", number, process.exitcode)
            failed = True
            end()
        if not running:
            break
        wait([process.sentinel for process in running], timeout=_POLL_SECONDS)
        if deadline is not None and time.monotonic() > deadline:
            _LOG.error("%d processes did not end in %.0f s and are killed", len(running), most_seconds)
            _signal(running, signal.SIGKILL)
            deadline += most_seconds
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
