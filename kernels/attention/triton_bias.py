"""The gradient of attention's bias in Triton: dbias = sum of dS over the sequences and heads that share an element.

A program has a tile of the bias and iterates over those sequences and heads in order. There are no atomics, so every
run gives the same bits. dS is recomputed from q, k, v, out, dout and lse, as in triton_backward.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fasttfm.kernels.attention.triton_backward import row_deltas, tile_gradients
from fasttfm.kernels.attention.triton_tiles import (
    DROPOUT,
    LEFT,
    RIGHT,
    SLOPES,
    head_bias,
    head_rows,
    load_rows,
    lse_in_log2,
    output_offsets,
    output_rows,
    sequence_span,
)
from fasttfm.kernels.common.triton.launcher import launched_kernel

_SIZES = [
    "sequences",
    "heads",
    "group",
    "q_size",
    "k_size",
    "q_longest",
    "k_longest",
    "window_left",
    "window_right",
    "threshold",
]
_TILES = ["query_tiles", "key_tiles", "bias_heads", "rows", "keys"]
_STRIDES = [f"{tensor}_{axis}" for tensor in ("q", "k", "v", "dout") for axis in ("batch", "row", "head")]
_STRIDES += [f"{tensor}_{axis}" for tensor in ("bias", "dbias") for axis in ("batch", "head", "row")]


@triton.jit
def _attends(first, first_key, shape, FEATURES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Whether a query of the tile may attend to a key of it."""
    q_length, k_length, window_left, window_right = shape
    offset = k_length - q_length
    attends = (first < q_length) & (first_key < k_length)
    if FEATURES[LEFT]:
        attends = attends & (first_key + BLOCK_N - 1 >= first + offset - window_left)
    if FEATURES[RIGHT]:
        attends = attends & (first_key <= tl.minimum(first + BLOCK_M, q_length) - 1 + offset + window_right)
    return attends


@launched_kernel
@triton.jit(do_not_specialize=[*_SIZES, *_TILES, *_STRIDES])
def _bias_kernel(
    q,  # [B, S, H, D] or [T, H, D]
    k,  # [B, Sk, Hk, D] or [Tk, Hk, D]
    v,
    out,  # like q, contiguous
    dout,  # like q
    lse,  # fp32 [B, H, S] or [H, T]
    dbias,  # [1 or B, 1 or H, rows, keys]
    q_bounds,  # int32: cu_seqlens or lengths, or unused
    k_bounds,
    bias,  # [1 or B, 1 or H, >= S, >= Sk]
    slopes,  # fp32 [H] or unused
    seed,  # int64 [1] or unused
    q_batch,  # strides in units of UNIT elements, those of bias of FEATURES[BIAS], those of dbias in elements
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
    bias_batch,
    bias_head,
    bias_row,
    dbias_batch,
    dbias_head,
    dbias_row,
    sequences,
    heads,
    group,  # H / Hk
    query_tiles,
    key_tiles,
    bias_heads,  # 1 or H
    rows,
    keys,
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
    ALL_SEQUENCES: tl.constexpr,  # share the bias
    ALL_HEADS: tl.constexpr,
    EVEN: tl.constexpr,  # every sequence consists of whole tiles
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    program = tl.program_id(0)
    first_key = program % key_tiles * BLOCK_N
    first = program // key_tiles % query_tiles * BLOCK_M
    own_head = program // key_tiles // query_tiles % bias_heads
    own_sequence = program // key_tiles // query_tiles // bias_heads
    queries = first + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(sequences if ALL_SEQUENCES else 1):
        sequence = own_sequence + step
        q_first, q_length = sequence_span(q_bounds, sequence, q_size, q_longest, Q_LAYOUT)
        k_first, k_length = sequence_span(k_bounds, sequence, k_size, k_longest, K_LAYOUT)
        shape = (q_length, k_length, window_left, window_right)
        if _attends(first, first_key, shape, FEATURES, BLOCK_M, BLOCK_N):
            for member in range(heads if ALL_HEADS else 1):
                head = own_head + member
                lse_start, out_start = output_offsets(sequence, q_first, head, heads, q_size, Q_LAYOUT)
                q_rows = head_rows(q, (q_batch, q_row, q_head), sequence, q_first, head, UNIT, WIDE)
                dout_rows = head_rows(dout, (dout_batch, dout_row, dout_head), sequence, q_first, head, UNIT, WIDE)
                k_rows = head_rows(k, (k_batch, k_row, k_head), sequence, k_first, head // group, UNIT, WIDE)
                v_rows = head_rows(v, (v_batch, v_row, v_head), sequence, k_first, head // group, UNIT, WIDE)
                dout_tile = load_rows(dout_rows, first, q_length, columns, not EVEN, D, BLOCK_M)
                out_tile = load_rows(
                    output_rows(out, out_start, heads, D, WIDE), first, q_length, columns, not EVEN, D, BLOCK_M
                )
                added = head_bias(bias, bias_batch, bias_head, sequence, head, FEATURES)
                _, dscores = tile_gradients(
                    load_rows(q_rows, first, q_length, columns, not EVEN, D, BLOCK_M),
                    dout_tile,
                    load_rows(k_rows, first_key, k_length, columns, not EVEN, D, BLOCK_N),
                    load_rows(v_rows, first_key, k_length, columns, not EVEN, D, BLOCK_N),
                    lse_in_log2(lse + lse_start, queries, q_length),
                    row_deltas(out_tile, dout_tile, threshold, PRECISION),
                    queries,
                    first_key,
                    shape,
                    (scale, added, bias_row, tl.load(slopes + head) if FEATURES[SLOPES] else 0.0),
                    (tl.load(seed) if FEATURES[DROPOUT] else 0, sequence, head, threshold),
                    not EVEN or FEATURES[LEFT] or FEATURES[RIGHT],
                    FEATURES,
                    False,
                    PRECISION,
                )
                total += dscores
    inside = (queries < rows)[:, None] & (first_key + tl.arange(0, BLOCK_N) < keys)[None, :]
    start = dbias + own_sequence.to(tl.int64) * dbias_batch + own_head.to(tl.int64) * dbias_head
    places = queries.to(tl.int64)[:, None] * dbias_row + (first_key + tl.arange(0, BLOCK_N))[None, :]
    tl.store(start + places, (total * dropout_scale).to(dbias.dtype.element_ty), mask=inside)
