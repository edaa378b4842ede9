"""CUDA graphs of the user: captured, also as the first use in a process, and replayed with changed inputs."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor

from fasttfm.ops.core.graph_capture import GraphPool
from fasttfm.testing.seams.entry import EntryPoint, Inputs, SeamError, Tensors, check_same

# What an error in a capture says: torch's and CUDA's words, and ours.
_WORDS = ("captur", "graph")


def check_capture(entry: EntryPoint, device: torch.device, *, first_use: bool = False) -> None:
    """A graph of a call follows its inputs: after they change in place, a replay gives the bits of the eager call.
    An entry point may refuse a capture, in words that name it; it then works outside of captures as before.

    Args:
        first_use: Whether nothing runs before the capture; for a process of its own.
    """
    subject = entry.make(device)
    static = entry.inputs(0, device)
    torch.cuda.synchronize(device)
    if not first_use:
        side = torch.cuda.Stream(device)
        with torch.cuda.stream(side):
            for _ in range(2):
                entry.call(subject, static)
        torch.cuda.synchronize(device)
    captured = _captured(entry, subject, static, device)
    for seed in (1, 2):
        fresh = entry.inputs(seed, device)
        expected = entry.call(entry.make(device), fresh)
        if captured is None:
            check_same(entry.call(subject, fresh), expected, f"{entry}: after a refused capture")
            continue
        graph, results = captured
        _overwrite(static, fresh)
        for _ in range(2):
            graph.replay()
        torch.cuda.synchronize(device)
        check_same(results, expected, f"{entry}: a replay with inputs {seed}")
        check_same(entry.call(subject, fresh), expected, f"{entry}: an eager call between replays")
        torch.cuda.synchronize(device)


def _captured(
    entry: EntryPoint, subject: Any, static: Inputs, device: torch.device
) -> tuple[torch.cuda.CUDAGraph, Tensors] | None:
    """The graph and its results; None if the entry point refuses a capture."""
    graph = torch.cuda.CUDAGraph()
    gc.collect()
    try:
        with torch.cuda.graph(graph):
            results = entry.call(subject, static)
    except Exception as error:
        if not any(word in str(error).lower() for word in _WORDS):
            raise SeamError(f"{entry}: in a capture: {type(error).__name__}: {error}") from error
        torch.cuda.synchronize(device)
        # After a failed capture, torch's generator expects its end; a capture that succeeds resets it.
        GraphPool().capture(torch.zeros(1, dtype=torch.int32, device=device).zero_)
        return None
    return graph, results


def _overwrite(static: Inputs, fresh: Inputs) -> None:
    for name, value in fresh.items():
        if isinstance(value, Tensor):
            static[name].copy_(value)
