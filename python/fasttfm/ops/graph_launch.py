"""A captured CUDA graph that is launched together with the copies of its inputs and results.

With the native core this is one call without any of torch's; its time on the host counts for graphs of small batches.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from fasttfm import _native


class Transfer(NamedTuple):
    """A copy of the first ``nbytes`` bytes between the GPU and pinned memory; both tensors are contiguous."""

    device: Tensor
    host: Tensor
    nbytes: int


class LaunchableGraph:
    """A captured graph, made with ``keep_graph=True``, that contains no random numbers."""

    def __init__(self, graph: torch.cuda.CUDAGraph, device: torch.device) -> None:
        self._graph, self._device = graph, device
        self._exec = 0
        if _native.missing_cuda() is not None:
            graph.instantiate()
            return
        handle = torch.zeros(1, dtype=torch.int64, device="cpu")
        _native.core().graph_instantiate_cuda(graph=graph.raw_cuda_graph(), exec=handle.data_ptr(), device=device.index)
        self._exec = int(handle)

    def __del__(self) -> None:
        if self._exec:
            with suppress(RuntimeError):  # when a process ends, the driver may have freed the graph already
                _native.core().graph_destroy_cuda(exec=self._exec, device=self._device.index)

    def launch(self, inputs: Transfer, results: Transfer, done: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        """Launches copy, graph and copy on the stream, and records ``done``, an event that was recorded before. The
        host's memory must not be used until ``done`` has completed."""
        if not self._exec:
            with torch.cuda.stream(stream):
                _bytes(inputs.device, inputs.nbytes).copy_(_bytes(inputs.host, inputs.nbytes), non_blocking=True)
                self._graph.replay()
                _bytes(results.host, results.nbytes).copy_(_bytes(results.device, results.nbytes), non_blocking=True)
                done.record(stream)
            return
        _native.core().graph_launch_cuda(
            exec=self._exec,
            inputs=inputs.device.data_ptr(),
            host_inputs=inputs.host.data_ptr(),
            input_bytes=inputs.nbytes,
            results=results.device.data_ptr(),
            host_results=results.host.data_ptr(),
            result_bytes=results.nbytes,
            event=done.cuda_event,
            device=self._device.index,
            stream=stream.cuda_stream,
        )


def _bytes(tensor: Tensor, count: int) -> Tensor:
    return tensor.view(-1).view(torch.uint8)[:count]
