"""``GraphPool``: the one way in which CUDA graphs are captured, for sessions, generation, training and benchmarks."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from fasttfm.ops.core.checks import in_one_line

Result = TypeVar("Result")

# Graphs whose capture has failed. torch's allocators may still refer to them, so they are never freed.
_failed: list[Any] = []


class CaptureError(RuntimeError):
    """A capture has failed, and nothing of it has run. The pool can capture other graphs."""


class GraphPool:
    """Captures CUDA graphs on one stream. They share one memory pool, so they also run on one stream, one after the
    other, and what one has written is read before the next one runs, unless a tensor of it is still referenced.

    During a capture Python's garbage collector is paused: what it frees may wait for the device, which is an error in a
    capture. Other threads may allocate memory and copy meanwhile. Unlike ``torch.cuda.graph`` it waits for this stream
    only, and keeps the memory that torch caches: calls after a capture would have to allocate it again.

    Args:
        stream: Where graphs are captured; by default a new stream of the current device.
        empty_cache: Whether captures first free the memory that torch caches, which graphs cannot use: for graphs that
            need a large part of the device's memory.
    """

    def __init__(self, stream: torch.cuda.Stream | None = None, *, empty_cache: bool = False) -> None:
        self.stream = torch.cuda.Stream() if stream is None else stream
        self._empty_cache = empty_cache
        # A graph that holds the memory pool. torch does not capture again with a pool whose last graph is freed.
        self._holder: Any = None

    def capture(self, work: Callable[[], Result], *, keep_graph: bool = False) -> tuple[torch.cuda.CUDAGraph, Result]:
        """Captures ``work``, which has run on the stream before: nothing is compiled or loaded now. Returns the graph
        and what ``work`` returned. Raises CaptureError if the capture fails; what ``work`` raises is its cause.

        Args:
            keep_graph: As for ``torch.cuda.CUDAGraph``.
        """
        self.stream.synchronize()
        if self._empty_cache:
            torch.cuda.synchronize(self.stream.device)
            torch.cuda.empty_cache()
        with torch.cuda.stream(self.stream), collection_paused():
            try:
                if self._holder is None:
                    self._holder = self._hold()
                return self._capture(work, self._holder.pool(), keep_graph)
            except BaseException as error:
                self._replace_pool()
                if not isinstance(error, RuntimeError):
                    raise
                raise CaptureError(f"a CUDA graph could not be captured: {in_one_line(error)}") from error

    def _capture(
        self, work: Callable[[], Result], pool: Any, keep_graph: bool = False
    ) -> tuple[torch.cuda.CUDAGraph, Result]:
        graph = torch.cuda.CUDAGraph(keep_graph=keep_graph)
        try:
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        except BaseException:
            _failed.append(graph)
            raise
        try:
            result = work()
        except BaseException:
            try:
                graph.capture_end()
            except RuntimeError:  # the error of work says more
                _failed.append(graph)
            raise
        try:
            graph.capture_end()
        except BaseException:
            _failed.append(graph)
            raise
        return graph, result

    def _hold(self) -> torch.cuda.CUDAGraph:
        """A graph with a new pool. It sets a number, because torch warns of empty graphs."""
        number = torch.zeros(1, dtype=torch.int32, device=self.stream.device)
        return self._capture(number.zero_, torch.cuda.graph_pool_handle(), keep_graph=True)[0]

    def _replace_pool(self) -> None:
        """After a failed capture, torch regards its pool as still in use by it, and torch's generator expects its end:
        other graphs get another pool, whose first capture resets the generator."""
        self._holder = None
        with contextlib.suppress(RuntimeError):
            self._holder = self._hold()


# ---- the garbage collector -------------------------------------------------------------------------------------------


class _Collector:
    """Python's garbage collector, which several threads may pause at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pauses, self._was_enabled = 0, False

    def pause(self) -> None:
        with self._lock:
            if self._pauses == 0:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._pauses += 1

    def resume(self) -> None:
        with self._lock:
            self._pauses -= 1
            if self._pauses == 0 and self._was_enabled:
                gc.enable()


_collector = _Collector()


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """A context in which Python does not start the garbage collector by itself, in any thread."""
    _collector.pause()
    try:
        yield
    finally:
        _collector.resume()
