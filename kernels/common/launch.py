"""Properties of the device that launchers use, and their arithmetic."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's GPU the current device. It is a no-op if it already is."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


def multiprocessors(tensor: Tensor) -> int:
    """The number of SMs of the tensor's GPU; 4 in Triton's interpreter, so that tests run several programs."""
    return _multiprocessors(tensor.get_device()) if tensor.is_cuda else 4


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def block_memory(tensor: Tensor) -> int:
    """Bytes of shared memory that a Triton program may use on the tensor's GPU; unlimited in the interpreter."""
    return _block_memory(tensor.get_device()) if tensor.is_cuda else 2**31 - 1


@functools.cache
def _block_memory(index: int) -> int:
    from triton.runtime import driver

    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and _capability(device.index) == (9, 0)


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


# Triton's functions of these names take the host microseconds, because kernels can call them too.


def cdiv(numerator: int, denominator: int) -> int:
    """The quotient, rounded up."""
    return -(-numerator // denominator)


def next_power_of_2(number: int) -> int:
    """The smallest power of 2 that is not less than a positive number."""
    return 1 << (number - 1).bit_length()


def ahead_of_time(
    kernel: Any,
    signature: Mapping[str, str],
    tile: Mapping[str, int],
    *,
    options: Mapping[str, Any] | None = None,
    **constants: Any,
) -> dict[str, object]:
    """The description of a Triton kernel that is compiled without a launch (testing/aot.py). ``tile`` has constants and
    launch options, as a launch passes them; ``options`` are the other fields of ``testing.spec.TritonKernel``."""
    launch = {name: tile[name] for name in ("num_warps", "num_stages") if name in tile}
    constants |= {name: value for name, value in tile.items() if name not in launch}
    return {"kernel": kernel, "signature": signature, "constants": constants, **launch, **(options or {})}
