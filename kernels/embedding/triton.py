"""Embedding in Triton. N tokens of C columns; the formulas are in reference.py.

Forward: a program takes BLOCK_N whole rows. Backward, with dx the gradient of a token's sum of rows:

1. _rows_kernel reads dy and gathers the rows of the tables again. If positions are the tokens' indices in their
   sequences, a program processes all tokens of one position: it sums dx into that row of dposition_table, and keeps
   dweight, dbias and up to two rows of dsegment_table in registers. It stores five numbers per token, from which dx is
   computed by elementwise operations.
2. Tokens are sorted by id. _table_kernel iterates over runs of sorted tokens, recomputes dx from dy and sums it
   (common/triton/sorted_sums.py). dx itself is never stored.

Sums have a fixed order, which depends only on the device and the sizes. Indices outside of their tables are clamped
before anything is read, give NaN, are recorded in ``errors`` (common/index_errors.py) and are left out of the tables'
gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.common import philox
from fasttfm.kernels.common.launch import cdiv, multiprocessors, next_power_of_2, on_device
from fasttfm.kernels.common.rows import gradient_like
from fasttfm.kernels.common.triton.index_errors import clamp_and_record, clamped
from fasttfm.kernels.common.triton.launcher import launched_kernel
from fasttfm.kernels.common.triton.normalize import normalized, row_tile
from fasttfm.kernels.common.triton.packed import packed_span, row_position
from fasttfm.kernels.common.triton.philox import kept
from fasttfm.kernels.common.triton.sorted_sums import RUN, join_runs
from fasttfm.kernels.common.triton.sum_parts import sum_parts

Triple = tuple[Tensor, Tensor | None, Tensor | None]

_PROGRAMS_PER_MULTIPROCESSOR = 4
_MEMBERS_PER_ITEM = 64  # tokens of one position that a program processes at a time
_FUSED_SEGMENTS = 2  # a segment table with more rows is summed like the word table
_NO_ROW = 2**31 - 1  # the key of a token that adds to no row


@triton.jit
def _keyed(raw_index, limit, excluded, keys, rows, mask, NO_ROW: tl.constexpr):
    """The index that is read; the row of the table's gradient that the token's dx goes to is stored in keys."""
    index, bad = clamped(raw_index, limit)
    tl.store(keys + rows, tl.where(bad | (raw_index == excluded), NO_ROW, raw_index).to(tl.int32), mask=mask)
    return index


@triton.jit
def _lookup(
    word_table,
    position_table,
    segment_table,
    word,
    position,
    segment,
    columns,
    mask,
    C,
    POSITIONS: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """The sum of the rows at int64 [BLOCK_N] indices inside their tables: fp32 [BLOCK_N, BLOCK_C]."""
    value = tl.load(word_table + word[:, None] * C + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    if POSITIONS != "none":
        value += tl.load(position_table + position[:, None] * C + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    if SEGMENTS != "none":
        value += tl.load(segment_table + segment[:, None] * C + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    return value


# Sizes that change from batch to batch: Triton would recompile a kernel for a 1 or for a size that 16 does not divide.
_SIZES_OF_A_BATCH = ["N", "sequences", "tokens_per_sequence"]


@launched_kernel
@triton.jit(do_not_specialize=_SIZES_OF_A_BATCH)
def _fwd_kernel(
    word_table,  # [V, C]
    position_table,  # [positions, C] or unused
    segment_table,  # [segments, C] or unused
    ids,  # [N]
    position_ids,  # [N] or unused
    segment_ids,  # [N] or unused
    cu_seqlens,  # [sequences + 1] int32, or unused
    weight,  # [C] or unused
    bias,  # [C] or unused
    seed,  # [1] int64, or unused
    y,  # [N, C]
    statistics,  # [2, N] fp32: mean, rstd
    errors,  # [2, 3] int64
    N,
    C,
    V,
    position_rows,
    segment_rows,
    sequences,
    tokens_per_sequence,
    eps,
    threshold,
    scale,
    POSITIONS: tl.constexpr,  # "none", "own" (a token's index in its sequence) or "given"
    SEGMENTS: tl.constexpr,  # "none", "zero" or "given"
    PACKED: tl.constexpr,
    LAYER_NORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_C)
    in_rows = rows < N
    in_row = columns < C
    mask = in_rows[:, None] & in_row[None, :]
    if DROPOUT or POSITIONS == "own":
        # Rows past the end are computed as the last one.
        sequence, token = row_position(tl.minimum(rows, N - 1), cu_seqlens, sequences, tokens_per_sequence, PACKED)

    word_id = tl.load(ids + rows, mask=in_rows, other=0).to(tl.int64)
    word, bad = clamp_and_record(word_id, V, errors, 0, 3, rows, in_rows)
    position = tl.zeros_like(word)
    segment = tl.zeros_like(word)
    if POSITIONS != "none":
        if POSITIONS == "own":
            position_id = token.to(tl.int64)
        else:
            position_id = tl.load(position_ids + rows, mask=in_rows, other=0).to(tl.int64)
        position, bad_position = clamp_and_record(position_id, position_rows, errors, 1, 3, rows, in_rows)
        bad = bad | bad_position
    if SEGMENTS == "given":
        segment_id = tl.load(segment_ids + rows, mask=in_rows, other=0).to(tl.int64)
        segment, bad_segment = clamp_and_record(segment_id, segment_rows, errors, 2, 3, rows, in_rows)
        bad = bad | bad_segment
    value = _lookup(
        word_table, position_table, segment_table, word, position, segment, columns, mask, C, POSITIONS, SEGMENTS
    )
    value = tl.where(bad[:, None], float("nan"), value)

    if LAYER_NORM:
        value = normalized(value, rows, columns, weight, bias, statistics, N, C, eps, HAS_WEIGHT, HAS_BIAS)
    if DROPOUT:
        keep = kept(tl.load(seed), sequence, token, threshold, 0, BLOCK_N, BLOCK_C)
        value = tl.where(keep, value * scale, 0.0)
    tl.store(y + rows[:, None] * C + columns[None, :], value.to(y.dtype.element_ty), mask=mask)


@launched_kernel
@triton.jit(do_not_specialize=[*_SIZES_OF_A_BATCH, "groups", "members", "splits"])
def _rows_kernel(
    dy,  # [N, C]
    word_table,  # [V, C]
    position_table,  # [positions, C] or unused
    segment_table,  # [segments, C] or unused
    ids,  # [N]
    position_ids,  # [N] or unused
    segment_ids,  # [N] or unused
    cu_seqlens,  # [sequences + 1] int32, or unused
    weight,  # [C] or unused
    seed,  # [1] int64, or unused
    statistics,  # [2, N] fp32: mean, rstd
    keys,  # [3, N] int32: the row of each table that the token's dx goes to; _NO_ROW for none
    row_indices,  # [N, 8] int32: id, position, segment, sequence, token
    terms,  # [N, 8] fp32: mean, rstd, correction, mean(g), slope
    dposition,  # [splits, positions, C], or unused
    parts,  # [4, programs, C] fp32: each program's partial sums of dweight, dbias and two rows of dsegment
    N,
    C,
    V,
    position_rows,
    segment_rows,
    sequences,
    tokens_per_sequence,
    padding_idx,  # -1 for none
    groups,  # positions, or 1 if tokens are not grouped by position
    members,  # sequences, or N
    splits,  # number of parts into which the members of a group are split
    threshold,
    scale,
    POSITIONS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    PACKED: tl.constexpr,
    LAYER_NORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    DROPOUT: tl.constexpr,
    BY_POSITION: tl.constexpr,
    FUSED_SEGMENTS: tl.constexpr,  # how many rows of dsegment are summed here
    NO_ROW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK_C)
    in_row = columns < C
    if HAS_WEIGHT:
        factor = tl.load(weight + columns, mask=in_row, other=0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK_C], dtype=tl.float32)
    dbias = tl.zeros([BLOCK_C], dtype=tl.float32)
    dsegment0 = tl.zeros([BLOCK_C], dtype=tl.float32)
    dsegment1 = tl.zeros([BLOCK_C], dtype=tl.float32)
    span = tl.cdiv(members, splits)
    for item in range(program, groups * splits, tl.num_programs(0)):
        group = (item // splits).to(tl.int64)
        split = item % splits
        dgroup = tl.zeros([BLOCK_C], dtype=tl.float32)
        for start in range(split * span, tl.minimum(members, (split + 1) * span), BLOCK_N):
            member = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
            in_rows = member < tl.minimum(members, (split + 1) * span)
            if BY_POSITION:
                if PACKED:
                    begin, length = packed_span(cu_seqlens, tl.minimum(member, members - 1), N, N)
                    rows = begin + group
                    in_rows = in_rows & (group < length)
                else:
                    rows = member * tokens_per_sequence + group
                sequence = member.to(tl.uint32)
                token = (tl.zeros_like(member) + group).to(tl.uint32)
            else:
                rows = member
                sequence, token = row_position(
                    tl.minimum(rows, N - 1), cu_seqlens, sequences, tokens_per_sequence, PACKED
                )
            mask = in_rows[:, None] & in_row[None, :]
            offsets = rows[:, None] * C + columns[None, :]

            word_id = tl.load(ids + rows, mask=in_rows, other=0).to(tl.int64)
            word = _keyed(word_id, V, padding_idx, keys, rows, in_rows, NO_ROW)
            position = tl.zeros_like(word)
            segment = tl.zeros_like(word)
            if POSITIONS == "own":
                position = _keyed(token.to(tl.int64), position_rows, -1, keys + N, rows, in_rows, NO_ROW)
            elif POSITIONS == "given":
                position_id = tl.load(position_ids + rows, mask=in_rows, other=0).to(tl.int64)
                position = _keyed(position_id, position_rows, -1, keys + N, rows, in_rows, NO_ROW)
            if SEGMENTS == "given":
                segment_id = tl.load(segment_ids + rows, mask=in_rows, other=0).to(tl.int64)
                segment = _keyed(segment_id, segment_rows, -1, keys + 2 * N, rows, in_rows, NO_ROW)
            tl.store(row_indices + rows * 8, word.to(tl.int32), mask=in_rows)
            tl.store(row_indices + rows * 8 + 1, position.to(tl.int32), mask=in_rows)
            tl.store(row_indices + rows * 8 + 2, segment.to(tl.int32), mask=in_rows)
            tl.store(row_indices + rows * 8 + 3, sequence.to(tl.int32, bitcast=True), mask=in_rows)
            tl.store(row_indices + rows * 8 + 4, token.to(tl.int32, bitcast=True), mask=in_rows)

            h = tl.load(dy + offsets, mask=mask, other=0.0).to(tl.float32)
            if DROPOUT:
                keep = kept(tl.load(seed), sequence, token, threshold, 0, BLOCK_N, BLOCK_C)
                h = tl.where(keep, h * scale, 0.0)
            dx = h
            if LAYER_NORM:
                value = _lookup(
                    word_table,
                    position_table,
                    segment_table,
                    word,
                    position,
                    segment,
                    columns,
                    mask,
                    C,
                    POSITIONS,
                    SEGMENTS,
                )
                mean = tl.load(statistics + rows, mask=in_rows, other=0.0)
                rstd = tl.load(statistics + N + rows, mask=in_rows, other=0.0)
                deviation = tl.where(mask, value - mean[:, None], 0.0)
                correction = tl.sum(deviation, axis=1) / C
                deviation -= correction[:, None]  # past the row's end it is not zero, but h is
                g = h
                if HAS_WEIGHT:
                    g = h * factor[None, :]
                mean_g = tl.sum(g, axis=1) / C
                slope = rstd * rstd * rstd * (tl.sum(g * deviation, axis=1) / C)
                dx = rstd[:, None] * (g - mean_g[:, None]) - slope[:, None] * deviation
                dweight += tl.sum(h * rstd[:, None] * deviation, axis=0)
                dbias += tl.sum(h, axis=0)
                tl.store(terms + rows * 8, mean, mask=in_rows)
                tl.store(terms + rows * 8 + 1, rstd, mask=in_rows)
                tl.store(terms + rows * 8 + 2, correction, mask=in_rows)
                tl.store(terms + rows * 8 + 3, mean_g, mask=in_rows)
                tl.store(terms + rows * 8 + 4, slope, mask=in_rows)
            if BY_POSITION:
                dgroup += tl.sum(tl.where(mask, dx, 0.0), axis=0)
            if FUSED_SEGMENTS >= 1:
                dsegment0 += tl.sum(tl.where(mask & (segment == 0)[:, None], dx, 0.0), axis=0)
            if FUSED_SEGMENTS >= 2:
                dsegment1 += tl.sum(tl.where(mask & (segment == 1)[:, None], dx, 0.0), axis=0)
        if BY_POSITION:
            offset = (split * position_rows + group) * C + columns
            tl.store(dposition + offset, dgroup.to(dposition.dtype.element_ty), mask=in_row)
    part = parts + program.to(tl.int64) * C + columns
    stride = tl.num_programs(0).to(tl.int64) * C
    if LAYER_NORM:
        tl.store(part, dweight, mask=in_row)
        tl.store(part + stride, dbias, mask=in_row)
    if FUSED_SEGMENTS >= 1:
        tl.store(part + 2 * stride, dsegment0, mask=in_row)
    if FUSED_SEGMENTS >= 2:
        tl.store(part + 3 * stride, dsegment1, mask=in_row)


@launched_kernel
@triton.jit(do_not_specialize=["N"])
def _table_kernel(
    dy,  # [N, C]
    word_table,  # [V, C]
    position_table,  # [positions, C] or unused
    segment_table,  # [segments, C] or unused
    weight,  # [C] or unused
    seed,  # [1] int64, or unused
    row_indices,  # [N, 8] int32, from _rows_kernel
    terms,  # [N, 8] fp32, from _rows_kernel
    keys,  # [N] int32, ascending
    order,  # [N] int64: the token of each key
    dtable,  # [table_rows, C], zero where no token's key is
    parts,  # [runs, 2, C] fp32: see common/triton/sorted_sums.py
    N,
    C,
    table_rows,
    threshold,
    scale,
    POSITIONS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    LAYER_NORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    DROPOUT: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    run = tl.program_id(0)
    first_column = tl.program_id(1) * BLOCK_C
    columns = first_column + tl.arange(0, BLOCK_C)
    in_row = columns < C
    part = parts + run.to(tl.int64) * 2 * C + columns
    if HAS_WEIGHT:
        factor = tl.load(weight + columns, mask=in_row, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK_C], dtype=tl.float32)
    begin = run * RUN
    end = tl.minimum(begin + RUN, N)
    # Whether the key being summed began in this run.
    began_here = (run == 0) | (tl.load(keys + begin) != tl.load(keys + tl.maximum(begin - 1, 0)))
    for start in range(begin, end, BLOCK_N):
        slots = start + tl.arange(0, BLOCK_N)
        live = (slots < end) & (tl.load(keys + slots, mask=slots < end, other=0) < table_rows)
        rows = tl.load(order + slots, mask=live, other=0)
        mask = live[:, None] & in_row[None, :]
        dx = tl.load(dy + rows[:, None] * C + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        if DROPOUT:
            sequence = tl.load(row_indices + rows * 8 + 3, mask=live, other=0).to(tl.uint32, bitcast=True)
            token = tl.load(row_indices + rows * 8 + 4, mask=live, other=0).to(tl.uint32, bitcast=True)
            keep = kept(tl.load(seed), sequence, token, threshold, first_column, BLOCK_N, BLOCK_C)
            dx = tl.where(keep, dx * scale, 0.0)
        if LAYER_NORM:
            word = tl.load(row_indices + rows * 8, mask=live, other=0).to(tl.int64)
            position = tl.load(row_indices + rows * 8 + 1, mask=live, other=0).to(tl.int64)
            segment = tl.load(row_indices + rows * 8 + 2, mask=live, other=0).to(tl.int64)
            value = _lookup(
                word_table,
                position_table,
                segment_table,
                word,
                position,
                segment,
                columns,
                mask,
                C,
                POSITIONS,
                SEGMENTS,
            )
            mean = tl.load(terms + rows * 8, mask=live, other=0.0)
            rstd = tl.load(terms + rows * 8 + 1, mask=live, other=0.0)
            correction = tl.load(terms + rows * 8 + 2, mask=live, other=0.0)
            mean_g = tl.load(terms + rows * 8 + 3, mask=live, other=0.0)
            slope = tl.load(terms + rows * 8 + 4, mask=live, other=0.0)
            if HAS_WEIGHT:
                dx = dx * factor[None, :]
            dx = rstd[:, None] * (dx - mean_g[:, None]) - slope[:, None] * (
                (value - mean[:, None]) - correction[:, None]
            )
        for i in tl.static_range(BLOCK_N):
            slot = start + i
            if slot < end:
                key = tl.load(keys + slot)
                ends = (slot + 1 == N) | (tl.load(keys + tl.minimum(slot + 1, N - 1)) != key)
                total += tl.sum(tl.where((tl.arange(0, BLOCK_N) == i)[:, None], dx, 0.0), axis=0)
                if key < table_rows:
                    if ends & began_here:
                        row = dtable + key.to(tl.int64) * C + columns
                        tl.store(row, total.to(dtable.dtype.element_ty), mask=in_row)
                    elif ends | (slot + 1 == end):
                        tl.store(tl.where(began_here, part + C, part), total, mask=in_row)
                total = tl.where(ends, 0.0, total)
                began_here = began_here | ends


# ---- launchers -------------------------------------------------------------------------------------------------------


# One draw of dropout decides 16 columns.
def _forward_tile(columns: int) -> dict[str, int]:
    return row_tile(columns, elements=4096, per_thread=32, least_columns=16)


def _rows_tile(columns: int) -> dict[str, int]:
    return row_tile(columns, elements=2048, per_thread=16 if columns <= 4096 else 8, least_columns=16)


def _table_tile(columns: int) -> dict[str, int]:
    block_c = min(1024, max(16, next_power_of_2(columns)))
    return {"BLOCK_N": 4, "BLOCK_C": block_c, "num_warps": min(4, max(1, block_c // 128))}


def _modes(tables: Triple, indices: Triple) -> dict[str, str]:
    """The kernels' constants for the kinds of positions and segments."""
    position = "none" if tables[1] is None else "own" if indices[1] is None else "given"
    segment = "none" if tables[2] is None else "zero" if indices[2] is None else "given"
    return {"POSITIONS": position, "SEGMENTS": segment}


