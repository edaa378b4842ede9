"""Attention of short sequences in Triton: one tile holds all queries and keys of a head.

Programs are persistent and iterate over (sequence, head) pairs; while one is computed, the next one's tiles are being
loaded. The backward reads neither out nor statistics apart from lse: with all keys in the tile, delta = sum(P * dP).
"""

from __future__ import annotations

import triton
import triton.language as tl

from fasttfm.kernels.attention.triton_tiles import (
    DROPOUT,
    LEFT,
    LN_2,
    PLAIN,
    RIGHT,
    clear_outputs,
    clear_rows,
    head_rows,
    load_rows,
    lse_in_log2,
    masked_scores,
    natural_lse,
    output_offsets,
    output_rows,
    sequence_span,
    store_rows,
)
from fasttfm.kernels.common.triton.launcher import launched_kernel
from fasttfm.kernels.common.triton.packed import packed_first
from fasttfm.kernels.common.triton.philox import dropped_rounded, dropped_weights

_SIZES = [
    "heads",
    "group",
    "items",
    "q_size",
    "k_size",
    "q_longest",
    "k_longest",
    "window_left",
    "window_right",
    "threshold",
]
_STRIDES = [
    f"{tensor}_{axis}" for tensor in ("q", "k", "v", "dout", "dq", "dk", "dv") for axis in ("batch", "row", "head")
]


