"""What attention's Triton kernels share: the rows of a sequence, which tiles need a mask, and a tile's scores.

A tile holds BLOCK_M queries (rows) and BLOCK_N keys (columns) of one sequence and head; indices count from the start of
the sequence. Scores are in units of log2, because GPUs compute exp2. Two groups of values are passed as tuples:

    shape = (q_length, k_length, window_left, window_right)
    terms = (scale, bias, bias_row, slope)          scale in units of log2, bias [queries, keys] of the head, its rows
                                                    bias_row * FEATURES[BIAS] elements apart
"""

from __future__ import annotations

import triton
import triton.language as tl

from fasttfm.kernels.common.triton.packed import packed_span

# What a call has, in the order of the tuple FEATURES: a limit of the window to the left, one to the right, a bias (0
# for none, otherwise the unit of its strides in elements), slopes, scores that are the plain products times a positive
# scale, dropout.
LEFT, RIGHT, BIAS, SLOPES, PLAIN, DROPOUT = (tl.constexpr(index) for index in range(6))

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def sequence_span(bounds, sequence, size, longest, LAYOUT: tl.constexpr):
    """First row (0 when dense) and number of rows of a sequence. ``size``: rows of the tensor, per sequence if dense;
    ``longest``: max_seqlen of packed sequences.

    ``bounds`` is cu_seqlens if LAYOUT is "packed", lengths if it is "lengths", and not read if it is "dense".
    """
    if LAYOUT == "packed":
        return packed_span(bounds, sequence, size, longest)
    length = size
    if LAYOUT == "lengths":
        length = tl.minimum(tl.maximum(tl.load(bounds + sequence), 0), size)
    return tl.zeros_like(sequence), length


@triton.jit
def row_stride(stride, WIDE: tl.constexpr):
    """A stride of rows, in 64 bits where WIDE. The launcher sets WIDE if a tile spans 2^31 elements; otherwise offsets
    inside of a tile have 32 bits, which take fewer registers."""
    return tl.cast(stride, tl.int64) if WIDE else stride


@triton.jit
def head_rows(tensor, strides, sequence, first, head, UNIT: tl.constexpr, WIDE: tl.constexpr):
    """One head of a sequence whose first row is ``first``: pointer to that row, and stride of rows in elements.
    ``strides`` of sequences, rows and heads are in units of UNIT elements."""
    offset = sequence.to(tl.int64) * strides[0] + tl.cast(first, tl.int64) * strides[1] + head.to(tl.int64) * strides[2]
    return tensor + offset * UNIT, row_stride(strides[1], WIDE) * UNIT


@triton.jit
def output_rows(out, start, heads, D: tl.constexpr, WIDE: tl.constexpr):
    """The same for a contiguous tensor, whose row ``start`` of D elements is the first."""
    return out + start * D, row_stride(heads, WIDE) * D


@triton.jit
def head_bias(bias, batch_stride, head_stride, sequence, head, FEATURES: tl.constexpr):
    """The bias of a sequence and head; a stride is 0 where all share it."""
    return bias + (sequence.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride) * FEATURES[BIAS]


@triton.jit
def output_offsets(sequence, first, head, heads, size, LAYOUT: tl.constexpr):
    """The offset of a sequence's first row in lse, and in a contiguous out in rows of D."""
    if LAYOUT == "packed":
        return head.to(tl.int64) * size + first, first.to(tl.int64) * heads + head
    return (sequence.to(tl.int64) * heads + head) * size, sequence.to(tl.int64) * size * heads + head


