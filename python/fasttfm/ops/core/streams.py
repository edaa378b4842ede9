"""``OrderedStream``: the stream that orders an object's state on a device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


class OrderedStream:
    """A CUDA stream of an object that any thread may call on any stream; on a CPU it does nothing. The object's tensors
    are allocated, used and freed inside of ``ordered``, by one thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def ordered(self) -> Iterator[None]:
        """Launches on the stream what runs inside of it: after all that the caller's stream has been given before, and
        before what it is given later. Does not synchronize with the host."""
        if self.stream is None:
            yield
            return
        caller = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(caller)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            caller.wait_stream(self.stream)


def to_host(tensor: Tensor, stream: torch.cuda.Stream) -> Tensor:
    """A copy of a GPU's tensor in pinned memory, made on ``stream``, for which it waits.

    Of memory in copies that do not wait, torch records events when it is freed, and aborts the process if that fails,
    as it does once a kernel has failed.
    """
    with torch.inference_mode(), torch.cuda.stream(stream):
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        return host.copy_(tensor)


def has_failed(stream: torch.cuda.Stream | None) -> bool:
    """Whether a kernel has failed so that the device computes nothing more in this process, for example by an access to
    an illegal address. Waits for the stream. False without a stream."""
    if stream is None:
        return False
    try:
        stream.synchronize()
    except RuntimeError:
        return True
    return False
