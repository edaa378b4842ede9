"""Removes and restores padding in Triton: one kernel copies rows between [B, S, C] and [T, C], in both directions.

A program takes BLOCK_S tokens of one sequence and BLOCK_C columns. All programs are along x, the only dimension of a
grid that has more than 65,535 of them. When packing, the padding tokens, numbered in order,
write zeros to the packed rows after the last sequence. If the padded batch has too few padding tokens, each sequence
has additional ones past its S tokens. So every row is written. Whatever cu_seqlens contains, nothing outside of the
tensors is accessed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.common.launch import ahead_of_time, cdiv, next_power_of_2, on_device
from fasttfm.kernels.common.triton.launcher import launched_kernel
from fasttfm.kernels.common.triton.packed import packed_first, packed_span

# Sizes that change from batch to batch: Triton would recompile the kernel for a 1 or for a size that 16 does not
# divide.
_SIZES_OF_A_BATCH = ["B", "S", "T", "slots", "token_blocks"]


@launched_kernel
@triton.jit(do_not_specialize=_SIZES_OF_A_BATCH)
def _copy_kernel(
    padded,  # [B, S, C], sequences batch_stride and tokens token_stride apart
    packed,  # [T, C], rows packed_stride apart
    cu_seqlens,  # [B + 1] int32
    B,
    S,
    T,
    C,
    slots,  # of a sequence; S, or more when packing
    token_blocks,  # of a sequence
    batch_stride,
    token_stride,
    packed_stride,
    TO_PACKED: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    program = tl.program_id(0)
    sequence = (program % B).to(tl.int64)
    tokens = (program // B % token_blocks * BLOCK_S + tl.arange(0, BLOCK_S)).to(tl.int64)
    columns = program // B // token_blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    begin, length = packed_span(cu_seqlens, sequence, T, T)
    rows = begin + tokens
    inside = (columns < C)[None, :]
    here = (tokens < S)[:, None] & inside
    present = here & (tokens < length)[:, None]
    pointers = padded + sequence * batch_stride + tokens[:, None] * token_stride + columns[None, :]
    if TO_PACKED:
        total = packed_first(cu_seqlens, B, T)
        padding = total + sequence * slots + tokens - (begin + length)
        padding = tl.where((tokens < slots) & (padding >= total), padding, -1)
        rows = tl.where(tokens < length, rows, padding)  # a token past S: the padded batch has no room for it: 0
        row = packed + rows[:, None] * packed_stride + columns[None, :]
        tl.store(row, tl.load(pointers, mask=present, other=0), mask=inside & ((rows >= 0) & (rows < T))[:, None])
        # A sequence that is longer than the padded batch: the rest of its rows, as far as they are in the tensor.
        covered = token_blocks * BLOCK_S
        for later in range(covered, length, covered):
            row = packed + (begin + later + tokens)[:, None] * packed_stride + columns[None, :]
            zeros = tl.zeros((BLOCK_S, BLOCK_C), packed.dtype.element_ty)
            tl.store(row, zeros, mask=inside & (later + tokens < length)[:, None])
    else:
        row = packed + rows[:, None] * packed_stride + columns[None, :]
        tl.store(pointers, tl.load(row, mask=present, other=0), mask=here)


# This one is for rows too narrow for wide loads, whose stride changes with the padded length too.
_narrow_kernel = launched_kernel(triton.jit(do_not_specialize=[*_SIZES_OF_A_BATCH, "batch_stride"])(_copy_kernel.fn))


def _tile(columns: int) -> dict[str, int]:
    """About 4096 elements per program, 32 per thread; fewer for short rows, which have many addresses."""
    block_c = min(1024, next_power_of_2(columns))
    return {"BLOCK_S": min(512, 4096 // block_c), "BLOCK_C": block_c, "num_warps": 4}


def pack_triton(x: Tensor, cu_seqlens: Tensor, total: int) -> Tensor:
    packed = torch.empty((total, *x.shape[2:]), dtype=x.dtype, device=x.device)
    _copy(x, packed, cu_seqlens, to_packed=True)
    return packed


def unpack_triton(packed: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    x = torch.empty((len(cu_seqlens) - 1, max_seqlen, *packed.shape[1:]), dtype=packed.dtype, device=packed.device)
    _copy(x, packed, cu_seqlens, to_packed=False)
    return x


def _copy(padded: Tensor, packed: Tensor, cu_seqlens: Tensor, to_packed: bool) -> None:
    if padded.numel() == 0:
        if to_packed:
            packed.zero_()
        return
    batch, longest, columns = padded.shape[0], padded.shape[1], padded.shape[2:].numel()
    slots = max(longest, cdiv(packed.shape[0], batch)) if to_packed else longest
    padded, packed = _columns(padded, 2), _columns(packed, 1)
    tile, kernel = _tile(columns), _narrow_kernel if columns * padded.element_size() < 16 else _copy_kernel
    token_blocks = cdiv(slots, tile["BLOCK_S"])
    with on_device(padded):
        kernel[(batch * token_blocks * cdiv(columns, tile["BLOCK_C"]),)](
            padded,
            packed,
            cu_seqlens.contiguous(),
            batch,
            longest,
            packed.shape[0],
            columns,
            slots,
            token_blocks,
            padded.stride(0),
            padded.stride(1),
            packed.stride(0),
            TO_PACKED=to_packed,
            **tile,
        )


def _columns(tensor: Tensor, leading: int) -> Tensor:
    """The dimensions after the ``leading`` ones as one contiguous dimension, by a copy only if a view cannot express
    it. Booleans as bytes."""
    if tensor.dtype == torch.bool:
        tensor = tensor.view(torch.uint8)
    tensor = tensor.unsqueeze(leading).flatten(leading)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def compile_signatures(columns: int, element: str) -> list[dict[str, object]]:
    """The kernel, in both directions, as it is compiled for tokens of ``columns`` elements of Triton type
    ``element``."""
    pointers = {"padded": f"*{element}", "packed": f"*{element}", "cu_seqlens": "*i32"}
    numbers = dict.fromkeys(
        ("B", "S", "T", "C", "slots", "token_blocks", "batch_stride", "token_stride", "packed_stride"), "i32"
    )
    signature, tile = {**pointers, **numbers}, _tile(columns)
    return [ahead_of_time(_copy_kernel, signature, tile, TO_PACKED=to_packed) for to_packed in (True, False)]