def _contiguous(*tensors: Tensor | None, instead: Tensor) -> list[Tensor]:
    """The tensors, contiguous; ``instead``, which is not read, for those that are None."""
    return [instead if tensor is None else tensor.contiguous() for tensor in tensors]


def _sizes(tables: Triple, indices: Triple, cu_seqlens: Tensor | None) -> dict[str, int]:
    ids = indices[0]
    return {
        "N": ids.numel(),
        "C": tables[0].shape[1],
        "V": tables[0].shape[0],
        "position_rows": 0 if tables[1] is None else tables[1].shape[0],
        "segment_rows": 0 if tables[2] is None else tables[2].shape[0],
        "sequences": 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        "tokens_per_sequence": max(1, ids.shape[-1]),
    }


def embedding_forward_triton(
    tables: Triple,
    indices: Triple,
    cu_seqlens: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    layer_norm: bool,
    eps: float,
    p: float,
    dtype: torch.dtype,
    errors: Tensor,
) -> tuple[Tensor, Tensor]:
    """``errors``: int64 [2, 3] of index_errors.py."""
    ids, word_table = indices[0], tables[0]
    count, columns = ids.numel(), word_table.shape[1]
    y = torch.empty((*ids.shape, columns), dtype=dtype, device=ids.device)
    statistics = torch.empty((2, count if layer_norm else 0), dtype=torch.float32, device=ids.device)
    if count == 0:
        return y, statistics
    tile, threshold = _forward_tile(columns), philox.threshold(p)
    with on_device(ids):
        _fwd_kernel[(cdiv(count, tile["BLOCK_N"]),)](
            *_contiguous(*tables, *indices, cu_seqlens, weight, bias, seed, instead=word_table),
            y,
            statistics,
            errors,
            **_sizes(tables, indices, cu_seqlens),
            eps=eps,
            threshold=threshold,
            scale=philox.scale(threshold),
            **_modes(tables, indices),
            PACKED=cu_seqlens is not None,
            LAYER_NORM=layer_norm,
            HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None,
            DROPOUT=seed is not None,
            **tile,
        )
    return y, statistics


