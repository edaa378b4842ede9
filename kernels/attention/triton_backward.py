"""Attention backward in Triton. With P the weights, Z what dropout makes of a one, and s its scale:

    out = (s Z P) v       dv = (s Z P)^T dout       dP = s Z (dout v^T)       delta = sum(out * dout)
    dS = P (dP - delta)   dq = scale dS k           dk = scale dS^T q

P is computed again from q, k and lse. Sums have a fixed order: no atomics.

_bwd_head_kernel: a program owns a whole head of keys and values. It goes over their tiles, keeps a tile's dk and dv in
registers while it goes over the queries, and adds to dq in a scratch of its own that stays in the cache. Where one tile
holds all keys, dq is written at once. Five matrix products for a tile.

_bwd_q_kernel, then _bwd_kv_kernel, for long sequences: a program owns a tile of queries (and leaves delta behind), or a
tile of keys. Seven products, but as many programs as there are tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fasttfm.kernels.attention.triton_tiles import (
    DROPOUT,
    LEFT,
    LN_2,
    LOG2_E,
    PLAIN,
    RIGHT,
    SLOPES,
    head_rows,
    key_tiles,
    load_rows,
    masked_scores,
    output_offsets,
    query_tiles,
    sequence_span,
    store_rows,
)
from fasttfm.kernels.common.philox_triton import dropped_weights

MAX_BLOCK_M = tl.constexpr(128)

_SIZES = ["heads", "kv_heads", "tiles", "items", "q_size", "k_size", "window_left", "window_right", "threshold"]
_STRIDES = [
    f"{tensor}_{axis}" for tensor in ("q", "k", "v", "dout", "dq", "dk", "dv") for axis in ("batch", "row", "head")
] + ["bias_head", "bias_row", "scratch_rows", "statistics_rows", "statistics_size"]


@triton.jit
def _lse_in_log2(lse, queries, q_length):
    """lse in units of log2, and +inf for rows that attend to nothing or are not there: their weights come out as 0."""
    value = tl.load(lse + queries, mask=queries < q_length, other=float("inf"))
    return tl.where(value == -float("inf"), float("inf"), value * LOG2_E)


@triton.jit
def _statistics_start(sequence, first, head, heads, rows, LAYOUT: tl.constexpr):
    """Where a sequence's first row stands in the statistics of tiled backward. Tiles reach past a sequence's end."""
    if LAYOUT == "packed":
        return head.to(tl.int64) * rows + first + sequence * MAX_BLOCK_M
    return (sequence * heads + head).to(tl.int64) * rows


@triton.jit
def _tile_gradients(
    q_tile,
    dout_tile,
    k_tile,
    v_tile,
    lse,  # fp32 [BLOCK_M], in units of log2
    delta,  # fp32 [BLOCK_M], over dropout's scale
    queries,  # int32 [BLOCK_M]
    first_key,
    shape,
    terms,
    dropout,  # seed, sequence, head, threshold
    MASKED: tl.constexpr,
    FEATURES: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Z P and dS / s of a tile, queries by keys or keys by queries, rounded to the type that matrix products take."""
    q_axis: tl.constexpr = 0 if KEYS_FIRST else 1  # along which what belongs to queries is repeated
    factor = terms[0] if FEATURES[PLAIN] else 1.0
    if KEYS_FIRST:
        products = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
        dproducts = tl.dot(v_tile, tl.trans(dout_tile), input_precision=PRECISION)
    else:
        products = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        dproducts = tl.dot(dout_tile, tl.trans(v_tile), input_precision=PRECISION)
    keys = first_key + tl.arange(0, k_tile.shape[0])
    scores = masked_scores(
        products, tl.expand_dims(queries, q_axis), tl.expand_dims(keys, 1 - q_axis), shape, terms, MASKED, FEATURES
    )
    weights = tl.exp2(scores * factor - tl.expand_dims(lse, q_axis))
    if FEATURES[DROPOUT]:
        tl.static_assert(not KEYS_FIRST, "dropout's draws lie along keys")
        dropped = dropped_weights(weights, dropout[0], dropout[1], dropout[2], queries, first_key, dropout[3])
        dscores = dropped * dproducts - weights * delta[:, None]
    else:
        dropped = weights
        dscores = weights * (dproducts - tl.expand_dims(delta, q_axis))
    return dropped.to(q_tile.dtype), dscores.to(q_tile.dtype)


