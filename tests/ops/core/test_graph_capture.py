"""Captures of CUDA graphs: the memory pool, the garbage collector, and failures. Without a GPU, with torch's calls
replaced by ones that follow the rules of its allocator."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fasttfm.ops.core import graph_capture, graph_launch
from fasttfm.ops.core.graph_cache import GraphCache
from fasttfm.ops.core.graph_capture import CaptureError, GraphPool, collection_paused


class Allocator:
    """The rules of torch's memory pools: see ``Graph``."""

    def __init__(self) -> None:
        self.uses: Counter[int] = Counter()
        self.freed: set[int] = set()  # pools that had graphs and have none
        self.recording: set[int] = set()
        self.handles = 0
        self.capturing = False
        self.invalidated = False

    def handle(self) -> int:
        self.handles += 1
        return self.handles


class Graph:
    """A graph that can be captured with a pool unless the pool's last graph was freed, or a capture with it failed."""

    allocator: Allocator

    def __init__(self, keep_graph: bool = False) -> None:
        self.used: int | None = None

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        own = self.allocator
        if pool in own.freed or pool in own.recording:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        own.recording.add(pool)
        own.capturing, own.invalidated = True, False
        self._recorded = pool

    def capture_end(self) -> None:
        own = self.allocator
        own.capturing = False
        if own.invalidated:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        own.recording.remove(self._recorded)
        self.used = self._recorded
        own.uses[self.used] += 1

    def pool(self) -> int:
        assert self.used is not None
        return self.used

    def __del__(self) -> None:
        if self.used is not None:
            self.allocator.uses[self.used] -= 1
            if self.allocator.uses[self.used] == 0:
                self.allocator.freed.add(self.used)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocator]:
    found = Allocator()
    kind = type("Graph", (Graph,), {"allocator": found})
    monkeypatch.setattr(torch.cuda, "CUDAGraph", kind)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", found.handle)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(graph_capture, "_failed", [])
    yield found
    assert not found.capturing


def new_pool() -> GraphPool:
    stream: Any = SimpleNamespace(device=torch.device("cpu"), synchronize=lambda: None)
    return GraphPool(stream)


def test_a_pool_is_kept_without_graphs(allocator: Allocator) -> None:
    """As after the eviction of a session's only graph."""
    pool = new_pool()
    for turn in range(3):
        graph, found = pool.capture(lambda turn=turn: turn)  # type: ignore[misc]
        assert found == turn
        used = graph.pool()
        del graph
        assert allocator.uses[used] == 1  # the pool's own
    assert allocator.handles == 1
    del pool
    assert allocator.freed == {used}


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_paused(allocator: Allocator, enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        assert new_pool().capture(gc.isenabled)[1] is False
        assert gc.isenabled() == enabled
        with pytest.raises(CaptureError), collection_paused():  # another thread's capture
            new_pool().capture(lambda: _invalidate(allocator))
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_pauses_of_threads_overlap() -> None:
    assert gc.isenabled()
    inside, leave = threading.Event(), threading.Event()

    def pause() -> None:
        with collection_paused():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=pause)
    with collection_paused():
        thread.start()
        inside.wait(10)
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def _invalidate(allocator: Allocator) -> None:
    allocator.invalidated = True


def _fail(allocator: Allocator) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def _fail_and_invalidate(allocator: Allocator) -> None:
    allocator.invalidated = True
    raise ValueError("unlucky")


@pytest.mark.parametrize(
    ("work", "error", "message"),
    [
        (_invalidate, CaptureError, "could not be captured: RuntimeError: CUDA error: operation failed"),
        (_fail, CaptureError, "could not be captured: OutOfMemoryError: CUDA out of memory"),
        (_fail_and_invalidate, ValueError, "unlucky"),
    ],
)
def test_a_pool_captures_after_a_failure(
    allocator: Allocator, work: Callable[[Allocator], None], error: type[Exception], message: str
) -> None:
    pool = new_pool()
    before, _ = pool.capture(lambda: None)
    with pytest.raises(error, match=message):
        pool.capture(lambda: work(allocator))
    after, found = pool.capture(lambda: 3)
    assert found == 3
    assert after.pool() != before.pool()  # whose memory is still in use by the graph before
    assert allocator.uses[before.pool()] == 1