def embedding_backward_triton(
    dy: Tensor,
    tables: Triple,
    indices: Triple,
    cu_seqlens: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
    seed: Tensor | None,
    layer_norm: bool,
    p: float,
    padding_idx: int | None,
    needed: list[bool],
) -> tuple[Tensor, ...]:
    word_table, dy = tables[0], dy.contiguous()
    dtables = [
        torch.zeros(table.shape if wants and table is not None else 0, dtype=word_table.dtype, device=dy.device)
        for table, wants in zip(tables, needed[:3], strict=True)
    ]
    dweight, dbias = gradient_like(weight, needed[3], word_table), gradient_like(bias, needed[4], word_table)
    if dy.numel() == 0:
        return *dtables, dweight.zero_(), dbias.zero_()
    sizes, threshold = _sizes(tables, indices, cu_seqlens), philox.threshold(p)
    count, columns = sizes["N"], sizes["C"]
    *whole_tables, whole_weight, whole_seed = _contiguous(*tables, weight, seed, instead=word_table)
    # Grouped by position, no program processes a packed token past the end of the position table: its keys keep these
    # values.
    keys = torch.full((3, count), _NO_ROW, dtype=torch.int32, device=dy.device)
    row_indices = torch.empty((count, 8), dtype=torch.int32, device=dy.device)
    terms = torch.empty((count if layer_norm else 0, 8), dtype=torch.float32, device=dy.device)
    common = {
        "threshold": threshold,
        "scale": philox.scale(threshold),
        **_modes(tables, indices),
        "LAYER_NORM": layer_norm,
        "HAS_WEIGHT": weight is not None,
        "DROPOUT": seed is not None,
        "enable_fp_fusion": columns > 1,  # a single column's g - mean(g) is zero only if both products are rounded
    }
    by_position = common["POSITIONS"] == "own" and len(dtables[1]) > 0
    used_segments = dtables[2][:1] if common["SEGMENTS"] == "zero" else dtables[2]
    fused_segments = len(used_segments) if len(used_segments) <= _FUSED_SEGMENTS else 0
    with on_device(dy):
        parts = _sum_by_position(
            (dy, *whole_tables, *_contiguous(*indices, cu_seqlens, instead=word_table), whole_weight, whole_seed),
            (statistics, keys, row_indices, terms),
            dtables[1] if by_position else None,
            {**sizes, "padding_idx": -1 if padding_idx is None else padding_idx},
            {**common, "PACKED": cu_seqlens is not None, "FUSED_SEGMENTS": fused_segments},
        )
        if needed[3] or needed[4]:
            sum_parts(parts[:2], (dweight, dbias))
        if fused_segments > 0:
            sum_parts(parts[2 : 2 + fused_segments], tuple(used_segments))
        for dtable, own_keys, done in zip(dtables, keys, (False, by_position, fused_segments > 0), strict=True):
            if len(dtable) > 0 and not done:
                _sum_by_key((dy, *whole_tables, whole_weight, whole_seed, row_indices, terms), own_keys, dtable, common)
    return *dtables, dweight, dbias


