"""``Graphs``: a training step as two CUDA graphs, one for a batch's forward and backward, one for the update.

A graph holds shapes and addresses. So batches that have the shapes of the captured one are copied into its memory, and
others run without the graph; gradients stay where they are and are set to 0 after an update.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_WARM_UP = 3  # steps without a graph: kernels are compiled and chosen, the optimizer's state is made


class Graphs:
    """Runs ``accumulate(batch)`` and ``update()``, the first steps as they are, later ones by graphs.

    ``accumulate`` reads nothing of a batch but its tensors and what is the same in all of them.
    """

    def __init__(self, accumulate: Callable[[Any], None], update: Callable[[], None]) -> None:
        self._accumulate = accumulate
        self._update = update
        self._steps = 0
        self._static: Any = None  # the batch that the graph reads
        self._batch_graph: torch.cuda.CUDAGraph | None = None
        self._update_graph: torch.cuda.CUDAGraph | None = None
        self.replayed = 0  # batches that ran by the graph

    def accumulate(self, batch: Any) -> None:
        if self._steps < _WARM_UP or (self._static is not None and shapes(batch) != shapes(self._static)):
            self._accumulate(batch)
            return
        if self._batch_graph is None:
            self._static = dataclasses.replace(
                batch, **{name: tensor.clone() for name, tensor in tensors(batch).items()}
            )
            self._batch_graph = _captured(lambda: self._accumulate(self._static))
        for name, target in tensors(self._static).items():
            target.copy_(getattr(batch, name), non_blocking=True)
        self._batch_graph.replay()
        self.replayed += 1

    def update(self) -> None:
        self._steps += 1
        if self._batch_graph is None:
            self._update()
            return
        if self._update_graph is None:
            self._update_graph = _captured(self._update)
        self._update_graph.replay()


def tensors(batch: Any) -> dict[str, Tensor]:
    found = {each.name: getattr(batch, each.name) for each in dataclasses.fields(batch)}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def shapes(batch: Any) -> tuple[Any, ...]:
    """The key of a graph: the tensors' shapes, and the bound of the sequences' lengths."""
    return (getattr(batch, "max_seqlen", None), *((name, value.shape) for name, value in tensors(batch).items()))


def _captured(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A capture runs nothing: what it holds happens when the graph is replayed."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph
