"""Means of packed sequences in Triton: a program sums BLOCK_C columns of one sequence, BLOCK_T rows at a time.

The order of the additions depends only on the sequence, so its mean does not depend on the rest of the batch. Whatever
cu_seqlens contains, nothing outside of the tensors is accessed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.common.launch import cdiv, on_device
from fasttfm.kernels.common.triton.launcher import launched_kernel
from fasttfm.kernels.common.triton.packed import packed_span

_TILE = {"BLOCK_T": 128, "BLOCK_C": 32, "num_warps": 8}


# Without specialization, vector widths and with them the order of the additions do not depend on C and stride.
@launched_kernel
@triton.jit(do_not_specialize=["B", "T", "C", "stride", "skipped"])
def _mean_kernel(
    x,  # [T, C], rows stride apart
    cu_seqlens,  # int32 [B + 1]
    means,  # fp32 [B, C]
    B,
    T,
    C,
    stride,
    skipped,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    sequence = (tl.program_id(0) % B).to(tl.int64)
    columns = tl.program_id(0) // B * BLOCK_C + tl.arange(0, BLOCK_C)
    first_row, length = packed_span(cu_seqlens, sequence, T, T)
    begin = first_row + skipped
    end = first_row + length
    sums = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for first in range(begin, end, BLOCK_T):
        rows = first + tl.arange(0, BLOCK_T)
        pointers = x + rows.to(tl.int64)[:, None] * stride + columns[None, :]
        sums += tl.load(pointers, mask=(rows < end)[:, None] & (columns < C)[None, :], other=0.0).to(tl.float32)
    mean = tl.sum(sums, 0) / tl.maximum(end - begin, 1).to(tl.float32)
    tl.store(means + sequence * C + columns, mean, mask=columns < C)


def sequence_means_triton(x: Tensor, cu_seqlens: Tensor, skipped: int) -> Tensor:
    """fp32 [B, C]"""
    tokens, columns = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    means = torch.empty(len(cu_seqlens) - 1, columns, dtype=torch.float32, device=x.device)
    if means.numel():
        with on_device(x):
            _mean_kernel[(len(means) * cdiv(columns, _TILE["BLOCK_C"]),)](
                x, cu_seqlens.contiguous(), means, len(means), tokens, columns, x.stride(0), skipped, **_TILE
            )
    return means
