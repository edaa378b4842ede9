"""Sums of rows by key, over keys that are sorted, in a fixed order and without atomics.

The op's own kernel processes runs of RUN sorted keys, one program per run. If all rows of a key are in one run, it
writes their sum to the result. Otherwise it writes partial sums, fp32 [runs, 2, C]:

    parts[run, 0]    of the run's first key, if that is also the last key of the previous run
    parts[run, 1]    of the run's last key, if it begins in this run and continues in the next

join_runs() then adds the partial sums of each key, in the order of the runs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.common.launch import cdiv, next_power_of_2
from fasttfm.kernels.common.triton.launcher import launched_kernel

RUN = 32


@launched_kernel
@triton.jit(do_not_specialize=["N", "runs"])
def join_kernel(
    keys,  # [N] int32, ascending
    parts,  # [runs, 2, C] fp32, see above
    dtable,  # [table_rows, C]
    N,
    C,
    table_rows,
    runs,
    RUN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program per run, which completes the sum of the key that begins in its run and continues in the next."""
    run = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_row = columns < C
    end = (run + 1) * RUN
    if end < N:
        key = tl.load(keys + end - 1)
        begins = (run == 0) | (tl.load(keys + tl.maximum(run * RUN - 1, 0)) != key)
        if begins & (key < table_rows) & (tl.load(keys + end) == key):
            total = tl.load(parts + (run.to(tl.int64) * 2 + 1) * C + columns, mask=in_row, other=0.0)
            following = run + 1
            going_on = True
            while going_on:
                later = following + tl.arange(0, BLOCK_N)
                same = tl.load(keys + later * RUN, mask=later < runs, other=-1) == key
                mask = same[:, None] & in_row[None, :]
                offsets = later.to(tl.int64)[:, None] * 2 * C + columns[None, :]
                total += tl.sum(tl.load(parts + offsets, mask=mask, other=0.0), axis=0)
                following += BLOCK_N
                going_on = tl.min(same.to(tl.int32), axis=0) == 1
            row = dtable + key.to(tl.int64) * C + columns
            tl.store(row, total.to(dtable.dtype.element_ty), mask=in_row)


_BLOCK_N = 16
_MAX_BLOCK_C = 1024
_NUM_WARPS = 8


def _block_c(columns: int) -> int:
    return min(_MAX_BLOCK_C, next_power_of_2(columns))


def join_runs(keys: Tensor, parts: Tensor, dtable: Tensor) -> None:
    """Writes the rows of ``dtable`` whose keys are in several runs. ``keys``: int32 [N], ascending; those that are
    no row of ``dtable`` are skipped."""
    runs, _, columns = parts.shape
    block_c = _block_c(columns)
    join_kernel[(runs, cdiv(columns, block_c))](
        keys,
        parts,
        dtable,
        len(keys),
        columns,
        len(dtable),
        runs,
        RUN=RUN,
        BLOCK_N=_BLOCK_N,
        BLOCK_C=block_c,
        num_warps=_NUM_WARPS,
    )


def compile_signature(columns: int, table: str) -> dict[str, object]:
    """The kernel as join_runs() compiles it for a table of Triton type ``table``."""
    sizes = dict.fromkeys(("N", "C", "table_rows", "runs"), "i32")
    return {
        "kernel": join_kernel,
        "signature": {"keys": "*i32", "parts": "*fp32", "dtable": f"*{table}", **sizes},
        "constants": {"RUN": RUN, "BLOCK_N": _BLOCK_N, "BLOCK_C": _block_c(columns)},
        "num_warps": _NUM_WARPS,
    }
