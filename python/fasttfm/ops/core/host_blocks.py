"""Large blocks of host memory that are used again: what the layers of a training step save and compute in.

The C library maps a large block for each allocation and unmaps it when it is freed, so that the system zeroes all of
its pages in every step.

Blocks belong to no stream: kernels of the CPU have ended when their call returns. A block is free when the last tensor
in it has gone, and serves the next request of its size, or of half of it and more. Requests in use and free blocks
together have at most twice the bytes that were in use at once: what a forward and its backward compute in, next to what
the layers have saved. Beyond that, the blocks that have been free for longest are returned to the system.
"""

from __future__ import annotations

import mmap
import sys
import threading
import weakref
from collections import deque

import torch
from torch import Tensor

_LEAST_BYTES = 1 << 20  # smaller ones are torch's
# Pages that are private to the process: after a fork, parent and child have copies.
_PRIVATE: dict[str, int] = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
_REQUESTS = 512  # over which, and at most twice as many, the most bytes in use are counted; 100 layers' step has 400
_PARTS = 8  # of a power of two, to which sizes are rounded up: pages that nothing touches take no memory


class HostBlocks:
    """Blocks of memory for tensors of bytes. Any thread may request them, and drop tensors."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Blocks that became free, and the bytes requested: where tensors are dropped, no lock can be taken.
        self._dropped: deque[tuple[int, mmap.mmap]] = deque()
        self._free: list[mmap.mmap] = []  # in the order in which they became free
        self._used = self._held = 0  # bytes that are in use, and of all blocks
        self._most, self._most_before = 0, 0  # bytes in use at once, of the last requests and of those before
        self._requests = 0

    def empty(self, count: int) -> Tensor:
        """``count`` bytes, uninitialized."""
        if count < _LEAST_BYTES:
            return torch.empty(count, dtype=torch.uint8, device="cpu")
        size = _rounded(count)
        with self._lock:
            block = self._taken(size)
        view = memoryview(block)[:count]  # all tensors in the block hold it
        weakref.finalize(view, self._dropped.append, (size, block)).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)

    def free_bytes(self) -> int:
        """The bytes of all free blocks."""
        with self._lock:
            self._collect()
            return sum(map(len, self._free))

    def _collect(self) -> None:
        while self._dropped:
            size, block = self._dropped.popleft()
            self._used -= size
            self._free.append(block)

    def _taken(self, size: int) -> mmap.mmap:
        """The smallest free block that may serve a request, or a new one."""
        self._collect()
        self._count(size)
        fitting = [block for block in self._free if size <= len(block) <= 2 * size]
        if fitting:
            block = min(reversed(fitting), key=len)  # of several, the one that became free last
            self._free = [other for other in self._free if other is not block]
        else:
            self._held += size
        self._return_blocks()
        return block if fitting else mmap.mmap(-1, size, **_PRIVATE)

    def _count(self, size: int) -> None:
        """Counts a request."""
        self._used += size
        self._requests += 1
        if self._requests % _REQUESTS == 0:
            self._most, self._most_before = 0, self._most
        self._most = max(self._most, self._used)

    def _return_blocks(self) -> None:
        """Returns blocks to the system, so that those which are held stay within the bound."""
        while self._free and self._held > 2 * max(self._most, self._most_before):
            self._held -= len(self._free.pop(0))


def _rounded(count: int) -> int:
    """The bytes of a block for ``count`` aligned ones."""
    part = (1 << count.bit_length() - 1) // _PARTS
    return -(-count // part) * part


_blocks = HostBlocks()


def empty_bytes(count: int, device: torch.device) -> Tensor:
    """``count`` bytes on a device, uninitialized."""
    return _blocks.empty(count) if device.type == "cpu" else torch.empty(count, dtype=torch.uint8, device=device)
