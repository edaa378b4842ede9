"""Disentangled attention forward in Triton: out = softmax(s) v, with dropout on the weights.

A program has a tile of queries of one sequence and head and iterates over all keys with a running maximum m and sum l
(online softmax).
"""

from __future__ import annotations

import triton
import triton.language as tl

from fasttfm.kernels.common.triton.launcher import launched_kernel
from fasttfm.kernels.common.triton.philox import dropped_rounded
from fasttfm.kernels.disentangled_attention.triton_tiles import (
    KEYS,
    LN_2,
    QUERIES,
    biased,
    head_rows,
    load_rows,
    load_table,
    present_tokens,
    sequence_span,
    store_rows,
    tile_scores,
)

_SIZES = ["total", "heads", "tiles", "size", "longest", "table_rows", "middle", "threshold"]


@launched_kernel
@triton.jit(do_not_specialize=_SIZES)
def _fwd_kernel(
    q,  # [T, H, D]
    k,
    v,
    position_keys,  # [table_rows, H, D] or unused
    position_queries,
    key_bias,  # [T, H], contiguous, or unused
    segment_bias,
    segments,  # int32 [T], or unused
    distance_rows,  # int32 [2 middle + 1]
    bounds,  # int32 [sequences + 1], or unused
    mask,  # uint8 [T], or unused
    seed,  # int64 [1], or unused
    out,  # [T, H, D], contiguous
    lse,  # fp32 [H, T]
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
    q_tile = load_rows(head_rows(q, first, q_row, head, q_head), q_row, first_query, there, D, BLOCK_D, BLOCK)
    k_base = head_rows(k, first, k_row, head, k_head)
    v_base = head_rows(v, first, v_row, head, v_head)
    keys_table = head_rows(position_keys, 0, keys_row, head, keys_head)
    queries_table = head_rows(position_queries, 0, queries_row, head, queries_head)
    seed_value = tl.load(seed) if DROPOUT else 0
    accumulator = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    m = tl.full((BLOCK,), -float("inf"), tl.float32)
    l = tl.zeros((BLOCK,), tl.float32)
    for first_key in range(0, length, BLOCK):
        present = present_tokens(mask, first, first_key + tl.arange(0, BLOCK), length, MASKED)
        k_tile = load_rows(k_base, k_row, first_key, present, D, BLOCK_D, BLOCK)
        offset = first_query - first_key
        keys_tile = (q_tile, q_tile)
        queries_tile = (k_tile, k_tile)
        if TABLES[KEYS]:
            keys_tile = load_table(keys_table, keys_row, distance_rows, offset, middle, table_rows, D, BLOCK_D, BLOCK)
        if TABLES[QUERIES]:
            queries_tile = load_table(
                queries_table, queries_row, distance_rows, offset, middle, table_rows, D, BLOCK_D, BLOCK
            )
        scores = tile_scores(q_tile, k_tile, keys_tile, queries_tile, TABLES, PRECISION)
        sources = (key_bias, segment_bias, segments)
        scores = biased(scores, sources, first, head, heads, queries, first_key, length, BIASES) * scale
        scores = tl.where(present[None, :], scores, -float("inf"))
        higher = tl.maximum(m, tl.max(scores, 1))
        reference = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp2(scores - reference[:, None])
        correction = tl.exp2(m - reference)
        l = l * correction + tl.sum(weights, 1)
        accumulator = accumulator * correction[:, None]
        v_tile = load_rows(v_base, v_row, first_key, present, D, BLOCK_D, BLOCK)
        if DROPOUT:
            weights = dropped_rounded(weights, seed_value, sequence, head, queries, first_key, threshold, v_tile.dtype)
        accumulator = tl.dot(weights.to(v_tile.dtype), v_tile, accumulator, input_precision=PRECISION)
        m = higher
    l = tl.where(there, l, 0.0)
    accumulator = tl.where((l == 0.0)[:, None], 0.0, accumulator * (dropout_scale / l)[:, None])
    natural = tl.where(l == 0.0, -float("inf"), tl.fma(m, LN_2, tl.log2(l) * LN_2))
    tl.store(lse + tl.cast(head, tl.int64) * total + first + queries, natural, mask=queries < length)
    row = tl.cast(heads, tl.int64) * D
    store_rows(head_rows(out, first, row, head, D), row, first_query, length, accumulator, D, BLOCK)