def _sum_by_position(
    inputs: tuple[Tensor, ...],
    rows: tuple[Tensor, ...],
    dposition: Tensor | None,
    sizes: dict[str, int],
    constants: dict[str, Any],
) -> Tensor:
    """Runs _rows_kernel: fills ``rows`` (statistics, keys, row_indices, terms) and ``dposition``; returns its parts."""
    dy, columns, groups, members = inputs[0], sizes["C"], 1, sizes["N"]
    if dposition is not None:
        groups = sizes["position_rows"] if constants["PACKED"] else sizes["tokens_per_sequence"]
        members = sizes["sequences"] if constants["PACKED"] else sizes["N"] // sizes["tokens_per_sequence"]
    splits = cdiv(members, _MEMBERS_PER_ITEM)
    programs = min(groups * splits, _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(dy))
    parts = torch.empty((4, programs, columns), dtype=torch.float32, device=dy.device)
    target = parts
    if dposition is not None:
        target = dposition if splits == 1 else dposition.new_zeros((splits, *dposition.shape), dtype=torch.float32)
    _rows_kernel[(programs,)](
        *inputs,
        *rows,
        target,
        parts,
        **sizes,
        groups=groups,
        members=members,
        splits=splits,
        **constants,
        BY_POSITION=dposition is not None,
        NO_ROW=_NO_ROW,
        **_rows_tile(columns),
    )
    if dposition is not None and splits > 1:
        dposition.copy_(target.sum(dim=0))
    return parts


def _sum_by_key(inputs: tuple[Tensor, ...], keys: Tensor, dtable: Tensor, constants: dict[str, Any]) -> None:
    """Sorts the tokens by key and adds their dx to the rows of ``dtable``, which are zero at the start."""
    count, (table_rows, columns) = len(keys), dtable.shape
    keys, order = torch.sort(keys, stable=True)
    runs = cdiv(count, RUN)
    parts = torch.empty((runs, 2, columns), dtype=torch.float32, device=keys.device)
    tile = _table_tile(columns)
    _table_kernel[(runs, cdiv(columns, tile["BLOCK_C"]))](
        *inputs, keys, order, dtable, parts, N=count, C=columns, table_rows=table_rows, **constants, RUN=RUN, **tile
    )
    join_runs(keys, parts, dtable)
