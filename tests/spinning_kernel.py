"""A Triton kernel that occupies SMs for a time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def _spinning_kernel(out, nanoseconds):
    begin = cuda.globaltimer()
    now = begin
    while now - begin < nanoseconds:
        now = cuda.globaltimer()
    tl.store(out, now)


def spin(seconds: float, programs: int) -> None:
    """Two programs fill the threads of an SM."""
    out = torch.zeros(1, dtype=torch.int64, device="cuda")
    _spinning_kernel[(programs,)](out, int(seconds * 1e9), num_warps=32)
