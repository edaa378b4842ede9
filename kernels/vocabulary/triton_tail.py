"""The tail of a vocabulary whose size is not a multiple of 8, in Triton.

cuBLAS GEMMs with such a size run up to three times slower. So they compute the tokens up to a multiple of 8, and two
small kernels compute the remaining tail of fewer than 8 tokens: one fills in their logits, the other initializes a
block's dh with their contribution and copies their gradients to a buffer, from which one GEMM computes dweight for the
whole call.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.common.launch import ahead_of_time, cdiv, next_power_of_2, on_device
from fasttfm.kernels.common.triton.launcher import launched_kernel

GROUP = 8  # columns of the copied gradients, padded with zeros


@launched_kernel
@triton.jit
def _logits_kernel(
    rows,  # [n, C], row_stride apart
    weight,  # [TAIL, C]: rows of the tail
    logits,  # [n, TAIL], logit_stride apart
    n,
    C,
    row_stride,
    weight_stride,
    logit_stride,
    scale,
    TAIL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    here = row < n
    for token in tl.static_range(TAIL):
        sums = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
        for start in range(0, C, BLOCK_C):
            columns = start + tl.arange(0, BLOCK_C)
            inside = columns < C
            h = tl.load(
                rows + row[:, None] * row_stride + columns[None, :], mask=here[:, None] & inside[None, :], other=0.0
            )
            w = tl.load(weight + token * weight_stride + columns, mask=inside, other=0.0)
            sums += h.to(tl.float32) * w.to(tl.float32)[None, :]
        logit = (tl.sum(sums, axis=1) * scale).to(logits.dtype.element_ty)
        tl.store(logits + row * logit_stride + token, logit, mask=here)


@launched_kernel
@triton.jit
def _start_kernel(
    g,  # [n, TAIL], g_stride apart
    weight,  # [TAIL, C]
    dh,  # [n, C] or unused
    copied,  # [n, GROUP]
    n,
    C,
    g_stride,
    weight_stride,
    TAIL: tl.constexpr,
    GROUP: tl.constexpr,
    WANT_DH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    here = row < n
    if WANT_DH:
        for start in range(0, C, BLOCK_C):
            columns = start + tl.arange(0, BLOCK_C)
            inside = columns < C
            total = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
            for token in tl.static_range(TAIL):
                w = tl.load(weight + token * weight_stride + columns, mask=inside, other=0.0).to(tl.float32)
                share = tl.load(g + row * g_stride + token, mask=here, other=0.0).to(tl.float32)
                total += share[:, None] * w[None, :]
            mask = here[:, None] & inside[None, :]
            tl.store(dh + row[:, None] * C + columns[None, :], total.to(dh.dtype.element_ty), mask=mask)
    column = tl.arange(0, GROUP)
    mask = here[:, None] & (column < TAIL)[None, :]
    gradients = tl.load(g + row[:, None] * g_stride + column[None, :], mask=mask, other=0.0)
    tl.store(copied + row[:, None] * GROUP + column[None, :], gradients, mask=here[:, None])


def _tile(columns: int) -> dict[str, int]:
    block_c = min(1024, next_power_of_2(columns))
    return {"BLOCK_N": max(1, 4096 // block_c), "BLOCK_C": block_c}


def logits(rows: Tensor, weight: Tensor, out: Tensor, scale: float = 1.0) -> None:
    """out = scale * rows weight^T for the weight of the tail; out [n, tail] may have any stride."""
    tile = _tile(rows.shape[1])
    with on_device(rows):
        _logits_kernel[(cdiv(len(rows), tile["BLOCK_N"]),)](
            rows,
            weight,
            out,
            *rows.shape,
            rows.stride(0),
            weight.stride(0),
            out.stride(0),
            scale,
            TAIL=len(weight),
            **tile,
        )


def start(g: Tensor, weight: Tensor, dh: Tensor | None, copied: Tensor) -> None:
    """dh = g weight for g and weight of the tail, unless dh is None, and copied = g, padded with zeros."""
    columns = weight.shape[1]
    tile = _tile(columns)
    with on_device(g):
        _start_kernel[(cdiv(len(g), tile["BLOCK_N"]),)](
            g,
            weight,
            copied if dh is None else dh,
            copied,
            len(g),
            columns,
            g.stride(0),
            weight.stride(0),
            TAIL=len(weight),
            GROUP=GROUP,
            WANT_DH=dh is not None,
            **tile,
        )


def compile_signatures(columns: int, element: str, tail: int) -> list[dict[str, object]]:
    """Both kernels as they are compiled for rows of ``columns`` elements."""
    tile, e = _tile(columns), f"*{element}"
    first = {**dict.fromkeys(("n", "C", "row_stride", "weight_stride", "logit_stride"), "i32"), "scale": "fp32"}
    second = dict.fromkeys(("n", "C", "g_stride", "weight_stride"), "i32")
    logits = {"rows": e, "weight": e, "logits": e, **first}
    start = {"g": e, "weight": e, "dh": e, "copied": e, **second}
    return [
        ahead_of_time(_logits_kernel, logits, tile, TAIL=tail),
        ahead_of_time(_start_kernel, start, tile, TAIL=tail, GROUP=GROUP, WANT_DH=True),
    ]