@launched_kernel
@triton.jit(do_not_specialize=[*_SIZES, *_STRIDES[:9]])
def _short_fwd_kernel(
    q,  # [B, S, H, D] or [T, H, D]
    k,  # [B, Sk, Hk, D] or [Tk, Hk, D]
    v,
    out,  # like q, contiguous
    lse,  # fp32 [B, H, S] or [H, T]
    q_bounds,  # int32: cu_seqlens or lengths, or unused
    k_bounds,
    seed,  # int64 [1] or unused
    q_batch,  # strides in units of UNIT elements
    q_row,
    q_head,
    k_batch,
    k_row,
    k_head,
    v_batch,
    v_row,
    v_head,
    heads,
    group,  # H / Hk
    items,  # sequences * heads
    q_size,  # S or T
    k_size,
    q_longest,  # max_seqlen, or unused
    k_longest,
    window_left,
    window_right,
    scale,  # in units of log2
    threshold,
    dropout_scale,
    Q_LAYOUT: tl.constexpr,
    K_LAYOUT: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,  # a tile of rows spans 2^31 elements
    FEATURES: tl.constexpr,
    EVEN: tl.constexpr,  # every sequence fills its tile
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    MASKED: tl.constexpr = not EVEN or FEATURES[LEFT] or FEATURES[RIGHT]
    columns = tl.arange(0, BLOCK_D)
    programs = tl.num_programs(0)
    if Q_LAYOUT == "packed":
        programs -= heads
    if Q_LAYOUT == "packed" and tl.program_id(0) >= programs:  # the rows after all sequences, of one head
        head = tl.program_id(0) - programs
        row = packed_first(q_bounds, items // heads, q_size)
        clear_outputs((out, lse), row, BLOCK_M, head, heads, q_size, columns, WIDE, D, BLOCK_M)
        return
    queries = tl.arange(0, BLOCK_M)
    keys = tl.arange(0, BLOCK_N)
    factor = scale if FEATURES[PLAIN] else 1.0
    terms = (scale, None, None, None)  # neither bias nor slope
    seed_value = tl.load(seed) if FEATURES[DROPOUT] else 0
    for item in tl.range(tl.program_id(0), items, programs, num_stages=STAGES):
        sequence = item // heads
        head = item % heads
        q_first, q_length = sequence_span(q_bounds, sequence, q_size, q_longest, Q_LAYOUT)
        k_first, k_length = sequence_span(k_bounds, sequence, k_size, k_longest, K_LAYOUT)
        q_rows = head_rows(q, (q_batch, q_row, q_head), sequence, q_first, head, UNIT, WIDE)
        k_rows = head_rows(k, (k_batch, k_row, k_head), sequence, k_first, head // group, UNIT, WIDE)
        v_rows = head_rows(v, (v_batch, v_row, v_head), sequence, k_first, head // group, UNIT, WIDE)
        q_tile = load_rows(q_rows, 0, q_length, columns, not EVEN, D, BLOCK_M)
        k_tile = load_rows(k_rows, 0, k_length, columns, not EVEN, D, BLOCK_N)
        v_tile = load_rows(v_rows, 0, k_length, columns, not EVEN, D, BLOCK_N)
        shape = (q_length, k_length, window_left, window_right)
        products = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        scores = masked_scores(products, queries[:, None], keys[None, :], shape, terms, MASKED, FEATURES)
        m = tl.max(scores, 1) * factor
        weights = tl.exp2(scores * factor - tl.where(m == -float("inf"), 0.0, m)[:, None])
        l = tl.sum(weights, 1)
        if FEATURES[DROPOUT]:
            weights = dropped_rounded(weights, seed_value, sequence, head, queries, 0, threshold, v_tile.dtype)
        result = tl.dot(weights.to(v_tile.dtype), v_tile, input_precision=PRECISION)
        if Q_LAYOUT == "lengths":
            l = tl.where(queries < q_length, l, 0.0)
        result = tl.where((l == 0.0)[:, None], 0.0, result * (dropout_scale / l)[:, None])
        rows = q_size if Q_LAYOUT == "lengths" else q_length  # rows past a dense sequence's length are zeros
        lse_start, out_start = output_offsets(sequence, q_first, head, heads, q_size, Q_LAYOUT)
        tl.store(lse + lse_start + queries, natural_lse(m, l), mask=queries < rows)
        store_rows(output_rows(out, out_start, heads, D, WIDE), 0, rows, columns, result, not EVEN, D, BLOCK_M)


@launched_kernel
@triton.jit(do_not_specialize=[*_SIZES, *_STRIDES])
def _short_bwd_kernel(
    q,  # [B, S, H, D] or [T, H, D]
    k,  # [B, Sk, H, D] or [Tk, H, D]
    v,
    dout,  # like q
    lse,  # fp32 [B, H, S] or [H, T]
    dq,
    dk,
    dv,
    q_bounds,  # int32: cu_seqlens or lengths, or unused
    k_bounds,
    seed,  # int64 [1] or unused
    q_batch,  # strides in units of UNIT elements
    q_row,
    q_head,
    k_batch,
    k_row,
    k_head,
    v_batch,
    v_row,
    v_head,
    dout_batch,
    dout_row,
    dout_head,
    dq_batch,
    dq_row,
    dq_head,
    dk_batch,
    dk_row,
    dk_head,
    dv_batch,
    dv_row,
    dv_head,
    heads,
    items,  # sequences * heads
    q_size,  # S or T
    k_size,
    q_longest,  # max_seqlen, or unused
    k_longest,
    window_left,
    window_right,
    scale,  # in units of log2
    threshold,
    dropout_scale,
    Q_LAYOUT: tl.constexpr,
    K_LAYOUT: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,  # a tile of rows spans 2^31 elements
    FEATURES: tl.constexpr,
    EVEN: tl.constexpr,  # every sequence fills its tile
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    MASKED: tl.constexpr = not EVEN or FEATURES[LEFT] or FEATURES[RIGHT]
    columns = tl.arange(0, BLOCK_D)
    programs = tl.num_programs(0)
    if Q_LAYOUT == "packed":
        programs -= heads
    if Q_LAYOUT == "packed" and tl.program_id(0) >= programs:  # the rows after all sequences, of one head
        head = tl.program_id(0) - programs
        row = packed_first(q_bounds, items // heads, q_size)
        clear_rows(
            head_rows(dq, (0, dq_row, dq_head), head, 0, head, UNIT, WIDE), row, q_size, BLOCK_M, columns, D, BLOCK_M
        )
        row = packed_first(k_bounds, items // heads, k_size)
        clear_rows(
            head_rows(dk, (0, dk_row, dk_head), head, 0, head, UNIT, WIDE), row, k_size, BLOCK_N, columns, D, BLOCK_N
        )
        clear_rows(
            head_rows(dv, (0, dv_row, dv_head), head, 0, head, UNIT, WIDE), row, k_size, BLOCK_N, columns, D, BLOCK_N
        )
        return
    queries = tl.arange(0, BLOCK_M)
    keys = tl.arange(0, BLOCK_N)
    factor = scale if FEATURES[PLAIN] else 1.0
    terms = (scale, None, None, None)  # neither bias nor slope
    seed_value = tl.load(seed) if FEATURES[DROPOUT] else 0
    for item in tl.range(tl.program_id(0), items, programs, num_stages=STAGES):
        sequence = item // heads
        head = item % heads
        q_first, q_length = sequence_span(q_bounds, sequence, q_size, q_longest, Q_LAYOUT)
        k_first, k_length = sequence_span(k_bounds, sequence, k_size, k_longest, K_LAYOUT)
        q_rows = head_rows(q, (q_batch, q_row, q_head), sequence, q_first, head, UNIT, WIDE)
        dout_rows = head_rows(dout, (dout_batch, dout_row, dout_head), sequence, q_first, head, UNIT, WIDE)
        k_rows = head_rows(k, (k_batch, k_row, k_head), sequence, k_first, head, UNIT, WIDE)
        v_rows = head_rows(v, (v_batch, v_row, v_head), sequence, k_first, head, UNIT, WIDE)
        q_tile = load_rows(q_rows, 0, q_length, columns, not EVEN, D, BLOCK_M)
        k_tile = load_rows(k_rows, 0, k_length, columns, not EVEN, D, BLOCK_N)
        dout_tile = load_rows(dout_rows, 0, q_length, columns, not EVEN, D, BLOCK_M)
        v_tile = load_rows(v_rows, 0, k_length, columns, not EVEN, D, BLOCK_N)
        lse_start, _ = output_offsets(sequence, q_first, head, heads, q_size, Q_LAYOUT)
        lse_row = lse_in_log2(lse + lse_start, queries, q_length)
        shape = (q_length, k_length, window_left, window_right)
        products = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        dproducts = tl.dot(dout_tile, tl.trans(v_tile), input_precision=PRECISION)
        scores = masked_scores(products, queries[:, None], keys[None, :], shape, terms, MASKED, FEATURES)
        weights = tl.exp2(scores * factor - lse_row[:, None])
        # lse carries a rounding error that grows with the logits. All weights of a row share it, so dividing by their
        # sum cancels it; 16-bit gradients do not show it.
        if q_tile.dtype == tl.float32:
            total = tl.sum(weights, 1)[:, None]
            weights = weights / tl.where(total == 0.0, 1.0, total)
        dropped = weights
        if FEATURES[DROPOUT]:
            dropped = dropped_weights(weights, seed_value, sequence, head, queries, 0, threshold)
        dscores = dropped * dproducts
        dscores -= weights * tl.sum(dscores, 1)[:, None]
        q_stored = q_size if Q_LAYOUT == "lengths" else q_length
        k_stored = k_size if K_LAYOUT == "lengths" else k_length
        back = scale * LN_2 * dropout_scale
        # The order matters: weights and dscores go through the same shared memory, one after the other.
        gradient = tl.trans(tl.dot(tl.trans(dout_tile), dropped.to(q_tile.dtype), input_precision=PRECISION))
        if K_LAYOUT == "lengths":  # 0 * NaN is NaN
            gradient = tl.where((keys < k_length)[:, None], gradient, 0.0)
        dv_rows = head_rows(dv, (dv_batch, dv_row, dv_head), sequence, k_first, head, UNIT, WIDE)
        store_rows(dv_rows, 0, k_stored, columns, gradient * dropout_scale, not EVEN, D, BLOCK_N)
        dscores = dscores.to(q_tile.dtype)
        gradient = tl.trans(tl.dot(tl.trans(q_tile), dscores, input_precision=PRECISION))
        dq_tile = tl.dot(dscores, k_tile, input_precision=PRECISION)
        if K_LAYOUT == "lengths":
            gradient = tl.where((keys < k_length)[:, None], gradient, 0.0)
        dq_tile = tl.where((lse_row == float("inf"))[:, None], 0.0, dq_tile)  # attends to nothing
        dk_rows = head_rows(dk, (dk_batch, dk_row, dk_head), sequence, k_first, head, UNIT, WIDE)
        store_rows(dk_rows, 0, k_stored, columns, gradient * back, not EVEN, D, BLOCK_N)
        dq_rows = head_rows(dq, (dq_batch, dq_row, dq_head), sequence, q_first, head, UNIT, WIDE)
        store_rows(dq_rows, 0, q_stored, columns, dq_tile * back, not EVEN, D, BLOCK_M)
