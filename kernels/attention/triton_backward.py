"""Attention backward in Triton. With P the weights, Z the dropout mask (1 for weights that are kept) and s its scale:

    out = (s Z P) v       dv = (s Z P)^T dout       dP = s Z (dout v^T)       delta = sum(out * dout)
    dS = P (dP - delta)   dq = scale dS k           dk = scale dS^T q

P is computed again from q, k and lse. Sums have a fixed order: no atomics.

In _bwd_q_kernel a program has a tile of queries. It stores their lse and delta, the statistics that _bwd_kv_kernel
reads, where a program has a tile of keys. triton_short.py has a kernel for short sequences.
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
    SLOPES,
    clear_rows,
    head_bias,
    head_rows,
    key_tiles,
    load_rows,
    lse_in_log2,
    masked_scores,
    output_offsets,
    output_rows,
    prefetch_rows,
    query_tiles,
    sequence_span,
    store_rows,
)
from fasttfm.kernels.common.triton.launcher import launched_kernel
from fasttfm.kernels.common.triton.packed import packed_first
from fasttfm.kernels.common.triton.philox import dropped_weights

MAX_BLOCK_M = tl.constexpr(128)  # of all tiles, also of keys

_SIZES = [
    "heads",
    "kv_heads",
    "tiles",
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
] + ["bias_batch", "bias_head", "bias_row", "statistics_rows", "statistics_size"]


@triton.jit
def _statistics_start(sequence, first, head, heads, rows, LAYOUT: tl.constexpr):
    """The offset of a sequence's first row in the statistics. The last tile of a sequence may extend past its end."""
    if LAYOUT == "packed":
        return head.to(tl.int64) * rows + first + sequence.to(tl.int64) * MAX_BLOCK_M
    return (sequence.to(tl.int64) * heads + head) * rows


