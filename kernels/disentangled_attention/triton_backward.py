"""Disentangled attention backward in Triton. With c the element of a tile's distances, and sums in a fixed order:

    dq = scale (ds k + [ds by query and c] kp)        dk = scale (ds^T q + [ds by c and key]^T qp)
    dkp_c = scale [ds by query and c]^T q             dqp_c = scale [ds by c and key] k

P is computed again from lse. _bwd_q_kernel has a program for each tile of queries and stores delta, which the others
read; _bwd_kv_kernel one for each tile of keys. Tiles on the same diagonal of all sequences touch the same distances:
a program of _bwd_positions_kernel has such a diagonal of some of the sequences, and writes its sums of dkp and dqp.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fasttfm.kernels.common.triton.launcher import launched_kernel
from fasttfm.kernels.common.triton.philox import dropped_weights
from fasttfm.kernels.disentangled_attention.triton_tiles import (
    KEYS,
    LN_2,
    LOG2_E,
    OF_KEYS,
    OF_SEGMENTS,
    QUERIES,
    biased,
    by_key,
    by_query,
    head_rows,
    load_rows,
    load_table,
    other_segments,
    present_tokens,
    sequence_span,
    store_rows,
    store_token_numbers,
    tile_scores,
)

_SIZES = ["total", "heads", "tiles", "size", "longest", "table_rows", "middle", "threshold"]


@triton.jit
def _gradients(
    q_tile,
    k_tile,
    v_tile,
    dout_tile,
    keys_tile,
    queries_tile,
    lse,  # fp32 [BLOCK], in units of log2; +inf for queries without weights
    delta,  # fp32 [BLOCK], over dropout's scale
    queries,
    first_key,
    present,  # bool [BLOCK], of keys
    scale,
    dropout,  # seed, sequence, head, threshold
    sources,  # of biased(), and its next arguments: the sequence's first row, heads and length
    TABLES: tl.constexpr,
    BIASES: tl.constexpr,
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """kept * P, and ds over dropout's scale; both in the type of q."""
    scores = tile_scores(q_tile, k_tile, keys_tile, queries_tile, TABLES, PRECISION)
    scores = biased(scores, sources[0], sources[1], dropout[2], sources[2], queries, first_key, sources[3], BIASES)
    scores *= scale
    weights = tl.exp2(scores - lse[:, None])
    weights = tl.where(present[None, :] & (lse != float("inf"))[:, None], weights, 0.0)
    dweights = tl.dot(dout_tile, tl.trans(v_tile), input_precision=PRECISION)
    if DROPOUT:
        dropped = dropped_weights(weights, dropout[0], dropout[1], dropout[2], queries, first_key, dropout[3])
        dscores = dropped * dweights - weights * delta[:, None]
    else:
        dropped = weights
        dscores = weights * (dweights - delta[:, None])
    dscores = tl.where(weights == 0.0, 0.0, dscores)  # a NaN among the values of keys that are not there
    return dropped.to(q_tile.dtype), dscores.to(q_tile.dtype)


@triton.jit
def _lse_in_log2(lse, queries, length):
    """lse of queries in units of log2; +inf for those that attend to nothing."""
    natural = tl.load(lse + queries, mask=queries < length, other=-float("inf"))
    return tl.where(natural == -float("inf"), float("inf"), natural * LOG2_E)


@triton.jit
def _row_deltas(out_tile, dout_tile, threshold, PRECISION: tl.constexpr):
    """delta of each query, over dropout's scale."""
    if PRECISION == "tf32x3":  # as dP's sums: where a row has one key the two are equal, and ds is 0
        row = tl.arange(0, out_tile.shape[0])
        pairs = tl.dot(dout_tile, tl.trans(out_tile), input_precision=PRECISION)
        delta = tl.sum(tl.where(row[:, None] == row[None, :], pairs, 0.0), 1)
    else:
        delta = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    return delta * ((256 - threshold) / 256.0)


