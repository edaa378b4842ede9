"""``run``: listens, loads the models, reloads them on SIGHUP, and drains on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import multiprocessing
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn

from fasttfm.serve import tracing
from fasttfm.serve.app import add_gauges, application
from fasttfm.serve.calls import Loaded, Server
from fasttfm.serve.engine import Arrivals
from fasttfm.serve.limits import Limits
from fasttfm.serve.models import ServedModel, Source, load
from fasttfm.serve.peers import Peers

_LOG = logging.getLogger("fasttfm.serve")
# A session's thread waits at most this long for the GIL before it launches the next batch, while the loop is busy.
_SWITCH_SECONDS = 0.001
_RELOAD_SECONDS = 2.0


@dataclass(frozen=True)
class Settings:
    """The options of a server.

    Args:
        key_file: A file with one API key on each line.
        origins: Origins whose pages may send requests; ``*`` for all.
        drain_timeout: Seconds for requests to end after SIGTERM.
        tokenization_workers: Threads that read long texts.
        traces: The endpoint of an OpenTelemetry collector and the service's name.
    """

    sources: Sequence[Source]
    hostname: str = "0.0.0.0"
    port: int = 8080
    limits: Limits = field(default_factory=Limits)
    key_file: Path | None = None
    origins: Sequence[str] = ("*",)
    drain_timeout: float = 30.0
    tokenization_workers: int = 4
    access_log: bool = False
    traces: tuple[str, str] | None = None

    def keys(self) -> list[str]:
        if self.key_file is None:
            return []
        keys = [line.strip() for line in self.key_file.read_text(encoding="utf-8").splitlines() if line.strip()]
        if not keys:
            raise ValueError(f"--api-key-file: expected a key on a line, got none in {self.key_file}")
        return keys


class _Uvicorn(uvicorn.Server):
    """SIGTERM and SIGINT drain, and the process exits with 0 instead of by the signal; SIGHUP reloads."""

    def __init__(self, config: uvicorn.Config, reload: Callable[[], None]) -> None:
        super().__init__(config)
        self._reload = reload

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # only the main thread gets signals
            yield
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.remove_signal_handler(number)


class Running:
    """A server on its event loop: loads, reloads and closes the models."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.server = Server(settings.limits, tokenization_workers=settings.tokenization_workers)
        add_gauges(self.server)
        self.application, self.asgi = application(
            self.server, settings.keys(), origins=settings.origins, access_log=settings.access_log
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._arrivals: Arrivals | None = None
        self._reloading = asyncio.Lock()

    async def load(self) -> None:
        """Loads all models, without blocking the loop, and serves them from then on."""
        loop = asyncio.get_running_loop()
        if self._arrivals is None:
            self._arrivals = Arrivals(loop)
        models = await loop.run_in_executor(None, self._open)
        before = self.server.loaded
        _freeze()
        self.server.loaded = Loaded(models, self.server.admission, self.server.metrics, self._arrivals)
        if before is not None:
            await asyncio.sleep(_RELOAD_SECONDS)  # requests that have begun submit to the former sessions
            await loop.run_in_executor(None, before.close)
            del before
            _freeze()

    def _open(self) -> list[ServedModel]:
        models = []
        for source in self.settings.sources:
            begun = time.perf_counter()
            model = load(source)
            models.append(model)
            _LOG.info("loaded %s in %.1f s, %s", ascii(source.name), time.perf_counter() - begun, model.dtype)
            for reason in {session.reason for session in model.sessions} - {None}:
                _LOG.info("precision %s of %s: %s", model.dtype, ascii(source.name), reason)
        return models

    def reload(self) -> None:
        """On SIGHUP: loads models and keys again. A failure leaves what is served."""
        task = asyncio.ensure_future(self._reload())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reload(self) -> None:
        async with self._reloading:
            try:
                keys = self.settings.keys()
                await self.load()
            except Exception as error:
                _LOG.error("reload: %s: %s; the former models are kept", type(error).__name__, ascii(str(error)))
                return
            self.application.keys = [key.encode() for key in keys]
            _LOG.info("reloaded")

    async def close(self) -> None:
        gc.unfreeze()
        if self.server.loaded is not None:
            await asyncio.get_running_loop().run_in_executor(None, self.server.loaded.close)


def _freeze() -> None:
    """Frees what is not used, and keeps the garbage collector from what stays: modules and models have about a million
    objects, during whose traversal no request is answered."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


class Listening(NamedTuple):
    """A server that listens: its port, the state that requests share, and what ends it, from any thread."""

    port: int
    server: Server
    stop: Callable[[], None]


def set_up_logging(prefix: str = "") -> None:
    """Logs to stderr."""
    form = f"%(asctime)s %(levelname)s {prefix}%(message)s"
    logging.basicConfig(level=logging.INFO, format=form, stream=sys.stderr)


def run(settings: Settings, *, started: Callable[[Listening], None] | None = None, peers: Peers | None = None) -> int:
    """Answers requests until SIGTERM or SIGINT. Returns the exit status: 0, or 1 if a model cannot be loaded.

    Args:
        started: Called once the server listens, before the models are loaded.
        peers: The other processes that serve the port.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
    if settings.traces is not None:
        tracing.start(*settings.traces)
    running = Running(settings)
    running.server.peers = peers
    listener = listen(settings.hostname, settings.port, shared=peers is not None)
    config = uvicorn.Config(
        running.asgi,
        interface="asgi3",
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=True,
        proxy_headers=False,
        lifespan="off",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int(settings.drain_timeout),
        backlog=2048,
        **_implementations(),
    )
    server = _Uvicorn(config, running.reload)
    return _run_loop(_serve(server, running, listener, started), config)


def _run_loop(coroutine: Any, config: uvicorn.Config) -> int:
    if config.loop == "uvloop":
        import uvloop

        loop: Any = uvloop.new_event_loop()
    else:
        loop = asyncio.new_event_loop()
    try:
        return int(loop.run_until_complete(coroutine))
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def _implementations() -> dict[str, Any]:
    """uvloop and httptools where they are installed; they are not on every platform."""
    implementations: dict[str, Any] = {"loop": "asyncio", "http": "h11", "ws": "none"}
    with contextlib.suppress(ImportError):
        import uvloop  # noqa: F401

        implementations["loop"] = "uvloop"
    with contextlib.suppress(ImportError):
        import httptools  # noqa: F401

        implementations["http"] = "httptools"
    return implementations


def listen(hostname: str, port: int, *, shared: bool = False) -> socket.socket:
    """A socket that is bound to a port.

    Args:
        shared: Whether other processes bind it too; the kernel then distributes connections over those that listen.
    """
    family = socket.AF_INET6 if ":" in hostname else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((hostname, port))
    except OSError as error:
        listener.close()
        raise OSError(error.errno, error.strerror, f"{hostname}:{port}") from None
    listener.set_inheritable(True)
    return listener


async def _serve(
    server: _Uvicorn, running: Running, listener: socket.socket, started: Callable[[Listening], None] | None
) -> int:
    """Listens while the models are loaded, so that /health answers 503 meanwhile."""
    status = 0

    async def load_models() -> None:
        nonlocal status
        try:
            await running.load()
            _LOG.info("ready on %s", _address(listener))
        except Exception as error:
            status = 1
            running.server.failure = f"{type(error).__name__}: {error}"
            _LOG.error("cannot load: %s", ascii(str(error)) if not str(error).isprintable() else error)
            server.should_exit = True

    listener.listen(server.config.backlog)  # connections wait from here on until uvicorn accepts them
    if started is not None:
        started(
            Listening(
                listener.getsockname()[1], running.server, functools.partial(setattr, server, "should_exit", True)
            )
        )
    peers = running.server.peers
    told = None if peers is None else await peers.publish(running.server.state)
    _end_with_parent(server)
    loading = asyncio.ensure_future(load_models())
    try:
        await server.serve(sockets=[listener])
    finally:
        if told is not None:
            told.close()
        await loading if status or server.should_exit else loading.cancel()
        await running.close()
        running.server.tokenization.close()
        running.server.pool.shutdown(wait=False)
    return status


def _end_with_parent(server: _Uvicorn) -> None:
    """Ends this process if it is one of several and the one that started them was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        asyncio.get_running_loop().add_reader(parent.sentinel, setattr, server, "should_exit", True)


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{host}:{port}"
