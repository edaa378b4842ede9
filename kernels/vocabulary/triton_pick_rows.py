"""Gathers rows of a matrix by index, and scatters their gradient, in Triton.

Positions may be in any order and may repeat. The scatter writes every row of the result once, by one program, zeros
included. Integer atomics first count the picks of each row and record the last of them, so that the same call gives the
same bits. Almost always a row has at most one pick; if it has more, a program searches for them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.common.launch import ahead_of_time, cdiv, next_power_of_2, on_device
from fasttfm.kernels.common.triton.index_errors import clamp_and_record, clamped
from fasttfm.kernels.common.triton.launcher import launched_kernel

_POSITIONS = 1  # index in (labels, positions), the arguments whose errors are recorded
_TILE = 4096  # elements of a program
_SEARCHED = 256  # picks that are compared at a time


@launched_kernel
@triton.jit
def _gather_kernel(
    rows,  # [T, C], row_stride apart
    positions,  # [N]
    out,  # [N, C], out_stride apart
    errors,  # int64 [2, 2]
    N,
    T,
    C,
    row_stride,
    out_stride,
    ARGUMENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    picks = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    here = picks < N
    position = tl.load(positions + picks, mask=here, other=0).to(tl.int64)
    index, bad = clamp_and_record(position, T, errors, ARGUMENT, 2, picks, here)
    mask = here[:, None] & (columns < C)[None, :]
    value = tl.load(rows + index[:, None] * row_stride + columns[None, :], mask=mask, other=0.0)
    tl.store(
        out + picks[:, None] * out_stride + columns[None, :], tl.where(bad[:, None], float("nan"), value), mask=mask
    )


@launched_kernel
@triton.jit
def _count_kernel(
    positions,  # [N]
    labels,  # [N]
    last,  # int32 [T], -1 before
    picks_of,  # int32 [T], 0 before
    N,
    T,
    ignore_index,
    BLOCK: tl.constexpr,
):
    picks = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = picks < N
    counted = here & (tl.load(labels + picks, mask=here, other=0).to(tl.int64) != ignore_index)
    index, bad = clamped(tl.load(positions + picks, mask=here, other=0).to(tl.int64), T)
    tl.atomic_max(last + index, picks, mask=counted & (bad == 0))
    tl.atomic_add(picks_of + index, 1, mask=counted & (bad == 0))


@launched_kernel
@triton.jit
def _scatter_kernel(
    dh,  # [N, C]
    positions,  # [N]
    labels,  # [N]
    last,  # int32 [T]
    picks_of,  # int32 [T]
    out,  # [T, C]
    scale,  # [1]
    N,
    T,
    C,
    ignore_index,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SEARCHED: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCK_T
    columns = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = columns < C
    factor = tl.load(scale).to(tl.float32)
    for offset in range(BLOCK_T):
        row = first + offset
        if row < T:
            pick = tl.load(last + row).to(tl.int64)
            picks = tl.load(picks_of + row)
            total = tl.load(dh + pick * C + columns, mask=inside & (pick >= 0), other=0.0).to(tl.float32)
            if picks > 1:  # in order; the last one is known
                others = tl.zeros([BLOCK_C], tl.float32)
                for start in range(0, pick, SEARCHED):
                    near = start + tl.arange(0, SEARCHED)
                    same = (near < pick) & (tl.load(positions + near, mask=near < pick, other=-1).to(tl.int64) == row)
                    counts = tl.load(labels + near, mask=same, other=0).to(tl.int64) != ignore_index
                    if tl.sum((same & counts).to(tl.int32), axis=0) > 0:
                        for index in range(start, tl.minimum(start + SEARCHED, pick)):
                            hit = tl.load(positions + index).to(tl.int64) == row
                            hit = hit & (tl.load(labels + index).to(tl.int64) != ignore_index)
                            contribution = tl.load(dh + index * C + columns, mask=inside & hit, other=0.0)
                            others += contribution.to(tl.float32)
                total += others
            tl.store(out + row * C + columns, (total * factor).to(out.dtype.element_ty), mask=inside)


def _tile(columns: int) -> tuple[int, int]:
    block_c = min(1024, next_power_of_2(columns))
    return max(1, _TILE // block_c), block_c


def gather(rows: Tensor, positions: Tensor, out: Tensor, errors: Tensor) -> None:
    """out[i] = rows[positions[i]]; NaN, and a record in ``errors``, for an index outside of the rows."""
    if out.numel() == 0:
        return
    block_n, block_c = _tile(rows.shape[1])
    grid = (cdiv(len(positions), block_n), cdiv(rows.shape[1], block_c))
    with on_device(rows):
        _gather_kernel[grid](
            rows,
            positions.contiguous(),
            out,
            errors,
            len(positions),
            rows.shape[0],
            rows.shape[1],
            rows.stride(0),
            out.stride(0),
            ARGUMENT=_POSITIONS,
            BLOCK_N=block_n,
            BLOCK_C=block_c,
        )


def scatter(dh: Tensor, positions: Tensor, labels: Tensor, ignore_index: int, out: Tensor, scale: Tensor) -> None:
    """out[r] = scale * the sum of dh[i] over all i with positions[i] = r and labels[i] != ignore_index."""
    count, total = len(positions), len(out)
    positions, labels = positions.contiguous(), labels.contiguous()
    last = torch.full((total,), -1, dtype=torch.int32, device=dh.device)
    picks_of = torch.zeros(total, dtype=torch.int32, device=dh.device)
    block_t, block_c = _tile(out.shape[1])
    with on_device(dh):
        _count_kernel[(cdiv(count, 256),)](positions, labels, last, picks_of, count, total, ignore_index, BLOCK=256)
        _scatter_kernel[(cdiv(total, block_t), cdiv(out.shape[1], block_c))](
            dh,
            positions,
            labels,
            last,
            picks_of,
            out,
            scale,
            count,
            total,
            out.shape[1],
            ignore_index,
            BLOCK_T=block_t,
            BLOCK_C=block_c,
            SEARCHED=_SEARCHED,
        )


def compile_signatures(columns: int, element: str) -> list[dict[str, object]]:
    """Every kernel as the launchers compile it for rows of ``columns`` elements of Triton type ``element``."""
    block, block_c = _tile(columns)
    e, i = f"*{element}", "*i64"
    numbers = dict.fromkeys(("N", "T", "C", "row_stride", "out_stride"), "i32")
    gathered = {"rows": e, "positions": i, "out": e, "errors": i, **numbers}
    counted = {"positions": i, "labels": i, "last": "*i32", "picks_of": "*i32"}
    few = dict.fromkeys(("N", "T", "ignore_index"), "i32")
    scattered = {"dh": e, **counted, "out": e, "scale": "*fp32", "C": "i32", **few}
    return [
        ahead_of_time(_gather_kernel, gathered, {"BLOCK_N": block, "BLOCK_C": block_c}, ARGUMENT=_POSITIONS),
        ahead_of_time(_count_kernel, {**counted, **few}, {"BLOCK": 256}),
        ahead_of_time(_scatter_kernel, scattered, {"BLOCK_T": block, "BLOCK_C": block_c}, SEARCHED=_SEARCHED),
    ]