@triton.jit
def load_rows(head, first, rows, columns, MASKED: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Rows ``first`` to ``first + BLOCK`` of a head; zeros past D and, where MASKED, past row ``rows``."""
    base, stride = head
    offsets = tl.arange(0, BLOCK)[:, None] * stride + columns[None, :]
    pointers = base + tl.cast(first, tl.int64) * stride + offsets
    if MASKED:
        inside = (first + tl.arange(0, BLOCK) < rows)[:, None]
        if columns.shape[0] > D:
            inside = inside & (columns < D)[None, :]
        return tl.load(pointers, mask=inside, other=0.0)
    if columns.shape[0] > D:
        return tl.load(pointers, mask=(columns < D)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def store_rows(head, first, rows, columns, value, MASKED: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Writes the rows from ``first`` on; where MASKED, those that lie before row ``rows``."""
    base, stride = head
    offsets = tl.arange(0, BLOCK)[:, None] * stride + columns[None, :]
    pointers = base + tl.cast(first, tl.int64) * stride + offsets
    value = value.to(base.dtype.element_ty)
    if MASKED:
        inside = (first + tl.arange(0, BLOCK) < rows)[:, None]
        if columns.shape[0] > D:
            inside = inside & (columns < D)[None, :]
        tl.store(pointers, value, mask=inside)
    elif columns.shape[0] > D:
        tl.store(pointers, value, mask=(columns < D)[None, :])
    else:
        tl.store(pointers, value)


@triton.jit
def clear_rows(head, first, end, step, columns, D: tl.constexpr, BLOCK: tl.constexpr):
    """Writes zeros to BLOCK rows from ``first`` on, and again after every ``step`` rows, as far as they lie before
    ``end``."""
    zeros = tl.zeros((BLOCK, columns.shape[0]), tl.float32)
    for row in range(first, end, step):
        store_rows(head, row, end, columns, zeros, True, D, BLOCK)


@triton.jit
def clear_outputs(
    outputs, first, step, head, heads, size, columns, WIDE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    """The same for a head of ``outputs``, packed out and lse of ``size`` rows, which have no key to attend to."""
    out, lse = outputs
    clear_rows(output_rows(out, head.to(tl.int64), heads, D, WIDE), first, size, step, columns, D, BLOCK)
    for row in range(first, size, step):
        rows = row + tl.arange(0, BLOCK)
        tl.store(lse + head.to(tl.int64) * size + rows, -float("inf"), mask=rows < size)


@triton.jit
def prefetch_rows(head, first, rows, D: tl.constexpr, BLOCK: tl.constexpr):
    """Prefetches rows ``first`` to ``first + BLOCK`` of a head, up to ``rows``, into L2. Programs prefetch for programs
    that run later, so that memory accesses overlap with computation."""
    base, stride = head
    size: tl.constexpr = base.dtype.element_ty.primitive_bitwidth // 8
    row = tl.minimum(first + tl.arange(0, BLOCK), tl.maximum(rows - 1, 0))
    starts = base + row.to(tl.int64) * stride
    for line in tl.static_range((D * size + 127) // 128):
        address = (starts + line * (128 // size)).to(tl.int64)
        tl.inline_asm_elementwise(
            "{ prefetch.global.L2 [$1]; mov.b32 $0, 0; }", "=r,l", [address], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def natural_lse(m, l):
    """The logarithm of a sum of l * 2^m, rounded once: fp32 gradients show every rounding of it. -inf where l is 0,
    whatever m is."""
    return tl.where(l == 0.0, -float("inf"), tl.fma(m, LN_2, tl.log2(l) * LN_2))


@triton.jit
def lse_in_log2(lse, queries, q_length):
    """lse in units of log2, and +inf for rows that attend to no keys or are past the end, so that their weights are
    0."""
    value = tl.load(lse + queries, mask=queries < q_length, other=float("inf"))
    return tl.where(value == -float("inf"), float("inf"), value * LOG2_E)


@triton.jit
def key_tiles(first, shape, FEATURES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys that the tile of queries from ``first`` on attends to: (begin, full_begin, full_end, end), the first three
    multiples of BLOCK_N. Between full_begin and full_end every query attends to every key."""
    q_length, k_length, window_left, window_right = shape
    last = tl.minimum(first + BLOCK_M, q_length) - 1
    offset = k_length - q_length
    begin = 0
    full_begin = 0
    end = k_length
    full_end = k_length
    if FEATURES[LEFT]:
        begin = tl.maximum(first + offset - window_left, 0) // BLOCK_N * BLOCK_N
        full_begin = tl.cdiv(tl.maximum(last + offset - window_left, 0), BLOCK_N) * BLOCK_N
    if FEATURES[RIGHT]:
        end = tl.minimum(end, tl.maximum(last + offset + window_right + 1, 0))
        full_end = tl.minimum(full_end, tl.maximum(first + offset + window_right + 1, 0))
    end = tl.where(first < q_length, end, begin)  # no query, no key
    full_end = tl.minimum(full_end, end) // BLOCK_N * BLOCK_N
    full_begin = tl.minimum(full_begin, tl.maximum(end, begin))
    return begin, full_begin, tl.maximum(full_begin, full_end), end


@triton.jit
def query_tiles(first, shape, FEATURES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Queries that attend to the tile of keys from ``first`` on: (begin, full_begin, full_end, end), the first two
    multiples of BLOCK_M. Between full_begin and full_end every query there is attends to every key."""
    q_length, k_length, window_left, window_right = shape
    offset = k_length - q_length
    begin = 0
    full_begin = 0
    end = q_length
    full_end = q_length
    if FEATURES[RIGHT]:
        begin = tl.maximum(first - offset - window_right, 0) // BLOCK_M * BLOCK_M
        full_begin = tl.cdiv(tl.maximum(first + BLOCK_N - 1 - offset - window_right, 0), BLOCK_M) * BLOCK_M
    if FEATURES[LEFT]:
        end = tl.minimum(end, tl.maximum(tl.minimum(first + BLOCK_N, k_length) - offset + window_left, 0))
        full_end = tl.minimum(full_end, tl.maximum(first - offset + window_left + 1, 0))
        full_end = tl.where(full_end < q_length, full_end // BLOCK_M * BLOCK_M, full_end)
    end = tl.where(first < k_length, end, begin)
    full_end = tl.where(first + BLOCK_N <= k_length, tl.minimum(full_end, end), begin)
    full_begin = tl.minimum(full_begin, tl.maximum(end, begin))
    return begin, full_begin, tl.maximum(full_begin, full_end), end


@triton.jit
def masked_scores(
    products,  # fp32: queries by keys, or keys by queries
    queries,  # int32, of two axes, as keys: they broadcast to the shape of products
    keys,
    shape,
    terms,
    MASKED: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Scores, -inf where a query does not attend to a key. They are in units of log2, except where PLAIN: then they are
    the products, to be multiplied by ``scale`` where they enter an exponential. Without MASKED all keys are attended
    to, and a mask that does not depend on the key leaves the loads of the bias vectors."""
    q_length, k_length, window_left, window_right = shape
    scale, bias, bias_row, slope = terms
    offset = k_length - q_length
    scores = products
    if not FEATURES[PLAIN]:
        scores = products * scale
        if FEATURES[BIAS]:
            inside = queries < q_length
            if MASKED:
                inside = inside & (keys < k_length)
            places = bias + queries.to(tl.int64) * bias_row * FEATURES[BIAS] + keys
            added = tl.load(places, mask=inside, other=0.0)
            scores += added.to(tl.float32) * LOG2_E
        if FEATURES[SLOPES]:
            scores -= slope * LOG2_E * tl.abs(queries + offset - keys).to(tl.float32)
    if MASKED:
        attended = keys < k_length
        if FEATURES[RIGHT]:
            attended = attended & (keys <= queries + (offset + window_right))
        if FEATURES[LEFT]:
            attended = attended & (keys >= queries + (offset - window_left))
        scores = tl.where(attended, scores, -float("inf"))
    return scores
