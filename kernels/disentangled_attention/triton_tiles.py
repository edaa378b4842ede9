"""What disentangled attention's Triton kernels share: the rows of a sequence, the rows of a tile's distances, scores.

A tile has BLOCK queries and as many keys of one sequence and head; it touches 2 BLOCK - 1 distances. Their rows of a
table are loaded and multiplied with the tile's queries or keys, and each score picks its element of that small product:
with c = (m - n - 1) mod BLOCK for query m and key n of the tile,

    s = scale * (q k^T [m, n] + q kp^T [m, c] + qp k^T [c, n] + u [n] + (g [m] != g [n]) e [m])

Row c of the tables is that of one of two distances, BLOCK apart: of the one below or at that of the tile's first query
and key for m <= n, above it for m > n. Both follow from m and c, and from c and n: a product of each half is computed,
and one of the two is chosen before elements are picked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fasttfm.kernels.common.triton.packed import packed_span

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

# The tables of a call, in the order of the tuple TABLES: keys, queries; and its biases, in that of BIASES.
KEYS, QUERIES = tl.constexpr(0), tl.constexpr(1)
OF_KEYS, OF_SEGMENTS = tl.constexpr(0), tl.constexpr(1)


@triton.jit
def sequence_span(bounds, sequence, size, longest, PACKED: tl.constexpr):
    """First row and number of rows of a sequence. ``size``: rows of the tensor, or of each dense sequence."""
    if PACKED:
        return packed_span(bounds, sequence, size, longest)
    return sequence * size, size


@triton.jit
def head_rows(tensor, first, row_stride, head, head_stride):
    """Pointer to the first row of a sequence and head."""
    return tensor + tl.cast(first, tl.int64) * row_stride + tl.cast(head, tl.int64) * head_stride


@triton.jit
def load_rows(base, row_stride, first, present, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK rows from ``first`` on, zeros where not ``present`` (bool [BLOCK]) and from column D on."""
    rows, columns = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    inside = present[:, None]
    if BLOCK_D > D:
        inside = inside & (columns < D)[None, :]
    return tl.load(base + rows.to(tl.int64)[:, None] * row_stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(base, row_stride, first, length, value, D: tl.constexpr, BLOCK: tl.constexpr):
    rows, columns = first + tl.arange(0, BLOCK), tl.arange(0, value.shape[1])
    inside = (rows < length)[:, None] & (columns < D)[None, :]
    pointers = base + rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
    tl.store(pointers, value.to(base.dtype.element_ty), mask=inside)


@triton.jit
def load_table(
    table,  # a head of [table_rows, H, D]
    row_stride,
    distance_rows,  # int32 [2 middle + 1]
    offset,  # first query minus first key of a tile
    middle,
    table_rows,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The rows of distances up to ``offset``, and of those above it, of which nothing reads the last."""
    below = _load_distances(
        table, row_stride, distance_rows, offset + middle - (BLOCK - 1), middle, table_rows, D, BLOCK_D, BLOCK
    )
    above = _load_distances(
        table, row_stride, distance_rows, offset + middle + 1, middle, table_rows, D, BLOCK_D, BLOCK
    )
    return below, above


@triton.jit
def _load_distances(
    table,
    row_stride,
    distance_rows,
    first,
    middle,
    table_rows,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    places = first + tl.arange(0, BLOCK)
    rows = tl.load(distance_rows + tl.minimum(tl.maximum(places, 0), 2 * middle))
    rows = tl.minimum(tl.maximum(rows, 0), table_rows - 1)
    columns = tl.arange(0, BLOCK_D)
    pointers = table + rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
    if BLOCK_D > D:
        return tl.load(pointers, mask=(columns < D)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def tile_scores(
    q_tile,
    k_tile,
    keys,  # rows of the table of keys, below and above, or unused
    queries,
    TABLES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """fp32 [BLOCK, BLOCK], without the scale."""
    BLOCK: tl.constexpr = q_tile.shape[0]
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
    m, n = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    place = (m - n - 1) & (BLOCK - 1)
    if TABLES[KEYS]:
        below = tl.dot(q_tile, tl.trans(keys[0]), input_precision=PRECISION)
        above = tl.dot(q_tile, tl.trans(keys[1]), input_precision=PRECISION)
        scores += tl.gather(tl.where(n >= m, below, above), place, 1)
    if TABLES[QUERIES]:
        below = tl.dot(queries[0], tl.trans(k_tile), input_precision=PRECISION)
        above = tl.dot(queries[1], tl.trans(k_tile), input_precision=PRECISION)
        scores += tl.gather(tl.where(m + n + 1 >= BLOCK, below, above), place, 0)
    return scores


@triton.jit
def biased(
    scores,  # [BLOCK, BLOCK], without the scale
    sources,  # key_bias [T, H], segment_bias [T, H] and segments [T]: those that there are
    first,  # row of the sequence
    head,
    heads,
    queries,  # tokens [BLOCK]
    first_key,
    length,
    BIASES: tl.constexpr,
):
    if BIASES[OF_KEYS]:
        keys = first_key + tl.arange(0, scores.shape[1])
        of_key = _token_numbers(sources[0], first, head, heads, keys, length)
        scores += of_key[None, :]
    if BIASES[OF_SEGMENTS]:
        of_query = _token_numbers(sources[1], first, head, heads, queries, length)
        others = other_segments(sources[2], first, queries, first_key, length, scores.shape[1])
        scores += tl.where(others, of_query[:, None], 0.0)
    return scores


@triton.jit
def _token_numbers(numbers, first, head, heads, tokens, length):
    """fp32 of [T, H]: a head's number of some tokens of a sequence; 0 past its end."""
    rows = tl.cast(first, tl.int64) + tokens
    return tl.load(numbers + rows * heads + head, mask=tokens < length, other=0.0).to(tl.float32)


@triton.jit
def store_token_numbers(numbers, first, head, heads, tokens, length, value):
    rows = tl.cast(first, tl.int64) + tokens
    tl.store(numbers + rows * heads + head, value.to(numbers.dtype.element_ty), mask=tokens < length)


@triton.jit
def other_segments(segments, first, queries, first_key, length, BLOCK: tl.constexpr):
    """bool [BLOCK, BLOCK]: whether query and key are of different segments, of int32 [T]."""
    keys = first_key + tl.arange(0, BLOCK)
    base = segments + tl.cast(first, tl.int64)
    of_queries = tl.load(base + queries, mask=queries < length, other=0)
    of_keys = tl.load(base + keys, mask=keys < length, other=0)
    return of_queries[:, None] != of_keys[None, :]


@triton.jit
def by_query(dscores):
    """[query m, place c] of ds, for the distances below and above: 0 where the tile has no such key."""
    BLOCK: tl.constexpr = dscores.shape[0]
    m, c = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    gathered = tl.gather(dscores, (m - c - 1) & (BLOCK - 1), 1)
    zeros = tl.zeros_like(gathered)
    return tl.where(c >= m, gathered, zeros), tl.where(c >= m, zeros, gathered)


@triton.jit
def by_key(dscores):
    """[place c, key n] of ds, for the distances below and above: 0 where the tile has no such query."""
    BLOCK: tl.constexpr = dscores.shape[0]
    c, n = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    gathered = tl.gather(dscores, (c + n + 1) & (BLOCK - 1), 0)
    zeros = tl.zeros_like(gathered)
    return tl.where(c + n + 1 >= BLOCK, gathered, zeros), tl.where(c + n + 1 >= BLOCK, zeros, gathered)


@triton.jit
def present_tokens(mask, first, tokens, length, MASKED: tl.constexpr):
    """Which tokens of a sequence are there. ``mask`` is uint8, of the rows from ``first`` on."""
    inside = tokens < length
    if MASKED:
        inside = inside & (tl.load(mask + tl.cast(first, tl.int64) + tokens, mask=inside, other=0) != 0)
    return inside
