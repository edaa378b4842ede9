"""A captured CUDA graph that is launched together with the transfer of its inputs and results.

With the native core this is one call without any of torch's; its time on the host counts for graphs of small batches.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fasttfm import _native


class HostMemory:
    """Pinned memory for the inputs and results of one launch at a time, and the event that ends the launch. The stream
    of the launch orders it until the event."""

    def __init__(self, inputs: Tensor, results: Tensor, stream: torch.cuda.Stream) -> None:
        self.inputs, self.results = inputs, results
        self.flag = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)  # set by graphs with a slot
        self.done = torch.cuda.Event()
        self.done.record(stream)  # creates the event
        # torch's calls for them take as long as a part of the launch
        self.input_address, self.result_address = inputs.data_ptr(), results.data_ptr()
        self.flag_address, self.event_address = self.flag.data_ptr(), int(self.done.cuda_event)


# Memory that was released during a capture, with the event that ends the device's use of it.
_deferred: list[tuple[Any, ...]] = []


def release_after(done: torch.cuda.Event, *memory: Any) -> None:
    """Called by ``__del__`` of an object whose memory the device may use until ``done``: torch must not give
    it to others before."""
    with suppress(RuntimeError):  # CUDA may have ended before
        if torch.cuda.is_current_stream_capturing():  # which is an error if this thread waits for the device
            _deferred.append((done, *memory))
            return
        done.synchronize()
        _deferred[:] = [entry for entry in _deferred if not entry[0].query()]


def make_slot(device: torch.device) -> Tensor | None:
    """Memory through which launches pass addresses to ``write_results``; None without the native core. Graphs that are
    launched on one stream share it."""
    if _native.missing_cuda() is not None:
        return None
    return torch.zeros(_native.core().graph_slot_bytes, dtype=torch.uint8, device=device)


def write_results(results: Tensor, slot: Tensor) -> None:
    """Captures the last kernel of a graph. It writes the first rows of contiguous results to the launch's
    ``HostMemory``, and its flag after them."""
    _native.core().graph_results_cuda(results, slot, results.nbytes)


class LaunchableGraph:
    """A captured graph, made with ``keep_graph=True``, that contains no random numbers.

    Args:
        inputs: What the graph reads: a contiguous tensor on the GPU, copied from the host before each launch. With a
            slot its size is a multiple of 16 bytes.
        results: What it writes: contiguous, with a row for each result; the first rows are copied to the host.
        stream: Where it is launched.
        slot: That of ``write_results``, if the graph ends with it. Otherwise results are copied after the graph.
    """

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        inputs: Tensor,
        results: Tensor,
        stream: torch.cuda.Stream,
        slot: Tensor | None = None,
    ) -> None:
        self._graph, self._inputs, self._results, self._stream, self._slot = graph, inputs, results, stream, slot
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
            *(self._exec, device, stream.cuda_stream, 0 if slot is None else slot.data_ptr()),
            *(inputs.data_ptr(), inputs.nbytes, results.data_ptr()),
        )
        self._wait = core.graph_wait_cuda

    def __del__(self) -> None:
        if self._exec:
            with suppress(RuntimeError):  # when a process ends, the driver may have freed the graph already
                _native.core().graph_destroy_cuda(self._exec, self._device.index)

    def launch(self, host: HostMemory, rows: int, results: Tensor | None = None) -> None:
        """Launches the copy of the inputs, the graph and the copy of the first ``rows`` results, to ``results`` if
        given (pinned memory; only without a slot), and records ``host.done``. The host's memory must not be used until
        ``wait`` has returned."""
        count = rows * self._row_bytes
        if self._exec:
            target = host.result_address if results is None else results.data_ptr()
            self._launch(host.input_address, target, count, host.flag_address, host.event_address)
            return
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            _bytes(self._inputs).copy_(_bytes(host.inputs)[: self._inputs.nbytes], non_blocking=True)
            self._graph.replay()
            source = host.results if results is None else results
            _bytes(source)[:count].copy_(_bytes(self._results)[:count], non_blocking=True)
            host.done.record(self._stream)

    def wait(self, host: HostMemory) -> None:
        """Waits for the results of the launch with this memory."""
        if self._exec:
            self._wait(0 if self._slot is None else host.flag_address, host.event_address)
        else:
            host.done.synchronize()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