@triton.jit
def _scratch_tile(scratch, first, TRANSPOSED: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr):
    """Pointers to a tile of dq, [BLOCK_M, BLOCK_D] or, TRANSPOSED, [BLOCK_D, BLOCK_M] that lies in the same place."""
    if TRANSPOSED:
        offsets = tl.arange(0, BLOCK_D)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    else:
        offsets = tl.arange(0, BLOCK_M)[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    return scratch + first * BLOCK_D + offsets


@triton.jit
def _over_queries(
    dk,  # fp32 [BLOCK_N, BLOCK_D] if KEYS_FIRST, else transposed
    dv,
    k_tile,
    v_tile,
    first_key,
    begin,
    end,
    q_rows,  # of head_rows
    dout_rows,
    out_rows,
    dq_rows,
    lse,  # of the sequence and head
    statistics,  # fp32: lse in units of log2 and, statistics_size after it, delta over dropout's scale
    statistics_size,
    scratch,
    stored_rows,
    shape,
    terms,
    dropout,
    scales,  # s * scale, 1 / s
    MASKED: tl.constexpr,
    FEATURES: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    DQ: tl.constexpr,  # "whole": these are all keys; "part": add to the scratch; "none"
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    BLOCK_D: tl.constexpr = k_tile.shape[1]
    columns = tl.arange(0, BLOCK_D)
    for first in range(begin, end, BLOCK_M):
        queries = first + tl.arange(0, BLOCK_M)
        q_tile = load_rows(q_rows, first, shape[0], columns, True, D, BLOCK_M)
        dout_tile = load_rows(dout_rows, first, shape[0], columns, True, D, BLOCK_M)
        if DQ == "whole":
            out_tile = load_rows(out_rows, first, shape[0], columns, True, D, BLOCK_M)
            delta_row = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1) * scales[1]
            lse_row = _lse_in_log2(lse, queries, shape[0])
        else:
            lse_row = tl.load(statistics + queries)
            delta_row = tl.load(statistics + statistics_size + queries)
        if DQ == "part":
            scratch_tile = _scratch_tile(scratch, first, KEYS_FIRST, BLOCK_D, BLOCK_M)
            dq = tl.load(scratch_tile)
        weights, dscores = _tile_gradients(
            q_tile,
            dout_tile,
            k_tile,
            v_tile,
            lse_row,
            delta_row,
            queries,
            first_key,
            shape,
            terms,
            dropout,
            MASKED,
            FEATURES,
            KEYS_FIRST,
            PRECISION,
        )
        if KEYS_FIRST:
            dv = tl.dot(weights, dout_tile, dv, input_precision=PRECISION)
            dk = tl.dot(dscores, q_tile, dk, input_precision=PRECISION)
        else:
            dv = tl.dot(tl.trans(dout_tile), weights, dv, input_precision=PRECISION)
            dk = tl.dot(tl.trans(q_tile), dscores, dk, input_precision=PRECISION)
        if DQ != "none":
            if KEYS_FIRST:
                share = tl.dot(tl.trans(k_tile), dscores, input_precision=PRECISION)
            else:
                share = tl.dot(dscores, k_tile, input_precision=PRECISION)
            if DQ == "part":
                tl.store(scratch_tile, dq + share)
            else:
                if KEYS_FIRST:
                    share = tl.trans(share)
                store_rows(dq_rows, first, stored_rows, columns, share * scales[0], D, BLOCK_M)
    return dk, dv


@triton.jit
def _key_tile(
    first,  # of the tile's keys
    k_rows,
    v_rows,
    dk_rows,
    dv_rows,
    tensors,  # q, dout, out, dq, lse, statistics, scratch
    strides,  # of q, dout and dq
    place,  # sequence, its first query, head of k and v, heads, group, q_size, rows to store of dq, of dk and dv
    shape,
    scale,
    additions,  # bias, bias_head, bias_row, slopes
    draw,  # seed, threshold
    scales,  # s * scale, 1 / s, s
    sizes,  # scratch_rows, statistics_size
    LAYOUT: tl.constexpr,
    UNIT: tl.constexpr,
    FEATURES: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    DQ: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dk and dv of a tile of keys, from all queries of all heads that read it, and the tile's share of dq."""
    q, dout, out, dq, lse, statistics, scratch = tensors
    sequence, q_first, kv_head, heads, group, q_size, q_stored, k_stored = place
    scratch_rows, statistics_size = sizes
    columns = tl.arange(0, BLOCK_D)
    k_tile = load_rows(k_rows, first, shape[1], columns, True, D, BLOCK_N)
    v_tile = load_rows(v_rows, first, shape[1], columns, True, D, BLOCK_N)
    begin, full_begin, full_end, end = query_tiles(first, shape, FEATURES, BLOCK_M, BLOCK_N)
    if DQ == "whole":  # every row of dq is written here
        begin = 0
        end = q_stored
    dk = tl.zeros((BLOCK_N, BLOCK_D) if KEYS_FIRST else (BLOCK_D, BLOCK_N), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D) if KEYS_FIRST else (BLOCK_D, BLOCK_N), tl.float32)
    for member in range(group):
        head = kv_head * group + member
        lse_start, out_start = output_offsets(sequence, q_first, head, heads, q_size, LAYOUT)
        q_rows = head_rows(q, strides[0], sequence, q_first, head, UNIT)
        dout_rows = head_rows(dout, strides[1], sequence, q_first, head, UNIT)
        dq_rows = head_rows(dq, strides[2], sequence, q_first, head, UNIT)
        if DQ == "part":  # the program's own
            statistics_start = member * scratch_rows
        else:
            statistics_start = _statistics_start(sequence, q_first, head, heads, scratch_rows, LAYOUT)
        slope = tl.load(additions[3] + head) if FEATURES[SLOPES] else 0.0
        terms = (scale, additions[0] + head.to(tl.int64) * additions[1], additions[2], slope)
        for part in tl.static_range(0 if FEATURES[RIGHT] else 1, 3):
            dk, dv = _over_queries(
                dk,
                dv,
                k_tile,
                v_tile,
                first,
                begin if part == 0 else full_begin if part == 1 else full_end,
                full_begin if part == 0 else full_end if part == 1 else end,
                q_rows,
                dout_rows,
                (out + out_start * D, heads * D),
                dq_rows,
                lse + lse_start,
                statistics + statistics_start,
                statistics_size,
                scratch + member * scratch_rows * BLOCK_D,
                q_stored,
                shape,
                terms,
                (draw[0], sequence, head, draw[1]),
                scales,
                part != 1,
                FEATURES,
                KEYS_FIRST,
                DQ,
                PRECISION,
                D,
                BLOCK_M,
            )
    if not KEYS_FIRST:
        dk = tl.trans(dk)
        dv = tl.trans(dv)
    store_rows(dk_rows, first, k_stored, columns, dk * scales[0], D, BLOCK_N)
    store_rows(dv_rows, first, k_stored, columns, dv * scales[2], D, BLOCK_N)


@triton.jit
def _prepare_head(
    tensors,
    strides,
    place,
    q_length,
    kept,  # 1 / s
    sizes,
    LAYOUT: tl.constexpr,
    UNIT: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """The statistics of every query of a group of heads, and zeros in the scratch of dq."""
    _, dout, out, _, lse, statistics, scratch = tensors
    sequence, q_first, kv_head, heads, group, q_size, q_stored, _ = place
    scratch_rows, statistics_size = sizes
    columns = tl.arange(0, BLOCK_D)
    for member in range(group):
        head = kv_head * group + member
        lse_start, out_start = output_offsets(sequence, q_first, head, heads, q_size, LAYOUT)
        dout_rows = head_rows(dout, strides[1], sequence, q_first, head, UNIT)
        for first in range(0, q_stored, BLOCK_M):
            queries = first + tl.arange(0, BLOCK_M)
            out_tile = load_rows((out + out_start * D, heads * D), first, q_length, columns, True, D, BLOCK_M)
            dout_tile = load_rows(dout_rows, first, q_length, columns, True, D, BLOCK_M)
            delta = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1) * kept
            own = statistics + member * scratch_rows + queries
            tl.store(own, _lse_in_log2(lse + lse_start, queries, q_length))
            tl.store(own + statistics_size, delta)
            scratch_tile = _scratch_tile(scratch, member * scratch_rows + first, False, BLOCK_D, BLOCK_M)
            tl.store(scratch_tile, tl.zeros((BLOCK_M, BLOCK_D), tl.float32))


@triton.jit
def _write_dq(
    tensors,
    strides,
    place,
    factor,
    scratch_rows,
    UNIT: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """The scratch's sums, times ``factor``, to dq."""
    _, _, _, dq, _, _, scratch = tensors
    sequence, q_first, kv_head, _, group, _, q_stored, _ = place
    columns = tl.arange(0, BLOCK_D)
    for member in range(group):
        dq_rows = head_rows(dq, strides[2], sequence, q_first, kv_head * group + member, UNIT)
        for first in range(0, q_stored, BLOCK_M):
            value = tl.load(_scratch_tile(scratch, member * scratch_rows + first, KEYS_FIRST, BLOCK_D, BLOCK_M))
            if KEYS_FIRST:
                value = tl.trans(value)
            store_rows(dq_rows, first, q_stored, columns, value * factor, D, BLOCK_M)


@triton.jit(do_not_specialize=[*_SIZES, *_STRIDES])
def _bwd_head_kernel(
    q,  # [B, S, H, D] or [T, H, D]
    k,  # [B, Sk, Hk, D] or [Tk, Hk, D]
    v,
    out,  # like q, contiguous
    dout,  # like q
    lse,  # fp32 [B, H, S] or [H, T]
    dq,
    dk,
    dv,
    statistics,  # fp32 [2, programs, H / Hk, scratch_rows] or unused (ONE_TILE)
    scratch,  # fp32 [programs, H / Hk, scratch_rows, BLOCK_D] or unused (ONE_TILE)
    q_bounds,  # int32: cu_seqlens or lengths, or unused
    k_bounds,
    bias,  # [H, >= S, >= Sk] or unused
    slopes,  # fp32 [H] or unused
    seed,  # int64 [1] or unused
    q_batch,  # strides in units of UNIT elements, those of bias in elements
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
    bias_head,
    bias_row,
    heads,
    kv_heads,
    items,  # sequences * kv_heads
    scratch_rows,  # at least the longest Lq, a multiple of BLOCK_M
    q_size,  # S or T
    k_size,
    window_left,
    window_right,
    scale,  # in units of log2
    threshold,
    dropout_scale,
    Q_LAYOUT: tl.constexpr,
    K_LAYOUT: tl.constexpr,
    UNIT: tl.constexpr,
    FEATURES: tl.constexpr,
    KEYS_FIRST: tl.constexpr,  # scores are computed keys by queries
    PRECISION: tl.constexpr,
    ONE_TILE: tl.constexpr,  # BLOCK_N holds all keys
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    group = heads // kv_heads
    if not ONE_TILE:
        statistics += tl.program_id(0) * group * scratch_rows
        scratch += tl.program_id(0).to(tl.int64) * group * scratch_rows * BLOCK_D
    tensors = (q, dout, out, dq, lse, statistics, scratch)
    sizes = (scratch_rows, tl.num_programs(0) * group * scratch_rows)
    strides = ((q_batch, q_row, q_head), (dout_batch, dout_row, dout_head), (dq_batch, dq_row, dq_head))
    draw = (tl.load(seed) if FEATURES[DROPOUT] else 0, threshold)
    scales = (scale * LN_2 * dropout_scale, (256 - threshold) / 256.0, dropout_scale)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        sequence = item // kv_heads
        head = item % kv_heads
        q_first, q_length = sequence_span(q_bounds, sequence, q_size, Q_LAYOUT)
        k_first, k_length = sequence_span(k_bounds, sequence, k_size, K_LAYOUT)
        q_stored = q_size if Q_LAYOUT == "lengths" else q_length
        k_stored = k_size if K_LAYOUT == "lengths" else k_length
        place = (sequence, q_first, head, heads, group, q_size, q_stored, k_stored)
        shape = (q_length, k_length, window_left, window_right)
        if not ONE_TILE:
            _prepare_head(tensors, strides, place, q_length, scales[1], sizes, Q_LAYOUT, UNIT, D, BLOCK_D, BLOCK_M)
            tl.debug_barrier()
        for first in range(0, BLOCK_N if ONE_TILE else k_stored, BLOCK_N):
            _key_tile(
                first,
                head_rows(k, (k_batch, k_row, k_head), sequence, k_first, head, UNIT),
                head_rows(v, (v_batch, v_row, v_head), sequence, k_first, head, UNIT),
                head_rows(dk, (dk_batch, dk_row, dk_head), sequence, k_first, head, UNIT),
                head_rows(dv, (dv_batch, dv_row, dv_head), sequence, k_first, head, UNIT),
                tensors,
                strides,
                place,
                shape,
                scale,
                (bias, bias_head, bias_row, slopes),
                draw,
                scales,
                sizes,
                Q_LAYOUT,
                UNIT,
                FEATURES,
                KEYS_FIRST,
                "whole" if ONE_TILE else "part",
                PRECISION,
                D,
                BLOCK_D,
                BLOCK_M,
                BLOCK_N,
            )
            if not ONE_TILE:
                tl.debug_barrier()  # the scratch is read by other threads than wrote it
        if not ONE_TILE:
            _write_dq(tensors, strides, place, scales[0], scratch_rows, UNIT, KEYS_FIRST, D, BLOCK_D, BLOCK_M)
            tl.debug_barrier()


@triton.jit(do_not_specialize=[*_SIZES, *_STRIDES])
def _bwd_kv_kernel(
    q,  # [B, S, H, D] or [T, H, D]
    k,  # [B, Sk, Hk, D] or [Tk, Hk, D]
    v,
    dout,  # like q
    statistics,  # fp32 [2, statistics_size]
    dk,
    dv,
    q_bounds,  # int32: cu_seqlens or lengths, or unused
    k_bounds,
    bias,  # [H, >= S, >= Sk] or unused
    slopes,  # fp32 [H] or unused
    seed,  # int64 [1] or unused
    q_batch,  # strides in units of UNIT elements, those of bias in elements
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
    dk_batch,
    dk_row,
    dk_head,
    dv_batch,
    dv_row,
    dv_head,
    bias_head,
    bias_row,
    heads,
    kv_heads,
    tiles,  # of a sequence
    statistics_rows,
    statistics_size,
    q_size,  # S or T
    k_size,
    window_left,
    window_right,
    scale,  # in units of log2
    threshold,
    dropout_scale,
    Q_LAYOUT: tl.constexpr,
    K_LAYOUT: tl.constexpr,
    UNIT: tl.constexpr,
    FEATURES: tl.constexpr,
    KEYS_FIRST: tl.constexpr,  # scores are computed keys by queries
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    program = tl.program_id(0)
    first = program % tiles * BLOCK_N
    head = program // tiles % kv_heads
    sequence = program // tiles // kv_heads
    q_first, q_length = sequence_span(q_bounds, sequence, q_size, Q_LAYOUT)
    k_first, k_length = sequence_span(k_bounds, sequence, k_size, K_LAYOUT)
    k_stored = k_size if K_LAYOUT == "lengths" else k_length
    if first >= k_stored:
        return
    q_strides = (q_batch, q_row, q_head)
    _key_tile(
        first,
        head_rows(k, (k_batch, k_row, k_head), sequence, k_first, head, UNIT),
        head_rows(v, (v_batch, v_row, v_head), sequence, k_first, head, UNIT),
        head_rows(dk, (dk_batch, dk_row, dk_head), sequence, k_first, head, UNIT),
        head_rows(dv, (dv_batch, dv_row, dv_head), sequence, k_first, head, UNIT),
        (q, dout, q, q, statistics, statistics, statistics),
        (q_strides, (dout_batch, dout_row, dout_head), q_strides),
        (sequence, q_first, head, heads, heads // kv_heads, q_size, q_length, k_stored),
        (q_length, k_length, window_left, window_right),
        scale,
        (bias, bias_head, bias_row, slopes),
        (tl.load(seed) if FEATURES[DROPOUT] else 0, threshold),
        (scale * LN_2 * dropout_scale, (256 - threshold) / 256.0, dropout_scale),
        (statistics_rows, statistics_size),
        Q_LAYOUT,
        UNIT,
        FEATURES,
        KEYS_FIRST,
        "none",
        PRECISION,
        D,
        BLOCK_D,
        BLOCK_M,
        BLOCK_N,
    )


@triton.jit
def _over_keys(
    dq,  # fp32 [BLOCK_M, BLOCK_D]
    q_tile,
    dout_tile,
    lse,  # fp32 [BLOCK_M], in units of log2
    delta,  # fp32 [BLOCK_M], over dropout's scale
    queries,  # int32 [BLOCK_M]
    begin,
    end,
    k_rows,
    v_rows,
    shape,
    terms,
    dropout,
    MASKED: tl.constexpr,
    FEATURES: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    columns = tl.arange(0, q_tile.shape[1])
    for first in range(begin, end, BLOCK_N):
        k_tile = load_rows(k_rows, first, shape[1], columns, MASKED, D, BLOCK_N)
        v_tile = load_rows(v_rows, first, shape[1], columns, MASKED, D, BLOCK_N)
        _, dscores = _tile_gradients(
            q_tile,
            dout_tile,
            k_tile,
            v_tile,
            lse,
            delta,
            queries,
            first,
            shape,
            terms,
            dropout,
            MASKED,
            FEATURES,
            False,
            PRECISION,
        )
        dq = tl.dot(dscores, k_tile, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=[*_SIZES, *_STRIDES])
def _bwd_q_kernel(
    q,  # [B, S, H, D] or [T, H, D]
    k,  # [B, Sk, Hk, D] or [Tk, Hk, D]
    v,
    out,  # like q, contiguous
    dout,  # like q
    lse,  # fp32 [B, H, S] or [H, T]
    statistics,  # fp32 [2, statistics_size]: written here
    dq,
    q_bounds,  # int32: cu_seqlens or lengths, or unused
    k_bounds,
    bias,  # [H, >= S, >= Sk] or unused
    slopes,  # fp32 [H] or unused
    seed,  # int64 [1] or unused
    q_batch,  # strides in units of UNIT elements, those of bias in elements
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
    bias_head,
    bias_row,
    heads,
    kv_heads,
    tiles,  # of a sequence
    statistics_rows,
    statistics_size,
    q_size,  # S or T
    k_size,
    window_left,
    window_right,
    scale,  # in units of log2
    threshold,
    dropout_scale,
    Q_LAYOUT: tl.constexpr,
    K_LAYOUT: tl.constexpr,
    UNIT: tl.constexpr,
    FEATURES: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    program = tl.program_id(0)
    first = (tiles - 1 - program % tiles) * BLOCK_M  # the last queries have the most keys where attention is causal
    head = program // tiles % heads
    sequence = program // tiles // heads
    q_first, q_length = sequence_span(q_bounds, sequence, q_size, Q_LAYOUT)
    k_first, k_length = sequence_span(k_bounds, sequence, k_size, K_LAYOUT)
    q_stored = q_size if Q_LAYOUT == "lengths" else q_length
    if first >= q_stored:
        return
    columns = tl.arange(0, BLOCK_D)
    queries = first + tl.arange(0, BLOCK_M)
    kv_head = head // (heads // kv_heads)
    lse_start, out_start = output_offsets(sequence, q_first, head, heads, q_size, Q_LAYOUT)
    q_rows = head_rows(q, (q_batch, q_row, q_head), sequence, q_first, head, UNIT)
    dout_rows = head_rows(dout, (dout_batch, dout_row, dout_head), sequence, q_first, head, UNIT)
    q_tile = load_rows(q_rows, first, q_length, columns, True, D, BLOCK_M)
    dout_tile = load_rows(dout_rows, first, q_length, columns, True, D, BLOCK_M)
    out_tile = load_rows((out + out_start * D, heads * D), first, q_length, columns, True, D, BLOCK_M)
    delta = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1) * ((256 - threshold) / 256.0)
    lse_row = _lse_in_log2(lse + lse_start, queries, q_length)
    own = statistics + _statistics_start(sequence, q_first, head, heads, statistics_rows, Q_LAYOUT) + queries
    tl.store(own, lse_row)
    tl.store(own + statistics_size, delta)
    shape = (q_length, k_length, window_left, window_right)
    terms = (scale, bias + head.to(tl.int64) * bias_head, bias_row, tl.load(slopes + head) if FEATURES[SLOPES] else 0.0)
    begin, full_begin, full_end, end = key_tiles(first, shape, FEATURES, BLOCK_M, BLOCK_N)
    dq_tile = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for part in tl.static_range(0 if FEATURES[LEFT] else 1, 3):
        dq_tile = _over_keys(
            dq_tile,
            q_tile,
            dout_tile,
            lse_row,
            delta,
            queries,
            begin if part == 0 else full_begin if part == 1 else full_end,
            full_begin if part == 0 else full_end if part == 1 else end,
            head_rows(k, (k_batch, k_row, k_head), sequence, k_first, kv_head, UNIT),
            head_rows(v, (v_batch, v_row, v_head), sequence, k_first, kv_head, UNIT),
            shape,
            terms,
            (tl.load(seed) if FEATURES[DROPOUT] else 0, sequence, head, threshold),
            part != 1,
            FEATURES,
            PRECISION,
            D,
            BLOCK_N,
        )
    dq_rows = head_rows(dq, (dq_batch, dq_row, dq_head), sequence, q_first, head, UNIT)
    store_rows(dq_rows, first, q_stored, columns, dq_tile * (scale * LN_2 * dropout_scale), D, BLOCK_M)
