"""Attention forward in Triton: out = softmax(scale * q k^T + bias) v, with dropout on the weights.

A program has BLOCK_M queries of one sequence and head and iterates over the keys they attend to with a running maximum
m and sum l (online softmax): tiles at the left edge of the window, full tiles that need no mask, and the last ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fasttfm.kernels.attention.triton_tiles import (
    BIAS,
    DROPOUT,
    LEFT,
    PLAIN,
    RIGHT,
    SLOPES,
    clear_outputs,
    head_bias,
    head_rows,
    key_tiles,
    load_rows,
    masked_scores,
    natural_lse,
    output_offsets,
    output_rows,
    sequence_span,
    store_rows,
)
from fasttfm.kernels.common.triton.launcher import launched_kernel
from fasttfm.kernels.common.triton.packed import packed_first
from fasttfm.kernels.common.triton.philox import dropped_rounded


@triton.jit
def _over_keys(
    accumulator,  # fp32 [BLOCK_M, BLOCK_D]
    m,  # fp32 [BLOCK_M], in units of log2
    l,  # fp32 [BLOCK_M]
    q_tile,
    queries,  # int32 [BLOCK_M]
    begin,
    end,
    k_rows,  # of head_rows
    v_rows,
    shape,
    terms,
    dropout,  # seed, sequence, head, threshold
    MASKED: tl.constexpr,
    FEATURES: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    columns = tl.arange(0, q_tile.shape[1])
    factor = terms[0] if FEATURES[PLAIN] else 1.0
    for first in range(begin, end, BLOCK_N):
        k_tile = load_rows(k_rows, first, shape[1], columns, MASKED, D, BLOCK_N)
        products = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        keys = tl.multiple_of(first + tl.arange(0, BLOCK_N), BLOCK_N)
        scores = masked_scores(products, queries[:, None], keys[None, :], shape, terms, MASKED, FEATURES)
        higher = tl.maximum(m, tl.max(scores, 1) * factor)
        reference = higher
        if MASKED or FEATURES[BIAS]:
            reference = tl.where(higher == -float("inf"), 0.0, higher)  # nothing attended to so far
        weights = tl.exp2(scores * factor - reference[:, None])
        correction = tl.exp2(m - reference)
        l = l * correction + tl.sum(weights, 1)
        accumulator = accumulator * correction[:, None]
        v_tile = load_rows(v_rows, first, shape[1], columns, MASKED, D, BLOCK_N)
        if FEATURES[DROPOUT]:
            seed, sequence, head, threshold = dropout
            weights = dropped_rounded(weights, seed, sequence, head, queries, first, threshold, v_tile.dtype)
        accumulator = tl.dot(weights.to(v_tile.dtype), v_tile, accumulator, input_precision=PRECISION)
        m = higher
    return accumulator, m, l


_SIZES = [
    "heads",
    "group",
    "tiles",
    "q_size",
    "k_size",
    "q_longest",
    "k_longest",
    "window_left",
    "window_right",
    "threshold",
]
_STRIDES = [f"{tensor}_{axis}" for tensor in "qkv" for axis in ("batch", "row", "head")] + [
    "bias_batch",
    "bias_head",
    "bias_row",
]


@launched_kernel
@triton.jit(do_not_specialize=[*_SIZES, *_STRIDES])
def _fwd_kernel(
    q,  # [B, S, H, D] or [T, H, D]
    k,  # [B, Sk, Hk, D] or [Tk, Hk, D]
    v,
    out,  # like q, contiguous
    lse,  # fp32 [B, H, S] or [H, T]
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
    bias_batch,
    bias_head,
    bias_row,
    heads,
    group,  # H / Hk
    tiles,  # of a sequence
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
        clear_outputs((out, lse), row, tiles * BLOCK_M, head, heads, q_size, tl.arange(0, BLOCK_D), WIDE, D, BLOCK_M)
        return
    q_first, q_length = sequence_span(q_bounds, sequence, q_size, q_longest, Q_LAYOUT)
    k_first, k_length = sequence_span(k_bounds, sequence, k_size, k_longest, K_LAYOUT)
    rows = q_size if Q_LAYOUT == "lengths" else q_length  # rows past a dense sequence's length are written as zeros
    columns = tl.arange(0, BLOCK_D)
    if first >= rows:
        return
    queries = first + tl.arange(0, BLOCK_M)
    q_rows = head_rows(q, (q_batch, q_row, q_head), sequence, q_first, head, UNIT, WIDE)
    k_rows = head_rows(k, (k_batch, k_row, k_head), sequence, k_first, head // group, UNIT, WIDE)
    v_rows = head_rows(v, (v_batch, v_row, v_head), sequence, k_first, head // group, UNIT, WIDE)
    q_tile = load_rows(q_rows, first, q_length, columns, not EVEN, D, BLOCK_M)
    shape = (q_length, k_length, window_left, window_right)
    slope = tl.load(slopes + head) if FEATURES[SLOPES] else 0.0
    terms = (scale, head_bias(bias, bias_batch, bias_head, sequence, head, FEATURES), bias_row, slope)
    dropout = (tl.load(seed) if FEATURES[DROPOUT] else 0, sequence, head, threshold)
    begin, full_begin, full_end, end = key_tiles(first, shape, FEATURES, BLOCK_M, BLOCK_N)
    accumulator = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    m = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    for part in tl.static_range(0 if FEATURES[LEFT] else 1, 2 if EVEN and not FEATURES[RIGHT] else 3):
        accumulator, m, l = _over_keys(
            accumulator,
            m,
            l,
            q_tile,
            queries,
            begin if part == 0 else full_begin if part == 1 else full_end,
            full_begin if part == 0 else full_end if part == 1 else end,
            k_rows,
            v_rows,
            shape,
            terms,
            dropout,
            part != 1,
            FEATURES,
            PRECISION,
            D,
            BLOCK_N,
        )
    if Q_LAYOUT == "lengths":
        l = tl.where(queries < q_length, l, 0.0)
    accumulator = tl.where((l == 0.0)[:, None], 0.0, accumulator * (dropout_scale / l)[:, None])
    lse_start, out_start = output_offsets(sequence, q_first, head, heads, q_size, Q_LAYOUT)
    tl.store(lse + lse_start + queries, natural_lse(m, l), mask=queries < rows)
    store_rows(output_rows(out, out_start, heads, D, WIDE), first, rows, columns, accumulator, not EVEN, D, BLOCK_M)