@triton.jit
def _prefetch(
    first,
    sequence,
    head,
    tensors,  # q, dout, k, v
    strides,  # of q, dout, k
    v_strides,
    sizes,  # q_bounds, k_bounds, q_size, k_size, q_longest, k_longest, heads of q that read one of k
    Q_LAYOUT: tl.constexpr,
    K_LAYOUT: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Prefetches BLOCK rows of each tensor into L2."""
    q_first, q_length = sequence_span(sizes[0], sequence, sizes[2], sizes[4], Q_LAYOUT)
    k_first, k_length = sequence_span(sizes[1], sequence, sizes[3], sizes[5], K_LAYOUT)
    if first < q_length:
        q_rows = head_rows(tensors[0], strides[0], sequence, q_first, head, UNIT, WIDE)
        prefetch_rows(q_rows, first, q_length, D, BLOCK)
        dout_rows = head_rows(tensors[1], strides[1], sequence, q_first, head, UNIT, WIDE)
        prefetch_rows(dout_rows, first, q_length, D, BLOCK)
    if first < k_length:
        k_rows = head_rows(tensors[2], strides[2], sequence, k_first, head // sizes[6], UNIT, WIDE)
        prefetch_rows(k_rows, first, k_length, D, BLOCK)
        v_rows = head_rows(tensors[3], v_strides, sequence, k_first, head // sizes[6], UNIT, WIDE)
        prefetch_rows(v_rows, first, k_length, D, BLOCK)


@triton.jit
def tile_gradients(
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
    """Z P and dS / s of a tile in fp32, queries by keys or keys by queries."""
    q_axis: tl.constexpr = 0 if KEYS_FIRST else 1  # along which what belongs to queries is repeated
    factor = terms[0] if FEATURES[PLAIN] else 1.0
    if KEYS_FIRST:
        products = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
        dproducts = tl.dot(v_tile, tl.trans(dout_tile), input_precision=PRECISION)
    else:
        products = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        dproducts = tl.dot(dout_tile, tl.trans(v_tile), input_precision=PRECISION)
    keys = tl.multiple_of(first_key + tl.arange(0, k_tile.shape[0]), k_tile.shape[0])
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
    return dropped, dscores


@triton.jit
def row_deltas(out_tile, dout_tile, threshold, PRECISION: tl.constexpr):
    """delta of each query, over dropout's scale."""
    if PRECISION == "ieee":  # in the order of dP's sums: where a row has one key the two are equal, and dS is 0
        row = tl.arange(0, out_tile.shape[0])
        pairs = tl.dot(dout_tile, tl.trans(out_tile), input_precision=PRECISION)
        delta = tl.sum(tl.where(row[:, None] == row[None, :], pairs, 0.0), 1)
    else:
        delta = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    return delta * ((256 - threshold) / 256.0)


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
    statistics,  # fp32: lse in units of log2 and, statistics_size after it, delta over dropout's scale
    statistics_size,
    shape,
    terms,
    dropout,  # seed, sequence, head, threshold
    MASKED: tl.constexpr,
    FEATURES: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    columns = tl.arange(0, k_tile.shape[1])
    for first in range(begin, end, BLOCK_M):
        queries = first + tl.arange(0, BLOCK_M)
        q_tile = load_rows(q_rows, first, shape[0], columns, not EVEN, D, BLOCK_M)
        dout_tile = load_rows(dout_rows, first, shape[0], columns, not EVEN, D, BLOCK_M)
        lse = tl.load(statistics + queries)
        delta = tl.load(statistics + statistics_size + queries)
        weights, dscores = tile_gradients(
            q_tile,
            dout_tile,
            k_tile,
            v_tile,
            lse,
            delta,
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
        weights = weights.to(q_tile.dtype)
        dscores = dscores.to(q_tile.dtype)
        if KEYS_FIRST:
            dv = tl.dot(weights, dout_tile, dv, input_precision=PRECISION)
            dk = tl.dot(dscores, q_tile, dk, input_precision=PRECISION)
        else:
            dv = tl.dot(tl.trans(dout_tile), weights, dv, input_precision=PRECISION)
            dk = tl.dot(tl.trans(q_tile), dscores, dk, input_precision=PRECISION)
    return dk, dv


@launched_kernel
@triton.jit(do_not_specialize=[*_SIZES, *_STRIDES, "ahead"])
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
    bias,  # [1 or B, 1 or H, >= S, >= Sk] or unused
    slopes,  # fp32 [H] or unused
    seed,  # int64 [1] or unused
    q_batch,  # strides in units of UNIT elements, those of bias of FEATURES[BIAS]
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
    bias_batch,
    bias_head,
    bias_row,
    heads,
    kv_heads,
    tiles,  # of a sequence
    ahead,
    statistics_rows,
    statistics_size,
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
    KEYS_FIRST: tl.constexpr,  # scores are computed keys by queries
    EVEN: tl.constexpr,  # every sequence consists of whole tiles
    AHEAD: tl.constexpr,  # whether to prefetch for the program ``ahead`` of this one
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    program = tl.program_id(0)
    first = program % tiles * BLOCK_N
    kv_head = program // tiles % kv_heads
    sequence = program // tiles // kv_heads
    sequences = tl.num_programs(0) // (tiles * kv_heads) - 1
    if K_LAYOUT == "packed" and sequence == sequences:  # the rows after all sequences
        row = packed_first(k_bounds, sequence, k_size) + first
        dk_all = head_rows(dk, (0, dk_row, dk_head), sequence, 0, kv_head, UNIT, WIDE)
        clear_rows(dk_all, row, k_size, tiles * BLOCK_N, tl.arange(0, BLOCK_D), D, BLOCK_N)
        dv_all = head_rows(dv, (0, dv_row, dv_head), sequence, 0, kv_head, UNIT, WIDE)
        clear_rows(dv_all, row, k_size, tiles * BLOCK_N, tl.arange(0, BLOCK_D), D, BLOCK_N)
        return
    q_first, q_length = sequence_span(q_bounds, sequence, q_size, q_longest, Q_LAYOUT)
    k_first, k_length = sequence_span(k_bounds, sequence, k_size, k_longest, K_LAYOUT)
    k_stored = k_size if K_LAYOUT == "lengths" else k_length
    columns = tl.arange(0, BLOCK_D)
    if first >= k_stored:
        return
    shape = (q_length, k_length, window_left, window_right)
    k_rows = head_rows(k, (k_batch, k_row, k_head), sequence, k_first, kv_head, UNIT, WIDE)
    v_rows = head_rows(v, (v_batch, v_row, v_head), sequence, k_first, kv_head, UNIT, WIDE)
    k_tile = load_rows(k_rows, first, k_length, columns, not EVEN, D, BLOCK_N)
    v_tile = load_rows(v_rows, first, k_length, columns, not EVEN, D, BLOCK_N)
    if AHEAD:
        programs = tl.num_programs(0)
        if K_LAYOUT == "packed":
            programs -= tiles * kv_heads  # those of the rows after all sequences
        later = tl.minimum(program + ahead, programs - 1)
        _prefetch(
            later % tiles * BLOCK_N,
            later // tiles // kv_heads,
            later // tiles % kv_heads * (heads // kv_heads),
            (q, dout, k, v),
            ((q_batch, q_row, q_head), (dout_batch, dout_row, dout_head), (k_batch, k_row, k_head)),
            (v_batch, v_row, v_head),
            (q_bounds, k_bounds, q_size, k_size, q_longest, k_longest, heads // kv_heads),
            Q_LAYOUT,
            K_LAYOUT,
            UNIT,
            WIDE,
            D,
            BLOCK_N,
        )
    begin, full_begin, full_end, end = query_tiles(first, shape, FEATURES, BLOCK_M, BLOCK_N)
    dk_tile = tl.zeros((BLOCK_N, BLOCK_D) if KEYS_FIRST else (BLOCK_D, BLOCK_N), tl.float32)
    dv_tile = tl.zeros((BLOCK_N, BLOCK_D) if KEYS_FIRST else (BLOCK_D, BLOCK_N), tl.float32)
    seed_value = tl.load(seed) if FEATURES[DROPOUT] else 0
    group = heads // kv_heads
    for member in range(group):
        head = kv_head * group + member
        slope = tl.load(slopes + head) if FEATURES[SLOPES] else 0.0
        for part in tl.static_range(0 if FEATURES[RIGHT] else 1, 2 if EVEN and not FEATURES[LEFT] else 3):
            dk_tile, dv_tile = _over_queries(
                dk_tile,
                dv_tile,
                k_tile,
                v_tile,
                first,
                begin if part == 0 else full_begin if part == 1 else full_end,
                full_begin if part == 0 else full_end if part == 1 else end,
                head_rows(q, (q_batch, q_row, q_head), sequence, q_first, head, UNIT, WIDE),
                head_rows(dout, (dout_batch, dout_row, dout_head), sequence, q_first, head, UNIT, WIDE),
                statistics + _statistics_start(sequence, q_first, head, heads, statistics_rows, Q_LAYOUT),
                statistics_size,
                shape,
                (scale, head_bias(bias, bias_batch, bias_head, sequence, head, FEATURES), bias_row, slope),
                (seed_value, sequence, head, threshold),
                part != 1,
                FEATURES,
                KEYS_FIRST,
                EVEN,
                PRECISION,
                D,
                BLOCK_M,
            )
    if not KEYS_FIRST:
        dk_tile = tl.trans(dk_tile)
        dv_tile = tl.trans(dv_tile)
    dk_rows = head_rows(dk, (dk_batch, dk_row, dk_head), sequence, k_first, kv_head, UNIT, WIDE)
    dv_rows = head_rows(dv, (dv_batch, dv_row, dv_head), sequence, k_first, kv_head, UNIT, WIDE)
    if K_LAYOUT == "lengths":  # 0 * NaN is NaN
        real = (first + tl.arange(0, BLOCK_N) < k_length)[:, None]
        dk_tile = tl.where(real, dk_tile, 0.0)
        dv_tile = tl.where(real, dv_tile, 0.0)
    factor = scale * LN_2 * dropout_scale
    store_rows(dk_rows, first, k_stored, columns, dk_tile * factor, not EVEN, D, BLOCK_N)
    store_rows(dv_rows, first, k_stored, columns, dv_tile * dropout_scale, not EVEN, D, BLOCK_N)


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
        _, dscores = tile_gradients(
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
        dq = tl.dot(dscores.to(q_tile.dtype), k_tile, dq, input_precision=PRECISION)
    return dq


@launched_kernel
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
    bias,  # [1 or B, 1 or H, >= S, >= Sk] or unused
    slopes,  # fp32 [H] or unused
    seed,  # int64 [1] or unused
    q_batch,  # strides in units of UNIT elements, those of bias of FEATURES[BIAS]
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
    bias_batch,
    bias_head,
    bias_row,
    heads,
    kv_heads,
    tiles,  # of a sequence
    statistics_rows,
    statistics_size,
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
    EVEN: tl.constexpr,  # every sequence consists of whole tiles
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
    if Q_LAYOUT == "packed" and sequence == tl.num_programs(0) // (tiles * heads) - 1:  # the rows after all sequences
        row = packed_first(q_bounds, sequence, q_size) + first
        dq_all = head_rows(dq, (0, dq_row, dq_head), sequence, 0, head, UNIT, WIDE)
        clear_rows(dq_all, row, q_size, tiles * BLOCK_M, tl.arange(0, BLOCK_D), D, BLOCK_M)
        return
    q_first, q_length = sequence_span(q_bounds, sequence, q_size, q_longest, Q_LAYOUT)
    k_first, k_length = sequence_span(k_bounds, sequence, k_size, k_longest, K_LAYOUT)
    q_stored = q_size if Q_LAYOUT == "lengths" else q_length
    columns = tl.arange(0, BLOCK_D)
    if first >= q_stored:
        return
    queries = first + tl.arange(0, BLOCK_M)
    kv_head = head // (heads // kv_heads)
    lse_start, out_start = output_offsets(sequence, q_first, head, heads, q_size, Q_LAYOUT)
    q_rows = head_rows(q, (q_batch, q_row, q_head), sequence, q_first, head, UNIT, WIDE)
    dout_rows = head_rows(dout, (dout_batch, dout_row, dout_head), sequence, q_first, head, UNIT, WIDE)
    q_tile = load_rows(q_rows, first, q_length, columns, not EVEN, D, BLOCK_M)
    dout_tile = load_rows(dout_rows, first, q_length, columns, not EVEN, D, BLOCK_M)
    out_tile = load_rows(output_rows(out, out_start, heads, D, WIDE), first, q_length, columns, not EVEN, D, BLOCK_M)
    delta = row_deltas(out_tile, dout_tile, threshold, PRECISION)
    lse_row = lse_in_log2(lse + lse_start, queries, q_length)
    target = statistics + _statistics_start(sequence, q_first, head, heads, statistics_rows, Q_LAYOUT) + queries
    tl.store(target, lse_row)
    tl.store(target + statistics_size, delta)
    shape = (q_length, k_length, window_left, window_right)
    slope = tl.load(slopes + head) if FEATURES[SLOPES] else 0.0
    terms = (scale, head_bias(bias, bias_batch, bias_head, sequence, head, FEATURES), bias_row, slope)
    begin, full_begin, full_end, end = key_tiles(first, shape, FEATURES, BLOCK_M, BLOCK_N)
    dq_tile = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for part in tl.static_range(0 if FEATURES[LEFT] else 1, 2 if EVEN and not FEATURES[RIGHT] else 3):
        dq_tile = _over_keys(
            dq_tile,
            q_tile,
            dout_tile,
            lse_row,
            delta,
            queries,
            begin if part == 0 else full_begin if part == 1 else full_end,
            full_begin if part == 0 else full_end if part == 1 else end,
            head_rows(k, (k_batch, k_row, k_head), sequence, k_first, kv_head, UNIT, WIDE),
            head_rows(v, (v_batch, v_row, v_head), sequence, k_first, kv_head, UNIT, WIDE),
            shape,
            terms,
            (tl.load(seed) if FEATURES[DROPOUT] else 0, sequence, head, threshold),
            part != 1,
            FEATURES,
            PRECISION,
            D,
            BLOCK_N,
        )
    dq_tile = tl.where((lse_row == float("inf"))[:, None], 0.0, dq_tile)  # attends to nothing; 0 * NaN is NaN
    dq_rows = head_rows(dq, (dq_batch, dq_row, dq_head), sequence, q_first, head, UNIT, WIDE)
    store_rows(dq_rows, first, q_stored, columns, dq_tile * (scale * LN_2 * dropout_scale), not EVEN, D, BLOCK_M)
