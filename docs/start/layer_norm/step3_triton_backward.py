"""Step 3: a Triton backward. A program processes every PROGRAMS-th row and sums dweight and dbias in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 264  # two per SM of an H200: few enough that the partial sums are small


@triton.jit
def _bwd_kernel(dy, x, weight, mean, rstd, dx, dweight, dbias, N, C, BLOCK: tl.constexpr):
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)  # 64 bits: row * C may exceed 32
    columns = tl.arange(0, BLOCK)
    inside = columns < C
    scale = tl.load(weight + columns, inside, 0.0)
    dweight_sum = tl.zeros([BLOCK], tl.float32)
    dbias_sum = tl.zeros([BLOCK], tl.float32)
    for row in range(program, N, programs):
        offset = row * C + columns
        incoming = tl.load(dy + offset, inside, 0.0).to(tl.float32)
        row_rstd = tl.load(rstd + row)
        xhat = (tl.load(x + offset, inside, 0.0).to(tl.float32) - tl.load(mean + row)) * row_rstd
        xhat = tl.where(inside, xhat, 0.0)
        g = incoming * scale
        tl.store(dx + offset, row_rstd * (g - tl.sum(g) / C - xhat * (tl.sum(g * xhat) / C)), inside)
        dweight_sum += incoming * xhat
        dbias_sum += incoming
    tl.store(dweight + program * C + columns, dweight_sum, inside)
    tl.store(dbias + program * C + columns, dbias_sum, inside)


def backward(dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    N, C = x.shape
    dx = torch.empty_like(x)
    programs = min(N, PROGRAMS)
    dweight, dbias = torch.empty(2, programs, C, device=x.device).unbind()  # a partial sum of each program
    _bwd_kernel[(programs,)](dy, x, weight, mean, rstd, dx, dweight, dbias, N, C, triton.next_power_of_2(C))
    return dx, dweight.sum(dim=0), dbias.sum(dim=0)  # in a fixed order: no atomics
