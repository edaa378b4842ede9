"""What launchers need to know about the tensors and the machine."""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager

import torch
from torch import Tensor


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Launches inside go to the tensor's GPU, whichever is current. Free of cost where it is current already."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


def multiprocessors(tensor: Tensor) -> int:
    """How many multiprocessors the tensor's GPU has; 4 in Triton's interpreter, so that tests see several programs."""
    return _multiprocessors(tensor.get_device()) if tensor.is_cuda else 4


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and _capability(device.index) == (9, 0)


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)
