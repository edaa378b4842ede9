"""The second step of sums over rows: adds the programs' partial sums in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.common.launch import cdiv
from fasttfm.kernels.common.triton.launcher import launched_kernel


@launched_kernel
@triton.jit(do_not_specialize=["P"])
def sum_parts_kernel(
    parts,  # [COUNT, P, C] fp32
    first,  # [C] each, or empty and unused
    second,
    third,
    P,
    C,
    WANTED: tl.constexpr,  # whether each output is needed
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    which = tl.program_id(1)
    total = tl.zeros([BLOCK_C], dtype=tl.float32)
    for start in range(0, P, BLOCK_P):
        rows = start + tl.arange(0, BLOCK_P)
        mask = (rows < P)[:, None] & (columns < C)[None, :]
        offsets = (which.to(tl.int64) * P + rows[:, None]) * C + columns[None, :]
        total += tl.sum(tl.load(parts + offsets, mask=mask, other=0.0), axis=0)
    in_row = columns < C
    if which == 0:
        if WANTED[0]:
            tl.store(first + columns, total.to(first.dtype.element_ty), mask=in_row)
    elif which == 1:
        if WANTED[1]:
            tl.store(second + columns, total.to(second.dtype.element_ty), mask=in_row)
    else:
        if WANTED[2]:
            tl.store(third + columns, total.to(third.dtype.element_ty), mask=in_row)


_BLOCK_P = 64
_BLOCK_C = 32


def sum_parts(parts: Tensor, outputs: Sequence[Tensor]) -> None:
    """``outputs[i][c]`` = sum over p of ``parts[i, p, c]``, rounded once. Up to three outputs; empty ones are
    skipped."""
    count, programs, columns = parts.shape
    needed = tuple(output.numel() > 0 for output in outputs)
    missing = 3 - count
    sum_parts_kernel[(cdiv(columns, _BLOCK_C), count)](
        parts,
        *outputs,
        *(parts,) * missing,
        programs,
        columns,
        WANTED=needed + (False,) * missing,
        BLOCK_P=_BLOCK_P,
        BLOCK_C=_BLOCK_C,
    )


def compile_signature(parameter: str, count: int) -> dict[str, object]:
    """The kernel as sum_parts() compiles it for ``count`` outputs of Triton type ``parameter``."""
    outputs = [f"*{parameter}"] * count + ["*fp32"] * (3 - count)
    names = dict(zip(("first", "second", "third"), outputs, strict=True))
    return {
        "kernel": sum_parts_kernel,
        "signature": {"parts": "*fp32", **names, "P": "i32", "C": "i32"},
        "constants": {
            "WANTED": (True,) * count + (False,) * (3 - count),
            "BLOCK_P": _BLOCK_P,
            "BLOCK_C": _BLOCK_C,
        },
    }
