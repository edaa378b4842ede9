"""``Graphs``: a training step as two CUDA graphs, one for a batch's forward and backward, one for the update.

A graph has fixed shapes and addresses. Batches with the shapes of the captured one are copied into its memory, and
others run without the graph. Gradients keep their memory and are set to 0 after an update.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fasttfm.ops.core.graph_capture import GraphPool

_WARM_UP = 3  # steps without a graph, which compile and tune kernels and create the optimizer's state


class Graphs:
    """Runs ``accumulate(batch)`` and ``update()``, directly in the first steps and by graphs in later ones.

    Of a batch, ``accumulate`` may read only its tensors and attributes that are the same in all batches. Parameters,
    gradients and the optimizer's state are ordered by the current stream of the thread that trains, where graphs are
    replayed; while they exist, the parameters keep their memory.
    """

    def __init__(self, accumulate: Callable[[Any], None], update: Callable[[], None]) -> None:
        self._accumulate = accumulate
        self._update = update
        self._steps = 0
        self._static: Any = None  # the batch that the graph reads
        self._batch_graph: torch.cuda.CUDAGraph | None = None
        self._update_graph: torch.cuda.CUDAGraph | None = None
        self.replayed = 0  # the number of batches that the graph has run

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
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return {name: value for name, value in fields.items() if isinstance(value, Tensor)}


def shapes(batch: Any) -> tuple[Any, ...]:
    """The key of a graph: the tensors' shapes, and max_seqlen."""
    return (getattr(batch, "max_seqlen", None), *((name, value.shape) for name, value in tensors(batch).items()))


def _captured(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Captures ``work`` without running it; it runs when the graph is replayed."""
    torch.cuda.synchronize()
    return GraphPool(empty_cache=True).capture(work)[0]
