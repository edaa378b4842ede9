"""Kernels of test_triton_launch.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fasttfm.kernels.common.triton.launcher import launched_kernel

OFFSET = tl.constexpr(0)


@launched_kernel
@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["other"])
def add_kernel(
    x,
    other,  # or None
    y,
    count,
    step,
    factor,
    flag,
    MODE: tl.constexpr = 0,
    BLOCK: tl.constexpr = 128,
):
    """y = x * factor + other + MODE, plus 1 if ``flag``, of every ``step``-th element."""
    columns = (tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)) * step + OFFSET
    inside = columns < count
    total = tl.load(x + columns, mask=inside).to(tl.float32) * factor + MODE
    if flag:
        total += 1
    if other is not None:
        total += tl.load(other + columns, mask=inside)
    tl.store(y + columns, total.to(y.dtype.element_ty), mask=inside)
