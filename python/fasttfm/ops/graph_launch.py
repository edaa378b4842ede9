"""A captured CUDA graph that is launched together with the copies of its inputs and results.

With the native core this is one call without any of torch's; its time on the host counts for graphs of small batches.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from fasttfm import _native


class HostMemory:
    """Pinned memory for the inputs and results of one launch at a time, and the event that ends the launch."""

    def __init__(self, inputs: Tensor, results: Tensor, stream: torch.cuda.Stream) -> None:
        self.inputs, self.results = inputs, results
        self.done = torch.cuda.Event()
        self.done.record(stream)  # creates the event
        # torch's calls for them take as long as a part of the launch
        self.input_address, self.result_address = inputs.data_ptr(), results.data_ptr()
        self.event_address: int = self.done.cuda_event

    def wait(self) -> None:
        """Waits for the end of the launch."""
        self.done.synchronize()


class LaunchableGraph:
    """A captured graph, made with ``keep_graph=True``, that contains no random numbers.

    Args:
        inputs: What the graph reads: a contiguous tensor on the GPU, copied from the host before each launch.
        results: What it writes: contiguous, with a row for each result; the first rows are copied to the host.
        stream: Where it is launched.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, inputs: Tensor, results: Tensor, stream: torch.cuda.Stream) -> None:
        self._graph, self._inputs, self._results, self._stream = graph, inputs, results, stream
        self._device = results.device
        self._row_bytes = results.nbytes // len(results)
        self._exec = 0
        if _native.missing_cuda() is not None:
            graph.instantiate()
            return
        handle = torch.zeros(1, dtype=torch.int64, device="cpu")
        core, device = _native.core(), self._device.index
        core.graph_instantiate_cuda(graph.raw_cuda_graph(), handle.data_ptr(), device)
        self._exec = int(handle)
        self._launch = partial(
            core.graph_launch_cuda,
            self._exec,
            *(device, stream.cuda_stream, inputs.data_ptr(), inputs.nbytes, results.data_ptr()),
        )

    def __del__(self) -> None:
        if self._exec:
            with suppress(RuntimeError):  # when a process ends, the driver may have freed the graph already
                _native.core().graph_destroy_cuda(self._exec, self._device.index)

    def launch(self, host: HostMemory, rows: int, results: Tensor | None = None) -> None:
        """Launches the copy of the inputs, the graph and the copy of the first ``rows`` results, to ``results`` if
        given (pinned memory), and records ``host.done``. The host's memory must not be used until that has
        completed."""
        count = rows * self._row_bytes
        if self._exec:
            target = host.result_address if results is None else results.data_ptr()
            self._launch(host.input_address, target, count, host.event_address)
            return
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            _bytes(self._inputs).copy_(_bytes(host.inputs)[: self._inputs.nbytes], non_blocking=True)
            self._graph.replay()
            found = host.results if results is None else results
            _bytes(found)[:count].copy_(_bytes(self._results)[:count], non_blocking=True)
            host.done.record(self._stream)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