@launched_kernel
@triton.jit(do_not_specialize=_SIZES)
def _bwd_q_kernel(
    q,  # [T, H, D]
    k,
    v,
    dout,  # [T, H, D], contiguous
    position_keys,  # [table_rows, H, D] or unused
    position_queries,
    key_bias,  # [T, H], contiguous, or unused
    segment_bias,
    segments,  # int32 [T], or unused
    distance_rows,  # int32 [2 middle + 1]
    bounds,  # int32 [sequences + 1], or unused
    mask,  # uint8 [T], or unused
    seed,  # int64 [1], or unused
    lse,  # fp32 [H, T]
    deltas,  # fp32 [H, T]: written here
    out,  # [T, H, D], contiguous
    dq,  # [T, H, D], contiguous
    dsegment_bias,  # [T, H], contiguous, or unused
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    keys_row,
    keys_head,
    queries_row,
    queries_head,
    total,  # T
    heads,
    tiles,  # of a sequence
    size,  # T, or the tokens of each dense sequence
    longest,
    table_rows,
    middle,
    scale,  # in units of log2
    threshold,
    dropout_scale,
    PACKED: tl.constexpr,
    MASKED: tl.constexpr,
    TABLES: tl.constexpr,
    BIASES: tl.constexpr,
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    first_query = program % tiles * BLOCK
    head, sequence = program // tiles % heads, program // tiles // heads
    first, length = sequence_span(bounds, sequence, size, longest, PACKED)
    if first_query >= length:
        return
    queries = first_query + tl.arange(0, BLOCK)
    there = present_tokens(mask, first, queries, length, MASKED)
    row = tl.cast(heads, tl.int64) * D
    q_tile = load_rows(head_rows(q, first, q_row, head, q_head), q_row, first_query, there, D, BLOCK_D, BLOCK)
    dout_tile = load_rows(head_rows(dout, first, row, head, D), row, first_query, there, D, BLOCK_D, BLOCK)
    out_tile = load_rows(head_rows(out, first, row, head, D), row, first_query, there, D, BLOCK_D, BLOCK)
    delta = _row_deltas(out_tile, dout_tile, threshold, PRECISION)
    statistics = tl.cast(head, tl.int64) * total + first
    tl.store(deltas + statistics + queries, delta, mask=queries < length)
    lse_row = _lse_in_log2(lse + statistics, queries, length)
    k_base = head_rows(k, first, k_row, head, k_head)
    v_base = head_rows(v, first, v_row, head, v_head)
    keys_table = head_rows(position_keys, 0, keys_row, head, keys_head)
    queries_table = head_rows(position_queries, 0, queries_row, head, queries_head)
    seed_value = tl.load(seed) if DROPOUT else 0
    dq_tile = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    dbias = tl.zeros((BLOCK,), tl.float32)
    for first_key in range(0, length, BLOCK):
        present = present_tokens(mask, first, first_key + tl.arange(0, BLOCK), length, MASKED)
        k_tile = load_rows(k_base, k_row, first_key, present, D, BLOCK_D, BLOCK)
        v_tile = load_rows(v_base, v_row, first_key, present, D, BLOCK_D, BLOCK)
        offset = first_query - first_key
        keys_tile = (q_tile, q_tile)
        queries_tile = (k_tile, k_tile)
        if TABLES[KEYS]:
            keys_tile = load_table(keys_table, keys_row, distance_rows, offset, middle, table_rows, D, BLOCK_D, BLOCK)
        if TABLES[QUERIES]:
            queries_tile = load_table(
                queries_table, queries_row, distance_rows, offset, middle, table_rows, D, BLOCK_D, BLOCK
            )
        _, dscores = _gradients(
            q_tile,
            k_tile,
            v_tile,
            dout_tile,
            keys_tile,
            queries_tile,
            lse_row,
            delta,
            queries,
            first_key,
            present,
            scale,
            (seed_value, sequence, head, threshold),
            ((key_bias, segment_bias, segments), first, heads, length),
            TABLES,
            BIASES,
            DROPOUT,
            PRECISION,
        )
        if BIASES[OF_SEGMENTS]:
            others = other_segments(segments, first, queries, first_key, length, BLOCK)
            dbias += tl.sum(tl.where(others, dscores.to(tl.float32), 0.0), 1)
        dq_tile = tl.dot(dscores, k_tile, dq_tile, input_precision=PRECISION)
        if TABLES[KEYS]:
            below, above = by_query(dscores)
            dq_tile = tl.dot(below, keys_tile[0], dq_tile, input_precision=PRECISION)
            dq_tile = tl.dot(above, keys_tile[1], dq_tile, input_precision=PRECISION)
    factor = scale * LN_2 * dropout_scale
    store_rows(head_rows(dq, first, row, head, D), row, first_query, length, dq_tile * factor, D, BLOCK)
    if BIASES[OF_SEGMENTS]:
        store_token_numbers(dsegment_bias, first, head, heads, queries, length, dbias * factor)


@launched_kernel
@triton.jit(do_not_specialize=_SIZES)
def _bwd_kv_kernel(
    q,  # [T, H, D]
    k,
    v,
    dout,  # [T, H, D], contiguous
    position_keys,  # [table_rows, H, D] or unused
    position_queries,
    key_bias,  # [T, H], contiguous, or unused
    segment_bias,
    segments,  # int32 [T], or unused
    distance_rows,  # int32 [2 middle + 1]
    bounds,  # int32 [sequences + 1], or unused
    mask,  # uint8 [T], or unused
    seed,  # int64 [1], or unused
    lse,  # fp32 [H, T]
    deltas,  # fp32 [H, T]: over dropout's scale
    dk,  # [T, H, D], contiguous
    dv,
    dkey_bias,  # [T, H], contiguous, or unused
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    keys_row,
    keys_head,
    queries_row,
    queries_head,
    total,  # T
    heads,
    tiles,  # of a sequence
    size,  # T, or the tokens of each dense sequence
    longest,
    table_rows,
    middle,
    scale,  # in units of log2
    threshold,
    dropout_scale,
    PACKED: tl.constexpr,
    MASKED: tl.constexpr,
    TABLES: tl.constexpr,
    BIASES: tl.constexpr,
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    first_key = program % tiles * BLOCK
    head, sequence = program // tiles % heads, program // tiles // heads
    first, length = sequence_span(bounds, sequence, size, longest, PACKED)
    if first_key >= length:
        return
    row = tl.cast(heads, tl.int64) * D
    present = present_tokens(mask, first, first_key + tl.arange(0, BLOCK), length, MASKED)
    k_tile = load_rows(head_rows(k, first, k_row, head, k_head), k_row, first_key, present, D, BLOCK_D, BLOCK)
    v_tile = load_rows(head_rows(v, first, v_row, head, v_head), v_row, first_key, present, D, BLOCK_D, BLOCK)
    statistics = tl.cast(head, tl.int64) * total + first
    q_base = head_rows(q, first, q_row, head, q_head)
    dout_base = head_rows(dout, first, row, head, D)
    keys_table = head_rows(position_keys, 0, keys_row, head, keys_head)
    queries_table = head_rows(position_queries, 0, queries_row, head, queries_head)
    seed_value = tl.load(seed) if DROPOUT else 0
    dk_tile = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    dv_tile = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    dbias = tl.zeros((BLOCK,), tl.float32)
    for first_query in range(0, length, BLOCK):
        queries = first_query + tl.arange(0, BLOCK)
        there = present_tokens(mask, first, queries, length, MASKED)
        q_tile = load_rows(q_base, q_row, first_query, there, D, BLOCK_D, BLOCK)
        dout_tile = load_rows(dout_base, row, first_query, there, D, BLOCK_D, BLOCK)
        lse_row = _lse_in_log2(lse + statistics, queries, length)
        delta = tl.load(deltas + statistics + queries, mask=queries < length, other=0.0)
        offset = first_query - first_key
        keys_tile = (q_tile, q_tile)
        queries_tile = (k_tile, k_tile)
        if TABLES[KEYS]:
            keys_tile = load_table(keys_table, keys_row, distance_rows, offset, middle, table_rows, D, BLOCK_D, BLOCK)
        if TABLES[QUERIES]:
            queries_tile = load_table(
                queries_table, queries_row, distance_rows, offset, middle, table_rows, D, BLOCK_D, BLOCK
            )
        weights, dscores = _gradients(
            q_tile,
            k_tile,
            v_tile,
            dout_tile,
            keys_tile,
            queries_tile,
            lse_row,
            delta,
            queries,
            first_key,
            present,
            scale,
            (seed_value, sequence, head, threshold),
            ((key_bias, segment_bias, segments), first, heads, length),
            TABLES,
            BIASES,
            DROPOUT,
            PRECISION,
        )
        dv_tile = tl.dot(tl.trans(weights), dout_tile, dv_tile, input_precision=PRECISION)
        if BIASES[OF_KEYS]:
            dbias += tl.sum(dscores.to(tl.float32), 0)
        dk_tile = tl.dot(tl.trans(dscores), q_tile, dk_tile, input_precision=PRECISION)
        if TABLES[QUERIES]:
            below, above = by_key(dscores)
            dk_tile = tl.dot(tl.trans(below), queries_tile[0], dk_tile, input_precision=PRECISION)
            dk_tile = tl.dot(tl.trans(above), queries_tile[1], dk_tile, input_precision=PRECISION)
    dk_base, dv_base = head_rows(dk, first, row, head, D), head_rows(dv, first, row, head, D)
    factor = scale * LN_2 * dropout_scale
    store_rows(dk_base, row, first_key, length, dk_tile * factor, D, BLOCK)
    store_rows(dv_base, row, first_key, length, dv_tile * dropout_scale, D, BLOCK)
    if BIASES[OF_KEYS]:
        keys = first_key + tl.arange(0, BLOCK)
        store_token_numbers(dkey_bias, first, head, heads, keys, length, dbias * factor)


@launched_kernel
@triton.jit(do_not_specialize=[*_SIZES, "sequences", "chunks"])
def _bwd_positions_kernel(
    q,  # [T, H, D]
    k,
    v,
    dout,  # [T, H, D], contiguous
    position_keys,  # [table_rows, H, D] or unused
    position_queries,
    key_bias,  # [T, H], contiguous, or unused
    segment_bias,
    segments,  # int32 [T], or unused
    distance_rows,  # int32 [2 middle + 1]
    bounds,  # int32 [sequences + 1], or unused
    mask,  # uint8 [T], or unused
    seed,  # int64 [1], or unused
    lse,  # fp32 [H, T]
    deltas,  # fp32 [H, T]: over dropout's scale
    sums,  # fp32 [2, chunks, H, 2 tiles - 1, 2 BLOCK, D]: of dkp and of dqp
    sequences,
    chunks,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    keys_row,
    keys_head,
    queries_row,
    queries_head,
    total,  # T
    heads,
    tiles,  # of a sequence
    size,  # T, or the tokens of each dense sequence
    longest,
    table_rows,
    middle,
    scale,  # in units of log2
    threshold,
    dropout_scale,
    PACKED: tl.constexpr,
    MASKED: tl.constexpr,
    TABLES: tl.constexpr,
    BIASES: tl.constexpr,
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    diagonals = 2 * tiles - 1
    index = program // (heads * chunks)  # the longest diagonals first: 0, 1, -1, 2, -2, ...
    diagonal = tl.where(index % 2 == 1, (index + 1) // 2, -(index // 2))
    head, chunk = program % heads, program // heads % chunks
    offset = diagonal * BLOCK  # first query minus first key
    row = tl.cast(heads, tl.int64) * D
    keys_table = head_rows(position_keys, 0, keys_row, head, keys_head)
    queries_table = head_rows(position_queries, 0, queries_row, head, queries_head)
    if TABLES[KEYS]:
        keys_tile = load_table(keys_table, keys_row, distance_rows, offset, middle, table_rows, D, BLOCK_D, BLOCK)
    if TABLES[QUERIES]:
        queries_tile = load_table(
            queries_table, queries_row, distance_rows, offset, middle, table_rows, D, BLOCK_D, BLOCK
        )
    if not TABLES[KEYS]:
        keys_tile = queries_tile
    if not TABLES[QUERIES]:
        queries_tile = keys_tile
    seed_value = tl.load(seed) if DROPOUT else 0
    dkeys_below = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    dkeys_above = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    dqueries_below = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    dqueries_above = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    for step in range(0, sequences - chunk, chunks):
        sequence = chunk + step
        first, length = sequence_span(bounds, sequence, size, longest, PACKED)
        statistics = tl.cast(head, tl.int64) * total + first
        q_base = head_rows(q, first, q_row, head, q_head)
        k_base = head_rows(k, first, k_row, head, k_head)
        v_base = head_rows(v, first, v_row, head, v_head)
        dout_base = head_rows(dout, first, row, head, D)
        for first_query in range(tl.maximum(offset, 0), tl.minimum(length, length + offset), BLOCK):
            first_key = first_query - offset
            queries = first_query + tl.arange(0, BLOCK)
            there = present_tokens(mask, first, queries, length, MASKED)
            present = present_tokens(mask, first, first_key + tl.arange(0, BLOCK), length, MASKED)
            q_tile = load_rows(q_base, q_row, first_query, there, D, BLOCK_D, BLOCK)
            k_tile = load_rows(k_base, k_row, first_key, present, D, BLOCK_D, BLOCK)
            v_tile = load_rows(v_base, v_row, first_key, present, D, BLOCK_D, BLOCK)
            dout_tile = load_rows(dout_base, row, first_query, there, D, BLOCK_D, BLOCK)
            lse_row = _lse_in_log2(lse + statistics, queries, length)
            delta = tl.load(deltas + statistics + queries, mask=queries < length, other=0.0)
            _, dscores = _gradients(
                q_tile,
                k_tile,
                v_tile,
                dout_tile,
                keys_tile,
                queries_tile,
                lse_row,
                delta,
                queries,
                first_key,
                present,
                scale,
                (seed_value, sequence, head, threshold),
                ((key_bias, segment_bias, segments), first, heads, length),
                TABLES,
                BIASES,
                DROPOUT,
                PRECISION,
            )
            if TABLES[KEYS]:
                below, above = by_query(dscores)
                dkeys_below = tl.dot(tl.trans(below), q_tile, dkeys_below, input_precision=PRECISION)
                dkeys_above = tl.dot(tl.trans(above), q_tile, dkeys_above, input_precision=PRECISION)
            if TABLES[QUERIES]:
                below, above = by_key(dscores)
                dqueries_below = tl.dot(below, k_tile, dqueries_below, input_precision=PRECISION)
                dqueries_above = tl.dot(above, k_tile, dqueries_above, input_precision=PRECISION)
    factor = scale * LN_2 * dropout_scale
    block = (tl.cast(chunk, tl.int64) * heads + head) * diagonals + diagonal + tiles - 1
    target = sums + block * (2 * BLOCK * D)
    if TABLES[KEYS]:
        store_rows(target, D, 0, BLOCK, dkeys_below * factor, D, BLOCK)
        store_rows(target, D, BLOCK, 2 * BLOCK, dkeys_above * factor, D, BLOCK)
    if TABLES[QUERIES]:
        target += tl.cast(chunks, tl.int64) * heads * diagonals * (2 * BLOCK * D)
        store_rows(target, D, 0, BLOCK, dqueries_below * factor, D, BLOCK)
        store_rows(target, D, BLOCK, 2 * BLOCK, dqueries_above * factor, D, BLOCK)
