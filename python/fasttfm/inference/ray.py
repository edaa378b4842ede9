"""Ray: ``Embedder`` for ``ray.data.Dataset.map_batches``, and a pool of workers that computes every task once.

Both keep a session in each actor. What is in flight is bounded: by Ray Data, or by ``OUTSTANDING`` tasks per worker.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fasttfm import _extras
from fasttfm.inference.session import Session

OUTSTANDING = 2  # tasks of a worker: one that it computes, and the next one
_MOST_LOSSES = 5  # workers that may be lost with the same task
_STORE_BYTES = 256 << 20  # of a cluster that is started here


class Embedder:
    """Adds a column of vectors to batches with a column of texts; ``ray.data.Dataset.map_batches`` makes one in each
    of its actors.

    Args:
        model: A checkpoint directory that every node can read, or a hub id.
        column: The name of the column of texts.
        vector_column: The name of the column of vectors.
        threads: The number of CPU threads; by default the number of CPUs that Ray gives to the actor.
        options: Further arguments of ``Session``, such as ``max_tokens`` or ``settings``.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        column: str = "text",
        vector_column: str = "vector",
        threads: int | None = None,
        **options: Any,
    ) -> None:
        torch.set_num_threads(threads or _assigned_cpus())
        self.column, self.vector_column = column, vector_column
        self.session = Session(model, **options)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self.column not in batch:
            got = f"columns {', '.join(map(repr, batch))}"
            raise ValueError(f"Embedder: column: expected a column {self.column!r} of texts, got {got}")
        return {**batch, self.vector_column: self.session.encode(list(batch[self.column]))}


class Workers(NamedTuple):
    """The number of actors, and the CPUs and GPUs of each."""

    number: int
    cpus: int
    gpus: int


def connect(address: str | None = None) -> dict[str, float]:
    """Connects to a cluster and returns its resources. Without an address, that of ``RAY_ADDRESS``, or a cluster that
    is started on this machine and ends with this process."""
    ray = ray_or_error()
    address = address or os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if address is None:
        options |= {"include_dashboard": False, "object_store_memory": _STORE_BYTES}
    try:
        ray.init(address=address, **options)
    except ConnectionError as error:
        raise OSError(f"--address: expected a Ray cluster that runs, got {address!r} ({error})") from None
    return dict(ray.cluster_resources())


def disconnect() -> None:
    """Leaves the cluster; one that ``connect`` has started ends."""
    ray_or_error().shutdown()


def run_tasks(
    open_work: Callable[[], Callable[..., Any]],
    tasks: Iterable[tuple[Any, ...]],
    workers: Workers,
    *,
    outstanding: int = OUTSTANDING,
) -> Iterator[Any]:
    """Yields the results of tasks, in the order in which they are complete. If a worker is lost, for example with its
    node, another one is started, and its tasks are computed again. An exception of a task is raised here.

    Args:
        open_work: Called in each worker. Returns what is called with the values of a task.
        tasks: They are read lazily.
        workers: Those for which the cluster has no resources yet begin when it has.
        outstanding: The maximum number of tasks of a worker.
    """
    source = (_Task(values) for values in tasks)
    task = next(source, None)
    if task is None:
        return
    pool = _Pool(open_work, workers)
    try:
        while task is not None or pool.running:
            while task is not None and (actor := pool.free(outstanding)) is not None:
                pool.submit(actor, task)
                task = pool.lost.popleft() if pool.lost else next(source, None)
            yield from pool.wait()
            if task is None and pool.lost:
                task = pool.lost.popleft()
    except BaseException:
        pool.kill()
        raise
    pool.close()


@dataclass
class _Task:
    values: tuple[Any, ...]
    losses: int = 0  # of workers


class _Pool:
    """The actors of ``run_tasks``."""

    def __init__(self, open_work: Callable[[], Callable[..., Any]], workers: Workers) -> None:
        self._ray = ray_or_error()
        options = {"num_cpus": workers.cpus, "num_gpus": workers.gpus, "max_restarts": 0}
        self._remote = self._ray.remote(_Worker).options(**options)
        self._arguments = (self._ray.put(open_work), workers.cpus)
        self._opening: dict[Any, Any] = {}  # the reference of its call -> an actor
        self._loads: dict[Any, int] = {}  # open actors -> the number of their tasks
        self._losses = 0  # of actors, since the last one that has opened
        self.running: dict[Any, tuple[Any, _Task]] = {}
        self.lost: deque[_Task] = deque()
        for _ in range(workers.number):
            self._start()

    def _start(self) -> None:
        actor = self._remote.remote(*self._arguments)
        self._opening[actor.open.remote()] = actor

    def free(self, outstanding: int) -> Any:
        """The open actor with the fewest tasks; None if all have as many as they may have."""
        actor = min(self._loads, key=self._loads.__getitem__, default=None)
        return None if actor is None or self._loads[actor] >= outstanding else actor

    def submit(self, actor: Any, task: _Task) -> None:
        self.running[actor.run.remote(*task.values)] = actor, task
        self._loads[actor] += 1

    def wait(self) -> Iterator[Any]:
        """Waits for a task or an actor. Yields the results of tasks."""
        done, _ = self._ray.wait([*self.running, *self._opening], num_returns=1)
        for reference in done:
            task: _Task | None = None
            if reference in self.running:
                actor, task = self.running.pop(reference)
            else:
                actor = self._opening.pop(reference)
            try:
                result = self._ray.get(reference)
            except self._ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except (self._ray.exceptions.RayActorError, self._ray.exceptions.WorkerCrashedError) as error:
                self._lose(actor, task, error)
                continue
            if task is None:
                self._loads[actor], self._losses = 0, 0
                continue
            self._loads[actor] -= 1
            yield result

    def _lose(self, actor: Any, task: _Task | None, error: Exception) -> None:
        """Starts another actor, at the first of the failures of a lost one, and keeps its task."""
        if task is None or self._loads.pop(actor, None) is not None:
            self._losses += task is None
            self._ray.kill(actor)
            self._start()
        if task is not None:
            task.losses += 1
            self.lost.append(task)
        if max(self._losses, 0 if task is None else task.losses) >= _MOST_LOSSES:
            what = "while they open the model" if task is None else "with the same task"
            got = f"{_MOST_LOSSES} that are lost {what}: {error}"
            raise ConnectionError(f"Ray: expected workers that compute, got {got}")

    def close(self) -> None:
        """Ends the actors, which have no more tasks."""
        for actor in self._opening.values():
            self._ray.kill(actor)
        for actor in self._loads:
            actor.__ray_terminate__.remote()

    def kill(self) -> None:
        for actor in [*self._loads, *self._opening.values()]:
            self._ray.kill(actor)


class _Worker:
    """An actor, which keeps the model."""

    def __init__(self, open_work: Callable[[], Callable[..., Any]], threads: int) -> None:
        self._open_work, self._threads = open_work, threads

    def open(self) -> None:
        """Opens the model. What it raises reaches the driver as it is, which is not so for a constructor."""
        torch.set_num_threads(self._threads)
        self._work = self._open_work()

    def run(self, *values: Any) -> Any:
        return self._work(*values)


def _assigned_cpus() -> int:
    """The number of CPUs that Ray gives to this actor; without Ray, torch's number of threads."""
    ray = ray_or_error()
    if not ray.is_initialized():
        return torch.get_num_threads()
    return max(1, int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1)))


def ray_or_error() -> Any:
    """The module ray. Raises ImportError that names the extra without it."""
    try:
        import ray
        import ray.exceptions
    except ImportError:
        raise _extras.missing("computing on a Ray cluster", "ray", "ray") from None
    return ray
