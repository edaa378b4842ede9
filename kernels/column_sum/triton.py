"""The sum over rows in Triton: one kernel, run twice.

A program takes a strip of columns and one part of the rows, adds tiles of rows elementwise and reduces the tile at the
end. The first launch writes one sum for each part, the second adds the parts. The partition of the rows depends only on
the device and the shape, so the same call gives the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.common.launch import ahead_of_time, cdiv, multiprocessors, on_device
from fasttfm.kernels.common.rows import as_rows
from fasttfm.kernels.common.triton.launcher import launched_kernel

_PROGRAMS_PER_MULTIPROCESSOR = 4
# 16 bytes of a 16-bit type for each thread and row, eight rows in flight.
_TILE = {"BLOCK_N": 32, "BLOCK_C": 256, "num_warps": 4}
# There are few parts, and they are in L2. Narrow strips give the second launch enough programs.
_PARTS_TILE = {"BLOCK_N": 64, "BLOCK_C": 32, "num_warps": 4}


@launched_kernel
@triton.jit
def _sum_kernel(
    x,  # [N, C], rows x_stride apart
    sums,  # [parts, C]
    N,
    C,
    x_stride,
    part_rows,  # rows of one part
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    part = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_row = columns < C
    end = tl.minimum((part + 1) * part_rows, N)
    total = tl.zeros([BLOCK_N, BLOCK_C], dtype=tl.float32)
    for start in range(part * part_rows, end, BLOCK_N):
        rows = start + tl.arange(0, BLOCK_N)
        mask = (rows < end)[:, None] & in_row[None, :]
        total += tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(sums + part * C + columns, tl.sum(total, axis=0).to(sums.dtype.element_ty), mask=in_row)


def column_sum_triton(x: Tensor, dtype: torch.dtype) -> Tensor:
    rows = as_rows(x)
    count, columns = rows.shape
    strips = cdiv(columns, _TILE["BLOCK_C"])
    most = max(1, _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(x) // strips)
    part_rows = max(_TILE["BLOCK_N"], cdiv(count, most))
    parts = max(1, cdiv(count, part_rows))
    workspace = torch.empty(parts, columns, dtype=torch.float32, device=x.device)
    total = torch.empty(columns, dtype=dtype, device=x.device)
    with on_device(x):
        _sum_kernel[(strips, parts)](rows, workspace, count, columns, rows.stride(0), part_rows, **_TILE)
        _sum_kernel[(cdiv(columns, _PARTS_TILE["BLOCK_C"]), 1)](
            workspace, total, parts, columns, columns, parts, **_PARTS_TILE
        )
    return total


def compile_signatures(element: str, total: str) -> list[dict[str, object]]:
    """Both runs as the launcher above would compile them for elements and a sum of these Triton types."""
    sizes = {"N": "i32", "C": "i32", "x_stride": "i32", "part_rows": "i32"}
    runs = ((_TILE, element, "fp32"), (_PARTS_TILE, "fp32", total))
    return [
        ahead_of_time(_sum_kernel, {"x": f"*{source}", "sums": f"*{target}", **sizes}, tile)
        for tile, source, target in runs
    ]