def test_a_cache_makes_values_again_after_failures() -> None:
    """After 64 lookups, then after 256 more: neither at every lookup nor never."""
    failures = 2
    calls: list[int] = []
    cache: GraphCache[str] = GraphCache(limit=4, lookups=1)
    lookups = 0

    def make(key: str) -> str:
        calls.append(lookups)
        if len(calls) <= failures:
            raise CaptureError("unlucky")
        return key

    while lookups < 400:
        with contextlib.suppress(CaptureError):
            cache.get("a", make)
        lookups += 1
    assert calls == [0, 64, 320]
    assert cache.counts.captured == 1
    cache.get("b", make)  # no delay after a success
    assert len(calls) == 4


def test_a_graph_is_captured_when_its_shape_repeats() -> None:
    made: list[str] = []

    def make(key: str) -> str:
        made.append(key)
        return key.upper()

    cache: GraphCache[str] = GraphCache(limit=2)
    assert [cache.get("a", make), cache.get("a", make), cache.get("a", make)] == [None, "A", "A"]
    assert made == ["a"]
    assert [cache.get("b", make), cache.get("b", make)] == [None, "B"]
    assert [cache.get("c", make) for _ in range(3)] == [None, None, None]  # looked up no more often than a
    assert cache.get("c", make) == "C"
    assert len(cache) == 2
    assert cache.get("b", make) == "B"
    assert (cache.counts.captured, cache.counts.evicted) == (3, 1)


def test_an_entry_is_used_until_it_is_evicted() -> None:
    cache: GraphCache[str] = GraphCache(limit=2)
    for key in "aabb":
        cache.get(key, str.upper)
    first, second = cache.kept("a"), cache.kept("b")
    assert first is not None
    assert second is not None
    assert cache.kept("c") is None
    assert [cache.use(first) for _ in range(3)] == ["A"] * 3  # b is the least recently used one now
    assert [cache.get("c", str.upper) for _ in range(3)] == [None, None, "C"]
    assert (cache.use(first), cache.use(second)) == ("A", None)
    assert cache.counts.replayed == 7
    cache.clear()
    assert cache.use(first) is None
    assert len(cache) == 0


def test_alternating_shapes_do_not_evict_each_other() -> None:
    """With more shapes than the limit, the existing graphs are kept and used."""
    cache: GraphCache[int] = GraphCache(limit=8)
    for _ in range(1000):
        for key in range(10):
            cache.get(key, int)
    assert cache.counts.captured <= 20
    assert cache.counts.replayed > 7000
    assert GraphCache(limit=0).get("a", str.upper) is None


def test_memory_released_in_a_capture_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for its event would invalidate the capture."""
    waited: list[str] = []
    reached: set[str] = set()
    capturing = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(graph_launch, "_deferred", [])

    def event(name: str) -> Any:
        return SimpleNamespace(synchronize=lambda: waited.append(name), query=lambda: name in reached)

    graph_launch.release_after(event("a"), bytearray(3))
    assert not waited
    capturing = False
    graph_launch.release_after(event("b"), bytearray(3))
    assert waited == ["b"]
    assert len(graph_launch._deferred) == 1  # the device still uses it
    reached.add("a")
    graph_launch.release_after(event("c"))
    assert not graph_launch._deferred


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_graphs_of_a_pool_on_a_gpu() -> None:
    """Captured again after all were freed, after an error of the captured function, and after a call that a capture
    does not allow. Random numbers can be drawn afterwards."""
    pool = GraphPool()
    x = torch.arange(4.0, device="cuda")
    pool.stream.wait_stream(torch.cuda.current_stream())
    for turn in range(3):
        graph, y = pool.capture(lambda turn=turn: x * (turn + 2))  # type: ignore[misc]
        with torch.cuda.stream(pool.stream):
            graph.replay()
            assert torch.equal(y, x * (turn + 2))
        del graph, y
        if turn == 0:
            with pytest.raises(ZeroDivisionError):
                pool.capture(lambda: x * (1 // 0))
        else:
            with pytest.raises(CaptureError, match="a CUDA graph could not be captured"):
                pool.capture(lambda: (x + 1).sum().item())
        torch.rand(3, device="cuda")


@pytest.mark.gpu
def test_a_graph_may_be_freed_in_a_capture() -> None:
    """Also one of the native core, which torch knows nothing about."""
    pool = GraphPool()
    with torch.cuda.stream(pool.stream):
        inputs = torch.zeros(4, device="cuda")
        kept, rows = pool.capture(lambda: inputs.view(1, 4) + 1, keep_graph=True)
        old = [graph_launch.LaunchableGraph(kept, inputs, rows, pool.stream)]
        del kept

        def work() -> torch.Tensor:
            old.clear()
            return inputs + 2

        graph, found = pool.capture(work)
        graph.replay()
        assert found.tolist() == [2.0] * 4
